"""Sequences that several devices share: positions, keys that travel, and attention to them."""

import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from moejax.comm import context
from moejax.comm.jaxprs import inner_jaxprs
from moejax.config.schema import MeshConfig
from moejax.kernels.attention import blocked
from moejax.kernels.attention.ranged import IMPLEMENTATIONS
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.layout.route import build_route
from moejax.layout.spec import StepSpec
from moejax.model.context import Rows, attend, attend_cached
from moejax.plan.trace.reader import collectives
from tests.cases import few
from tests.kernels.attention.test_ranged import dense


def shared_by(c, stripe, *, nodes=1, tensor=1):
    """The layout of c devices that share a sequence: two axes of them if c is a multiple of 4."""
    fsdp = 2 if c % 4 == 0 else 1
    mesh = MeshConfig(1, fsdp, c // fsdp, tensor, nodes=nodes, context=c, context_stripe=stripe)
    return build_layout(mesh)


def on_devices(layout, function, *specs, out):
    """Maps per-device code over the first devices."""
    count = math.prod(size for _, size in layout.sizes)
    mesh = build_mesh(layout, jax.devices()[:count])
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    )


def dealt(length, c, stripe):
    """Positions of each device, dealt one stripe at a time."""
    hands = [[] for _ in range(c)]
    for number, start in enumerate(range(0, length, stripe)):
        turn, place = divmod(number, c)
        hands[place if turn % 2 == 0 else c - 1 - place] += range(start, start + stripe)
    return np.array(hands)


@pytest.mark.parametrize(("c", "stripe", "nodes"), [(2, 3, 1), (4, 1, 2), (8, 2, 4), (8, 4, 2)])
def test_stripes_are_dealt_back_and_forth_and_gathered_in_order(c, stripe, nodes):
    layout, length = shared_by(c, stripe, nodes=nodes), 2 * c * stripe * 3
    x_BSC = np.random.default_rng(0).standard_normal((2, length, 3)).astype(np.float32)

    def body(x_BSC):
        own_BTC = context.own(x_BSC, layout)
        return context.positions(length, layout), own_BTC, context.gather(own_BTC, layout)

    parts = P(layout.context), P(None, layout.context), P()
    position, own, whole = on_devices(layout, body, P(), out=parts)(x_BSC)
    wanted = dealt(length, c, stripe)
    np.testing.assert_array_equal(np.reshape(position, (c, -1)), wanted)
    np.testing.assert_array_equal(np.reshape(own, (2, c, -1, 3)), x_BSC[:, wanted])
    np.testing.assert_array_equal(whole, x_BSC)
    for device, hand in enumerate(wanted):
        points = np.arange(length + 1)
        below = context.keys_before(jnp.asarray(points), jnp.int32(device), layout)
        np.testing.assert_array_equal(below, np.searchsorted(hand, points))


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 13])
def test_each_query_finds_its_keys_where_they_are_said_to_be(window):
    layout, length = shared_by(4, 4), 64
    reach = context.reach_of(window, layout)
    assert (reach.before is None) == (window > 5)

    def body(x_BS):
        position_T = context.positions(length, layout)
        first_T = jnp.maximum(position_T - window + 1, 0)
        x_BK = context.exchange(context.own(x_BS, layout), reach, layout, jnp.float32)
        first_T, last_T = reach.places(first_T, position_T, length, layout)
        sums = jnp.cumsum(jnp.pad(x_BK, ((0, 0), (1, 0))), axis=1)
        return sums[:, last_T + 1] - sums[:, first_T]

    position_S = np.arange(1, length + 1)
    found = on_devices(layout, body, P(), out=P(None, layout.context))(position_S[None])
    back = np.concatenate(dealt(length, 4, 4))
    wanted = [position_S[max(0, p - window + 1) : p + 1].sum() for p in back]
    np.testing.assert_array_equal(found[0], wanted)


def bordered(length, stripe, offset):
    """Documents that begin `offset` after every other border of stripes."""
    position = np.arange(length)
    return np.sum([position >= b + offset for b in range(stripe, length, 2 * stripe)], axis=0)


def case(c, stripe, window, exchange, documents, sinks, groups):
    """An example of the next test."""
    names = "c", "stripe", "window", "exchange", "documents", "sinks", "groups"
    values = c, stripe, window, exchange, documents, sinks, groups
    return example(**dict(zip(names, values, strict=True)))


