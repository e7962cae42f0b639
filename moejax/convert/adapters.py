"""Exports of a run with adapters: added to the weights they were trained on, or alone for peft."""

from functools import partial
from pathlib import Path

import numpy as np

from moejax.checkpoint.arrays import StoredWeights
from moejax.checkpoint.find import Saved
from moejax.checkpoint.source import FolderSource, Source
from moejax.comm.weights.adapters import adapter_dims
from moejax.config.schema import Config
from moejax.hf.adapters import write_adapter
from moejax.hf.families.family import Family
from moejax.hf.load import parameters_of, read_part
from moejax.hf.model import describe_anywhere
from moejax.hf.rules import PREDICT_AHEAD, Index, ReadPart, tensors_of
from moejax.step.adapters import matrices_in
from moejax.step.model import ModelDef
from moejax.step.state import flat


def adapted_parameters(model: ModelDef) -> dict[str, str]:
    """Returns the letters of each parameter with an adapter, by path."""
    factors = flat(model.dims)
    letters = flat(model.frozen_dims)
    return {path: letters[path] for path in letters if f"{path}.a" in factors}


def merged_weights(saved: Saved, cfg: Config, frozen: Source) -> ReadPart:
    """Returns a function that reads parts of a checkpoint's weights, with their adapters added.

    They are added in float32. Several threads may read.

    Args:
      frozen: the weights that the adapters were trained on; a folder is open.
    """
    model, params, _ = describe_anywhere(cfg, adapters=True)
    held = flat(matrices_in(cfg.lora.base_dtype, model.frozen_dims, params))
    adapted, run = adapted_parameters(model), StoredWeights(saved.path).read
    if isinstance(frozen, FolderSource):
        base: ReadPart = partial(read_part, frozen.plan, frozen.folder)
    else:
        base = StoredWeights(frozen.path).read

    def product(path: str, index: Index) -> np.ndarray:
        """Returns the product of the factors, at the positions of `index`."""
        dims = adapted[path]
        factors = adapter_dims(dims)
        assert factors is not None, f"{path} is no matrix"
        layer = index[: len(index) - len(dims)]
        at = dict(zip(dims, index[len(layer) :], strict=True))
        values, letters = [], []
        for name, own in zip("ab", factors, strict=True):
            part = (*layer, *(at.get(letter, slice(None)) for letter in own))
            values.append(run(f"{path}.{name}", part))
            letters.append("".join(x for x in own if isinstance(at.get(x, slice(None)), slice)))
        out = "".join(x for x in dims if isinstance(at[x], slice))
        return np.einsum(f"{letters[0]},{letters[1]}->{out}", *values, optimize=True)

    def read(path: str, index: Index) -> np.ndarray:
        if path not in held:
            return run(path, index)
        weight = base(path, index).astype(held[path].dtype).astype(np.float32)
        if path in adapted:
            weight += cfg.lora.scale * product(path, index)
        return weight

    return read


def write_adapters(
    saved: Saved, cfg: Config, family: Family, base: str | None, out: Path
) -> tuple[int, int]:
    """Writes the adapters of a checkpoint into an existing folder, as peft reads them.

    Adapters of multi-token prediction are left out: peft adapts the model of
    `AutoModelForCausalLM`, which does not have it.

    Args:
      base: name or path of the weights that they adapt, for peft.
    Returns:
      the numbers of tensors whose adapters were written, and were left out.
    Raises:
      InputError: names a tensor that peft cannot adapt.
    """
    model, params, _ = describe_anywhere(cfg)
    rules = (*family.rules, *family.joined_experts)
    adapted = adapted_parameters(describe_anywhere(cfg, adapters=True)[0])
    tensors = [
        tensor
        for tensor in tensors_of(rules, parameters_of(model, params, ()), cfg.model)
        if tensor.path in adapted
    ]
    kept = [tensor for tensor in tensors if not tensor.path.startswith(PREDICT_AHEAD)]
    read = StoredWeights(saved.path).read
    write_adapter(out, kept, read, cfg.lora, base=base)
    return len(kept), len(tensors) - len(kept)
