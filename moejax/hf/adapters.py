"""Writes adapters as peft reads them: `adapter_config.json` and `adapter_model.safetensors`.

A parameter's tensor in a model's files is a matrix, whose module has two tensors in an adapter's
file: `lora_A` [A, inputs] and `lora_B` [outputs, A]. The experts of a layer are one tensor, as in
transformers 5, and have theirs joined: `lora_A` [E * A, inputs] with experts outermost, `lora_B`
[outputs, A * E] with experts innermost. Of two such tensors in one module peft wraps the second
around the first, and names the first `base_layer`. Where parameters share the rows of a tensor,
their adapters are one, of the sum of their ranks: `lora_A` has all their `a` one below the other,
and `lora_B` each `b` in its parameter's rows. Sources: peft 0.21, `tuners/lora/layer.py`
(`ParamWrapper`) and `utils/transformers_weight_conversion.py`.

Letters as in `moejax/layout/layout.py`.
"""

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from moejax.comm.weights.adapters import Adapter, adapter_dims
from moejax.config.schema import LoraConfig
from moejax.errors import InputError, write_whole, writing
from moejax.hf.rules import ReadPart, Rows, Tensor
from moejax.hf.views import View
from moejax.layout.layout import RANK

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's, in front of a module's name
WEIGHT = ".weight"  # the parameter of a module that is a matrix
# Experts' parameters, in the order of transformers' modules.
FUSED = ("gate_up_proj", "up_proj", "down_proj")
# Names in files of models whose modules transformers 5 has renamed.
RENAMED = ((".block_sparse_moe.", ".mlp."), ("backbone.", "model."))
# Modules of older transformers, for which peft 0.21 takes targets of these names: those of other
# modules are named as parameters, which it leaves as they are.
REMAPPED = ("gate", "gate_proj", "up_proj", "down_proj")
# Mamba-2's last matrix: peft 0.21 refuses it, because kernels read the weight past an adapter.
WITHOUT = "mixer.out_proj"


def parameter_of(tensor: Tensor) -> str:
    """Returns the name in transformers of a tensor's parameter."""
    name = tensor.name
    for before, after in RENAMED:
        name = name.replace(before, after)
    return name


def module_of(tensor: Tensor) -> str:
    """Returns the name in transformers of the module that has it."""
    return parameter_of(tensor).rpartition(".")[0]


def is_fused(view: View) -> bool:
    """Returns whether a tensor has all experts of a layer."""
    return view.dims[0] == view.groups[0] == "E"


def write_adapter(
    folder: Path,
    tensors: Iterable[Tensor],
    read: ReadPart,
    lora: LoraConfig,
    *,
    base: str | None,
) -> None:
    """Writes an adapter into an existing folder.

    Args:
      tensors: tensors of all parameters with an adapter. Experts must be one tensor a layer.
      read: reads the factors, which are the parameters `PATH.a` and `PATH.b`.
      base: name or path of the model that it adapts.
    Raises:
      InputError: names a tensor that peft cannot adapt.
    """
    tensors = sorted(tensors, key=lambda tensor: tensor.name)
    for tensor in tensors:
        _check(tensor)
    with writing(folder / WEIGHTS):
        (folder / WEIGHTS).write_bytes(save(dict(_arrays(tensors, read)), {"format": "pt"}))
    config = adapter_config(tensors, lora, base=base)
    write_whole(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def adapter_config(
    tensors: Iterable[Tensor], lora: LoraConfig, *, base: str | None
) -> dict[str, Any]:
    """Returns peft's config of an adapter on these tensors."""
    assert lora.rank is not None
    modules, parameters, joined = [], [], Counter()
    for tensor in tensors:
        if tensor.rows is not None:
            joined[module_of(tensor)] += 1
        if is_fused(tensor.view) or module_of(tensor).rpartition(".")[2] in REMAPPED:
            parameters.append(parameter_of(tensor))
        else:
            modules.append(module_of(tensor))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "rank_pattern": {module: count * lora.rank for module, count in joined.items()},
        "alpha_pattern": {
            module: lora.scale * count * lora.rank for module, count in joined.items()
        },
        "target_modules": sorted(set(modules)),
        "target_parameters": sorted(parameters) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "use_dora": False,
        "use_rslora": False,
    }


