import os
from types import SimpleNamespace

import pytest

from moejax.aot.target import TARGETS
from moejax.config.schema import MeshConfig
from moejax.plan.cluster.file import load_topology
from moejax.runtime.memory import FRACTIONS, POOL, SHARE, device_memory, take_share
from moejax.runtime.start import start


@pytest.mark.parametrize("begin", [take_share, lambda: start(MeshConfig(simulated_devices=8))])
def test_jax_may_take_what_plans_count_on(monkeypatch, begin):
    for name in FRACTIONS:
        monkeypatch.setenv(name, "")
    begin()
    assert [os.environ[name] for name in FRACTIONS] == [str(SHARE), ""]


@pytest.mark.parametrize("name", FRACTIONS)
def test_what_the_user_says_stays(monkeypatch, name):
    """JAX takes one of the two names, and refuses both."""
    for other in FRACTIONS:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "0.5")
    take_share()
    assert [os.environ.get(other) for other in FRACTIONS].count(None) == 1
    assert os.environ[name] == "0.5"


@pytest.mark.parametrize(("said", "pool"), [("", "200"), ("96", "96")])
def test_xla_may_pin_all_of_a_machine_unless_the_user_says_less(monkeypatch, said, pool):
    monkeypatch.setattr("moejax.runtime.memory.machine_memory", lambda: 200 * 2**30 + 5)
    monkeypatch.setenv(POOL, said)
    monkeypatch.setenv(FRACTIONS[0], "0.5")
    take_share()
    assert os.environ[POOL] == pool


def test_described_gpus_have_what_jax_may_take():
    """151,397,597,184 bytes: all of an H200's, as XLA describes it."""
    assert TARGETS["h200"].memory_bytes == int(SHARE * 151_397_597_184)
    assert load_topology("h200").device.memory_bytes == TARGETS["h200"].memory_bytes


def test_a_device_may_take_what_the_allocator_has():
    stats = {"bytes_limit": 5, "bytes_in_use": 3}
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    assert device_memory(gpu, sharing=4) == 5
