"""Writes adapters as peft reads them: `adapter_config.json` and `adapter_model.safetensors`.

A parameter's tensor in a model's files is a matrix, whose module has two tensors in an adapter's
file: `lora_A` [A, inputs] and `lora_B` [outputs, A]. The experts of a layer are one tensor, as in
transformers 5, and have theirs joined: `lora_A` [E * A, inputs] with experts outermost, `lora_B`
[outputs, A * E] with experts innermost. Of two such tensors in one module peft wraps the second
around the first, and names the first `base_layer`. Sources: peft 0.21, `tuners/lora/layer.py`
(`ParamWrapper`) and `utils/transformers_weight_conversion.py`.

Letters as in `moejax/layout/layout.py`.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from moejax.comm.weights.adapters import Adapter, adapter_dims
from moejax.config.schema import LoraConfig
from moejax.errors import InputError, write_whole, writing
from moejax.hf.rules import ReadPart, Tensor
from moejax.hf.views import View
from moejax.layout.layout import RANK

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's, in front of a module's name
WEIGHT = ".weight"  # the parameter of a module that is a matrix
FUSED = ("gate_up_proj", "down_proj")  # experts' parameters, in the order of transformers' modules
# Names in files of models whose modules transformers 5 has renamed.
RENAMED = (".block_sparse_moe.", ".mlp.")
# Modules of older transformers, for which peft 0.21 takes targets of these names: those of other
# modules are named as parameters, which it leaves as they are.
REMAPPED = ("gate", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class AdaptedTensor:
    """A tensor of a model's files whose parameter has an adapter.

    Attributes:
      name: its name in the model's files, such as model.layers.3.self_attn.q_proj.weight.
      view: how it holds one layer's parameter.
      factors: returns the layer's adapter, as arrays of the host.
    """

    name: str
    view: View
    factors: Callable[[], Adapter]

    @property
    def parameter(self) -> str:
        """Its name in transformers."""
        return self.name.replace(*RENAMED)

    @property
    def module(self) -> str:
        """The module in transformers that has it."""
        return self.parameter.rpartition(".")[0]

    @property
    def is_fused(self) -> bool:
        """True if it has all experts of a layer."""
        return self.view.dims[0] == self.view.groups[0] == "E"


def adapted_tensors(tensors: Iterable[Tensor], read: ReadPart) -> list[AdaptedTensor]:
    """Returns tensors with their adapters.

    Args:
      tensors: tensors of parameters with an adapter, the experts of a layer in one tensor.
      read: reads the factors, which are the parameters `PATH.a` and `PATH.b`.
    """

    def factors(tensor: Tensor) -> Adapter:
        layer = () if tensor.repeat is None else (tensor.repeat,)
        return Adapter(read(f"{tensor.path}.a", layer), read(f"{tensor.path}.b", layer))

    return [AdaptedTensor(tensor.name, tensor.view, partial(factors, tensor)) for tensor in tensors]


def write_adapter(
    folder: Path, tensors: Iterable[AdaptedTensor], lora: LoraConfig, *, base: str | None
) -> None:
    """Writes an adapter into an existing folder.

    Args:
      tensors: tensors of all parameters with an adapter. Experts must be one tensor a layer.
      base: name or path of the model that it adapts.
    Raises:
      InputError: names a tensor that peft cannot adapt.
    """
    tensors = sorted(tensors, key=lambda tensor: tensor.name)
    for tensor in tensors:
        _check(tensor)
    with writing(folder / WEIGHTS):
        (folder / WEIGHTS).write_bytes(save(dict(_arrays(tensors)), {"format": "pt"}))
    config = adapter_config(tensors, lora, base=base)
    write_whole(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def adapter_config(
    tensors: Iterable[AdaptedTensor], lora: LoraConfig, *, base: str | None
) -> dict[str, Any]:
    """Returns peft's config of an adapter on these tensors."""
    assert lora.rank is not None
    modules, parameters = [], []
    for tensor in tensors:
        if tensor.is_fused or tensor.module.rpartition(".")[2] in REMAPPED:
            parameters.append(tensor.parameter)
        else:
            modules.append(tensor.module)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "use_dora": False,
        "use_rslora": False,
    }


def _check(tensor: AdaptedTensor) -> None:
    """Refuses tensors whose adapters peft keeps in another form."""
    if tensor.module.endswith("embed_tokens"):
        raise InputError(
            f"the adapter of {tensor.name} has no place in peft's form here. Embeddings are looked "
            "up, not multiplied. Train without embedding.* in lora.targets, or export the merged "
            "weights."
        )
    if not (tensor.is_fused or tensor.name.endswith(WEIGHT)):
        raise InputError(
            f"the adapter of {tensor.name} has no place in peft's form: it adapts tensors whose "
            f"names end in {WEIGHT}. Export the merged weights."
        )


def _arrays(tensors: Sequence[AdaptedTensor]) -> Iterable[tuple[str, np.ndarray]]:
    """Yields the names and arrays of an adapter's file."""
    inside: dict[str, list[str]] = defaultdict(list)  # parameters that peft wraps, first innermost
    for tensor in tensors:
        if tensor.is_fused:
            inside[tensor.module].append(tensor.parameter.rpartition(".")[2])
    for tensor in tensors:
        place = PREFIX + tensor.module
        if tensor.is_fused:
            wrapped = sorted(inside[tensor.module], key=FUSED.index)
            outer = wrapped[wrapped.index(tensor.parameter.rpartition(".")[2]) + 1 :]
            place += ".base_layer" * len(outer)
        a, b = factor_tensors(tensor.view, tensor.factors())
        yield f"{place}.lora_A.weight", a
        yield f"{place}.lora_B.weight", b


def factor_tensors(view: View, adapter: Adapter) -> tuple[np.ndarray, np.ndarray]:
    """Returns `lora_A` and `lora_B` of a tensor, from the factors of one layer."""
    letters = adapter_dims(view.dims)
    assert letters is not None, f"{view.dims} is no matrix"
    joined = "E" if view.dims[0] == view.groups[0] == "E" else ""
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
