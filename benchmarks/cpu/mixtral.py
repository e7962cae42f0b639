"""A folder of a random Mixtral, of any size, to time and to measure memory. A test uses it too."""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}


def config_of(
    *, layers: int, width: int, heads: int, experts: int, hidden: int, vocabulary: int
) -> dict[str, Any]:
    """Returns the `config.json`; a key's head serves four queries' heads, two experts a token."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the model's tensors."""
    width, hidden = config["hidden_size"], config["intermediate_size"]
    tables = (config["vocab_size"], width)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": tables}
    found |= {"lm_head.weight": tables, "model.norm.weight": (width,)}
    rows = {"q": width, "k": width // 4, "v": width // 4, "o": width}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}self_attn.{x}_proj.weight": (n, width) for x, n in rows.items()}
        for norm in ("input", "post_attention"):
            found[f"{prefix}{norm}_layernorm.weight"] = (width,)
        prefix += "block_sparse_moe."
        found[f"{prefix}gate.weight"] = (config["num_local_experts"], width)
        for expert in range(config["num_local_experts"]):
            each = {"w1": (hidden, width), "w2": (width, hidden), "w3": (hidden, width)}
            found |= {f"{prefix}experts.{expert}.{w}.weight": s for w, s in each.items()}
    return found


def elements(config: dict[str, Any]) -> int:
    """Returns the number of parameters."""
    return sum(map(math.prod, tensor_shapes(config).values()))


def write_mixtral(folder: Path, config: dict[str, Any], dtype: str) -> None:
    """Writes the model's folder: scales of norms are one, other numbers keep activations near one.

    Args:
      dtype: BF16 or F32.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    kind, header, offset = np.dtype(DTYPES[dtype]), {}, 0
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        end = offset + kind.itemsize * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            values = np.ones(shape, np.float32)
            if len(shape) > 1:
                values = rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(shape[-1]))
            file.write(values.astype(kind).tobytes())
