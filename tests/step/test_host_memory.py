"""State in the host's memory: the same bits as on the device, and the memory that holds it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.comm import host
from moejax.comm.host import MEMORY_KIND
from moejax.config.schema import LoraConfig, MemoryConfig
from moejax.layout.layout import is_product
from tests.cases import CERTAIN, on_nodes, place, random_batch, small_config, some_of, step_for


def staged(schedule, chunks=1, slices=1, micro_batches=4):
    model = {"num_layers": 4, "stage_chunks": chunks, "remat": "attention"}
    cfg = small_config(
        (1, 1, 2, 2), moe=CERTAIN, model=model, train={"micro_batches": micro_batches}
    )
    mesh = dataclasses.replace(cfg.mesh, stage=2, schedule=schedule, stage_slices=slices)
    return dataclasses.replace(cfg, mesh=mesh)


ADAPTED = dataclasses.replace(
    small_config((1, 1, 2, 2), moe=CERTAIN), lora=LoraConfig(rank=2, targets=("moe.w_*", "*.w_q"))
)
CASES = {
    "one device": small_config(),
    "all axes": small_config((1, 2, 2, 2), model={"num_layers": 2}),
    "muon": small_config((1, 2, 2, 2), model={"num_layers": 2}, optimizer={"name": "muon"}),
    "codecs": on_nodes(),
    "adapters": ADAPTED,
    "stages": staged("1f1b"),
}


def with_host(cfg, **memory):
    return dataclasses.replace(cfg, memory=MemoryConfig(**memory))


def run(cfg, steps=2):
    step = step_for(cfg)
    state, batch = step.init(), place(step, random_batch(cfg))
    for _ in range(steps):
        state, metrics = step.step(state, batch)
    return step, state, metrics


def close(x, wanted):
    np.testing.assert_allclose(x, wanted, rtol=3e-6, atol=1e-7)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(host, "PIECE", 64)


@pytest.mark.slow
def test_all_that_may_be_there_is_on_the_host():
    cfg = small_config((1, 1, 2, 2), moe=CERTAIN, model={"num_layers": 2, "remat": "attention"})
    everything = dict.fromkeys(("optimizer", "experts", "residuals"), "host")
    _, state, metrics = run(with_host(cfg, **everything))
    _, wanted, wanted_metrics = run(cfg)
    jax.tree.map(close, (metrics, state), (wanted_metrics, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("name", some_of(CASES, "muon", "codecs", "stages"))
def test_moments_on_the_host_change_no_bit(name):
    """But the last of an update where XLA for CPUs fuses it with the decoding of gradients."""
    cfg = CASES[name]
    host_cfg = with_host(cfg, optimizer="host")
    step, state, metrics = run(host_cfg)
    _, wanted, wanted_metrics = run(cfg)
    same = close if name == "codecs" else np.testing.assert_array_equal
    jax.tree.map(same, (metrics, state), (wanted_metrics, wanted))
    kinds = jax.tree.map(
        lambda dims, moments: (
            {x.sharding.memory_kind for x in jax.tree.leaves(moments) if x.ndim}
            == {MEMORY_KIND if is_product(dims) else "device"}
        ),
        step.dims,
        state.optimizer,
    )
    assert all(jax.tree.leaves(kinds))


EXPERTS = {
    "codecs": on_nodes(),
    "adapters": ADAPTED,
    "one device": small_config(moe=CERTAIN, model={"num_layers": 2}),
    "all axes": small_config((1, 2, 2, 2), moe=CERTAIN, model={"num_layers": 2}),
    "recomputed": small_config(
        (1, 2, 2, 2),
        moe=CERTAIN,
        model={"num_layers": 2, "remat": "full"},
        train={"micro_batches": 2},
    ),
}


@pytest.mark.slow
def test_moments_on_the_host_stay_where_a_step_is_not_finite():
    cfg = with_host(small_config((1, 1, 2, 2), moe=CERTAIN), optimizer="host")
    step = step_for(cfg)
    state, batch = step.init(), place(step, random_batch(cfg))
    state, _ = step.step(state, batch)
    before = jax.tree.map(np.array, state.optimizer)
    table = state.params["embedding"]["table"]
    state.params["embedding"]["table"] = jax.device_put(table * np.nan, table.sharding)
    state, metrics = step.step(state, batch)
    assert int(metrics.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, state.optimizer, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_of(EXPERTS, "codecs"))
def test_experts_on_the_host_change_rounding_at_most(name):
    """Their gradient's norm is added up layer by layer."""
    cfg = EXPERTS[name]
    step, state, metrics = run(with_host(cfg, experts="host", optimizer="host"))
    _, wanted, wanted_metrics = run(cfg)
    jax.tree.map(close, (metrics, state), (wanted_metrics, wanted))
    kinds = jax.tree.map(
        lambda dims, x: (x.sharding.memory_kind == MEMORY_KIND) == (dims in ("EDUF", "EFD")),
        step.dims,
        state.params,
    )
    assert all(jax.tree.leaves(kinds))


def with_remat(remat, **mesh):
    cfg = small_config((1, 2, 2, 2), moe=CERTAIN, model={"num_layers": 2, "remat": remat})
    return dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **mesh))


RESIDUALS = {
    "remat attention": with_remat("attention"),
    "remat experts": with_remat("experts"),
    "across nodes once": with_remat("token_collectives", nodes=2, gather_across="passes"),
    "1f1b": staged("1f1b"),
    "combined": staged("combined_1f1b"),
    "chunks": staged("1f1b", chunks=2),
    "slices": staged("1f1b", slices=2, micro_batches=2),
}


def unwritten(shape, dtype):
    """What may stand in the host's memory before a step; CPUs put zeros there."""
    value = np.nan if np.issubdtype(dtype, np.floating) else -1
    return host.to_host(jnp.full(shape, value, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", some_of(RESIDUALS, "1f1b", "slices"))
def test_residuals_on_the_host_change_no_bit(name, monkeypatch):
    monkeypatch.setattr(host, "empty", unwritten)
    cfg = RESIDUALS[name]
    step, state, metrics = run(with_host(cfg, residuals="host"))
    _, wanted, wanted_metrics = run(cfg)
    jax.tree.map(np.testing.assert_array_equal, (metrics, state), (wanted_metrics, wanted))
    traced = str(step.step.trace(step.abstract, step.abstract_batch()).jaxpr)
    assert "<host>" in traced
