"""Collectives in one order: the same values, each waiting for the one before it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.comm import wire
from moejax.comm.cpu.exchange import Exchange, connected
from moejax.comm.cpu.gloo import in_order
from moejax.config.fields import change
from tests.cases import CERTAIN, place, random_batch, small_config, step_for

MESH = Mesh(np.array(jax.devices()[:4]), ("d",))


def everywhere(body):
    return jax.jit(
        jax.shard_map(body, mesh=MESH, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    )


def exchange(x):
    return lax.all_to_all(x, "d", 0, 0, tiled=True)


def in_a_loop(x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, exchange(s[1]) * 2), (0, x))[1]


def in_a_scan(x):
    carry, rows = lax.scan(
        lambda c, r: (exchange(c) + r, lax.pmax(c, "d")), x, jnp.stack([x, 2 * x]), reverse=True
    )
    return carry + rows.sum(0)


def in_a_branch(x):
    first = lax.all_gather(x, "d", axis=0, tiled=True)[0, 0]
    return lax.cond(first > 100, lambda x: x, lambda x: exchange(x) + lax.psum(x, "d"), x)


def in_calls(x):
    inner = jax.checkpoint(lambda x: jax.jit(exchange)(jnp.sin(x)) * lax.psum(x, "d"))
    return jax.grad(lambda x: jnp.sum(inner(x) ** 2))(x)


def apart(x):
    """Nothing here needs anything else."""
    scattered = lax.psum_scatter(x, "d", scatter_dimension=0, tiled=True)
    small = exchange((x > 0).astype(jnp.uint8)).astype(jnp.float32)
    return jnp.concatenate([in_a_loop(x), in_a_branch(x), exchange(x), scattered, small])


BODIES = [in_a_loop, in_a_scan, in_a_branch, in_calls, apart]


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("special", [0.0, -0.0, np.nan, np.inf])
def test_values_stay_as_they_are(body, special):
    x = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
    x[::4, 0] = special  # what a device's collective begins with
    wanted, got = everywhere(body)(x), everywhere(in_order(body))(x)
    if body is apart:  # its reduce-scatter adds up in the order of the ranks
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    else:
        assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()


COLLECTIVE = re.compile(
    r"%(\S+) = .*? (all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute)\("
)


CALLED = re.compile(r"(?:body|condition|to_apply|calls|branch_computations)=\{?([^}\s]+)")


def communicating(text):
    """The computations of a compiled program that hold collectives, however deep inside."""
    blocks = {block.split(" (")[0].split("%")[-1]: block for block in re.split(r"\n\n", text)}
    held = {name for name, block in blocks.items() if COLLECTIVE.search(block)}
    while True:
        more = {
            name
            for name, block in blocks.items()
            if held & set(re.findall(r"[\w.\-]+", " ".join(CALLED.findall(block))))
        }
        if more <= held:
            return held
        held |= more


def depends(text):
    """For each computation of a compiled program: its collectives' names and what each needs."""
    found, held = {}, communicating(text)
    for block in re.split(r"\n\n", text):
        lines = [line for line in block.splitlines() if " = " in line]
        needs = {}
        for line in lines:
            name = re.search(r"%(\S+) =", line)[1]
            used = re.findall(r"%([\w.\-]+)", line.split(" = ", 1)[1])
            needs[name] = set(used).union(*(needs.get(one, set()) for one in used))
        busy = [
            re.search(r"%(\S+) =", line)[1]
            for line in lines
            if COLLECTIVE.search(line)
            or held & set(re.findall(r"[\w.\-]+", " ".join(CALLED.findall(line))))
        ]
        if len(busy) > 1:
            found[block.splitlines()[0]] = (busy, needs)
    return found


def unordered(text):
    """Pairs of collectives, or of what holds them, of which neither needs the other."""
    return [
        (a, b)
        for busy, needs in depends(text).values()
        for i, a in enumerate(busy)
        for b in busy[:i]
        if b not in needs[a] and a not in needs[b]
    ]


