"""Selection biases after a step: by loads and by quantiles, on any mesh; forced routing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.moe import layer, router
from moejax.plan.trace.reader import collectives
from moejax.step.balance import layers_of
from tests.cases import CERTAIN, place, random_batch, small_config, some_of, step_for
from tests.moe.test_quantile import exact_bias, widest_bin
from tests.step.pipeline.test_stages import as_one_device_sees_it, config, on_one_device
from tests.step.test_context import shared

pytestmark = pytest.mark.usefixtures("unchecked_annotations")
QUANTILES = {"quantile_bins": 4000, "balance_loss": 0.0}
# Scores of meshes differ in their last bits, which puts a token into the next bin here and there.
BINS_OFF = 3


def with_biases(state, seed=3):
    """The state with some selection bias for every expert."""
    rng = np.random.default_rng(seed)

    def draw(bias):
        drawn = rng.normal(0, 0.05, bias.shape).astype(np.float32)
        return jax.device_put(drawn, bias.sharding)

    return state._replace(router_bias=jax.tree.map(draw, state.router_bias))


def biases_after(cfg, batch):
    """The selection biases before and after the first step."""
    step = step_for(cfg)
    state = with_biases(step.init())
    before = jax.tree.map(np.asarray, state.router_bias)
    return before, step.step(state, place(step, batch))[0].router_bias


def assert_near(got, wanted, before):
    for g, w, b in zip(*map(jax.tree.leaves, (got, wanted, before)), strict=True):
        width = max(widest_bin(row, QUANTILES["quantile_bins"], w) for row in b)
        assert np.max(np.abs(w - b)) > 20 * width, "the step moves no bias"
        np.testing.assert_allclose(g, w, atol=BINS_OFF * width)


@pytest.mark.exhaustive
@pytest.mark.parametrize("score", some_of(["softmax", "sigmoid"], "sigmoid"))
def test_one_device_takes_the_quantiles_of_all_micro_batches(monkeypatch, score):
    """Beside sorted scores, which the test takes from the router."""
    seen, route = [], router.route

    def recorded(*args, **kwargs):
        found = route(*args, **kwargs)
        jax.debug.callback(lambda score_NE: seen.append(np.asarray(score_NE)), found.score_NE)
        return found

    monkeypatch.setattr(layer.router, "route", recorded)
    cfg = small_config(router={"score": score, **QUANTILES}, train={"micro_batches": 2})
    before, after = biases_after(cfg, random_batch(cfg))
    jax.effects_barrier()
    (bias_LE,), (found_LE,) = jax.tree.leaves(before), jax.tree.leaves(after)
    assert sum(map(len, seen)) == 8 * 16
    exact_E = exact_bias(np.concatenate(seen), bias_LE[0], cfg.moe.experts_per_token)
    width = widest_bin(bias_LE[0], QUANTILES["quantile_bins"], exact_E)
    np.testing.assert_allclose(found_LE[0], exact_E - exact_E.mean(), atol=2 * width)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        pytest.param((2, 2, 1, 2), {"train": {"micro_batches": 2}}, marks=pytest.mark.exhaustive),
        ((1, 2, 2, 2), {"activations": "replicated", "router": {**QUANTILES, "score": "sigmoid"}}),
    ],
)
def test_every_mesh_takes_the_quantiles_of_one_device(mesh, changes):
    changes = {"router": QUANTILES, "moe": CERTAIN, **changes}
    cfg = small_config(mesh, model={"num_layers": 2}, **changes)
    batch = random_batch(cfg)
    _, got = biases_after(cfg, batch)
    before, wanted = biases_after(on_one_device(cfg), batch)
    assert_near(got, wanted, before)


@pytest.mark.slow
def test_devices_that_share_sequences_take_the_quantiles_of_one_device():
    cfg = shared((1, 2, 2, 2), 4, 2, rows=2, model={"num_layers": 2}, router=QUANTILES)
    batch = random_batch(cfg)
    _, got = biases_after(cfg, batch)
    before, wanted = biases_after(on_one_device(cfg), batch)
    assert_near(got, wanted, before)


@pytest.mark.parametrize(
    ("stages", "model"),
    [
        (2, {"layers_before_stages": 1, "predict_ahead": 1}),
        pytest.param(2, {"stage_chunks": 2, "num_layers": 4}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("keeps", some_of(["input", "residuals"], "input"))
def test_stages_take_the_quantiles_of_one_device(stages, model, keeps):
    axis = {"stage_keeps": keeps}
    cfg = config((1, 1, 2, 2), stages, 4, model=model, axis=axis, router=QUANTILES)
    batch = random_batch(cfg)
    _, got = biases_after(cfg, batch)
    one = on_one_device(cfg)
    before, wanted = biases_after(one, as_one_device_sees_it(cfg, batch))
    assert_near(got, wanted, before)


@pytest.mark.slow
def test_quantiles_take_one_collective_a_step_and_leave_gradients_as_they_are():
    """Of 3 layers x 8 experts x 100 bins, 4 bytes each."""

    def traced(**router_settings):
        cfg = small_config(
            (2, 2, 1, 2),
            model={"num_layers": 3},
            moe=CERTAIN,
            router=router_settings,
            train={"micro_batches": 2},
        )
        step = step_for(cfg)
        return step, step.step.trace(step.abstract, step.abstract_batch()).jaxpr

    (plain, without), (quantile, having) = traced(), traced(quantile_bins=100)
    added = collectives(having)
    for one in collectives(without):
        added.remove(one)
    assert [(one.kind, one.calls, one.bytes) for one in added] == [("all_reduce", 1, 9600)]
    batch = place(plain, random_batch(plain.cfg))
    (wanted, parts), (found, _) = (s.gradients(s.init(), batch) for s in (plain, quantile))
    assert parts.needed_LEQ is None
    for w, f in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(w, f)


@pytest.mark.slow
def test_a_step_that_is_not_finite_moves_no_quantile():
    cfg = small_config(router=QUANTILES)
    step = step_for(cfg)
    state = with_biases(step.init())
    state.params["norm"]["scale"] = state.params["norm"]["scale"].at[0].set(np.nan)
    before = jax.tree.map(np.asarray, state.router_bias)
    after, metrics = step.step(state, place(step, random_batch(cfg)))
    assert int(metrics.skipped) == 1
    for b, a in zip(jax.tree.leaves(before), jax.tree.leaves(after.router_bias), strict=True):
        np.testing.assert_array_equal(b, a)


def test_each_block_of_a_pattern_has_the_layers_that_are_its_own():
    """Two blocks with experts in turn, three times; then a single layer."""
    blocks = {0: {"moe": {"bias": np.zeros((3, 1))}}, 1: {"moe": {"bias": np.zeros((3, 1))}}}
    tree = {"groups": {0: {"blocks": blocks}}, "predict_ahead": {"group": np.zeros((1, 1))}}
    found = layers_of(jnp.arange(7), tree, [1, 1, 1])
    assert [part.tolist() for part in found] == [[0, 2, 4], [1, 3, 5], [6]]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", some_of([(1, 1, 1, 1), (1, 2, 2, 2)], (1, 2, 2, 2)))
def test_biases_of_blocks_that_take_turns_move_by_their_own_loads(mesh):
    model = {"num_layers": 4, "sliding_window": 3, "full_attention_every": 2}
    cfg = small_config(mesh, model=model, router={"bias_update_rate": 0.5})
    step = step_for(cfg)
    state, metrics = step.step(step.init(), place(step, random_batch(cfg)))
    load_LE = np.asarray(metrics.load_LE, np.float64)
    wanted_LE = 0.5 * np.sign(load_LE.mean(axis=1, keepdims=True) - load_LE)
    blocks = state.router_bias["groups"][0]["blocks"]
    for place_, block in blocks.items():
        np.testing.assert_array_equal(block["moe"]["bias"], wanted_LE[place_::2])


@pytest.mark.slow
def test_biases_of_stages_whose_blocks_take_turns_move_by_their_own_loads():
    model = {"num_layers": 8, "sliding_window": 3, "full_attention_every": 2}
    cfg = config((1, 2, 1, 2), 2, 4, layers=8, model=model, router={"bias_update_rate": 0.5})
    step = step_for(cfg)
    state, metrics = step.step(step.init(), place(step, random_batch(cfg)))
    load_LE = np.asarray(metrics.load_LE, np.float64)
    wanted_LE = 0.5 * np.sign(load_LE.mean(axis=1, keepdims=True) - load_LE)
    for block, leaf in state.router_bias["groups"][0]["blocks"].items():
        np.testing.assert_array_equal(leaf["moe"]["bias"], wanted_LE[block::2])


FORCED = {"forced": "balanced", "balance_loss": 0.0, "z_loss": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        pytest.param((2, 2, 1, 2), {}, marks=pytest.mark.exhaustive),
        (
            (1, 2, 2, 2),
            {
                "activations": "replicated",
                "router": {**FORCED, "num_groups": 4, "groups_per_token": 2, "score": "sigmoid"},
                "train": {"micro_batches": 2},
            },
        ),
    ],
)
def test_forced_loads_are_even_on_every_mesh_and_scores_are_trained(mesh, changes):
    cfg = small_config(mesh, model={"num_layers": 2}, **{"router": FORCED, **changes})
    step = step_for(cfg)
    state, batch = step.init(), place(step, random_batch(cfg))
    gradients, parts = step.gradients(state, batch)
    # 8 x 16 tokens choose 2 of 8 experts each.
    np.testing.assert_array_equal(parts.load_LE, np.full((2, 8), 8 * 16 * 2 / 8))
    assert not np.any(parts.uneven_L3)
    assert all(np.any(g) for g in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_evaluation_and_sampling_of_a_forced_run_choose_by_scores():
    cfg = small_config(router=FORCED)
    free = dataclasses.replace(cfg.moe.router, forced="none")
    plain = dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, router=free))
    step, other = step_for(cfg), step_for(plain)
    state, batch = step.init(), place(step, random_batch(cfg))
    prompt = (batch.token_BT[:1], jnp.int32(5))
    for name, given in (("evaluate", batch), ("target_nll", batch), ("next_logits", prompt)):
        found, wanted = (np.asarray(getattr(s, name)(state, given)) for s in (step, other))
        np.testing.assert_array_equal(found, wanted)
    forced, wanted = (s.gradients(state, batch)[1].nll for s in (step, other))
    assert float(forced) != float(wanted)
