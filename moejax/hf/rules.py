"""Rules from parameters to the names and layouts of tensors, and the list of tensors they give.

A rule is data; the same rule reads and writes. Parameters of a layer group are stacked: repeat r of
block J of a group is a layer, whose number stands in the tensors' names. Experts are either a
tensor each, with their number in its name, or one tensor together. A tensor may join the rows of
several parameters: then each of them has a `Tensor` of that name.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from moejax.config.pattern import ahead_kind, block_kinds, layer_groups
from moejax.config.schema import ModelConfig
from moejax.errors import InputError
from moejax.hf.views import Bounds, Box, Read, View

LAYER = "model.layers.{}."  # prefix of the names of a layer's tensors
FLAT = "*"  # of a rule: one dimension of all letters
# The module for multi-token prediction is a layer after the last, with parameters of its own.
PREDICT_AHEAD = "predict_ahead."  # prefix of its parameters' paths
AHEAD = f"{PREDICT_AHEAD}group.blocks.0."  # prefix of those of its block
BLOCK = re.compile(rf"(?P<stack>groups\.\d+\.blocks\.\d+\.|{re.escape(AHEAD)})(?P<own>.+)")

Index = tuple[int | slice, ...]  # positions in an array, and whole dimensions; see `hf.views.Box`
# Returns a part of a parameter or selection bias, given its path and an index. Dimensions without
# an entry in the index are whole. Several threads call it.
ReadPart = Callable[[str, Index], np.ndarray]


@dataclass(frozen=True)
class Rule:
    """One kind of tensor.

    Attributes:
      ours: path of a parameter below its block, or from the model's root.
      theirs: name of the tensor below its layer, or whole; {E} stands for an expert's number, and
        {L} for the layer's, in a name that is whole. Parameters of `predict_ahead` outside its
        block are below its layer too.
      dims: letters that each of its dimensions joins, with spaces between; "1" for one element.
      at: the position of a letter that the tensor lacks.
      paired: letter whose rotary channels are pairs in the tensor, and halves here.
      leading: whether these are the letter's first channels; else they are its last.
      block: "dense", "moe" or the name of a mixer for the blocks it is about; "": all.
      ahead: whether it is about the module for multi-token prediction alone, by a whole name. Where
        a family has such rules, the module has no others.
      wide: whether export keeps it in float32.
      joins: parameters of the block whose rows the tensor has, in their order; (): its own alone.
      each: a parameter and a letter: rows are joined for each of the letter by itself.
    """

    ours: str
    theirs: str
    dims: str = FLAT
    at: tuple[tuple[str, int], ...] = ()
    paired: str = ""
    leading: bool = False
    block: str = ""
    ahead: bool = False
    wide: bool = False
    joins: tuple[str, ...] = ()
    each: tuple[str, str] | None = None


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor that one of its parameters has: as many of each equal part.

    Attributes:
      parts: number of the parts.
      first, count: its rows of a part.
      of_part: all rows of a part.
    """

    parts: int
    first: int
    count: int
    of_part: int

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields ranges of the tensor's rows, given a range of the parameter's."""
        at = start
        while at < stop:
            part, place = divmod(at, self.count)
            last = min(stop, (part + 1) * self.count)
            row = part * self.of_part + self.first + place
            yield row, row + last - at
            at = last


@dataclass(frozen=True)
class Parameter:
    """A parameter, or the selection bias of a router.

    Attributes:
      dims: letters of its dimensions, without stacked layers.
      shape: its shape, with stacked layers in front.
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
    rows: Rows | None = None  # where other parameters have rows too

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in files."""
        own = self.view.shape
        return own if self.rows is None else (self.rows.parts * self.rows.of_part, *own[1:])

    def fill(self, out: np.ndarray, box: Box, read: Read) -> None:
        """As `View.fill`; `read` returns parts of the tensor as it is in files."""

        def own(ranges: Bounds) -> np.ndarray:
            assert self.rows is not None
            (start, stop), *others = ranges
            pieces = [read((piece, *others)) for piece in self.rows.pieces(start, stop)]
            return np.concatenate(pieces)

        self.view.fill(out, box, read if self.rows is None else own)

    @property
    def index(self) -> Index:
        """The index of its numbers in the parameter."""
        at = dict(self.view.at)
        own = tuple(at.get(letter, slice(None)) for letter in self.view.dims)
        return own if self.repeat is None else (self.repeat, *own)


@dataclass(frozen=True)
class _Place:
    """The place of a parameter in the model.

    Attributes:
      own: its path below its block, or the whole path.
      kinds: "dense" or "moe" and the mixer, as of its block; () outside of blocks.
      layers: numbers of the layers that it has, in the order they are stacked.
      stacked: whether these are in front of its dimensions.
      ahead: whether it is of the module for multi-token prediction.
    """

    own: str
    kinds: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    stacked: bool = False
    ahead: bool = False


def tensors_of(
    rules: Iterable[Rule],
    parameters: Mapping[str, Parameter],
    model: ModelConfig,
) -> list[Tensor]:
    """Returns all tensors of a model, in the order of its layers, from its parameters by path.

    Raises:
      InputError: if no rule holds some parameter.
    """
    stacks, found, rules = stacks_of(model), [], tuple(rules)
    rotated, apart = model.rope_width or model.head_width, any(rule.ahead for rule in rules)
    for parameter in parameters.values():
        place = _place_of(parameter.path, parameters, stacks, model)
        ahead = place.ahead and apart
        chosen = [
            rule
            for rule in rules
            if rule.ours == place.own and rule.block in ("", *place.kinds) and rule.ahead == ahead
        ]
        tensors = []
        for rule in chosen:
            found_rows = _rows(rule, parameter, place, parameters) if rule.joins else None
            tensors += _expand(rule, parameter, place, rotated, found_rows)
        _check_covered(parameter, tensors)
        found += tensors
    return sorted(found, key=lambda tensor: _order(tensor.name))


def stacks_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of the layers of each stack, by the path in front of its parameters.

    The block of multi-token prediction counts as the layer after the last.
    """
    stacks: dict[str, tuple[int, ...]] = {AHEAD: (model.num_layers,)}
    first = 0
    for group, (kinds, repeats) in enumerate(layer_groups(model)):
        for index in range(len(kinds)):
            layers = range(first + index, first + len(kinds) * repeats, len(kinds))
            stacks[f"groups.{group}.blocks.{index}."] = tuple(layers)
        first += len(kinds) * repeats
    return stacks


