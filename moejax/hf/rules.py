"""Rules from parameters to the names and layouts of tensors, and the list of tensors they give.

A rule is data; the same rule reads and writes. Parameters of a layer group are stacked: repeat r of
block J of a group is a layer, whose number stands in the tensors' names. Experts are either a
tensor each, with their number in its name, or one tensor together.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from moejax.config.schema import ModelConfig
from moejax.errors import InputError
from moejax.hf.views import View
from moejax.model.transformer import layer_groups

FLAT = "*"  # of a rule: one dimension of all letters
BLOCK = re.compile(r"groups\.(\d+)\.blocks\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Rule:
    """One kind of tensor.

    Attributes:
      ours: path of a parameter below its block, or from the model's root.
      theirs: name of the tensor below its layer, or whole; {E} stands for an expert's number.
      dims: letters that each of its dimensions joins, with spaces between; "1" for one element.
      at: the position of a letter that the tensor lacks.
      paired: letter whose rotary channels are pairs in the tensor, and halves here.
      block: "dense" or "moe" for the blocks it is about; "": all.
      wide: whether export keeps it in float32.
    """

    ours: str
    theirs: str
    dims: str = FLAT
    at: tuple[tuple[str, int], ...] = ()
    paired: str = ""
    block: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Parameter:
    """A parameter, or the selection bias of a router.

    Attributes:
      dims: letters of its dimensions, without stacked layers.
      shape: with stacked layers in front.
    """

    path: str
    dims: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file and the part of a parameter that it holds.

    Attributes:
      repeat: index of the stacked layer; None for a parameter that is not stacked.
    """

    name: str
    path: str
    repeat: int | None
    view: View
    wide: bool = False


@dataclass(frozen=True)
class _Block:
    """Where a stacked block's layers are: the number of its first, and from one to the next."""

    first: int
    step: int
    repeats: int


def tensors_of(
    rules: Iterable[Rule],
    parameters: Mapping[str, Parameter],
    model: ModelConfig,
    *,
    layer: str = "model.layers.{}.",
) -> list[Tensor]:
    """Returns all tensors of a model, in the order of its layers.

    Args:
      parameters: by path.
      layer: what the names of a layer's tensors begin with.
    Raises:
      InputError: if no rule holds some parameter.
    """
    blocks, found = _blocks(model), []
    rotated = getattr(model, "rope_width", None) or model.head_width
    for parameter in parameters.values():
        match = BLOCK.fullmatch(parameter.path)
        block = blocks[int(match[1]), int(match[2])] if match else None
        kind = _kind_of(parameter.path, parameters)
        own = match[3] if match else parameter.path
        chosen = [r for r in rules if r.ours == own and r.block in ("", kind)]
        tensors = [t for rule in chosen for t in _expand(rule, parameter, block, rotated, layer)]
        _check_covered(parameter, tensors)
        found += tensors
    return sorted(found, key=lambda tensor: _order(tensor.name))


def _blocks(model: ModelConfig) -> dict[tuple[int, int], _Block]:
    """Returns where the layers of each group's blocks are."""
    blocks, first = {}, 0
    for group, (kinds, repeats) in enumerate(layer_groups(model)):
        for index in range(len(kinds)):
            blocks[group, index] = _Block(first + index, len(kinds), repeats)
        first += len(kinds) * repeats
    return blocks


def _kind_of(path: str, parameters: Mapping[str, Parameter]) -> str:
    match = BLOCK.fullmatch(path)
    if match is None:
        return ""
    router = f"groups.{match[1]}.blocks.{match[2]}.moe.w_router"
    return "moe" if router in parameters else "dense"


def _expand(
    rule: Rule, parameter: Parameter, block: _Block | None, rotated: int, layer: str
) -> Iterable[Tensor]:
    """Yields the rule's tensors of one parameter: of each layer, and of each expert."""
    sizes = parameter.shape[len(parameter.shape) - len(parameter.dims) :]
    groups = (parameter.dims,) if rule.dims == FLAT else tuple(rule.dims.split())
    groups = tuple("" if group == "1" else group for group in groups)
    paired = (rule.paired, rotated) if rule.paired else None
    view_at = {"E": 0} if "{E}" in rule.theirs else {}
    at = tuple((view_at | dict(rule.at)).items())
    view = View(parameter.dims, sizes, groups, at, paired)
    experts = range(view.size["E"]) if view_at else (0,)
    for repeat in range(block.repeats) if block else (None,):
        prefix = (
            layer.format(block.first + repeat * block.step) if block and repeat is not None else ""
        )
        for expert in experts:
            name = prefix + rule.theirs.replace("{E}", str(expert))
            placed = view
            if view_at:
                placed = replace(view, at=(("E", expert), *rule.at))
            yield Tensor(name, parameter.path, repeat, placed, rule.wide)


def _check_covered(parameter: Parameter, tensors: list[Tensor]) -> None:
    """Refuses a parameter that the tensors do not hold exactly once."""
    elements = 1
    for size in parameter.shape:
        elements *= size
    if not tensors:
        raise InputError(f"no tensor of this family holds the parameter {parameter.path}")
    held = sum(tensor.view.elements for tensor in tensors)
    assert held == elements, f"{parameter.path}: {held} of {elements} elements"


def _order(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts names with numbers by their numbers."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(p)) if p.isdigit() else (1, p) for p in parts)
