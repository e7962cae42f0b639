"""Reads a traced program: every collective it will issue, with its axes and bytes.

The walk enters loops (multiplied by their length) and calls. Of a `lax.switch` or `lax.cond` it
counts the first branch (the false one), which is what an ordinary step takes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from moejax.comm.jaxprs import KINDS, inner_jaxprs, opened


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
        if name in KINDS:
            yield from _collective(eqn, times)
            continue
        repeat = eqn.params["length"] if name == "scan" else 1
        inner = inner_jaxprs(eqn)
        for sub in inner[:1] if name == "cond" else inner:
            yield from _walk(opened(sub), times * repeat)


def _collective(eqn: Any, times: int) -> Iterator[Collective]:
    axes = eqn.params.get("axes") or eqn.params.get("axis_name")
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    kind = KINDS[eqn.primitive.name]
    counted = eqn.outvars if kind == "all_gather" else eqn.invars
    for var in counted:
        aval = var.aval
        size = int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize
        yield Collective(kind, axes, str(aval.dtype), size, times)
