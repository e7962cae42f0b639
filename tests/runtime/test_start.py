import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import moejax.runtime.start
from moejax.config.schema import MeshConfig
from moejax.errors import InputError
from moejax.runtime.start import (
    _timed,
    check_can_listen,
    coordinator_listens_at,
    measure_peak,
    platform_of,
    start,
)


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
        "from moejax.config.schema import MeshConfig\n"
        "from moejax.runtime.start import start\n"
        "print(len(start(MeshConfig(simulated_devices=3))))\n"
    )
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=5"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_the_platform_is_that_of_the_devices():
    assert platform_of(jax.devices()) == "cpu"


@pytest.mark.parametrize(
    ("seconds", "taken", "best"),
    [((0.5, 0.4, 0.25, 0.3, 0.5, 0.1), 5, 0.25), ((*[0.01] * 9, 0.005, *[0.01] * 9), 15, 0.005)],
    ids=["slow", "fast"],
)
def test_a_peak_is_the_best_product_of_a_second(monkeypatch, seconds, taken, best):
    """On CPU a product has all cores, so it is the peak of all simulated devices together."""
    coming, products = iter(seconds), []

    def timed(multiply, x):
        products.append((multiply(x, x).shape, x.dtype))
        return next(coming)

    monkeypatch.setattr("moejax.runtime.start._timed", timed)
    N = 1536
    assert measure_peak(jax.devices(), "bfloat16") == 2 * N**3 / best
    assert products == [((N, N), "bfloat16")] * taken


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


@pytest.mark.parametrize(
    ("coordinator", "leads_to", "place"),
    [
        ("127.0.0.1:99", "127.0.0.1", "127.0.0.1:99"),
        ("localhost:99", "127.0.0.1", "localhost:99"),
        ("[::1]:99", "::1", "[::1]:99"),
        ("10.77.0.1:99", "10.77.0.1", "10.77.0.1:99"),
        ("node1:99", "10.77.0.1", "node1:99"),
        # Debian's own name; others know it by another address.
        ("node1:99", "127.0.1.1", "[::]:99"),
    ],
)
def test_the_coordinator_listens_at_its_own_address(monkeypatch, coordinator, leads_to, place):
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    infos = [(None, None, None, "", (leads_to, 0))]
    monkeypatch.setattr("moejax.runtime.start.socket.getaddrinfo", lambda *_: infos)
    assert coordinator_listens_at(coordinator) == place
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "[::]:7")
    assert coordinator_listens_at(coordinator) == "[::]:7"


def test_a_name_that_leads_nowhere_here_is_left_to_jax(monkeypatch):
    def fail(*_):
        raise OSError

    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    monkeypatch.setattr("moejax.runtime.start.socket.getaddrinfo", fail)
    assert coordinator_listens_at("node1:99") == "node1:99"


@pytest.mark.parametrize("place", ["192.0.2.1:4444", "127.0.0.1:99999", "127.0.0.1:x", "a b:1"])
def test_where_nobody_can_listen_is_bad_input(place):
    with pytest.raises(InputError, match=f"cannot listen for the others. At {place}"):
        check_can_listen(place)


def test_where_somebody_listens_is_bad_input():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match="in use"):
            check_can_listen(place)
    check_can_listen(place)
