"""The step on every mesh against the one-device oracle: loss, every gradient, and properties."""

import dataclasses
import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import (
    assert_close,
    one_device_state,
    part_of,
    place,
    random_batch,
    skew,
    small_config,
    spread,
    trainer_for,
)
from tests.oracle import oracle_loss

# Sums run over the tokens of the batch, the widest reduction of a gradient.
TERMS = 8 * 16

MESHES = [
    (1, 1, 1, 8),
    (1, 1, 8, 1),
    (8, 1, 1, 1),
    (1, 8, 1, 1),
    (1, 2, 4, 1),
    (2, 1, 2, 2),
    (1, 2, 2, 2),
    (2, 2, 1, 2),
]
LAYOUTS = [("sequence", "hidden"), ("sequence", "folded"), ("replicated", "hidden")]
LAYOUTS += [("replicated", "folded")]
ROUTINGS = [(k, score) for k in (1, 2, 8) for score in ("softmax", "sigmoid")]


def on_meshes():
    """Every mesh with every layout that differs there, and with every routing.

    A tensor axis of one has only one layout. Of six routings each case runs one by default, all of
    them in turn; the others are for `make test-all`.
    """
    layouts = [(mesh, *one) for mesh in MESHES for one in LAYOUTS[: 4 if mesh[3] > 1 else 1]]
    for (row, case), (turn, routing) in product(enumerate(layouts), enumerate(ROUTINGS)):
        marks = () if turn == row % len(ROUTINGS) else pytest.mark.exhaustive
        names = "-".join(map(str, (*case, *routing)))
        yield pytest.param(*case, *routing, id=names, marks=marks)


@functools.cache
def oracle_case(cfg, bias):
    """State, batch, and the oracle's loss, loads and gradients; computed once a config."""
    state = one_device_state(cfg)
    state = state._replace(balance=skew(state.balance, dict(bias)))
    batch = random_batch(cfg)
    loss = functools.partial(oracle_loss, balance=state.balance, batch=batch, cfg=cfg)
    graded = jax.jit(jax.value_and_grad(lambda p: loss(p), has_aux=True))
    (_, (nll, load)), gradients = graded(state.params)
    return state, batch, nll, load, jax.tree.map(np.asarray, gradients)


def check_against_oracle(cfg, bias=()):
    # Neither mesh nor route changes what is right, so all of them share one oracle run.
    plain = dataclasses.replace(cfg, mesh=MESH_OF_ONE, **NO_ROUTE)
    state, batch, nll, load, wanted = oracle_case(plain, bias)
    trainer = trainer_for(cfg)
    gradients, parts = trainer.gradients(spread(state, trainer), place(trainer, batch))
    np.testing.assert_allclose(parts.nll, nll, rtol=TERMS * np.finfo(np.float32).eps)
    np.testing.assert_array_equal(parts.load_LE, load)
    assert int(parts.dropped_L.sum()) == 0
    assert_close(gradients, wanted, terms=TERMS)
    return parts


MESH_OF_ONE = small_config().mesh
NO_ROUTE = {"route": "split", "route_chunks": 1, "route_chunks_backward": None}


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "activations", "weights", "k", "score"), list(on_meshes()))
def test_every_mesh_and_layout_gives_the_oracles_loss_and_gradients(
    mesh, activations, weights, k, score
):
    # Expert 0 is chosen by nobody; 16 experts are more than any axis here has devices.
    cfg = small_config(
        mesh,
        activations=activations,
        expert_weights=weights,
        moe={"num_experts": 16, "experts_per_token": k, "implementation": "reference"},
        router={"score": score},
    )
    parts = check_against_oracle(cfg, bias=((0, -10.0),))
    assert int(parts.load_LE[0, 0]) == 0


@pytest.mark.slow
def test_experts_in_e4m3_give_nearly_the_oracles_loss_and_gradients():
    """Each factor of a product errs by 2^-4 at most, evenly spread: 0.04 on average."""
    plain = small_config(moe={"implementation": "reference"})
    cfg = small_config((1, 1, 4, 2), moe={"implementation": "reference_e4m3"})
    state, batch, nll, load, wanted = oracle_case(plain, ())
    trainer = trainer_for(cfg)
    gradients, parts = trainer.gradients(spread(state, trainer), place(trainer, batch))
    assert 0 < abs(float(parts.nll) - nll) < 0.01 * nll
    np.testing.assert_array_equal(parts.load_LE, load)
    for have, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        off = np.linalg.norm(np.asarray(have) - want)
        assert off < 0.1 * np.linalg.norm(want)


