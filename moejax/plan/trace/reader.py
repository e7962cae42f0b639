"""Reads a traced program: every product, memory-bound region and collective it will run.

The walk enters calls and loops. Of a `lax.switch` or `lax.cond` it takes the first branch (the
false one), which is what an ordinary step takes; told that buckets overflow, the branch that goes
in rounds. Nothing here runs or needs a device, and the size of the mesh makes no difference.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from moejax.comm.jaxprs import CALLS, KINDS, communicates, inner_jaxprs, opened, scan_operands
from moejax.comm.tokens.rounds import ROUNDS
from moejax.kernels.costs import attention_cost, dot_flops, named_cost
from moejax.plan.trace.fusion import Node, Storage, fuse
from moejax.plan.trace.schedule import TRAFFIC, Collective, Schedule, collectives_of

# Other names of what they are given.
VIEWS = ("reshape", "squeeze", "expand_dims", "name", "stop_gradient", "copy", "reshard")
# Made out of nothing where they are used.
CONSTANTS = ("iota", "axis_index", "random_seed", "empty2", "empty")
# Read of their first operand only what they give back.
SLICES = ("slice", "dynamic_slice", "split", "unstack")
GATHERS = ("gather", "scatter", "scatter-add", "scatter_add", "dynamic_update_slice", "sort")
GATHERS += ("top_k", "cumsum", "cummax", "cumlogsumexp", "reduce_window")
WORKING = ("while", "pallas_call", "core_map", "mpmd_map")
REST = "the rest"  # what stands in no scope: norms, residual sums
TRANSFORMS = {"jvp", "transpose", "vmap", "jit", "pjit", "checkpoint", "rematted_computation"}
TRANSFORMS |= {"while", "body", "cond", "closed_call", "shard_map", "remat"}


def read(jaxpr: Any, *, rounds: int = 0) -> Schedule:
    """Returns the schedule of a jaxpr, open or closed.

    Args:
      rounds: in how many expert layers go, where their buckets overflow; 0: they do not.
    """
    return _Reader(rounds).schedule(opened(jaxpr), ())


def collectives(jaxpr: Any) -> list[Collective]:
    """Returns every collective of a jaxpr, in order."""
    return collectives_of(read(jaxpr))


class _Reader:
    """Turns one jaxpr, and what it calls, into nodes; loops get readers of their own."""

    def __init__(self, rounds: int):
        self.rounds = rounds
        self.storage = Storage()
        self.nodes: list[Node] = []

    def schedule(self, jaxpr: Any, scope: tuple[str, ...]) -> Schedule:
        """The schedule of a jaxpr that stands in these scopes, outermost first."""
        values: dict[Any, int | None] = dict.fromkeys(jaxpr.constvars)
        inputs = [self.storage.new(_bytes(var.aval)) for var in jaxpr.invars]
        values |= dict(zip(jaxpr.invars, inputs, strict=True))
        outputs = self._run(jaxpr, values, scope)
        return fuse(self.nodes, self.storage, inputs, outputs)

    def _run(self, jaxpr: Any, values: dict[Any, int | None], scope: tuple[str, ...]) -> list:
        """Walks the equations; returns the values of the jaxpr's results."""

        def value_of(atom: Any) -> int | None:
            return None if hasattr(atom, "val") else values[atom]

        for eqn in jaxpr.eqns:
            inside = scope + _scope_names(eqn)
            given = [value_of(atom) for atom in eqn.invars]
            found = self._equation(eqn, given, inside)
            values.update(zip(eqn.outvars, found, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, given: list, scope: tuple[str, ...]) -> Sequence[int | None]:
        name = eqn.primitive.name
        if name in VIEWS:
            return given[:1]
        if name in CONSTANTS or (name == "broadcast_in_dim" and given[0] is None):
            return [None] * len(eqn.outvars)
        if name in KINDS:
            return self._collective(eqn, given, scope)
        if name == "scan":
            return self._scan(eqn, given, scope)
        if name == "while":
            return self._while(eqn, given, scope)
        if name == "cond":
            return self._inline(self._branch(eqn), given[1:], scope)
        if name in ("jit", "pjit") and _works(inner_jaxprs(eqn)[0]):
            cost = named_cost(eqn.params["name"], [var.aval for var in eqn.invars])
            if cost is not None:
                return self._add(eqn=eqn, given=given, scope=scope, **cost)
        if (cost := attention_cost(name, eqn)) is not None:
            return self._add(eqn=eqn, given=given, scope=scope, **cost)
        if name in CALLS:
            if name == "shard_map":  # from here on sizes are those of one device
                for value, var in zip(given, inner_jaxprs(eqn)[0].invars, strict=True):
                    if value is not None:
                        self.storage.resize(value, _bytes(var.aval))
            return self._inline(inner_jaxprs(eqn)[0], given, scope)
        if any(map(communicates, inner_jaxprs(eqn))):
            raise NotImplementedError(f"the planner cannot read collectives inside {name}")
        if name in ("dot_general", "ragged_dot_general", "ragged_dot"):
            flops, ragged = dot_flops(eqn), name != "dot_general"
            dtype = str(eqn.invars[0].aval.dtype)
            return self._add("product", eqn, given, scope, flops=flops, dtype=dtype, work=ragged)
        if name == "optimization_barrier":
            aliases = [None if v is None else self.storage.alias(v) for v in given]
            self.nodes.append(Node("join", *_place(scope), _reads(given), _present(aliases)))
            return aliases
        if name in GATHERS:
            return self._gather(eqn, given, scope)
        return self._add("region", eqn, given, scope)

    def _inline(self, jaxpr: Any, given: list, scope: tuple[str, ...]) -> list[int | None]:
        inner = opened(jaxpr)
        values: dict[Any, int | None] = dict.fromkeys(inner.constvars)
        values |= dict(zip(inner.invars, given, strict=True))
        return self._run(inner, values, scope)

    def _add(
        self, kind: Any, eqn: Any, given: list, scope: tuple[str, ...], **cost: Any
    ) -> list[int]:
        """A node that reads its operands, or slices of them, and writes what is new."""
        written = [self.storage.new(_bytes(var.aval)) for var in eqn.outvars]
        size = sum(map(self.storage.bytes, written))
        reads = _reads(given)
        if eqn.primitive.name in SLICES:
            reads = tuple((value, float(size)) for value, _ in reads[:1]) + reads[1:]
        self.nodes.append(Node(kind, *_place(scope), reads, tuple(written), **cost))
        return written

    def _gather(self, eqn: Any, given: list, scope: tuple[str, ...]) -> list[int]:
        """Rows by index, and what is written in place: the bytes that move."""
        name, sizes = eqn.primitive.name, [_bytes(var.aval) for var in eqn.invars]
        out = sum(_bytes(var.aval) for var in eqn.outvars)
        if name == "gather":
            moved = 2 * out + sizes[1]
        elif name.startswith("scatter"):
            moved = 2 * sizes[2] + sizes[1]
        elif name == "dynamic_update_slice":
            moved = 2 * sizes[1]
        else:
            length = max(eqn.invars[0].aval.shape[-1:], default=1)
            passes = math.log2(max(length, 2)) if name == "sort" else 1
            moved = (sum(sizes) + out) * passes
        in_place = name.startswith("scatter") or name == "dynamic_update_slice"
        if in_place and given[0] is not None:
            written = [self.storage.alias(given[0])]
        else:
            written = [self.storage.new(_bytes(var.aval)) for var in eqn.outvars]
        node = Node("gather", *_place(scope), _reads(given), tuple(written), bytes=moved)
        self.nodes.append(node)
        return written

    def _collective(self, eqn: Any, given: list, scope: tuple[str, ...]) -> list[int]:
        axes = eqn.params.get("axes") or eqn.params.get("axis_name")
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        kind, written = KINDS[eqn.primitive.name], []
        traffic = next((name for name in reversed(scope) if name in TRAFFIC), "")
        for value, before, after in zip(given, eqn.invars, eqn.outvars, strict=True):
            counted = after.aval if kind == "all_gather" else before.aval
            one = Collective(kind, axes, str(counted.dtype), _bytes(counted), 1, traffic)
            written.append(self.storage.new(_bytes(after.aval)))
            place = _place(scope)
            self.nodes.append(
                Node("collective", *place, _reads([value]), (written[-1],), collective=one)
            )
        return written

    def _scan(self, eqn: Any, given: list, scope: tuple[str, ...]) -> list[int | None]:
        params = eqn.params
        length, unroll = params["length"], params["unroll"]
        kept, carry, _ = scan_operands(params, given)
        body = _Reader(self.rounds).schedule(opened(params["jaxpr"]), scope)
        unrolled = unroll if isinstance(unroll, int) and 1 < unroll <= length else 1
        return self._loop(eqn, given, (len(kept), carry), scope, body, length // unrolled, unrolled)

    def _while(self, eqn: Any, given: list, scope: tuple[str, ...]) -> list[int | None]:
        params = eqn.params
        body_consts, cond_consts = params["body_nconsts"], params["cond_nconsts"]
        body = _Reader(self.rounds).schedule(opened(params["body_jaxpr"]), scope)
        trip_count = max(self.rounds, 1) if ROUNDS in scope else 1
        carried = given[cond_consts + body_consts :]
        return self._loop(eqn, given, (body_consts, carried), scope, body, trip_count, 1)

    def _loop(
        self,
        eqn: Any,
        given: list,
        carried: tuple[int, list],
        scope: tuple[str, ...],
        body: Schedule,
        trip_count: int,
        unrolled: int,
    ) -> list[int | None]:
        """A loop's carry stays where it is; what it stacks is new.

        Args:
          carried: where it starts in the body's inputs, and its first values.
        """
        first, carry = carried
        written: list[int] = [
            self.storage.new(_bytes(var.aval)) if value is None else self.storage.alias(value)
            for value, var in zip(carry, eqn.outvars, strict=False)
        ]
        stacked = eqn.outvars[len(carry) :]
        written += [self.storage.new(_bytes(var.aval)) for var in stacked]
        node = Node(
            "loop", *_place(scope), _reads(given), tuple(written), body=body, trip_count=trip_count
        )
        node.unrolled = unrolled
        pairs = zip(body.inputs[first:], body.outputs[: len(carry)], strict=False)
        node.carried = tuple((a, b) for a, b in pairs if b is not None)
        self.nodes.append(node)
        return list(written)

    def _branch(self, eqn: Any) -> Any:
        branches = eqn.params["branches"]
        if self.rounds:
            return next((b for b in branches if _has_rounds(b)), branches[0])
        return branches[0]


def _works(jaxpr: Any) -> bool:
    """Whether a call loops as data asks or runs a kernel; recomputation may leave only the rest."""
    return any(
        eqn.primitive.name in WORKING or any(map(_works, inner_jaxprs(eqn)))
        for eqn in opened(jaxpr).eqns
    )


def _has_rounds(jaxpr: Any) -> bool:
    return any(
        ROUNDS in _scope_names(eqn) or any(map(_has_rounds, inner_jaxprs(eqn)))
        for eqn in opened(jaxpr).eqns
    )


def _scope_names(eqn: Any) -> tuple[str, ...]:
    """The names of the scopes that an equation stands in, outermost first."""
    return tuple(re.findall(r"[A-Za-z_]\w*", str(eqn.source_info.name_stack)))


def _place(scope: tuple[str, ...]) -> tuple[str, bool]:
    """(scope, whether it is the backward pass)."""
    named = [name for name in scope if name not in TRANSFORMS]
    return (named[-1] if named else REST), "transpose" in scope


def _reads(given: Iterable[int | None]) -> tuple[tuple[int, float | None], ...]:
    """Values that are read whole."""
    return tuple((value, None) for value in _present(given))


def _present(values: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(value for value in values if value is not None)


def _bytes(aval: Any) -> int:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not hasattr(dtype, "itemsize"):
        return 0
    return int(np.prod(aval.shape, dtype=np.int64)) * dtype.itemsize