@pytest.mark.slow
@few(2)
@case(8, 4, (0, 1), "gather", 1, None, 1)
@case(8, 4, (1, -1), "gather", -1, 10.0, 2)
@case(4, 4, (1, 0), "gather", 0, None, 1)
@case(4, 4, (1, 1), "gather", 1, -10.0, 2)
@case(8, 1, (3, 0), "ring", 0, 10.0, 2)
@case(8, 4, None, "ring", -1, -10.0, 1)
@case(2, 4, (1, 1), "ring", 1, None, 1)
@given(
    c=st.sampled_from([2, 4, 8]),
    stripe=st.sampled_from([1, 4]),
    window=st.sampled_from([None, (0, 1), (1, -1), (1, 0), (1, 1), (3, 0)]),  # stripes, and more
    exchange=st.sampled_from(["gather", "ring"]),
    documents=st.sampled_from([None, -1, 0, 1]),
    sinks=st.sampled_from([None, -10.0, 10.0]),
    groups=st.sampled_from([1, 2]),
)
def test_attention_to_shared_sequences_is_that_of_one_device(
    c, stripe, window, exchange, documents, sinks, groups
):
    """Result and gradients; documents begin before, at and after borders of stripes."""
    layout, length = shared_by(c, stripe, nodes=2), 2 * c * stripe * 2
    if window is not None:
        window = max(1, window[0] * stripe + window[1])
    rng = np.random.default_rng(0)
    shapes = (1, length, 4, 8), (1, length, groups, 8), (1, length, groups, 4), (1, length, 4, 4)
    q, k, v, dy = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    sinks = None if sinks is None else np.full(4, sinks, np.float32)
    begins = np.zeros(length, int) if documents is None else bordered(length, stripe, documents)
    segment = jnp.asarray(begins[None], jnp.int32)
    dy, form = jnp.asarray(dy), {"window": window, "scale": 0.3}
    back = np.arange(length)[:, None] - np.arange(length)
    seen = (back >= 0) & (back < (window or length)) & (begins[:, None] == begins)
    exact = np.full(4, -np.inf) if sinks is None else sinks
    q, k, v, d = (np.asarray(x, np.float64) for x in (q, k, v, dy))
    y, *wanted = dense(q, k, v, exact, seen[None], 0.3, d)
    wanted = [np.sum(y * d), *wanted]
    q, k, v = (x.astype(np.float32) for x in (q, k, v))

    spec = StepSpec(layout, build_route("split", layout), context_exchange=exchange)

    def shared(q, k, v, sinks):
        own = partial(context.own, layout=layout)

        def loss(q, k, v, sinks):
            y = attend(*map(own, (q, k, v)), segment=segment, spec=spec, sinks_H=sinks, **form)
            return jnp.sum(y * own(dy))

        found = jax.value_and_grad(loss, (0, 1, 2, 3) if sinks is not None else (0, 1, 2))
        return jax.tree.map(partial(jax.lax.psum, axis_name=layout.context), found(q, k, v, sinks))

    found = on_devices(layout, shared, P(), P(), P(), P(), out=P())(q, k, v, sinks)
    found = jax.tree.leaves(found)
    wanted = wanted[: len(found)]
    # Where a query sees little, gradients of scores are differences of terms as large as these.
    largest = max(np.abs(x).max() for x in wanted[1:])
    for have, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=2e-6 * largest)


def test_keys_travel_the_ring_as_they_are_and_sums_of_their_gradients_in_float32():
    """What each device sends in bfloat16: keys and values, in both passes; the sums are wider."""
    c, length, channels = 4, 32, 2 * 8 + 2 * 4
    layout = shared_by(c, 2)
    spec = StepSpec(layout, build_route("split", layout), context_exchange="ring")
    segment = jnp.zeros((1, length), jnp.int32)

    def body(*arrays):
        y, pull = jax.vjp(
            partial(attend, segment=segment, window=None, spec=spec, scale=1.0), *arrays
        )
        return pull(y)

    split = P(None, layout.context)
    shapes = (4, 8), (2, 8), (2, 4)
    arrays = [jax.ShapeDtypeStruct((1, length, *shape), jnp.bfloat16) for shape in shapes]
    traced = on_devices(layout, body, *[split] * 3, out=split).trace(*arrays)
    sent = Counter()
    for one in collectives(traced.jaxpr.jaxpr):
        sent[one.dtype] += one.calls * one.bytes
    # Two sends a hop: the way around is one of its own. Each carries a device's part of the keys.
    part = length // c * channels
    assert sent == {"bfloat16": 2 * 2 * (c - 1) * 2 * part, "float32": 2 * c * 4 * part}


