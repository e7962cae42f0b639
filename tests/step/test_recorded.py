"""Tokens that go to recorded experts: loss, gradients and loads beside the one-device oracle."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.model.remat import in_turn
from moejax.moe.sizes import expert_capacity
from tests import oracle
from tests.cases import (
    CERTAIN,
    assert_close,
    one_device_state,
    place,
    random_batch,
    small_config,
    some_of,
    spread,
    step_for,
)
from tests.oracle import Noise, oracle_loss
from tests.step.against_oracle import MESH_OF_ONE, NO_ROUTE, TERMS, only
from tests.step.pipeline.test_stages import config as staged
from tests.step.test_context import shared

unchecked = pytest.mark.usefixtures("unchecked_annotations")  # small tests below check them

# Balance is counted over what a device sees at a time, and the oracle sees all at once.
NO_BALANCE = {"router": {"balance_loss": 0.0}}
EVERY_SECOND = {"num_layers": 4, "moe_every": 2}
AHEAD = {"predict_ahead": 1}
GROUPS = {"score": "sigmoid", "num_groups": 4, "groups_per_token": 1, "balance_over": "sequence"}


def flat(mesh, route="split", **changes):
    cfg = small_config(mesh, **({"moe": CERTAIN} | changes))
    return dataclasses.replace(cfg, route=route)


def in_stages(mesh, stages, micro_batches, **changes):
    return staged(mesh, stages, micro_batches, **(NO_BALANCE | changes))


CASES = {
    "one device": flat((1, 1, 1, 1), model={"remat": "full", **EVERY_SECOND}, router=GROUPS),
    "all axes, micro-batches": flat(
        (1, 2, 2, 2),
        model={"num_layers": 3, "first_dense_layers": 1, "remat": "attention"},
        train={"micro_batches": 2},
        **NO_BALANCE,
    ),
    "replicated, predicts ahead": flat(
        *((2, 1, 2, 2), "duplicate"),
        activations="replicated",
        model={"num_layers": 2, "scan_layers": False, **AHEAD},
        moe={**CERTAIN, "experts_per_token": 4},
    ),
    "shared sequences": shared((1, 2, 2, 2), 4, 2, rows=2, model=EVERY_SECOND),
    "shared sequences, jitter": shared(
        *((1, 2, 2, 2), 4, 2), rows=2, model={"num_layers": 2}, router={"jitter": 0.2}
    ),
    "stages, layers before": in_stages(
        *((1, 1, 2, 1), 2, 2),
        layers=5,
        model={"layers_before_stages": 1, "stage_chunks": 2},
    ),
    "stages, slices": in_stages((1, 1, 1, 2), 2, 2, layers=4, axis={"stage_slices": 2}),
    "stages, inputs kept": in_stages(
        *((1, 2, 1, 1), 2, 2),
        layers=4,
        model={"moe_every": 2, "remat": "full", **AHEAD},
        axis={"stage_keeps": "input"},
    ),
    "stages, shared sequences": in_stages(
        *((1, 1, 2, 1), 2, 2), layers=2, axis={"context": 2, "context_stripe": 4}
    ),
}
RARE = ("stages, slices", "replicated, predicts ahead")


def drawn(cfg, seed=0, free=1 / 3):
    """A batch whose tokens have any experts; a share of them chooses freely."""
    batch, rng = random_batch(cfg, seed), np.random.default_rng(seed + 1)
    E, K, L = cfg.moe.num_experts, cfg.moe.experts_per_token, cfg.model.expert_layers
    order = rng.permuted(np.broadcast_to(np.arange(E), (*batch.token_BT.shape, L, E)), axis=-1)
    expert_BTLK = order[..., :K].astype(np.int32)
    expert_BTLK[rng.random(batch.token_BT.shape) < free] = -1
    return batch._replace(expert_BTLK=expert_BTLK)


def plain(cfg):
    """The same model on one device."""
    moe = dataclasses.replace(cfg.moe, capacity_factor=None)
    return dataclasses.replace(cfg, mesh=MESH_OF_ONE, moe=moe, **NO_ROUTE)


def noise_of(cfg):
    """The noise of the first step's routers, for the oracle."""
    key = jax.random.fold_in(jax.random.key(cfg.train.seed), 0)
    rows = np.arange(cfg.train.batch_sequences)
    return Noise(jax.random.split(key)[0], rows) if cfg.moe.router.jitter else None


@functools.cache
def first_state(cfg):
    return one_device_state(cfg)


def check(cfg, batch, path="certain"):
    """Returns the loss's parts, equal to the oracle's."""
    one, train_step = plain(cfg), step_for(cfg)
    state = first_state(one)
    given = {"router_bias": state.router_bias, "batch": batch, "cfg": one, "noise": noise_of(cfg)}
    loss = functools.partial(oracle_loss, **given)
    (_, told), wanted = jax.value_and_grad(loss, has_aux=True)(state.params)
    with only(path):
        got, parts = train_step.gradients(spread(state, train_step), place(train_step, batch))
    np.testing.assert_allclose(parts.nll, told.nll, rtol=TERMS * np.finfo(np.float32).eps)
    if told.ahead is not None:
        np.testing.assert_allclose(parts.ahead, told.ahead, rtol=1e-5)
    np.testing.assert_array_equal(parts.load_LE, told.load)
    assert_close(got, jax.tree.map(np.asarray, wanted), terms=TERMS)
    return parts


