"""Several processes on CPU: collectives in a fixed order, overlapped with computation.

On CPU the gloo library carries collectives between processes. XLA has faults there (JAX 0.10.2 to
0.12.0.1):

- It starts independent collectives in program order, but a collective inside a loop or conditional
  may start after a later one outside. A rank then takes a message of one collective for a message
  of another: the program ends with sizes that do not match, or goes on with wrong numbers.
- Large reduce-scatters return wrong numbers now and then (github.com/jax-ml/jax/issues/40830).
- The thread that runs the program waits in gloo, and computes nothing meanwhile.

`in_order` rewrites a traced function so that each collective waits for the collective before it,
through every loop, conditional and call, and so that large ones go through `comm.cpu.exchange`.
Decisions 0008 and 0022 have the measurements.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from moejax.comm.cpu.exchange import Exchange, connected, hold
from moejax.comm.cpu.held import HeldArrays
from moejax.comm.cpu.transfers import Transfers, bind
from moejax.comm.jaxprs import (
    CALLS,
    KINDS,
    communicates,
    inner_jaxprs,
    is_beside,
    scan_operands,
)

MOVES = ("all_to_all", "all_gather", "ppermute")  # collectives without arithmetic
LARGE = 2**16  # bytes from which a collective goes through the exchange


def is_gloo(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether gloo carries the collectives of programs on this mesh."""
    if not isinstance(mesh, Mesh) or not jax.distributed.is_initialized():
        return False
    return mesh.devices.flat[0].platform == "cpu"


def computes_beside(mesh: Mesh) -> bool:
    """Returns whether a program on this mesh computes during large collectives (`exchange`)."""
    return is_gloo(mesh) and connected(mesh) is not None


def shard_map(
    body: Callable,
    mesh: Mesh | AbstractMesh,
    in_specs: Any,
    out_specs: Any,
    *,
    ordered: bool = False,
) -> Callable:
    """`jax.shard_map` with the conventions of `comm.wire`; `in_order` on gloo.

    Args:
      ordered: whether collectives run one after the other in one process too. Not on an abstract
        mesh, whose programs are read and never run.
    """
    if isinstance(mesh, Mesh) and is_gloo(mesh):
        body = in_order(body, connected(mesh))
    elif ordered and isinstance(mesh, Mesh):
        body = in_order(body)
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def in_order(function: Callable, exchange: Exchange | None = None) -> Callable:
    """Returns a function with the same results whose collectives run one after the other.

    Args:
      function: runs per device, inside shard_map; arguments and results are trees of arrays.
      exchange: carries large collectives; None leaves them to gloo.
    """

    def ordered(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        flat, rewriter = jax.tree.leaves(arguments), _Rewriter(exchange)
        results, _ = rewriter.evaluate(closed.jaxpr, closed.consts, flat, jnp.uint32(0))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return ordered


Results = tuple[list[Any], jax.Array]  # the results, and the next token


class _Rewriter:
    """Evaluates jaxprs with their collectives in order.

    A token is a zero computed from the last collective's result: using it makes the next
    collective wait. After an exchange that `is_beside` the token is computed from its number: the
    next collective waits only for its start. Every method takes the token
    before it and returns the token after it.
    """

    def __init__(self, exchange: Exchange | None):
        self.exchange = exchange
        self.control = {"cond": self._cond, "while": self._while, "scan": self._scan}

    def evaluate(
        self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], token: jax.Array
    ) -> Results:
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(jaxpr.invars, arguments, strict=True))
        held, transfers = HeldArrays([], [], {}, []), Transfers(values)
        after = token  # the next exchange begins when this exists
        for eqn in jaxpr.eqns:
            if transfers.defer(eqn):
                continue
            transfers.compute(eqn.invars)
            inputs, name = transfers.read(eqn.invars), eqn.primitive.name
            exchange = self._exchange(eqn, inputs)
            if exchange and is_beside(eqn):
                after = transfers.start(eqn, exchange, inputs[0], after)
                token = _token(after)
                continue
            if exchange:
                result, after = exchange.run(name, inputs[0], after, **eqn.params)
                if name == "all_to_all":
                    held.sent([inputs[0], result], values.values())
                results, token = [result], _token(result)
            elif name not in KINDS and not any(map(communicates, inner_jaxprs(eqn))):
                inputs = transfers.after_start(eqn, held.in_turn(eqn, inputs))
                results = bind(eqn, inputs)
                held.computed(eqn, inputs, results)
            else:
                results, token = self._in_order(eqn, inputs, token)
                after = token
            transfers.add_results(eqn, results)
            values |= dict(zip(eqn.outvars, results, strict=True))
        transfers.end_all()
        if held.arrays:
            token = hold(token, held.arrays)
        return transfers.read(jaxpr.outvars), token

    def _in_order(self, eqn: Any, inputs: list[Any], token: jax.Array) -> Results:
        """Evaluates a collective that gloo carries, or an equation with collectives inside."""
        name = eqn.primitive.name
        if name in KINDS:
            return self._collective(eqn, inputs, token)
        if name in self.control:
            return self.control[name](eqn.params, inputs, token)
        if name in CALLS:
            return self._call(eqn, inputs, token)
        raise NotImplementedError(f"collectives inside {name} on several CPU processes")

    def _closed(self, jaxpr: Any, inputs: list[Any], token: jax.Array) -> Results:
        if hasattr(jaxpr, "jaxpr"):
            return self.evaluate(jaxpr.jaxpr, jaxpr.consts, inputs, token)
        return self.evaluate(jaxpr, (), inputs, token)

    def _exchange(self, eqn: Any, inputs: list[Any]) -> Exchange | None:
        """Returns the exchange that carries this equation's collective; None if gloo does."""
        if self.exchange is None or eqn.primitive.name not in self.exchange.carries:
            return None
        return self.exchange if len(inputs) == 1 and inputs[0].nbytes >= LARGE else None

    def _collective(self, eqn: Any, inputs: list[Any], token: jax.Array) -> Results:
        name, params = eqn.primitive.name, eqn.params
        inputs = [_wait(inputs[0], token), *inputs[1:]]
        if name == "reduce_scatter":
            results = [_reduce_scatter(inputs[0], **params)]
        elif name in MOVES:
            both = zip(bind(eqn, list(map(_as_bits, inputs))), inputs, strict=True)
            results = [lax.bitcast_convert_type(y, x.dtype) for y, x in both]
        else:
            results = bind(eqn, inputs)
        return results, _token(results[0])

    def _cond(self, params: Any, inputs: list[Any], token: jax.Array) -> Results:
        def branch(closed: Any) -> Callable:
            return lambda token, *operands: self._closed(closed, list(operands), token)

        index, *operands = inputs
        return lax.switch(index, [branch(b) for b in params["branches"]], token, *operands)

    def _while(self, params: Any, inputs: list[Any], token: jax.Array) -> Results:
        cond_jaxpr, body_jaxpr = params["cond_jaxpr"], params["body_jaxpr"]
        if communicates(cond_jaxpr):
            raise NotImplementedError("a collective in the condition of a loop")
        start = params["cond_nconsts"]
        stop = start + params["body_nconsts"]
        cond_consts, body_consts, carry = inputs[:start], inputs[start:stop], inputs[stop:]

        def condition(state: Any) -> Any:
            return self._closed(cond_jaxpr, [*cond_consts, *state[0]], jnp.uint32(0))[0][0]

        def body(state: Any) -> Any:
            return self._closed(body_jaxpr, [*body_consts, *state[0]], state[1])

        return lax.while_loop(condition, body, (carry, token))

    def _scan(self, params: Any, inputs: list[Any], token: jax.Array) -> Results:
        consts, carry, scanned = scan_operands(params, inputs)
        num_carry = len(carry)

        def body(state: Any, slices: Any) -> Any:
            arguments = [*consts, *state[0], *slices]
            results, token = self._closed(params["jaxpr"], arguments, state[1])
            return (results[:num_carry], token), results[num_carry:]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        (carry, token), stacked = lax.scan(body, (carry, token), scanned, **options)
        return [*carry, *stacked], token

    def _call(self, eqn: Any, inputs: list[Any], token: jax.Array) -> Results:
        if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
            # Without it the compiler would keep values that the backward pass is to recompute.
            inputs = lax.optimization_barrier(inputs)
        return self._closed(inner_jaxprs(eqn)[0], list(inputs), token)


