"""States that pass from stripe to stripe of sequences that devices share, and their effects."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from moejax.comm import context
from moejax.kernels.chunks import Effect, convolve
from moejax.kernels.delta import gated_delta
from moejax.kernels.state_space import state_space
from moejax.model.mixers.states import _goes_on, _states_before, _tails_before
from moejax.plan.trace.reader import collectives
from tests.cases import few
from tests.model.test_context import bordered, on_devices, shared_by
from tests.oracle_delta import convolve_by_position, delta_by_position
from tests.oracle_state_space import states_by_position

EPSILON = np.finfo(np.float32).eps
(G, H), C, V = (1, 3), 4, 3  # heads, which two devices do not divide


in_a_tree = jax.jit(partial(jax.lax.associative_scan, Effect.then))


@few(20)
@given(count=st.sampled_from([1, 7]), number=st.booleans(), seed=st.integers(0, 999))
def test_effects_in_a_tree_are_those_one_after_the_other(count, number, seed):
    """Of maps that make nothing longer, as those of states; some forget all."""
    rng = np.random.default_rng(seed)
    factor = rng.uniform(-1, 1, (count, 1, 1) if number else (count, C, C))
    factor /= np.maximum(1, np.linalg.norm(factor, 2, axis=(1, 2)))[:, None, None]
    factor[rng.random(count) < 0.2] = 0
    addend, first = rng.standard_normal((count, C, V)), rng.standard_normal((C, V))
    every = in_a_tree(Effect(*(jnp.asarray(x, jnp.float32) for x in (factor, addend))))
    found = jax.jit(Effect.on)(every, jnp.asarray(first, jnp.float32))
    state = first
    for n in range(count):
        state = (factor[n] * state if number else factor[n] @ state) + addend[n]
        np.testing.assert_allclose(found[n], state, rtol=0, atol=100 * EPSILON)


def operands(form, length, batch=2, seed=0):
    """Queries, keys, values, logarithms of fading, and betas of the delta rule; in float64."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((batch, length, G, C)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    of_g = (G, C) if form == "channel" else (H,)
    g = -np.exp(rng.standard_normal((batch, length, *of_g)) - 3)
    arrays = [q, k, rng.standard_normal((batch, length, H, V)), g]
    return [*arrays, rng.random((batch, length, H))] if form != "number" else arrays


def in_stripes(form, arrays, segment, layout):
    """Results of a kernel at a device's positions of arrays of all, as a mixer takes them."""
    kernel = state_space if form == "number" else gated_delta

    def stripes(x_BS):
        own_BT = context.own(x_BS, layout)
        return own_BT.reshape(-1, layout.stripe, *own_BT.shape[2:])

    goes_on_BP = _goes_on(segment, 1, layout)[..., 0]
    before = partial(_states_before, goes_on_BP=goes_on_BP, layout=layout)
    y_RsHV, _ = kernel(*map(stripes, arrays), stripes(segment), before)
    return y_RsHV.reshape(len(segment), -1, H, V)


