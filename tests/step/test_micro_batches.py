"""A batch in parts: what crosses nodes once a step, and router noise."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moejax.config.schema import CompressionConfig
from moejax.plan.trace.reader import collectives
from moejax.step.state import Batch
from tests.cases import (
    CERTAIN,
    assert_close,
    one_device_state,
    place,
    random_batch,
    small_config,
    spread,
    step_for,
)

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

DENSE = {"moe_every": None}


def across_nodes(codec, parts, sequences, seed=0):
    """A dense model on two nodes of one device, whose gradients meet through the codec."""
    train = {"micro_batches": parts, "batch_sequences": sequences, "seed": seed}
    cfg = small_config((2, 1, 1, 1), model=DENSE, train=train)
    policy = CompressionConfig(block=16, dense_gradient=codec)
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
    """A trainer, and the same weights whatever the seed is."""
    plain = dataclasses.replace(cfg, compression=CompressionConfig())
    plain = dataclasses.replace(plain, train=dataclasses.replace(cfg.train, seed=0))
    train_step = step_for(cfg)
    state = one_device_state(plain)._replace(reduction=train_step.first_reduction())
    return train_step, spread(state, train_step)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "int8+feedback"])
def test_copies_across_nodes_meet_once_a_step(codec):
    """More parts are more reduce-scatters over shards, and no more of what copies send."""
    found = []
    for parts in (1, 4):
        cfg = small_config(
            (2, 2, 2, 1), train={"micro_batches": parts, "batch_sequences": 32}, moe=CERTAIN
        )
        cfg = dataclasses.replace(
            cfg,
            compression=CompressionConfig(block=16, dense_gradient=codec, expert_gradient=codec),
            mesh=dataclasses.replace(cfg.mesh, nodes=2),
        )
        train_step = step_for(cfg)
        traced = train_step.step.trace(train_step.abstract, train_step.abstract_batch())
        calls = collectives(traced.jaxpr.jaxpr)
        across = [one for one in calls if one.axes == ("replica",) and "gradient" in one.traffic]
        found.append(sorted((one.kind, one.bytes, one.calls) for one in across))
    assert found[0]
    assert found[0] == found[1]


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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "parts", "activations"), CUTS)
def test_router_noise_depends_on_neither_mesh_nor_parts(mesh, parts, activations):
    wanted, found = noisy((1, 1, 1, 1), 1, "sequence"), noisy(mesh, parts, activations)
    assert_close(found[0], wanted[0], terms=2000)
    assert float(found[1].nll) == pytest.approx(float(wanted[1].nll), rel=1e-5)
    np.testing.assert_array_equal(found[1].load_LE, wanted[1].load_LE)


@pytest.mark.slow
def test_router_noise_differs_by_step_and_is_the_same_again():
    whole = (1, 1, 1, 1), 1, "sequence"
    nats = [float(noisy(*whole, step=step)[1].nll) for step in (0, 0, 1)]
    assert nats[0] == nats[1] != nats[2]


def test_the_last_part_waits_for_the_sums_of_the_others():
    """Else a compiler may run its forward pass first, and hold what it saves meanwhile."""
    train_step = step_for(small_config((1, 2, 1, 1), model=DENSE, train={"micro_batches": 4}))
    traced = train_step.gradients.trace(train_step.abstract, train_step.abstract_batch())
    (mapped,) = (eqn for eqn in traced.jaxpr.jaxpr.eqns if eqn.primitive.name == "shard_map")
    eqns = mapped.params["jaxpr"].eqns
    first = next(eqn for eqn in eqns if eqn.primitive.name == "scan")
    assert first.params["length"] == 3
    sums = {var for var in first.outvars if var.aval.shape}
    barriers = (eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier")
    (barrier,) = (eqn for eqn in barriers if len(eqn.invars) > 1)  # others are of documents alone
    assert sums & set(barrier.invars)
    rows = [var.aval.shape for var in barrier.invars if var.aval.dtype == np.int32]
    assert rows == [(1, 16)] * 3
    late = eqns[eqns.index(barrier) + 1 :]
    assert any(eqn.primitive.name == "scan" for eqn in late), "the layers of the last part"