rarely = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
# route, mesh, nodes, chunks forward and backward, K; each of the last three differs somewhere.
ROUTES = [
    ("duplicate", (1, 1, 4, 2), 1, (2, 2), 2),
    rarely("duplicate", (1, 1, 2, 4), 1, (1, 1), 8),
    ("spread", (1, 1, 4, 2), 1, (3, 2), 2),
    rarely("spread", (1, 2, 1, 4), 1, (1, 1), 2),
    ("gather_home", (1, 1, 4, 2), 1, (4, 3), 2),
    ("gather_home", (2, 1, 2, 2), 1, (1, 2), 8),
    ("split", (1, 1, 4, 2), 1, (2, 2), 1),
    ("split", (1, 2, 2, 2), 1, (3, 4), 2),
    rarely("split", (1, 1, 8, 1), 1, (6, 1), 2),
    ("split", (1, 1, 2, 4), 1, (10, 10), 8),
    ("merge", (1, 1, 8, 1), 1, (1, 1), 8),
    ("merge", (1, 1, 2, 4), 1, (4, 6), 2),
    ("two_level", (1, 1, 8, 1), 2, (3, 3), 2),
    ("two_level", (2, 1, 4, 1), 4, (1, 1), 8),
    rarely("two_level_merge", (1, 1, 8, 1), 2, (1, 1), 2),
    ("two_level_merge", (1, 1, 8, 1), 4, (2, 3), 8),
    ("two_level_merge", (1, 1, 4, 2), 2, (4, 4), 2),
]


def routed(cfg, route, nodes, chunks, **mesh):
    """The config with another route."""
    return dataclasses.replace(
        cfg,
        route=route,
        route_chunks=chunks[0],
        route_chunks_backward=chunks[1],
        mesh=dataclasses.replace(cfg.mesh, nodes=nodes, **mesh),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("route", "mesh", "nodes", "chunks", "k"), ROUTES)
def test_every_route_gives_the_oracles_loss_and_gradients(route, mesh, nodes, chunks, k):
    # Expert 0 is chosen by nobody; 16 experts are more than any axis here has devices. Buckets of
    # 16 or 32 tokens overflow now and then, so some of these go in rounds.
    moe = {"num_experts": 16, "experts_per_token": k, "implementation": "reference"}
    cfg = routed(small_config(mesh, moe=moe), route, nodes, chunks)
    parts = check_against_oracle(cfg, bias=((0, -10.0),))
    assert int(parts.load_LE[0, 0]) == 0


# Gradients cross nodes where weights are gathered, where they are copied, or both; the axis that
# does lies across nodes whole, or is split; and the rest of it lies inside.
REDUCTIONS = [
    ((8, 1, 1, 1), 4, "hidden"),
    ((1, 8, 1, 1), 2, "hidden"),
    ((4, 1, 2, 1), 2, "hidden"),
    ((2, 4, 1, 1), 4, "hidden"),
    ((2, 2, 2, 1), 8, "hidden"),
    ((1, 2, 2, 2), 4, "folded"),
    ((2, 1, 2, 2), 4, "whole"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "nodes", "weights"), REDUCTIONS)