def test_each_collective_of_the_compiled_program_needs_the_one_before_it():
    x = jnp.ones((16, 3))
    assert unordered(everywhere(apart).lower(x).compile().as_text())
    text = everywhere(in_order(apart)).lower(x).compile().as_text()
    assert len(COLLECTIVE.findall(text)) > 5
    assert unordered(text) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "exchanged"),
    [
        (2, True),
        pytest.param(2, False, marks=pytest.mark.exhaustive),
        pytest.param(1, True, marks=pytest.mark.exhaustive),
        pytest.param(1, False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_train_step_stays_right_and_its_collectives_are_replaced(monkeypatch, stages, exchanged):
    mesh, model = (1, 2, 2, 2 // stages), {"remat": "full", "num_layers": stages}
    cfg = small_config(mesh, model=model, moe=CERTAIN, train={"micro_batches": 2})
    cfg = change(cfg, {"mesh.stage": stages})
    plain, ordered = step_for(cfg), step_for(cfg)
    state, batch = plain.init(), place(plain, random_batch(cfg))
    wanted = plain.gradients(state, batch)
    monkeypatch.setattr("moejax.comm.cpu.gloo.is_gloo", lambda mesh: True)
    monkeypatch.setattr("moejax.comm.cpu.gloo.LARGE", 0)
    if not exchanged:
        monkeypatch.setattr("moejax.comm.cpu.gloo.connected", lambda mesh: None)
    compiled = ordered.gradients.lower(state, batch).compile()
    got = compiled(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), wanted, got)
    text = compiled.as_text()
    assert "reduce-scatter(" not in text
    assert ("moejax_exchange" in text) == exchanged
    assert ("moejax_exchange_start_pairs" in text) == (exchanged and stages > 1)
    assert ("collective-permute(" in text) == (not exchanged and stages > 1)
    assert unordered(text) == []


@pytest.mark.parametrize("size", [8, 2**17])
def test_two_bytes_a_value_travel_as_two(size):
    """XLA widens bfloat16 that it communicates on CPU."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("d", "other"))

    def body(x):
        scattered = lax.psum_scatter(x, "d", scatter_dimension=0, tiled=True)
        gathered = lax.all_gather(x, "d", axis=0, tiled=True)
        return scattered, gathered, exchange(x), lax.ppermute(x, "d", [(0, 1), (1, 0)])

    def compiled(body):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(mapped).lower(x).compile()

    x = jnp.asarray(np.random.default_rng(0).standard_normal(size), jnp.bfloat16)
    ordered, plain = compiled(in_order(body)), compiled(body)
    sent = re.findall(
        r"= (\w+)\[.*? (?:all-to-all|all-gather|collective-permute)\(", ordered.as_text()
    )
    assert sent
    assert set(sent) == {"u16"}
    for got, wanted in zip(ordered(x), plain(x), strict=True):
        np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))


def holds(body, *shapes):
    """For each hold of a per-device function on two devices, the shapes that it reads."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    ordered = in_order(body, Exchange((0, 1), (0, 1), ("d",), (2,)))
    mapped = jax.shard_map(ordered, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jaxpr = jax.make_jaxpr(mapped)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    calls = [e for e in jaxpr.eqns[0].params["jaxpr"].eqns if e.primitive.name == "ffi_call"]
    calls = [e for e in calls if e.params["target_name"] == "moejax_hold"]
    return [[var.aval.shape for var in call.invars] for call in calls]


def held(body, *shapes):
    """The shapes that a per-device function holds until its last exchange, on two devices."""
    return [shape for shapes in holds(body, *shapes)[-1:] for shape in shapes]


ROWS, HIDDEN, SUMS = (2, 16384), (2, 8), (8, 16384)


def test_what_experts_read_and_make_between_exchanges_is_held_but_not_what_they_add_to():
    def add_up(rows, hidden, sums):
        return lax.fori_loop(0, 2, lambda _, s: s + hidden.T @ rows, sums)

    def layer(rows, hidden, sums):
        arrived = exchange(rows)
        sums = jax.jit(add_up)(arrived * 2, hidden * 3, sums)
        return exchange(arrived * 4), sums, hidden.T @ rows

    shapes = held(layer, ROWS, HIDDEN, SUMS)
    assert HIDDEN in shapes
    assert SUMS not in shapes
    # Two exchanges, each with what it sends and what it receives, and what the experts read.
    assert shapes.count(ROWS) == 5


def test_a_stage_computes_between_the_start_of_a_transfer_and_its_first_use():
    """One hold makes a product wait for the number of the transfer before it, the other the
    transfer's end for the product; nothing else does, not even an addition of what arrives."""

    def product(rows, hidden):
        return jax.jit(lambda x, y: x.T @ x + y.sum())(rows, hidden)

    def tick(rows, hidden):
        arrived = lax.ppermute(rows, "d", [(0, 1)]) + 1
        first = product(rows, hidden)
        unread = lax.ppermute(rows, "d", [(1, 0)])
        return first, product(arrived, hidden), arrived, unread

    product_of_rows = (16384, 16384)
    first, first_end, second, second_end = holds(tick, ROWS, HIDDEN)
    assert first == second == [HIDDEN, ()]
    assert first_end == second_end == [(), product_of_rows]


def test_a_loop_with_collectives_runs_between_a_gather_beside_it_and_its_first_use():
    """The loop waits for the gather's start, and its end for the loop, as with transfers."""

    def step(rows, hidden):
        arrived = wire.gather_beside(rows, ("d",)) * 2
        looped = lax.fori_loop(0, 3, lambda _, x: lax.psum(x, "d"), hidden)
        return arrived + looped.sum()

    assert holds(step, ROWS, HIDDEN) == [[(), ()]]


def test_a_loop_with_collectives_waits_for_the_start_of_a_transfer_and_the_end_for_the_loop():
    def tick(rows, hidden):
        arrived = lax.ppermute(rows, "d", [(0, 1)])
        return arrived * lax.fori_loop(0, 3, lambda _, x: lax.psum(x, "d"), hidden).sum()

    assert holds(tick, ROWS, HIDDEN) == [[(), ()]]


@pytest.mark.slow
def test_deferred_equations_are_computed_once_and_in_order():
    """A chain of additions to the result of a transfer, some of which are used early."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    x = np.random.default_rng(0).standard_normal((4, 2**15), np.float32)

    def body(x):
        arrived = lax.ppermute(x, "d", [(0, 1)])
        one = arrived + 1
        two = one * 3
        other = lax.ppermute(x * 2, "d", [(1, 0)]) + two
        product = two @ x.T
        return one, two + product.sum(), other, product, lax.psum(other, "d")

    def of(body):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
        return jax.jit(mapped)(x)

    for got, wanted in zip(of(in_order(body, connected(mesh))), of(body), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_without_an_exchange_of_tokens_nothing_is_held():
    assert held(lambda x: lax.psum(x, "d") + (x.T @ x).sum(), ROWS) == []


def test_the_order_of_rows_is_held_if_it_is_read_after_the_first_exchange():
    def layer(rows, choices):
        first, second, unread = (choices[0].astype(jnp.int32) * n for n in (1, 2, 3))
        arrived = exchange(rows)
        made_since = jnp.flip(second)
        return exchange(arrived[:, first]), made_since * 2, unread

    shapes = held(layer, ROWS, ROWS)
    # Each exchange's rows, as sent and as received, and the two orders that are read.
    assert shapes.count(ROWS) == 4
    assert shapes.count(ROWS[1:]) == 2


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (1, 2**16), (2, 1)])
def test_what_a_device_alone_computes_for_long_waits_for_what_computed_before_by_a_small_input(
    monkeypatch, devices, count
):
    monkeypatch.setattr(jax, "local_device_count", lambda: devices)

    def layer(rows, counts):
        def experts(rows):
            return jax.jit(lambda rows, counts: (rows.T @ rows) * counts.sum())(rows, counts)

        arrived = exchange(rows)
        return experts(arrived), experts(exchange(rows * 2))

    *turns, _ = holds(layer, (2, 16384), (count,))
    first = (16384, 16384)
    assert turns == ([[(1,), first]] if devices == count == 1 else [])
