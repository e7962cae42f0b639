"""Reads a traced program: every product, memory-bound region and collective that it will run.

The walk enters calls and loops. For a `lax.switch` or `lax.cond` it reads the first (false) branch,
as ordinary steps do. If buckets overflow, it reads the branch with overflow rounds, and of the step
in which sites send all at once the branch that sends.
Nothing here runs or needs a device. The time does not depend on the size of the mesh.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from moejax.comm.jaxprs import (
    CALLS,
    KINDS,
    communicates,
    inner_jaxprs,
    is_beside,
    opened,
    scan_operands,
)
from moejax.comm.tokens.rounds import ROUNDS
from moejax.kernels.costs import attention_cost, dot_flops, named_cost, named_trips
from moejax.plan.trace.fusion import Node, Storage, fuse
from moejax.plan.trace.schedule import TRAFFIC, Collective, Op, Schedule, collectives_of

# Primitives whose result shares the buffer of the first operand.
VIEWS = ("reshape", "squeeze", "expand_dims", "name", "stop_gradient", "copy", "reshard")
# Primitives that cost nothing: the compiler computes them where they are used.
CONSTANTS = ("iota", "axis_index", "random_seed", "empty2")
# Primitives that read no more of the first operand than they return.
SLICES = ("slice", "dynamic_slice", "split", "unstack")
EXPONENTIALS = ("exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "sin", "cos")
EXPONENTIALS += ("pow",)
REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin")
GATHERS = ("gather", "scatter", "scatter-add", "scatter_add", "dynamic_update_slice", "sort")
GATHERS += ("top_k", "cumsum", "cummax", "cumlogsumexp", "reduce_window")
WORKING = ("while", "pallas_call", "core_map", "mpmd_map")
REST = "the rest"  # operations outside any named scope: norms, residual sums
TRANSFORMS = {"jvp", "transpose", "vmap", "jit", "pjit", "checkpoint", "rematted_computation"}
TRANSFORMS |= {"while", "body", "cond", "closed_call", "shard_map", "remat"}
Scope = tuple[str, ...]  # named scopes, outermost first


def read(jaxpr: Any, *, rounds: int = 0, burst: bool = False) -> Schedule:
    """Returns the schedule of a jaxpr, open or closed.

    Args:
      rounds: overflow rounds of each expert layer; 0: no bucket overflows.
      burst: whether it is the last step of an outer loop's period, for `outer.order` all.
    """
    return _Reader(rounds, burst).schedule(opened(jaxpr), ())


def collectives(jaxpr: Any) -> list[Collective]:
    """Returns every collective of a jaxpr, in order."""
    return collectives_of(read(jaxpr))


class _Reader:
    """Turns one jaxpr and the calls inside into nodes; each loop body gets its own reader."""

    def __init__(self, rounds: int, burst: bool = False):
        self.rounds, self.burst = rounds, burst
        self.storage = Storage()
        self.nodes: list[Node] = []
        self.sent: set[int] = set()  # values that copies from the device made
        self.empty: set[int] = set()  # values that are not written yet

    def _new(self, var: Any) -> int:
        """Returns a new value in a buffer of the memory that a variable lies in."""
        return self.storage.new(_bytes(var.aval), on_host=_is_on_host(var))

    def schedule(self, jaxpr: Any, scope: Scope, carried: int | None = None) -> Schedule:
        """Returns the schedule of a jaxpr inside the named scopes, outermost first.

        Args:
          carried: of a loop's body the number of results that go to the next trip. Copies to the
            host write the others where they are stacked.
        """
        inputs = [self._new(var) for var in jaxpr.invars]
        outputs = self._run(jaxpr, inputs, scope)
        for value in self.sent.intersection(outputs[carried:] if carried is not None else ()):
            self.storage.resize(value, 0)
        return fuse(self.nodes, self.storage, inputs, outputs)

    def _run(self, jaxpr: Any, operands: Sequence[int | None], scope: Scope) -> list:
        """Walks the equations; returns the values of the jaxpr's results."""
        values: dict[Any, int | None] = dict.fromkeys(jaxpr.constvars)
        values |= dict(zip(jaxpr.invars, operands, strict=True))

        def value_of(atom: Any) -> int | None:
            return None if hasattr(atom, "val") else values[atom]

        for eqn in jaxpr.eqns:
            inside = scope + _scope_names(eqn)
            read = [value_of(atom) for atom in eqn.invars]
            results = self._equation(eqn, read, inside)
            values.update(zip(eqn.outvars, results, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list, scope: Scope) -> Sequence[int | None]:
        name = eqn.primitive.name
        if name in VIEWS:
            return operands[:1]
        if name in CONSTANTS or (name == "broadcast_in_dim" and operands[0] is None):
            return [None] * len(eqn.outvars)
        if name in KINDS:
            return self._collective(eqn, operands, scope)
        if name == "device_put":
            return self._copies(eqn, operands, scope)
        if name == "empty":
            self.empty.add(value := self._new(eqn.outvars[0]))
            return [value]
        if name == "scan":
            return self._scan(eqn, operands, scope)
        if name == "while":
            return self._while(eqn, operands, scope)
        if name == "cond":
            return self._run(opened(self._taken(eqn, scope)), operands[1:], scope)
        if name in ("jit", "pjit") and _works(inner_jaxprs(eqn)[0]):
            cost = named_cost(eqn.params["name"], [var.aval for var in eqn.invars])
            if cost is not None:
                return self._add(eqn=eqn, operands=operands, scope=scope, **cost)
        if (cost := attention_cost(name, eqn)) is not None:
            return self._add(eqn=eqn, operands=operands, scope=scope, **cost)
        if name in CALLS:
            if name == "shard_map":  # from here on sizes are those of one device
                for value, var in zip(operands, inner_jaxprs(eqn)[0].invars, strict=True):
                    if value is not None:
                        self.storage.resize(value, _bytes(var.aval))
            return self._run(opened(inner_jaxprs(eqn)[0]), operands, scope)
        if any(map(communicates, inner_jaxprs(eqn))):
            raise NotImplementedError(f"the planner cannot read collectives inside {name}")
        if name in ("dot_general", "ragged_dot_general", "ragged_dot"):
            flops, ragged = dot_flops(eqn), name != "dot_general"
            dtype = str(eqn.invars[0].aval.dtype)
            cost = {"flops": flops, "dtype": dtype, "scales_with_fill": ragged}
            return self._add("product", eqn, operands, scope, **cost)
        if name == "optimization_barrier":
            aliases = [None if v is None else self.storage.alias(v) for v in operands]
            join = Op("join", *_labels(scope))
            self.nodes.append(Node(join, _reads(operands), _present(aliases)))
            return aliases
        if any(map(_is_on_host, eqn.outvars)):
            return self._on_host(eqn, operands, scope)
        if name in GATHERS:
            return self._gather(eqn, operands, scope)
        return self._add("region", eqn, operands, scope, **_computed(eqn))

    def _taken(self, eqn: Any, scope: Scope) -> Any:
        """Returns the branch of a conditional that is read."""
        branches = eqn.params["branches"]
        taken = [b for b in branches if self.rounds and _has_rounds(b)] or branches
        return taken[-1 if self.burst and "outer" in scope else 0]

    def _add(
        self, kind: Any, eqn: Any, operands: list, scope: Scope, unread: float = 1.0, **cost: Any
    ) -> list[int]:
        """Adds a node that reads its operands, or slices of them, and writes new buffers."""
        written = [self.storage.new(_bytes(var.aval)) for var in eqn.outvars]
        size = sum(map(self.storage.bytes, written))
        reads = _reads(operands)
        if eqn.primitive.name in SLICES:
            reads = tuple((value, float(size)) for value, _ in reads[:1]) + reads[1:]
        op = Op(kind, *_labels(scope), **cost)
        self.nodes.append(Node(op, reads, tuple(written), unread))
        return written

    def _gather(self, eqn: Any, operands: list, scope: Scope) -> list[int]:
        """Adds a gather, scatter, sort or in-place update, priced by the bytes that it moves."""
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
        if in_place and operands[0] is not None:
            written = [self.storage.alias(operands[0])]
        else:
            written = [self.storage.new(_bytes(var.aval)) for var in eqn.outvars]
        kind = "write" if name == "dynamic_update_slice" else "gather"
        op = Op(kind, *_labels(scope), bytes=moved)
        self.nodes.append(Node(op, _reads(operands), tuple(written)))
        return written

    def _copies(self, eqn: Any, operands: list, scope: Scope) -> list[int | None]:
        """Adds a copy for each operand that changes its memory; others stay where they are."""
        written: list[int | None] = []
        for value, before, after in zip(operands, eqn.invars, eqn.outvars, strict=True):
            away = _is_on_host(after)
            if _is_on_host(before) == away or (value is None and not away):
                written.append(value)
                continue
            copy = self._new(after)
            written.append(copy)
            if value in self.empty:
                continue  # nothing has been written that could be copied
            op = Op(
                "from_device" if away else "to_device", *_labels(scope), bytes=_bytes(after.aval)
            )
            self.nodes.append(Node(op, _reads([value]), (copy,)))
            self.sent.update([copy] if away else [])
        return written

    def _on_host(self, eqn: Any, operands: list, scope: Scope) -> Sequence[int | None]:
        """Reads an operation in the host's memory: a part of an array, or a write of one.

        Neither moves anything by itself: a copy reads or writes its part where it lies.
        """
        name = eqn.primitive.name
        if name in SLICES or name == "broadcast_in_dim":
            return operands[:1] * len(eqn.outvars)
        if name != "dynamic_update_slice":
            raise NotImplementedError(f"the planner cannot read {name} in the host's memory")
        array, part = operands[:2]
        if part in self.sent:
            self.storage.resize(part, 0)  # it has no other place
        written = self._new(eqn.outvars[0]) if array is None else self.storage.alias(array)
        join = Op("join", *_labels(scope))
        self.nodes.append(Node(join, _reads(operands[:2]), (written,)))
        return [written]

    def _collective(self, eqn: Any, operands: list, scope: Scope) -> list[int]:
        axes = eqn.params.get("axes") or eqn.params.get("axis_name")
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        kind, written = KINDS[eqn.primitive.name], []
        senders = tuple(sorted(sender for sender, _ in eqn.params.get("perm", ())))
        traffic = next((name for name in reversed(scope) if name in TRAFFIC), "")
        for value, before, after in zip(operands, eqn.invars, eqn.outvars, strict=True):
            counted = after.aval if kind == "all_gather" else before.aval
            about = (kind, axes, str(counted.dtype), _bytes(counted))
            beside = kind == "all_gather" and is_beside(eqn)
            collective = Collective(*about, 1, traffic, senders, beside)
            written.append(self.storage.new(_bytes(after.aval)))
            op = Op("collective", *_labels(scope), collective=collective)
            self.nodes.append(Node(op, _reads([value]), (written[-1],)))
        return written

    def _scan(self, eqn: Any, operands: list, scope: Scope) -> list[int | None]:
        params = eqn.params
        length, unroll = params["length"], params["unroll"]
        consts, carry, _ = scan_operands(params, operands)
        unrolled = unroll if isinstance(unroll, int) and 1 < unroll <= length else 1
        trips = {"trip_count": length // unrolled, "unrolled": unrolled}
        return self._loop(eqn, params["jaxpr"], operands, scope, (len(consts), carry), **trips)

    def _while(self, eqn: Any, operands: list, scope: Scope) -> list[int | None]:
        params = eqn.params
        first = params["body_nconsts"]
        carried = first, operands[params["cond_nconsts"] + first :]
        rounds = max(self.rounds, 1) if ROUNDS in scope else 1
        trips = {"trip_count": named_trips(reversed(scope)) or rounds}
        return self._loop(eqn, params["body_jaxpr"], operands, scope, carried, **trips)

    def _loop(
        self,
        eqn: Any,
        jaxpr: Any,
        operands: list,
        scope: Scope,
        carried: tuple[int, list],
        **trips: Any,
    ) -> list[int | None]:
        """Adds a loop over a jaxpr. Its carry stays in place; stacked results get new buffers.

        Args:
          carried: index of the carry in the body's inputs, and its initial values.
        """
        first, carry = carried
        body = _Reader(self.rounds, self.burst).schedule(opened(jaxpr), scope, len(carry))
        written: list[int] = [
            self._new(var) if value is None else self.storage.alias(value)
            for value, var in zip(carry, eqn.outvars, strict=False)
        ]
        stacked = eqn.outvars[len(carry) :]
        written += [self._new(var) for var in stacked]
        pairs = zip(body.inputs[first:], body.outputs[: len(carry)], strict=False)
        op = Op(
            "loop",
            *_labels(scope),
            body=body,
            carried=tuple((a, b) for a, b in pairs if b is not None),
            **trips,
        )
        self.nodes.append(Node(op, _reads(operands), tuple(written)))
        return list(written)


def _computed(eqn: Any) -> dict[str, float]:
    """Returns the values that an elementwise operation computes besides moving them."""
    name = eqn.primitive.name
    if name in EXPONENTIALS:
        return {"exponentials": float(eqn.outvars[0].aval.size)}
    return {"reduced": float(eqn.invars[0].aval.size)} if name in REDUCTIONS else {}


def _works(jaxpr: Any) -> bool:
    """Returns whether a call holds a data-dependent loop or a kernel."""
    return any(
        eqn.primitive.name in WORKING or any(map(_works, inner_jaxprs(eqn)))
        for eqn in opened(jaxpr).eqns
    )


def _has_rounds(jaxpr: Any) -> bool:
    return any(
        ROUNDS in _scope_names(eqn) or any(map(_has_rounds, inner_jaxprs(eqn)))
        for eqn in opened(jaxpr).eqns
    )


def _scope_names(eqn: Any) -> Scope:
    """Returns the named scopes of an equation, outermost first."""
    # `jnp.einsum` makes one of its letters, which says nothing.
    names = re.sub(r"[\w,]+->\w*", "", str(eqn.source_info.name_stack))
    return tuple(re.findall(r"[A-Za-z_]\w*", names))


def _labels(scope: Scope) -> tuple[str, bool]:
    """Returns (scope, whether it is in the backward pass)."""
    named = [n for n in scope if n not in TRANSFORMS and named_trips((n,)) is None]
    return (named[-1] if named else REST), "transpose" in scope


def _reads(values: Iterable[int | None]) -> tuple[tuple[int, float | None], ...]:
    return tuple((value, None) for value in _present(values))


def _present(values: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(value for value in values if value is not None)


def _is_on_host(var: Any) -> bool:
    space = getattr(var.aval, "memory_space", jax.memory.Space.Device)
    return space == jax.memory.Space.Host


def _bytes(aval: Any) -> int:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not hasattr(dtype, "itemsize"):
        return 0
    return int(np.prod(aval.shape, dtype=np.int64)) * dtype.itemsize