def test_gradients_that_cross_nodes_are_reduced_by_hops(mesh, nodes, weights):
    moe = {"num_experts": 16, "implementation": "reference"}
    cfg = small_config(mesh, expert_weights=weights, moe=moe)
    check_against_oracle(routed(cfg, "split", nodes, (1, 1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "weights", "activations"),
    part_of(
        [
            ("split", "whole"),
            ("merge", "folded"),
            ("two_level_merge", "folded"),
            ("merge", "whole"),
        ],
        ["sequence", "replicated"],
    ),
)
def test_routes_with_other_expert_layouts(route, weights, activations):
    moe = {"num_experts": 16, "implementation": "reference"}
    cfg = small_config((1, 1, 4, 2), activations=activations, expert_weights=weights, moe=moe)
    check_against_oracle(routed(cfg, route, 2, (2, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "changes"),
    part_of(
        ["duplicate", "gather_home", "merge", "two_level_merge"],
        [
            {"moe": {"capacity_factor": 8.0}, "activations": "replicated"},
            {"router": {"jitter": 0.2}, "model": {"remat": "collectives"}},
            {"train": {"micro_batches": 2}, "router": {"balance_over": "sequence"}},
        ],
    ),
)
def test_routes_give_the_split_routes_gradients(route, changes):
    """With what the oracle has not: jitter, micro-batches, replicated activations."""
    cfg = small_config((1, 1, 4, 2), **changes)
    wanted = routed_gradients(routed(cfg, "split", 2, (1, 1)))
    assert_close(routed_gradients(routed(cfg, route, 2, (2, 2))), wanted, terms=TERMS)


@functools.cache  # all routes are compared with one
def routed_gradients(cfg):
    trainer = trainer_for(cfg)
    state = spread(one_device_state(cfg), trainer)
    gradients, _ = trainer.gradients(state, place(trainer, random_batch(cfg)))
    return jax.tree.map(np.asarray, gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crowded", "mesh"), part_of([3, 7], [(1, 1, 8, 1), (1, 1, 4, 2), (2, 1, 2, 2)])
)
def test_all_tokens_to_one_expert_lose_nothing(crowded, mesh):
    cfg = small_config(mesh, moe={"experts_per_token": 1})
    parts = check_against_oracle(cfg, bias=((crowded, 10.0),))
    assert int(parts.load_LE[0, crowded]) == TERMS


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param((1, 1, 1, 1), marks=pytest.mark.exhaustive),
        pytest.param((1, 1, 8, 1), marks=pytest.mark.exhaustive),
        (1, 2, 2, 2),
    ],
)
@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"qk_norm": "head", "attention_bias": True, "tie_embeddings": False}},
        {"model": {"qk_norm": "full", "sliding_window": 5, "num_kv_heads": 4}},
        {"model": {"num_layers": 3, "first_dense_layers": 1, "scan_layers": False}},
        {"model": {"num_layers": 4, "moe_every": 2, "remat": "full"}},
        {"model": {"remat": "collectives"}, "moe": {"num_shared_experts": 2}},
        {"router": {"balance_over": "sequence", "renormalize": False, "weight_scale": 2.5}},
        {"router": {"score": "sigmoid", "num_groups": 4, "groups_per_token": 2}},
        {"router": {"score": "softmax", "num_groups": 4, "groups_per_token": 2}},
    ],
    ids=lambda c: "-".join(f"{k}={v}" for part in c.values() for k, v in part.items()),
)
def test_every_kind_of_model_gives_the_oracles_loss_and_gradients(mesh, changes):
    check_against_oracle(small_config(mesh, **changes))


def test_a_dense_model_gives_the_oracles_loss_and_gradients():
    cfg = small_config((2, 2, 1, 2), model={"moe_every": None})
    cfg = dataclasses.replace(cfg, moe=type(cfg.moe)())
    state, batch, nll, _, wanted = oracle_case(dataclasses.replace(cfg, mesh=MESH_OF_ONE), ())
    trainer = trainer_for(cfg)
    gradients, parts = trainer.gradients(spread(state, trainer), place(trainer, batch))
    np.testing.assert_allclose(parts.nll, nll, rtol=TERMS * np.finfo(np.float32).eps)
    assert_close(gradients, wanted, terms=TERMS)


@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (2, 1, 2, 2)])
def test_accumulation_gives_the_gradient_of_the_whole_batch(mesh):
    # Without router losses: those are defined per micro-batch.
    router = {"balance_loss": 0.0, "z_loss": 0.0}
    whole = small_config((1, 1, 1, 1), router=router)
    cut = small_config(mesh, router=router, train={"micro_batches": 2})
    state, batch = one_device_state(whole), random_batch(whole)
    one, two = trainer_for(whole), trainer_for(cut)
    wanted, _ = one.gradients(state, place(one, batch))
    gradients, _ = two.gradients(spread(state, two), place(two, batch))
    assert_close(gradients, jax.tree.map(np.asarray, wanted), terms=TERMS)