def _place_of(
    path: str,
    parameters: Mapping[str, Parameter],
    stacks: Mapping[str, tuple[int, ...]],
    model: ModelConfig,
) -> _Place:
    match, ahead = BLOCK.fullmatch(path), path.startswith(PREDICT_AHEAD)
    if match is None:
        return _Place(path, layers=(model.num_layers,) if ahead else (), ahead=ahead)
    stack = match["stack"]
    mlp = "moe" if f"{stack}moe.w_router" in parameters else "dense"
    kind = ahead_kind(model) if ahead else block_kinds(model)[stacks[stack][0]]
    return _Place(match["own"], (mlp, kind.mixer), stacks[stack], stacked=True, ahead=ahead)


def _rows(
    rule: Rule, parameter: Parameter, place: _Place, parameters: Mapping[str, Parameter]
) -> Rows:
    """Returns the rows that a parameter has of a tensor that joins several."""
    block = parameter.path.removesuffix(place.own)

    def letters(own: str) -> dict[str, int]:
        found = parameters[block + own]
        sizes = found.shape[len(found.shape) - len(found.dims) :]
        return dict(zip(found.dims, sizes, strict=True))

    # All have the same columns, so rows are to each other as their numbers are.
    one = rule.dims.split()[0]
    own = math.prod(letters(rule.ours)[letter] for letter in one)
    columns = math.prod(letters(rule.ours).values()) // own
    counts = [math.prod(letters(other).values()) // columns for other in rule.joins]
    parts = 1 if rule.each is None else letters(rule.each[0])[rule.each[1]]
    before = sum(counts[: rule.joins.index(rule.ours)])
    return Rows(parts, before // parts, own // parts, sum(counts) // parts)


def _expand(
    rule: Rule, parameter: Parameter, place: _Place, rotated: int, rows: Rows | None
) -> Iterable[Tensor]:
    """Yields the rule's tensors of one parameter: of each layer, and of each expert."""
    sizes = parameter.shape[len(parameter.shape) - len(parameter.dims) :]
    groups = (parameter.dims,) if rule.dims == FLAT else tuple(rule.dims.split())
    groups = tuple("" if group == "1" else group for group in groups)
    size = dict(zip(parameter.dims, sizes, strict=True)).get(rule.paired, 0)
    first = 0 if rule.leading else size - rotated
    paired = (rule.paired, first, rotated) if rule.paired else None
    apart = (("E", 0),) if "{E}" in rule.theirs else ()
    view = View(parameter.dims, sizes, groups, apart + rule.at, paired)
    for index, number in enumerate(place.layers or (None,)):
        own_layer = number is not None and "{L}" not in rule.theirs and not rule.ahead
        prefix = LAYER.format(number) if own_layer else ""
        repeat = index if place.stacked else None
        for expert in range(view.size["E"]) if apart else (0,):
            name = prefix + rule.theirs.replace("{L}", str(number)).replace("{E}", str(expert))
            own = replace(view, at=(("E", expert), *rule.at)) if apart else view
            yield Tensor(name, parameter.path, repeat, own, rule.wide, rows)


def _check_covered(parameter: Parameter, tensors: list[Tensor]) -> None:
    """Refuses a parameter that the tensors do not hold exactly once."""
    if not tensors:
        raise InputError(f"no tensor of this family holds the parameter {parameter.path}")
    elements = math.prod(parameter.shape)
    held = sum(tensor.view.elements for tensor in tensors)
    if held != elements:
        raise InputError(
            f"the tensors of this family hold {held:,} of the {elements:,} numbers of "
            f"{parameter.path}. Each must be held once. Choose another family."
        )


def _order(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts names with numbers by their numbers."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(p)) if p.isdigit() else (1, p) for p in parts)