@pytest.mark.slow
@unchecked
@pytest.mark.parametrize(
    "name", some_of(["all axes, micro-batches", *RARE], "all axes, micro-batches")
)
def test_tokens_go_to_recorded_experts_and_others_choose(name):
    cfg = CASES[name]
    batch = drawn(cfg)
    parts = check(cfg, batch)
    # Before the first layer with experts nothing depends on them.
    own_BTK, given_BTK = (x[:, :, 0] for x in (own_choices(cfg, batch), batch.expert_BTLK))
    agreed = np.sum(given_BTK[..., None] == own_BTK[..., None, :])
    assert 0 < agreed < np.sum(given_BTK >= 0)
    assert parts.replayed_L2[0].tolist() == [agreed, np.sum(given_BTK >= 0)]


def own_choices(cfg, batch):
    """The experts that the oracle's routers choose, by layer; those of a module ahead are left."""
    one, weights, batch = plain(cfg), [], batch._replace(expert_BTLK=None)

    def spied(*args, moe_reference=oracle.moe_reference, **options):
        found = moe_reference(*args, **options)
        weights.append(np.asarray(found[1]))
        return found

    state = first_state(one)
    with mock.patch.object(oracle, "moe_reference", spied):
        oracle_loss(state.params, state.router_bias, batch, one, noise_of(cfg))
    K, layers = cfg.moe.experts_per_token, cfg.model.expert_layers
    expert_NLK = np.stack([np.argsort(-w)[:, :K] for w in weights[:layers]], axis=1)
    return expert_NLK.reshape(*batch.token_BT.shape, layers, K).astype(np.int32)


@unchecked
@pytest.mark.slow
@pytest.mark.parametrize("name", some_of(CASES, "shared sequences, jitter"))
def test_a_models_own_choices_change_nothing(name):
    cfg = CASES[name]
    train_step, batch = step_for(cfg), random_batch(cfg)
    recorded = batch._replace(expert_BTLK=own_choices(cfg, batch))
    state = spread(first_state(plain(cfg)), train_step)
    wanted, free = train_step.gradients(state, place(train_step, batch))
    got, parts = train_step.gradients(state, place(train_step, recorded))
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(same, parts._replace(replayed_L2=None), free)
    every = cfg.model.expert_layers * [2 * [recorded.expert_BTLK[:, :, 0].size]]
    assert parts.replayed_L2.tolist() == every + cfg.model.predict_ahead * [[0, 0]]
    # One rounding of each gradient's largest number: a program fuses as it is.
    assert_close(got, jax.tree.map(np.asarray, wanted), terms=8)


def all_to(cfg, experts):
    batch = random_batch(cfg)
    shape = (*batch.token_BT.shape, cfg.model.expert_layers, len(experts))
    return batch._replace(expert_BTLK=np.broadcast_to(np.int32(experts), shape))


@pytest.mark.slow
def test_experts_that_get_all_tokens_get_them_in_rounds():
    cfg = small_config((1, 1, 8, 1))
    parts = check(cfg, all_to(cfg, (3, 4)), path="rounds")
    assert np.count_nonzero(parts.load_LE) == 2


@pytest.mark.slow
def test_choices_above_the_capacity_are_dropped_and_counted():
    cfg = small_config(moe={"capacity_factor": 1.0})
    train_step, tokens = step_for(cfg), 8 * 16
    _, parts = train_step.gradients(train_step.init(), place(train_step, all_to(cfg, (5, 2))))
    kept = expert_capacity(cfg.moe, tokens=tokens)
    assert kept < tokens
    assert parts.load_LE.tolist() == [[0, 0, tokens, 0, 0, tokens, 0, 0]]
    assert int(parts.uneven_L3[0, 0]) == 2 * (tokens - kept)


def test_a_step_moves_the_router_of_recorded_experts():
    """Weights of experts are those of the trainer's own scores, which have gradients."""
    cfg = small_config(router={"balance_loss": 0.0, "z_loss": 0.0})
    train_step = step_for(cfg)
    gradients, _ = train_step.gradients(train_step.init(), place(train_step, all_to(cfg, (5, 2))))
    w_router_DE = np.asarray(gradients["groups"][0]["blocks"][0]["moe"]["w_router"][0])
    assert np.abs(w_router_DE[:, [2, 5]]).min() > 0
    # Softmax and then shares of two: the other experts cancel out, but for rounding.
    assert np.abs(w_router_DE[:, [0, 1, 3, 4, 6, 7]]).max() < 1e-6 * np.abs(w_router_DE).max()


def test_layers_that_run_in_turn_take_integers():
    """Unrolled layers are tied to each other, through gradients that integers do not have."""
    state = {"w": jnp.arange(3.0), "expert_K": jnp.arange(2)}

    def repeat(x, scanned):
        own = scanned[1]
        return x * own["w"] + jnp.sum(own["expert_K"]), None

    def loss(w):
        given = {**state, "w": w}
        return jnp.sum(in_turn(repeat, jnp.ones(3), (jnp.int32(0), given))[0])

    np.testing.assert_array_equal(jax.grad(loss)(state["w"]), np.ones(3))
