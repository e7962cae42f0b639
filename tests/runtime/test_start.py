import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import moejax.runtime.start
from moejax.config import MeshConfig
from moejax.errors import InputError
from moejax.runtime.start import _timed, measure_peak, platform_of, start


def test_devices_that_were_already_simulated_are_taken():
    count = len(jax.devices())
    assert start(MeshConfig(simulated_devices=count)) == jax.devices()


def test_another_number_of_devices_in_a_started_process_is_refused():
    count = len(jax.devices())
    with pytest.raises(InputError, match=f"has {count} CPU devices.*is {count + 1}"):
        start(MeshConfig(simulated_devices=count + 1))


def devices_of(*processes):
    return [SimpleNamespace(process_index=index, platform="cpu") for index in processes]


def test_processes_with_unequal_devices_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: devices_of(0, 1, 0, 0))
    with pytest.raises(InputError, match="process 0 has 3, process 1 has 1") as raised:
        start(MeshConfig())
    assert "\n" not in str(raised.value)
    monkeypatch.setattr(jax, "devices", lambda: devices_of(1, 0, 0, 1))
    assert [device.process_index for device in start(MeshConfig())] == [0, 0, 1, 1]


def test_the_config_wins_over_the_flags_of_the_environment():
    code = (
        "from moejax.config import MeshConfig\n"
        "from moejax.runtime.start import start\n"
        "print(len(start(MeshConfig(simulated_devices=3))))\n"
    )
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=5"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_the_platform_is_that_of_the_devices():
    assert platform_of(jax.devices()) == "cpu"


def test_a_peak_is_the_best_of_five_products_that_all_devices_share(monkeypatch):
    """On CPU a product has all cores, so it is the peak of all simulated devices together."""
    seconds, products = iter((0.5, 0.4, 0.25, 0.3, 0.5)), []

    def timed(multiply, x):
        products.append((multiply(x, x).shape, x.dtype))
        return next(seconds)

    monkeypatch.setattr("moejax.runtime.start._timed", timed)
    N = 1536
    assert measure_peak(jax.devices(), "bfloat16") == 2 * N**3 / 0.25
    assert products == [((N, N), "bfloat16")] * 5


def test_a_product_is_timed_until_it_is_done(monkeypatch):
    clock, seen = iter((10.0, 12.5)), []

    def read_clock():
        seen.append("clock")
        return next(clock)

    x = jnp.ones(1)
    monkeypatch.setattr(moejax.runtime.start, "time", SimpleNamespace(perf_counter=read_clock))
    monkeypatch.setattr(jax, "block_until_ready", lambda _: seen.append("done"))
    assert _timed(lambda a, b: seen.append("product"), x) == 2.5
    assert seen == ["clock", "product", "done", "clock"]
