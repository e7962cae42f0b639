"""Devices of several processes are connected to each other, and to nobody else who comes by."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moejax.comm.cpu import peers
from moejax.comm.cpu.peers import ANSWER, HELLO, NotConnectedError, accept_peers
from moejax.runtime.meeting import listen

TOKEN = b"a token of thirty-two characters"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def server():
    with listen("127.0.0.1", 0) as opened:
        yield opened


def come(server, said=b""):
    connection = socket.create_connection(server.getsockname(), timeout=10)
    connection.sendall(said)
    return connection


def is_closed(connection):
    """Whether the other side has closed a connection, within ten seconds."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


STRANGERS = {
    "silent": b"",
    "16 bytes": bytes(range(16)),
    "another program": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + bytes(64),
    "without the token": HELLO.pack(bytes(32), 5, 0),
    "a device that is not there": HELLO.pack(TOKEN, 5, 99),
    "a peer of another process's device": HELLO.pack(TOKEN, 0, 5),
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_closed_and_does_not_count(server, monkeypatch, said):
    monkeypatch.setattr(peers, "HELLO_S", 0.3)
    with come(server, said) as stranger, come(server) as leaves:
        leaves.close()
        ours = [come(server, HELLO.pack(TOKEN, peer, 0)) for peer in (5, 6)]
        twice = come(server, HELLO.pack(TOKEN, 5, 0))
        # The last comes in two parts, when the silent have been closed.
        late = come(server, HELLO.pack(TOKEN, 7, 0)[:20])
        rest = threading.Timer(0.2, late.sendall, [HELLO.pack(TOKEN, 7, 0)[20:]])
        rest.start()
        expected = {(0, 5), (0, 6), (0, 7)}
        found = accept_peers(server, TOKEN, expected, time.monotonic() + 10)
        assert set(found) == {(0, 5), (0, 6), (0, 7)}
        for peer in (5, 6, 7):
            found[0, peer].setblocking(True)
            found[0, peer].sendall(bytes([peer]))
        heard = [one.recv(len(ANSWER) + 1, socket.MSG_WAITALL) for one in (*ours, late, twice)]
        # Of two callers that are one device either may be heard first; the other is closed.
        assert sorted(heard) == [b"", *(ANSWER + bytes([peer]) for peer in (5, 6, 7))]
        assert is_closed(stranger)
        for connection in (*ours, twice, late, *found.values()):
            connection.close()


def test_who_does_not_come_is_named_when_the_time_is_up(server):
    began = time.monotonic()
    with come(server), pytest.raises(NotConnectedError, match="first from device 6 to device 0"):
        accept_peers(server, TOKEN, {(0, 6), (1, 6)}, time.monotonic() + 0.3)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400\r\n"])
def test_who_answers_otherwise_is_not_taken_for_a_device(server, answer):
    def serve():
        connection, _ = server.accept()
        connection.sendall(answer)
        connection.close()

    address = peers.Address(*server.getsockname(), "")
    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(NotConnectedError, match=r"device 5 to device 0 at 127\.0\.0\.1"):
        peers._call(address, TOKEN, (5, 0), time.monotonic() + 5)


def test_who_accepts_and_says_nothing_is_given_up(server):
    address = peers.Address(*server.getsockname(), "")
    with pytest.raises(NotConnectedError, match="timed out"):
        peers._call(address, TOKEN, (5, 0), time.monotonic() + 0.3)


PROGRAM = """
import sys
from moejax.runtime.start import join
processes = join()
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from moejax.comm.cpu import exchange
from moejax.comm.cpu import gloo
from moejax.runtime import program_cache
if sys.argv[1:] == ["broken"]:
    def compile_library(source, library):
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_bytes(b"no library")
    program_cache.compile_library = compile_library
mesh = jax.make_mesh((2,), ("d",))
beside = gloo.computes_beside(mesh)
total = gloo.shard_map(lambda x: jax.lax.psum(x, "d"), mesh, P("d"), P())
x = jax.device_put(np.ones((2, 2**17), np.float32), jax.NamedSharding(mesh, P("d")))
print("beside" if beside else "gloo", float(jax.jit(total)(x).sum()))
"""


def run_two(tmp_path, *broken, inside=(), host="127.0.0.1"):
    """Runs two processes; returns what each says on stdout and stderr.

    Args:
      inside: a command that runs them.
      host: address of the coordinator.
    """
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else 2) as free:
        port = free.getsockname()[1]
    coordinator = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    environment = {**os.environ, "MOEJAX_COORDINATOR": coordinator, "MOEJAX_PROCESSES": "2"}
    environment |= {"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    started = []
    for index in range(2):
        own = {"MOEJAX_PROCESS": str(index)}
        if index in broken:
            own["XDG_CACHE_HOME"] = str(tmp_path)
        started.append(
            subprocess.Popen(
                [*inside, sys.executable, "-c", PROGRAM, *(["broken"] if index in broken else [])],
                env=environment | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        return [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_all_that_listens_takes_ipv6(tmp_path):
    """JAX's coordination service, and our exchange."""
    found = run_two(tmp_path, host="::1")
    assert [said.splitlines()[-1:] for said, _ in found] == [["beside 262144.0"]] * 2, found


@pytest.mark.slow
def test_a_library_that_does_not_load_is_told_everywhere_and_all_go_on(tmp_path):
    (first, told), (second, told_too) = run_two(tmp_path, 1)
    assert [said.splitlines()[-1:] for said in (first, second)] == [["gloo 262144.0"]] * 2, told
    text = "the library cannot be loaded: "
    assert f"Collectives do not run beside compute: process 1: {text}" in told
    assert f"Collectives do not run beside compute: {text}" in told_too
    assert "Traceback" not in told + told_too


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_a_host_name_without_an_address_is_not_needed(tmp_path):
    """Neither by the exchange nor by gloo."""
    name = 'echo without-address > /proc/sys/kernel/hostname; exec "$@"'
    answers = run_two(tmp_path, inside=("unshare", "--uts", "sh", "-c", name, "sh"))
    for said, told in answers:
        assert said.splitlines()[-1:] == ["beside 262144.0"], told