@pytest.mark.slow
def test_gradient_is_the_slope_of_the_loss():
    """Finite differences, along the gradient and along a random direction."""
    cfg = small_config((2, 1, 2, 2), router={"balance_loss": 0.0, "z_loss": 0.0})
    trainer = trainer_for(cfg)
    state, batch = trainer.init(), place(trainer, random_batch(cfg))
    gradients, parts = trainer.gradients(state, batch)
    targets = int((batch.target_BT >= 0).sum())
    # Routing must not flip within the difference, so steps are small and the loss is smooth.
    step = 1e-2
    rng = np.random.default_rng(0)
    noise = jax.tree.map(lambda g: rng.standard_normal(g.shape).astype(np.float32), gradients)
    for direction in (jax.tree.map(np.asarray, gradients), noise):
        norm = float(np.sqrt(sum(np.sum(d**2) for d in jax.tree.leaves(direction))))

        unit = jax.tree.map(lambda d, n=norm: d / n, direction)

        def loss_at(distance, unit=unit):
            moved = jax.tree.map(lambda p, u: p + distance * u, state.params, unit)
            moved = spread(state._replace(params=moved), trainer)
            return float(trainer.evaluate(moved, batch)) / targets

        slope = (loss_at(step) - loss_at(-step)) / (2 * step)
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(direction), strict=True)
        wanted = sum(float(np.sum(np.asarray(g) * d)) for g, d in pairs) / norm
        # Central difference: error of order step^2 times the third derivative, plus rounding of
        # the loss over 2 * step.
        assert abs(slope - wanted) < 2e-3 * max(1.0, abs(wanted)), (slope, wanted)
    assert float(parts.nll) > 0


def nll_by_position(trainer, state, batch):
    """Nats of each single target, by evaluating with all others left out."""

    def only(b, t):
        target = np.full_like(batch.target_BT, -1)
        target[b, t] = batch.target_BT[b, t]
        return float(trainer.evaluate(state, place(trainer, batch._replace(target_BT=target))))

    return only


def test_no_position_sees_later_tokens_or_other_documents():
    cfg = small_config((1, 1, 2, 2))
    trainer = trainer_for(cfg)
    state, batch = trainer.init(), random_batch(cfg)
    batch = batch._replace(target_BT=np.abs(batch.target_BT))
    segment = np.zeros_like(batch.segment_BT)
    segment[:, 6:] = 1
    batch = batch._replace(segment_BT=segment)
    before = nll_by_position(trainer, state, batch)
    token = batch.token_BT.copy()
    token[0, 10] = (token[0, 10] + 1) % cfg.model.vocab_size
    after = nll_by_position(trainer, state, batch._replace(token_BT=token))
    assert before(0, 9) == after(0, 9), "position 9 saw position 10"
    assert before(0, 3) == after(0, 3), "the first document saw the second"
    assert before(0, 10) != after(0, 10), "position 10 did not see itself"
    assert before(0, 13) != after(0, 13), "position 13 did not see position 10"
    token = batch.token_BT.copy()
    token[0, 2] = (token[0, 2] + 1) % cfg.model.vocab_size
    after = nll_by_position(trainer, state, batch._replace(token_BT=token))
    assert before(0, 8) == after(0, 8), "the second document saw the first"
    assert before(0, 4) != after(0, 4), "position 4 did not see position 2"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), part_of(["adamw", "muon"], [(1, 2, 2, 2), (2, 1, 4, 1)]))
