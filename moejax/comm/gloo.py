"""Workarounds for several processes on CPU: collectives in one order, and no reduce-scatter.

On CPU the gloo library carries collectives between processes. XLA has two faults there (JAX 0.10.2
to 0.12.0.1):

- It starts independent collectives in program order, but a collective inside a loop or conditional
  may start after a later one outside. A rank then takes a message of one collective for a message
  of another: the program ends with sizes that do not match, or goes on with wrong numbers.
- Large reduce-scatters return wrong numbers now and then (github.com/jax-ml/jax/issues/40830).

`in_order` rewrites a traced function so that each collective waits for the collective before it,
through every loop, conditional and call. Gloo carries one at a time anyway.

When two ranks exchange data, one rank sometimes sends only after the other has finished (decision
0008). A large exchange of pairs therefore becomes two sends, one in each direction. Half of the
pairs send in the opposite order, so that together they fill the link in both directions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from moejax.comm.jaxprs import CALLS, KINDS, communicates, inner_jaxprs, scan_operands

MOVES = ("all_to_all", "all_gather", "ppermute")  # collectives without arithmetic
PAIRED = 2**16  # bytes from which an exchange of two devices becomes two sends


def is_gloo(mesh: Mesh | AbstractMesh) -> bool:
    """Whether gloo carries the collectives of programs on this mesh."""
    if not isinstance(mesh, Mesh) or not jax.distributed.is_initialized():
        return False
    return mesh.devices.flat[0].platform == "cpu"


def shard_map(body: Callable, mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any) -> Callable:
    """`jax.shard_map` with the conventions of `comm.wire`; `in_order` on gloo."""
    body = in_order(body) if is_gloo(mesh) else body
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def in_order(function: Callable) -> Callable:
    """Returns a function with the same results whose collectives run one after the other.

    Args:
      function: runs per device, inside shard_map; arguments and results are trees of arrays.
    """

    def ordered(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        flat = jax.tree.leaves(arguments)
        results, _ = _evaluate(closed.jaxpr, closed.consts, flat, jnp.uint32(0))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return ordered


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], token: jax.Array
) -> tuple[list[Any], jax.Array]:
    """Evaluates a jaxpr.

    `token` is a zero computed from the last collective's result: using it makes the next
    collective wait. The token after the last collective is returned beside the results.
    """
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if name in KINDS:
            results, token = _collective(eqn, inputs, token)
        elif not any(map(communicates, inner_jaxprs(eqn))):
            results = _bind(eqn, inputs)
        elif name in CONTROL:
            results, token = CONTROL[name](eqn.params, inputs, token)
        elif name in CALLS:
            results, token = _call(eqn, inputs, token)
        else:
            raise NotImplementedError(f"collectives inside {name} on several CPU processes")
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars], token


def _bind(eqn: Any, inputs: list[Any]) -> list[Any]:
    results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _closed(jaxpr: Any, inputs: list[Any], token: jax.Array) -> tuple[list[Any], jax.Array]:
    if hasattr(jaxpr, "jaxpr"):
        return _evaluate(jaxpr.jaxpr, jaxpr.consts, inputs, token)
    return _evaluate(jaxpr, (), inputs, token)


def _collective(eqn: Any, inputs: list[Any], token: jax.Array) -> tuple[list[Any], jax.Array]:
    name, params = eqn.primitive.name, eqn.params
    axes = params.get("axis_name", params.get("axes"))
    large = len(inputs) == 1 and inputs[0].nbytes >= PAIRED
    if name in PAIRWISE and large and (pairs := _pairs(axes)):
        result, token = PAIRWISE[name](inputs[0], pairs, token, **params)
        return [result], token
    inputs = [_wait(inputs[0], token), *inputs[1:]]
    if name == "reduce_scatter":
        results = [_reduce_scatter(inputs[0], **params)]
    elif name in MOVES:
        both = zip(_bind(eqn, list(map(_as_bits, inputs))), inputs, strict=True)
        results = [lax.bitcast_convert_type(y, x.dtype) for y, x in both]
    else:
        results = _bind(eqn, inputs)
    return results, _token(results[0])


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
    assert tiled
    count = lax.axis_size(axis_name)
    parts = _as_bits(jnp.stack(jnp.split(x, count, axis=scatter_dimension)))
    parts = lax.all_to_all(parts, axis_name, 0, 0, tiled=True)
    return jnp.sum(lax.bitcast_convert_type(parts, x.dtype), axis=0, dtype=x.dtype)


def _pairs(axis_name: Any) -> list[tuple[int, int]]:
    """The pairs of devices, by position in the mesh; [] unless all are pairs and even in number."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    names = mesh.axis_names
    if lax.axis_size(axes) != 2 or not set(axes) <= set(names):
        return []
    ids = np.arange(math.prod(mesh.axis_sizes)).reshape(mesh.axis_sizes)
    ids = np.moveaxis(ids, [names.index(axis) for axis in axes], range(-len(axes), 0))
    pairs = [(int(a), int(b)) for a, b in ids.reshape(-1, 2)]
    return pairs if len(pairs) % 2 == 0 else []


