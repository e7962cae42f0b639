"""A folder of a random Mixtral, large enough to time and to measure memory. A test uses it too."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np

WIDTH, EXPERTS, HIDDEN, VOCABULARY = 1024, 16, 2048, 32_000
CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Returns the model's tensors."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    found |= {"lm_head.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    rows = {"q": WIDTH, "k": WIDTH // 4, "v": WIDTH // 4, "o": WIDTH}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}self_attn.{x}_proj.weight": (n, WIDTH) for x, n in rows.items()}
        for norm in ("input", "post_attention"):
            found[f"{prefix}{norm}_layernorm.weight"] = (WIDTH,)
        prefix += "block_sparse_moe."
        found[f"{prefix}gate.weight"] = (EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            each = {"w1": (HIDDEN, WIDTH), "w2": (WIDTH, HIDDEN), "w3": (HIDDEN, WIDTH)}
            found |= {f"{prefix}experts.{expert}.{w}.weight": s for w, s in each.items()}
    return found


def elements(layers: int) -> int:
    """Returns the number of parameters."""
    return sum(map(math.prod, shapes(layers).values()))


def write_model(folder: Path, layers: int) -> None:
    """Writes the model's folder in bfloat16, a tensor at a time."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    header, offset = {}, 0
    for name, shape in shapes(layers).items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes(layers).values():
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
            file.write(values.astype(ml_dtypes.bfloat16).tobytes())
