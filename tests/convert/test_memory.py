"""Peak memory of a conversion: a process's own weights and little more, not the files beside them.

The model has 479 million parameters: 0.96 GB in two bytes, 1.9 GB in four. Its largest parameter,
the experts' first matrices of all layers, has 1.07 GB of those.
"""

import json
import math
import os
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from tests.integration.runs import REPOSITORY

L, D, E, F, V = 4, 1024, 16, 2048, 32_000
CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
GB = 1e9
PYTHON = 0.45 * GB  # of Python, JAX and Orbax, with nothing loaded
BUFFERS = 0.95 * GB  # of tensorstore, which writes files of 2 GB: here all, compressed
LARGEST = 4 * L * E * D * 2 * F
CHILD = """
import resource, sys
from moejax.convert.command import main
code = main(sys.argv[1:])
print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


def shapes():
    found = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    found["model.norm.weight"] = (D,)
    for layer in range(L):
        prefix = f"model.layers.{layer}."
        attention = {"q": D, "k": D // 4, "v": D // 4, "o": D}
        found |= {f"{prefix}self_attn.{x}_proj.weight": (n, D) for x, n in attention.items()}
        for norm in ("input", "post_attention"):
            found[f"{prefix}{norm}_layernorm.weight"] = (D,)
        prefix += "block_sparse_moe."
        found[f"{prefix}gate.weight"] = (E, D)
        for expert in range(E):
            each = {"w1": (F, D), "w2": (D, F), "w3": (F, D)}
            found |= {f"{prefix}experts.{expert}.{w}.weight": s for w, s in each.items()}
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with the model's folder, written a tensor at a time."""
    place = tmp_path_factory.mktemp("large")
    (place / "model").mkdir()
    (place / "model" / "config.json").write_text(json.dumps(CONFIG))
    header, offset = {}, 0
    for name, shape in shapes().items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with (place / "model" / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes().values():
            values = rng.standard_normal(shape, dtype=np.float32) * 0.02
            file.write(values.astype(ml_dtypes.bfloat16).tobytes())
    yield place
    shutil.rmtree(place)  # gigabytes, which pytest would keep


def peak(place, *words):
    """Runs the command in a process of its own. Returns its largest resident size in bytes."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    env |= {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", CHILD, *map(str, words)]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("PEAK")[1])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_conversions_hold_their_own_weights_and_little_more(place):
    elements = sum(map(math.prod, shapes().values()))
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        imported = peak(place, "import", "model", "--out", dtype, "--dtype", dtype)
        assert imported < PYTHON + size * elements + BUFFERS, f"{imported / GB:.2f} GB"
    # The largest parameter twice, while it is restored; never all of them.
    exported = peak(place, "export", "float32", "--out", "exported")
    assert exported < PYTHON + 2.2 * LARGEST, f"{exported / GB:.2f} GB"
    one, other = (place / name / "model.safetensors" for name in ("model", "exported"))
    assert one.stat().st_size > 9e8
    with one.open("rb") as first, other.open("rb") as second:
        sizes = [int.from_bytes(f.read(8), "little") for f in (first, second)]
        headers = [json.loads(f.read(n)) for f, n in zip((first, second), sizes, strict=True)]
        name = "model.layers.3.block_sparse_moe.experts.15.w2.weight"
        data = []
        for file, size, header in zip((first, second), sizes, headers, strict=True):
            start, stop = header[name]["data_offsets"]
            file.seek(8 + size + start)
            data.append(file.read(stop - start))
    assert data[0] == data[1]