def _from_peer(
    x: jax.Array, pairs: list[tuple[int, int]], token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the x of the other device of this device's pair, and the next token."""
    dtype, x = x.dtype, _as_bits(x)
    mesh_axes = tuple(jax.sharding.get_abstract_mesh().axis_names)
    forth = [pair if index % 2 else pair[::-1] for index, pair in enumerate(pairs)]
    first = lax.ppermute(_wait(x, token), mesh_axes, forth)
    back = [(b, a) for a, b in forth]
    second = lax.ppermute(_wait(x, _token(first)), mesh_axes, back)
    receives_first = np.zeros(2 * len(pairs), bool)
    receives_first[[target for _, target in forth]] = True
    received = jnp.where(jnp.asarray(receives_first)[lax.axis_index(mesh_axes)], first, second)
    return lax.bitcast_convert_type(received, dtype), _token(second)


def _paired_all_to_all(
    x: jax.Array, pairs: Any, token: Any, *, axis_name: Any, **_: Any
) -> tuple[jax.Array, jax.Array]:
    own, other = _halves(x, axis_name, 0)
    received, token = _from_peer(other, pairs, token)
    return _joined(own, received, axis_name, 0), token


def _paired_all_gather(
    x: jax.Array, pairs: Any, token: Any, *, axis_name: Any, all_gather_dimension: int, **_: Any
) -> tuple[jax.Array, jax.Array]:
    received, token = _from_peer(x, pairs, token)
    return _joined(x, received, axis_name, all_gather_dimension), token


def _paired_reduce_scatter(
    x: jax.Array, pairs: Any, token: Any, *, axis_name: Any, scatter_dimension: int, **_: Any
) -> tuple[jax.Array, jax.Array]:
    own, other = _halves(x, axis_name, scatter_dimension)
    received, token = _from_peer(other, pairs, token)
    return own + received, token


def _paired_all_reduce(
    x: jax.Array, pairs: Any, token: Any, *, axes: Any, **_: Any
) -> tuple[jax.Array, jax.Array]:
    """Reduce-scatter and all-gather: XLA's own all-reduce does not run beside compute on CPU."""
    flat = jnp.pad(x.reshape(-1), (0, x.size % 2))
    half, token = _paired_reduce_scatter(flat, pairs, token, axis_name=axes, scatter_dimension=0)
    whole, token = _paired_all_gather(half, pairs, token, axis_name=axes, all_gather_dimension=0)
    return whole[: x.size].reshape(x.shape), token


def _halves(x: jax.Array, axis_name: Any, dim: int) -> tuple[jax.Array, jax.Array]:
    """Splits x: this device's half (its position in the pair), then the other device's half."""
    first, second = jnp.split(x, 2, axis=dim)
    is_first = lax.axis_index(axis_name) == 0
    return jnp.where(is_first, first, second), jnp.where(is_first, second, first)


def _joined(own: jax.Array, other: jax.Array, axis_name: Any, dim: int) -> jax.Array:
    """The inverse of `_halves`."""
    is_first = lax.axis_index(axis_name) == 0
    halves = [jnp.where(is_first, own, other), jnp.where(is_first, other, own)]
    return jnp.concatenate(halves, axis=dim)


PAIRWISE: dict[str, Callable] = {
    "all_to_all": _paired_all_to_all,
    "all_gather": _paired_all_gather,
    "reduce_scatter": _paired_reduce_scatter,
    "psum": _paired_all_reduce,
    "psum_invariant": _paired_all_reduce,
}


def _cond(params: Any, inputs: list[Any], token: jax.Array) -> tuple[list[Any], jax.Array]:
    def branch(closed: Any) -> Callable:
        return lambda token, *operands: _closed(closed, list(operands), token)

    index, *operands = inputs
    return lax.switch(index, [branch(b) for b in params["branches"]], token, *operands)


def _while(params: Any, inputs: list[Any], token: jax.Array) -> tuple[list[Any], jax.Array]:
    cond_jaxpr, body_jaxpr = params["cond_jaxpr"], params["body_jaxpr"]
    if communicates(cond_jaxpr):
        raise NotImplementedError("a collective in the condition of a loop")
    start = params["cond_nconsts"]
    stop = start + params["body_nconsts"]
    cond_consts, body_consts, carry = inputs[:start], inputs[start:stop], inputs[stop:]

    def condition(state: Any) -> Any:
        return _closed(cond_jaxpr, [*cond_consts, *state[0]], jnp.uint32(0))[0][0]

    def body(state: Any) -> Any:
        return _closed(body_jaxpr, [*body_consts, *state[0]], state[1])

    return lax.while_loop(condition, body, (carry, token))


def _scan(params: Any, inputs: list[Any], token: jax.Array) -> tuple[list[Any], jax.Array]:
    consts, carry, scanned = scan_operands(params, inputs)
    num_carry = len(carry)

    def body(state: Any, slices: Any) -> Any:
        results, token = _closed(params["jaxpr"], [*consts, *state[0], *slices], state[1])
        return (results[:num_carry], token), results[num_carry:]

    (carry, token), stacked = lax.scan(
        body,
        (carry, token),
        scanned,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked], token


def _call(eqn: Any, inputs: list[Any], token: jax.Array) -> tuple[list[Any], jax.Array]:
    if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
        # Without it the compiler would keep values that the backward pass is to recompute.
        inputs = lax.optimization_barrier(inputs)
    return _closed(inner_jaxprs(eqn)[0], list(inputs), token)


CONTROL: dict[str, Callable] = {"cond": _cond, "while": _while, "scan": _scan}
