"""Reads a traced program: every collective it will issue, with its axes and bytes.

The walk enters loops (multiplied by their length) and calls. Of a `lax.switch` or `lax.cond` it
counts the first branch (the false one), which is what an ordinary step takes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

COLLECTIVES = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_max",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
}


@dataclass(frozen=True)
class Collective:
    """A collective of the program.

    Attributes:
      kind: as in `comm.wire`.
      axes: mesh axes.
      dtype: of what is sent.
      bytes: of one device's operand (all_gather: of its result), one call.
      calls: how often a step issues it.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    calls: int


def collectives(jaxpr: Any) -> list[Collective]:
    """Returns every collective of a jaxpr, in program order."""
    return list(_walk(jaxpr, 1))


def _walk(jaxpr: Any, times: int) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in COLLECTIVES:
            yield from _collective(eqn, times)
            continue
        repeat = eqn.params["length"] if name == "scan" else 1
        inner = list(_inner(eqn))
        for sub in inner[:1] if name == "cond" else inner:
            yield from _walk(sub, times * repeat)


def _inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs an equation calls. A while loop's condition comes with its body."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def _collective(eqn: Any, times: int) -> Iterator[Collective]:
    axes = eqn.params.get("axes") or eqn.params.get("axis_name")
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    kind = COLLECTIVES[eqn.primitive.name]
    counted = eqn.outvars if kind == "all_gather" else eqn.invars
    for var in counted:
        aval = var.aval
        size = int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize
        yield Collective(kind, axes, str(aval.dtype), size, times)