def test_a_run_on_eight_devices_follows_the_run_on_one(name, mesh):
    """The same loss curve, 10 steps; the bound grows with the steps taken."""
    train = {"num_steps": 10}
    optimizer = {"learning_rate": 1e-2, "warmup_steps": 2, "name": name}
    router = {"jitter": 0.1, "bias_update_rate": 0.01}
    curves = []
    for where in [(1, 1, 1, 1), mesh]:
        cfg = small_config(where, train=train, optimizer=optimizer, router=router)
        trainer = trainer_for(cfg)
        state, losses, advance = trainer.init(), [], trainer.step
        for step in range(10):
            state, metrics = advance(state, place(trainer, random_batch(cfg, seed=step)))
            losses.append(float(metrics.loss))
        curves.append(losses)
    steps, (one, eight) = np.arange(1, 11), map(np.array, curves)
    off = np.abs(eight - one)
    assert np.all(off <= steps * TERMS * np.finfo(np.float32).eps * one), off


def test_first_weights_do_not_depend_on_the_mesh():
    one = one_device_state(small_config())
    eight = trainer_for(small_config((1, 2, 2, 2))).init()
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), one.params, eight.params)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("mesh", [(1, 1, 8, 1), (1, 2, 2, 2)])
def test_nothing_that_shards_is_whole_on_a_device(mesh):
    trainer = trainer_for(small_config(mesh))
    state = trainer.init()
    for moments in jax.tree.leaves(state.optimizer):
        if moments.ndim < 3:
            continue  # counters, norm scales and the router
        assert moments.addressable_shards[0].data.size <= moments.size // 2
    largest = max(jax.tree.leaves(state.params), key=lambda p: p.size)
    assert largest.addressable_shards[0].data.size == largest.size // 8


def test_an_update_that_is_not_finite_is_counted_and_not_applied():
    cfg = small_config((1, 1, 2, 2))
    trainer = trainer_for(cfg)
    state, batch = trainer.init(), place(trainer, random_batch(cfg))
    bad = jax.tree.map(lambda p: p, state.params)
    bad["norm"]["scale"] = bad["norm"]["scale"].at[0].set(jnp.inf)
    state = spread(state._replace(params=bad), trainer)
    before = jax.tree.map(np.asarray, (state.params, state.optimizer))
    state, metrics = trainer.step(state, batch)
    assert int(metrics.skipped) == 1
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.optimizer))


def test_a_step_compiled_for_shapes_is_not_compiled_again():
    """Processes compile first and meet then; a second compilation would part them again."""
    cfg = small_config((1, 1, 2, 2))
    trainer = trainer_for(cfg)
    state, batch = trainer.init(), place(trainer, random_batch(cfg))
    trainer.step.lower(trainer.abstract, trainer.abstract_batch()).compile()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name)
    )
    jax.block_until_ready(trainer.step(state, batch))
    jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "backend_compile" in name]


@pytest.mark.slow
def test_the_update_clips_by_the_norm_over_all_devices():
    norms = []
    for mesh in [(1, 1, 1, 1), (1, 2, 2, 2)]:
        cfg = small_config(mesh)
        trainer = trainer_for(cfg)
        _, metrics = trainer.step(trainer.init(), place(trainer, random_batch(cfg)))
        norms.append(float(metrics.gradient_norm))
    assert norms[0] == pytest.approx(norms[1], rel=float(TERMS * np.finfo(np.float32).eps))


@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (1, 1, 4, 2)])
def test_capacity_drops_and_counts_what_does_not_fit(mesh):
    cfg = small_config(mesh, moe={"capacity_factor": 1.0, "experts_per_token": 1})
    trainer = trainer_for(cfg)
    state = trainer.init()
    state = spread(state._replace(balance=skew(state.balance, {3: 10.0})), trainer)
    _, parts = trainer.gradients(state, place(trainer, random_batch(cfg)))
    # Every device may send a share of 1 / E of its tokens to each expert.
    assert int(parts.dropped_L[0]) == TERMS - TERMS // 8


@pytest.mark.slow
def test_bfloat16_compute_stays_near_float32():
    losses = []
    for dtype in ("float32", "bfloat16"):
        cfg = small_config((1, 1, 2, 2), model={"dtype": dtype, "init_deviation": 0.1})
        trainer = trainer_for(cfg)
        state = trainer.init()
        assert {p.dtype for p in jax.tree.leaves(state.params)} == {np.dtype("float32")}
        _, parts = trainer.gradients(state, place(trainer, random_batch(cfg)))
        losses.append(float(parts.nll))
    # bfloat16 keeps 8 bits; errors of single tokens average out.
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)