def _as_bits(x: jax.Array) -> jax.Array:
    """Bit-casts two-byte floats to integers: on CPU XLA would send them as float32."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
    return lax.bitcast_convert_type(x, jnp.uint16) if narrow else x


def _wait(x: jax.Array, token: jax.Array) -> jax.Array:
    """Makes x wait for the token: XORs the zero into the bits of x's first element."""
    if not x.size:
        return x
    flat = x.reshape(-1)
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    first = lax.bitcast_convert_type(flat[:1], bits) ^ token.astype(bits)
    first = lax.bitcast_convert_type(first, x.dtype)
    return lax.dynamic_update_slice(flat, first, (0,)).reshape(x.shape)


def _token(y: jax.Array) -> jax.Array:
    """Makes the token, a zero, from a collective's result."""
    if not y.size:
        return jnp.uint32(0)
    first = y.reshape(-1)[0].astype(jnp.float32)
    zero = jnp.where(jnp.isfinite(first), first, 0) * 0.0
    return lax.bitcast_convert_type(zero, jnp.uint32) & 0x7FFFFFFF  # it may be -0.0


def _reduce_scatter(
    x: jax.Array, *, axis_name: Any, scatter_dimension: int, tiled: bool, **_: Any
) -> jax.Array:
    """A reduce-scatter as an all-to-all of parts and a sum in rank order; sends as many bytes."""
    if not tiled:
        raise ValueError("a reduce-scatter that drops its dimension is not carried")
    count = lax.axis_size(axis_name)
    parts = _as_bits(jnp.stack(jnp.split(x, count, axis=scatter_dimension)))
    parts = lax.all_to_all(parts, axis_name, 0, 0, tiled=True)
    return jnp.sum(lax.bitcast_convert_type(parts, x.dtype), axis=0, dtype=x.dtype)