def _check(tensor: Tensor) -> None:
    """Refuses tensors whose adapters peft keeps in another form."""
    if module_of(tensor).endswith(("embed_tokens", "embeddings")):
        raise InputError(
            f"the adapter of {tensor.name} has no place in peft's form here. Embeddings are looked "
            "up, not multiplied. Train without embedding.* in lora.targets, or export the merged "
            "weights."
        )
    if module_of(tensor).endswith(WITHOUT):
        raise InputError(
            f"the adapter of {tensor.name} has no place in peft, which refuses this matrix of "
            "Mamba-2. Train without it in lora.targets, or export the merged weights."
        )
    if not (is_fused(tensor.view) or tensor.name.endswith(WEIGHT)):
        raise InputError(
            f"the adapter of {tensor.name} has no place in peft's form: it adapts tensors whose "
            f"names end in {WEIGHT}. Export the merged weights."
        )


def _arrays(tensors: Sequence[Tensor], read: ReadPart) -> Iterable[tuple[str, np.ndarray]]:
    """Yields the names and arrays of an adapter's file."""
    inside: dict[str, list[str]] = defaultdict(list)  # parameters that peft wraps, first innermost
    joined: dict[str, list[tuple[Rows, np.ndarray, np.ndarray]]] = defaultdict(list)
    for tensor in tensors:
        if is_fused(tensor.view):
            inside[module_of(tensor)].append(parameter_of(tensor).rpartition(".")[2])
    for tensor in tensors:
        place = PREFIX + module_of(tensor)
        if is_fused(tensor.view):
            wrapped = sorted(inside[module_of(tensor)], key=FUSED.index)
            outer = wrapped[wrapped.index(parameter_of(tensor).rpartition(".")[2]) + 1 :]
            place += ".base_layer" * len(outer)
        layer = () if tensor.repeat is None else (tensor.repeat,)
        factors = Adapter(*(read(f"{tensor.path}.{factor}", layer) for factor in "ab"))
        a, b = factor_tensors(tensor.view, factors)
        if tensor.rows is not None:
            joined[place].append((tensor.rows, a, b))
            continue
        yield f"{place}.lora_A.weight", a
        yield f"{place}.lora_B.weight", b
    for place, parts in joined.items():
        yield f"{place}.lora_A.weight", np.concatenate([a for _, a, _ in parts])
        yield f"{place}.lora_B.weight", _in_rows([(rows, b) for rows, _, b in parts])


def _in_rows(parts: Sequence[tuple[Rows, np.ndarray]]) -> np.ndarray:
    """Returns the columns of all parts side by side, each in its own rows of their tensor."""
    ranks = [b.shape[1] for _, b in parts]
    first = parts[0][0]
    out = np.zeros((first.parts * first.of_part, sum(ranks)), np.float32)
    ends = np.cumsum(ranks)
    for (rows, b), end, rank in zip(parts, ends, ranks, strict=True):
        part, place = np.divmod(np.arange(len(b)), rows.count)
        out[part * rows.of_part + rows.first + place, end - rank : end] = b
    return out


def factor_tensors(view: View, adapter: Adapter) -> tuple[np.ndarray, np.ndarray]:
    """Returns `lora_A` and `lora_B` of a tensor, from the factors of one layer."""
    letters = adapter_dims(view.dims)
    assert letters is not None, f"{view.dims} is no matrix"
    joined = "E" if is_fused(view) else ""
    one, other = view.groups[len(joined) :]
    is_input = set(one) <= set(letters.a)
    side_in, side_out = (one, other) if is_input else (other, one)
    a = _factor(view, letters.a, adapter.a, (joined + RANK, side_in))
    b = _factor(view, letters.b, adapter.b, (side_out, RANK + joined))
    return a, b


def _factor(view: View, dims: str, values: np.ndarray, groups: tuple[str, str]) -> np.ndarray:
    """Returns the tensor of one factor, as the view of the whole would cut and order it."""
    at = tuple((letter, place) for letter, place in view.at if letter in dims)
    paired = view.paired if view.paired is not None and view.paired[0] in dims else None
    whole = np.asarray(values, np.float32)
    own = dataclasses.replace(
        view, dims=dims, sizes=whole.shape, groups=groups, at=at, paired=paired
    )
    places = dict(at)
    return own.to_tensor(whole[tuple(places.get(letter, slice(None)) for letter in dims)])
