"""State in the host's memory: the same bits as on the device, and the memory that holds it."""

import dataclasses

import jax
import numpy as np
import pytest

from moejax.comm.host import MEMORY_KIND
from moejax.config.schema import MemoryConfig
from moejax.layout.layout import is_product
from moejax.step import optimizer
from tests.cases import CERTAIN, on_nodes, place, random_batch, small_config, step_for

CASES = {
    "one device": small_config(),
    "all axes": small_config((1, 2, 2, 2), model={"num_layers": 2}),
    "muon": small_config((1, 2, 2, 2), model={"num_layers": 2}, optimizer={"name": "muon"}),
}


def with_host(cfg, **memory):
    return dataclasses.replace(cfg, memory=MemoryConfig(**memory))


def run(cfg, steps=2):
    step = step_for(cfg)
    state, batch = step.init(), place(step, random_batch(cfg))
    for _ in range(steps):
        state, metrics = step.step(state, batch)
    return step, state, metrics


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(optimizer, "PIECE", 64)


@pytest.mark.parametrize("name", CASES)
def test_moments_on_the_host_change_no_bit(name):
    cfg = CASES[name]
    host_cfg = with_host(cfg, optimizer="host")
    step, state, metrics = run(host_cfg)
    _, wanted, wanted_metrics = run(cfg)
    jax.tree.map(np.testing.assert_array_equal, state, wanted)
    jax.tree.map(np.testing.assert_array_equal, metrics, wanted_metrics)
    kinds = jax.tree.map(
        lambda dims, moments: (
            {x.sharding.memory_kind for x in jax.tree.leaves(moments) if x.ndim}
            == {MEMORY_KIND if is_product(dims) else "device"}
        ),
        step.dims,
        state.optimizer,
    )
    assert all(jax.tree.leaves(kinds))
