import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock, call

import jax
import jax.numpy as jnp
import pytest

from moejax.config.schema import MeshConfig
from moejax.errors import InputError
from moejax.runtime import patches
from moejax.runtime import start as start_module
from moejax.runtime.processes import Rank
from moejax.runtime.start import (
    _timed,
    coordinator_listens_at,
    measure_peak,
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
    monkeypatch.setattr(start_module, "time", SimpleNamespace(perf_counter=read_clock))
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


@pytest.fixture
def joined(monkeypatch):
    """JAX and its private parts as mocks, in a process that has joined no program."""
    mocks = SimpleNamespace(jax=Mock(), xla_bridge=Mock(), distributed=Mock())
    mocks.distributed.global_state.client = "client"
    monkeypatch.setattr(start_module, "jax", mocks.jax)
    monkeypatch.setattr(start_module, "_address", "127.0.0.1")
    monkeypatch.setattr(start_module, "fix_settings", lambda: None)
    for name in ("xla_bridge", "distributed"):
        monkeypatch.setattr(patches, name, getattr(mocks, name))
    for name in ("MOEJAX_ASSIGNMENT", "JAX_COORDINATOR_BIND_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return mocks


def launched(monkeypatch, coordinator, processes, process):
    monkeypatch.setenv("MOEJAX_COORDINATOR", coordinator)
    monkeypatch.setenv("MOEJAX_PROCESSES", str(processes))
    monkeypatch.setenv("MOEJAX_PROCESS", str(process))


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_of_several_joins_the_others_over_gloo(joined, monkeypatch, index):
    place, met = "127.0.0.1:29400", Mock(return_value="10.0.0.7")
    monkeypatch.setattr(start_module, "meet", met)
    launched(monkeypatch, place, 2, index)
    found = start_module.join()
    assert (found.index, found.count, found._client) == (index, 2, "client")
    joined.jax.config.update.assert_any_call("jax_cpu_collectives_implementation", "gloo")
    joined.jax.config.update.assert_any_call("jax_enable_preemption_service", False)
    met.assert_called_once_with(Rank(place, 2, index), place)
    joined.jax.distributed.initialize.assert_called_once_with(
        coordinator_address=place,
        num_processes=2,
        process_id=index,
        coordinator_bind_address=place,
        cluster_detection_method="deactivate",
    )
    assert start_module.own_address() == "10.0.0.7"


@pytest.mark.parametrize("elastic", [False, True])
def test_a_process_alone_joins_nobody_and_has_no_gloo_if_it_was_one_of_several(
    joined, monkeypatch, elastic
):
    if elastic:
        monkeypatch.setenv("MOEJAX_ASSIGNMENT", "/there")
    launched(monkeypatch, "127.0.0.1:29400", 1, 0)
    assert start_module.join().count == 1
    settings = [call("jax_cpu_collectives_implementation", None)]
    assert joined.jax.config.update.call_args_list == settings * elastic


def test_gloo_listens_at_the_address_that_others_reach(joined, monkeypatch):
    gloo = Mock()
    monkeypatch.setattr(patches, "_jax", gloo)
    monkeypatch.setattr(start_module, "_address", "10.0.0.7")
    patches.make_cpu_client_with(start_module.own_address)
    (platform, make), options = joined.xla_bridge.register_backend_factory.call_args
    assert (platform, options) == ("cpu", {"fail_quietly": False})
    make()
    options = {"distributed_client": "client", "hostname": "10.0.0.7"}
    gloo.make_gloo_tcp_collectives.assert_called_once_with(**options)
    made = gloo.make_gloo_tcp_collectives.return_value
    joined.distributed.global_state.client = None
    make()
    assert joined.xla_bridge.make_cpu_client.call_args_list == [call(made), call()]


@pytest.mark.parametrize("client", [None, "client"])
def test_who_leaves_a_program_forgets_its_devices(joined, client):
    joined.distributed.global_state.client = client
    start_module.leave()
    assert joined.jax.distributed.shutdown.called == (client is not None)
    assert joined.jax.clear_caches.called
    assert joined.jax.extend.backend.clear_backends.called


@pytest.mark.parametrize(
    ("error", "platform", "said"),
    [
        (RuntimeError("no\n  GPU"), "gpu", "no gpu device. JAX says: no GPU. "),
        (AssertionError(), None, "no usable device. JAX says: no device of that platform was"),
    ],
)
def test_hardware_that_is_missing_is_told_in_one_line(monkeypatch, error, platform, said):
    def fail():
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    before = jax.config.jax_platforms
    try:
        with pytest.raises(InputError) as raised:
            start(MeshConfig(platform=platform))
    finally:
        jax.config.update("jax_platforms", before)
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)