def documents_of(kind, length, stripe):
    """Documents that begin at, before or after borders of stripes; two sequences that differ."""
    begins = np.zeros(length, int) if kind is None else bordered(length, stripe, kind)
    return jnp.asarray([begins, np.arange(length) // 7], jnp.int32)


@pytest.mark.parametrize(
    ("form", "c", "stripe", "documents"),
    [
        ("number", 4, 4, 1),
        pytest.param("head", 2, 4, 0, marks=pytest.mark.slow),
        pytest.param("channel", 4, 4, -1, marks=pytest.mark.slow),
        pytest.param("head", 4, 4, 1, marks=pytest.mark.exhaustive),
        pytest.param("head", 8, 1, None, marks=pytest.mark.exhaustive),
        pytest.param("number", 2, 8, -1, marks=pytest.mark.exhaustive),
        pytest.param("number", 8, 4, 0, marks=pytest.mark.exhaustive),
        pytest.param("channel", 2, 1, 0, marks=pytest.mark.exhaustive),
        pytest.param("channel", 8, 4, None, marks=pytest.mark.exhaustive),
    ],
)
def test_states_pass_from_stripe_to_stripe_as_on_one_device(form, c, stripe, documents):
    """Results and gradients, beside a loop over positions in float64."""
    layout, length = shared_by(c, stripe, nodes=2 if c > 2 else 1), 2 * c * stripe * 2
    exact, segment = operands(form, length), documents_of(documents, length, stripe)
    d = np.random.default_rng(1).standard_normal((2, length, H, V))

    def body(arrays, d):
        def loss(arrays):
            y = in_stripes(form, arrays, segment, layout)
            return jnp.sum(y * context.own(d, layout)), y

        (_, y), found = jax.value_and_grad(loss, has_aux=True)(arrays)
        return context.gather(y, layout), jax.lax.psum(found, layout.context)

    inputs = [jnp.asarray(x, jnp.float32) for x in exact], jnp.asarray(d, jnp.float32)
    y, found = on_devices(layout, body, P(), P(), out=P())(*inputs)
    loop = states_by_position if form == "number" else delta_by_position
    with jax.enable_x64(True):
        wanted, pull = jax.vjp(lambda *x: loop(*x, segment)[0], *map(jnp.asarray, exact))
        gradients = pull(jnp.asarray(d))
    for have, want in zip([y, *found], [wanted, *gradients], strict=True):
        bound = 4 * (length + 16) * EPSILON * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(have, want, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("c", "documents"),
    [(4, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, 0), (4, -1), (2, None)))],
)
def test_a_convolution_sees_the_end_of_the_stripe_before(c, documents):
    layout, length, X = shared_by(c, 4), 16 * c, 4
    segment, rng = documents_of(documents, length, 4), np.random.default_rng(0)
    parts = [rng.standard_normal((2, length, n, 2)).astype("f") for n in (1, 3)]
    taps = [jnp.asarray(rng.standard_normal((n, 2, X)), jnp.float32) for n in (1, 3)]

    def body(*parts):
        own = [context.own(x, layout).reshape(-1, 4, *x.shape[2:]) for x in parts]
        tails = _tails_before(tuple(own), _goes_on(segment, X - 1, layout), layout)
        of_stripes = context.own(segment, layout).reshape(-1, 4)
        found = [convolve(*x, of_stripes, tail) for *x, tail in zip(own, taps, tails, strict=True)]
        return [context.gather(y.reshape(2, -1, *y.shape[2:]), layout) for y in found]

    found = on_devices(layout, body, *[P()] * 2, out=P())(*parts)
    for have, x, w in zip(found, parts, taps, strict=True):
        flat = convolve_by_position(x.reshape(2, length, -1), w.reshape(-1, X), segment)
        np.testing.assert_allclose(have, flat.reshape(have.shape), atol=16 * EPSILON)


@pytest.mark.parametrize(("form", "factor"), [("head", C * C), ("number", 1)])
def test_what_crosses_is_the_effects_and_the_states_before(form, factor):
    """In float32: a factor and an addend of each stripe and head, and a state back."""
    c, stripe, length = 4, 2, 32
    layout = shared_by(c, stripe)
    segment = jnp.zeros((1, length), jnp.int32)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in operands(form, length, batch=1)]
    body = partial(in_stripes, form, segment=segment, layout=layout)
    traced = on_devices(layout, body, P(), out=P(None, layout.context)).trace(arrays)
    sent = Counter()
    for one in collectives(traced.jaxpr.jaxpr):
        assert one.traffic == "context"
        sent[one.kind, one.dtype] += one.calls * one.bytes
    stripes, heads = length // stripe // c, 4  # three, filled up
    assert sent == {("all_to_all", "float32"): 4 * stripes * heads * (factor + 2 * C * V)}