def traced(layout, exchange, implementation="blocked"):
    """The jaxpr of attention and its gradients, on the devices of a layout."""
    route = build_route("split", layout)
    spec = StepSpec(layout, route, context_exchange=exchange, attention=implementation)
    segment = jnp.zeros((1, 64), jnp.int32)

    def body(*arrays):
        y, pull = jax.vjp(
            partial(attend, segment=segment, window=None, spec=spec, scale=1.0), *arrays
        )
        return pull(y)

    split = P(None, layout.context)
    arrays = [jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)] * 3
    return on_devices(layout, body, *[split] * 3, out=split).trace(*arrays).jaxpr.jaxpr


def test_a_ring_is_a_loop_whatever_its_length():
    def equations(jaxpr):
        return len(jaxpr.eqns) + sum(
            equations(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn)
        )

    four, eight = (equations(traced(shared_by(c, 2), "ring")) for c in (4, 8))
    assert four == eight > 100


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_nobody_differentiates_a_kernel_or_the_sum_of_its_parts(monkeypatch, exchange):
    """Gradients of a sum of pieces by pieces would lack what a kernel's own rule leaves out."""

    @partial(jax.custom_jvp, nondiff_argnums=(5, 6))
    def forward(q, k, v, first, last, scale, extent):
        return blocked.forward(q, k, v, first, last, scale=scale, extent=extent)

    @forward.defjvp
    def refuse(*_):
        raise AssertionError("a kernel is differentiated")

    kernel = SimpleNamespace(
        forward=lambda *keys, scale, extent: forward(*keys, scale, extent),
        gradients=blocked.gradients,
    )
    monkeypatch.setitem(IMPLEMENTATIONS, "watched", kernel)
    traced(shared_by(4, 2), exchange, "watched")


@pytest.mark.parametrize("sinks", [None, 1.0])
def test_a_token_attends_to_the_parts_of_a_cache_that_devices_hold(sinks):
    """Each device has a row's query, and a part of the positions of all rows' slots."""
    layout, length, c = shared_by(4, 2), 32, 4
    rng = np.random.default_rng(0)
    shapes = (c, 1, 4, 8), (c, length, 2, 8), (c, length, 2, 4)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    last = np.array([0, 9, 20, length - 1], np.int32)
    sinks_H = None if sinks is None else jnp.full(4, sinks)

    def body(q, k, v, last):
        k, v = (jnp.swapaxes(context.own(x, layout), 1, 2) for x in (k, v))
        one = jnp.ones_like(last)
        row = Rows(0 * last, last, one, 1, every=True)
        return attend_cached(q, k, v, row, layout, sinks_H=sinks_H, window=None, scale=0.3)

    rows = P(layout.context)
    found = on_devices(layout, body, rows, P(), P(), rows, out=rows)(q, k, v, last)
    for row, end in enumerate(last):
        for head in range(4):
            weight = np.exp(0.3 * k[row, : end + 1, head // 2] @ q[row, 0, head])
            total = weight.sum() + (0 if sinks is None else np.exp(sinks))
            wanted = weight @ v[row, : end + 1, head // 2] / total
            np.testing.assert_allclose(found[row, 0, head], wanted, rtol=1e-5, atol=1e-6)


# Lengths of documents as they come in files of code and prose, in tokens.
RECORDED = (310, 1_870, 4_096, 95, 12_400, 730, 2_210, 27_000, 5_150, 640, 8_800, 1_020)


def test_stripes_give_devices_nearly_equal_work_where_halves_do_not():
    length = 131_072
    ends = np.minimum(np.cumsum(np.resize(RECORDED, 40)), length)
    begins = np.concatenate([[0], ends[:-1]])
    position = np.arange(length)
    pairs = position - begins[np.searchsorted(ends, position, side="right")] + 1

    def busiest(stripe):
        work = pairs[dealt(length, 8, stripe)].sum(axis=1)
        return work.max() / work.mean()

    assert busiest(512) < 1.2 < busiest(length // 16), "two parts a device are zig-zag"
