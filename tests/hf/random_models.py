"""Folders of weights of any family: a config, and numbers drawn from each tensor's name.

Needs only NumPy, so that `tests/golden/make_models.py` draws the same weights beside transformers.
The draws are of raw bits, which NumPy keeps the same from version to version.
"""

import hashlib
import json
import math
from pathlib import Path

import numpy as np

SELECTION_BIASES = ("e_score_correction_bias", "expert_bias")  # ends of tensors' names
# Norms, and factors of blocks, of experts and of a router's input (Gemma 4).
FACTORS = (
    "norm.weight",
    "norm_f.weight",
    "layernorm_1.weight",
    "layernorm_2.weight",
    "layer_scalar",
)
FACTORS += ("router.scale", "per_expert_scale")
DTYPES = {"F32": np.float32, "F16": np.float16}


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's numbers, float32: uniform, of a size that keeps activations near one."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    bits = np.random.PCG64(seed).random_raw(max(1, math.prod(shape)))
    unit = (bits >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
    values = unit[: math.prod(shape)].reshape(shape)
    if name.endswith(FACTORS):
        return np.float32(1) + np.float32(0.25) * values
    if name.endswith(SELECTION_BIASES):
        return np.float32(0.1) * values
    if name.endswith("sinks"):
        return np.float32(1) * values
    if len(shape) == 1 or name.endswith("bias"):
        return np.float32(0.3) * values
    if name.endswith("router.proj.weight"):  # whose input is as small as a unit vector's
        return np.float32(1.5) * values
    fan = shape[-2] if ".mlp.experts." in name and len(shape) == 3 else shape[-1]
    if name.endswith("embed_tokens.weight"):  # small, so that layers matter where it is tied
        return np.float32(0.3) * values
    scale = 2.0 if name.endswith(("gate.weight", "router.weight")) else 1.5
    return values * np.float32(scale / math.sqrt(fan))


def write_file(path: Path, tensors: dict[str, np.ndarray], **changes) -> None:
    """Writes a safetensors file. The format is written out, to damage it in tests.

    Args:
      changes: `header`, a function that changes the header; `cut`, bytes to leave out at the end;
        `dtypes`, names of dtypes by tensor where NumPy's kind does not say.
    """
    header, offset = {}, 0
    for name, values in tensors.items():
        end = offset + values.nbytes
        dtype = changes.get("dtypes", {}).get(name) or dtype_name(values)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, end]}
        offset = end
    if "header" in changes:
        header = changes["header"](header)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(values.tobytes() for values in tensors.values())
    whole = len(text).to_bytes(8, "little") + text + data
    path.write_bytes(whole[: len(whole) - changes.get("cut", 0)])


def dtype_name(values: np.ndarray) -> str:
    """The dtype's name in files."""
    names = {
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "uint8": "U8",
        "int64": "I64",
    }
    return names[values.dtype.name]


def write_folder(
    folder: Path, config: dict, tensors: dict[str, np.ndarray], files: int = 1
) -> Path:
    """Writes a folder as transformers does: one file, or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if files == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    where = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::files]}
        write_file(folder / name, part)
        where |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def draw_all(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """All tensors of a model by name."""
    return {name: draw(name, tuple(shape)) for name, shape in shapes.items()}
