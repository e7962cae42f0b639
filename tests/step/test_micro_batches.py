"""A batch in parts: random rounding, measured squared errors and router noise, part by part."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moejax.comm.codecs.build import build_codec
from moejax.comm.weights.states import sum_squared_errors
from moejax.config.schema import CompressionConfig
from moejax.step.state import Batch
from tests.cases import (
    assert_close,
    one_device_state,
    place,
    random_batch,
    small_config,
    spread,
    step_for,
)

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

PARTS = 8
DENSE = {"moe_every": None}


def across_nodes(codec, parts, sequences, seed=0):
    """A dense model on two nodes of one device, whose gradients meet through the codec."""
    train = {"micro_batches": parts, "batch_sequences": sequences, "seed": seed}
    cfg = small_config((2, 1, 1, 1), model=DENSE, train=train)
    policy = CompressionConfig(block=16, dense_gradient=codec, adapt_every=1)
    return dataclasses.replace(cfg, compression=policy, mesh=dataclasses.replace(cfg.mesh, nodes=2))


def equal_parts(cfg):
    """On each device the same sequence in every part."""
    rows = random_batch(
        dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, batch_sequences=2))
    )
    times = cfg.train.batch_sequences // 2
    return Batch(*(np.repeat(np.asarray(x), times, axis=0) for x in rows))


def reduced(cfg, step=0):
    """The gradient of `equal_parts`, all weights that the codec serves in one vector."""
    train_step, state = first(cfg)
    state = state._replace(step=jax.device_put(np.int32(step), state.step.sharding))
    gradients = train_step.gradients(state, place(train_step, equal_parts(cfg)))[0]
    leaves = zip(jax.tree.leaves(gradients), jax.tree.leaves(train_step.dims), strict=True)
    return np.concatenate([np.asarray(x, np.float64).ravel() for x, d in leaves if len(d) > 1])


@functools.cache
def first(cfg):
    """A trainer, and the same weights whatever the seed of the rounding is."""
    plain = dataclasses.replace(cfg, compression=CompressionConfig())
    plain = dataclasses.replace(plain, train=dataclasses.replace(cfg.train, seed=0))
    train_step = step_for(cfg)
    state = one_device_state(plain)._replace(reduction=train_step.first_reduction())
    return train_step, spread(state, train_step)


@pytest.mark.slow
def test_equal_parts_round_apart():
    """The error of the sum falls with the root of the parts, as of independent rounding.

    Rounding errs by an independent number at each value. So the mean square of the error is, of
    eight equal parts of an eighth each, an eighth of that of one part, within five standard errors.
    """
    plain, one = across_nodes("none", 1, 2), across_nodes("int4+stochastic", 1, 2)
    parts = across_nodes("int4+stochastic", PARTS, 2 * PARTS)
    wanted = reduced(plain)
    once, eight = (np.square(reduced(cfg) - wanted) for cfg in (one, parts))
    spread_of = np.hypot(np.std(eight), np.std(once) / PARTS) / np.sqrt(wanted.size)
    assert abs(eight.mean() - once.mean() / PARTS) <= 5 * spread_of
    assert 5 * spread_of < once.mean() / PARTS, "else the bound says little"


def test_rounding_differs_by_step_and_seed_and_is_the_same_again():
    cfg = across_nodes("int4+stochastic", PARTS, 2 * PARTS)
    found = reduced(cfg)
    np.testing.assert_array_equal(reduced(cfg), found)
    assert not np.array_equal(reduced(cfg, step=1), found)
    other = across_nodes("int4+stochastic", PARTS, 2 * PARTS, seed=1)
    assert not np.array_equal(reduced(other), found)


def squared_errors_of(parts, sequences, batch):
    """What a measuring step notes: left out by each level, and all."""
    cfg = across_nodes("adaptive:0.5:int8|topk:0.4", parts, sequences)
    train_step, state = first(cfg)
    now = train_step.at(train_step.spec.compression.at(0, (0, 0)))
    codec = now.spec.codecs.dense_gradient
    assert codec is not None
    state, _ = now.step(jax.tree.map(lambda x: x.copy(), state), place(now, batch))
    adaptive = build_codec(codec)
    return np.asarray(
        sum_squared_errors(adaptive, state.reduction.residuals, now.dims, "dense_gradient")
    )


@pytest.mark.slow
def test_squared_errors_are_of_all_parts():
    """A last part without targets sends what the first left out, and adds that to the sum."""
    cfg = small_config(train={"batch_sequences": 4})
    batch = random_batch(cfg)
    target_BT = batch.target_BT.copy()
    target_BT[1::2] = -1  # of both devices the second part
    whole = batch._replace(target_BT=target_BT)
    half = Batch(*(x[::2] for x in whole))
    one, two = squared_errors_of(1, 2, half), squared_errors_of(2, 4, whole)
    assert two[-1] == pytest.approx(one[-1] + one[0], rel=1e-4)
    assert np.all(two[:-1] >= one[:-1])


NOISY = {
    "router": {"jitter": 0.2, "balance_over": "sequence"},
    "moe": {"capacity_factor": 16.0},  # certain: no rounds, and nothing is dropped
}
CUTS = [((2, 1, 2, 2), 2, "sequence")]
CUTS += [pytest.param((2, 1, 1, 4), 4, "replicated", marks=pytest.mark.exhaustive)]


@functools.cache
def noisy_step(mesh, parts, activations):
    """A trainer with router noise, and the same weights on every mesh."""
    train = {"micro_batches": parts}
    train_step = step_for(small_config(mesh, activations=activations, train=train, **NOISY))
    return train_step, spread(noisy_weights(), train_step)


@functools.cache
def noisy_weights():
    return one_device_state(small_config(**NOISY))


def noisy(*cut, step=0):
    train_step, state = noisy_step(*cut)
    state = state._replace(step=jax.device_put(np.int32(step), state.step.sharding))
    return train_step.gradients(state, place(train_step, random_batch(train_step.cfg)))


@pytest.mark.parametrize(("mesh", "parts", "activations"), CUTS)
def test_router_noise_depends_on_neither_mesh_nor_parts(mesh, parts, activations):
    wanted, found = noisy((1, 1, 1, 1), 1, "sequence"), noisy(mesh, parts, activations)
    assert_close(found[0], wanted[0], terms=2000)
    assert float(found[1].nll) == pytest.approx(float(wanted[1].nll), rel=1e-5)
    np.testing.assert_array_equal(found[1].load_LE, wanted[1].load_LE)


def test_router_noise_differs_by_step_and_is_the_same_again():
    whole = (1, 1, 1, 1), 1, "sequence"
    nats = [float(noisy(*whole, step=step)[1].nll) for step in (0, 0, 1)]
    assert nats[0] == nats[1] != nats[2]
