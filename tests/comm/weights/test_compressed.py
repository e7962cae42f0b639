"""Compressed reductions on eight devices: right sums, two errors, bytes, a state that adds up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.comm.codecs.codec import Blocks, Cast, ErrorFeedback
from moejax.comm.weights.compressed import empty_state, reduce_parts
from moejax.plan.trace.reader import collectives
from tests.cases import part_of
from tests.comm.codecs.sizes import wire_bytes

EPS = np.finfo(np.float32).eps
EVERY = ("scatter", "copies")
MESH = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), EVERY)
CASES = [(("scatter",), ("copies",)), (EVERY, ()), ((), EVERY), (("scatter",), ())]
CODECS = {
    "bfloat16": Cast(),
    "int8": Blocks("int8", block=32),
    "int4": Blocks("int4", block=32),
    "feedback": ErrorFeedback(Blocks("int4", block=32)),
    "loco": ErrorFeedback(Blocks("int4", block=32), 0.5, "e4m3", 32, 4),
}
n = 50  # odd tails


def sizes(scatter, copies):
    return tuple(int(np.prod([MESH.shape[a] for a in axes])) for axes in (scatter, copies))


def build(codec, scatter, copies):
    """The jitted (x, state, step) -> (sum, state), each device with its own row of each."""
    device = P(EVERY)

    def body(x, state, step):
        state = jax.tree.map(lambda s: s[0], state)
        total, state = reduce_parts(x[0], scatter, copies, codec, state, step)
        return total[None], jax.tree.map(lambda s: s[None], state)

    specs = (device, device, P())
    return jax.jit(
        jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=(device, device), check_vma=False)
    )


def start(codec, scatter, copies):
    S, C = sizes(scatter, copies)
    state = empty_state([codec], S, C, n)
    return jax.tree.map(lambda s: jnp.zeros((8, *s.shape)), state)


def exact(x, scatter, copies):
    """What each device should hold: the sum of its part over all who share its axes."""
    grid = np.asarray(x, np.float64).reshape(4, 2, *x.shape[1:])
    wanted = np.zeros((4, 2, *x.shape[2:]))
    for place in np.ndindex(4, 2):
        peers = tuple(
            slice(None) if axis in scatter + copies else place[i] for i, axis in enumerate(EVERY)
        )
        own = 0
        for axis in scatter:
            own = own * MESH.shape[axis] + place[EVERY.index(axis)]
        wanted[place] = grid[peers].reshape(-1, *x.shape[1:]).sum(0)[own]
    return wanted.reshape(8, *wanted.shape[2:])


def draw(seed, scatter, copies):
    return jnp.asarray(
        np.random.default_rng(seed).standard_normal((8, *sizes(scatter, copies), n)), jnp.float32
    )


@pytest.mark.slow
@pytest.mark.parametrize(("scatter", "copies", "name"), part_of(CASES, list(CODECS)))
def test_sums_are_right_and_what_is_kept_adds_up(name, scatter, copies):
    codec = CODECS[name]
    step, state = build(codec, scatter, copies), start(codec, scatter, copies)
    S, C = sizes(scatter, copies)
    sent, true = 0.0, 0.0
    for number in range(3):
        x = draw(number, scatter, copies)
        total, state = step(x, state, number)
        sent, true = sent + np.asarray(total, np.float64), true + exact(x, scatter, copies)
    # Every device along `copies` holds the same bits.
    if C > 1:
        rows = np.asarray(total).reshape(4, 2, C, n)
        rows = rows if scatter else rows.reshape(1, 8, C, n)
        np.testing.assert_array_equal(rows, np.broadcast_to(rows[:, :1], rows.shape))
    if name == "feedback":
        # What was not sent yet is kept: by each sender, and by who sums.
        sent = sent + kept(state, scatter, copies)
        assert np.abs(sent - true).max() <= 100 * EPS * np.abs(true).max() * S * C
    elif name != "loco":  # three sums of so many parts, each off by the codec's share
        off = {"bfloat16": 2**-8, "int8": 0.5 / 127, "int4": 0.5 / 7}[name]
        largest = 4.0 * (1 + off)
        assert np.abs(sent - true).max() <= 3 * off * largest * (S * C + np.sqrt(S * C) * 2)


def kept(state, scatter, copies):
    """The errors not yet sent, as a part of each device's sum."""
    S, C = sizes(scatter, copies)
    parts = np.asarray(state.parts, np.float64)[..., :n].reshape(8, S, C, n)
    kept = exact(parts, scatter, copies)
    if C == 1:
        return kept
    total = np.asarray(state.total, np.float64)[:, 0, :n]  # of the share that each device sums
    total = total.reshape(4, 2, n) if scatter else total.reshape(1, 8, n)
    return kept + np.broadcast_to(total[:, None], (len(total), C, C, n)).reshape(8, C, n)


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("scatter", "copies"), CASES)
def test_bytes_are_the_codecs_and_travel_in_two_collectives(name, scatter, copies):
    codec = CODECS[name]
    S, C = sizes(scatter, copies)
    traced = build(codec, scatter, copies).trace(
        draw(0, scatter, copies), start(codec, scatter, copies), 0
    )
    found = {call.kind: call for call in collectives(traced.jaxpr.jaxpr)}
    assert found.pop("all_to_all").bytes == S * C * wire_bytes(codec, n)
    if C > 1:
        assert found.pop("all_gather").bytes == C * wire_bytes(codec, n)
    assert not found


def test_codecs_that_follow_each_other_share_what_is_kept():
    """What one leaves out, the next one sends."""
    scatter, copies = ("scatter",), ("copies",)
    S, C = sizes(scatter, copies)
    first, then = (ErrorFeedback(Blocks(kind, block=32)) for kind in ("int4", "int8"))
    state = empty_state([first, then], S, C, n)
    assert state.parts.shape == (S * C, n)
    state = jax.tree.map(lambda s: jnp.zeros((8, *s.shape)), state)
    sent, true = 0.0, 0.0
    for number, codec in enumerate((first, first, then)):
        x = draw(number, scatter, copies)
        total, state = build(codec, scatter, copies)(x, state, number)
        sent, true = sent + np.asarray(total, np.float64), true + exact(x, scatter, copies)
    sent = sent + kept(state, scatter, copies)
    assert np.abs(sent - true).max() <= 100 * EPS * np.abs(true).max() * S * C


def test_two_errors_however_many_devices():
    """All devices alike: the sum of eight equal payloads is off as one of them, and once more."""
    codec = Blocks("int8", block=64)
    x = jnp.broadcast_to(draw(5, (), EVERY)[:1], (8, 1, 8, n))
    total, _ = build(codec, (), EVERY)(x, start(codec, (), EVERY), 0)
    off = np.abs(np.asarray(total[0]) - 8 * np.asarray(x[0, 0], np.float64))
    once = 0.5 / 127 * np.abs(np.asarray(x[0, 0])).max(-1, keepdims=True)
    assert np.all(off <= 8 * once + 8 * once * (1 + 1 / 127) + 1e-5)
