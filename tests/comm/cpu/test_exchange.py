"""Exchanges between devices: the same results as JAX's collectives, and what goes wrong is told."""

import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.comm.cpu import exchange, peers
from moejax.comm.cpu.gloo import in_order
from moejax.comm.cpu.peers import NotConnectedError
from moejax.runtime import program_cache

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"))
COLLECTIVES = {
    "all_to_all": lambda x, axes: lax.all_to_all(x, axes, 0, 0, tiled=True),
    "all_gather": lambda x, axes: lax.all_gather(x, axes, axis=1, tiled=True),
    "reduce_scatter": lambda x, axes: lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True),
    "all_reduce": lambda x, axes: lax.psum(x[:, :3], axes),
    "gather_beside": lambda x, axes: lax.all_gather(x, axes, axis=0, tiled=False)[-1],
    "ppermute": lambda x, axes: along_a_chain(x, tuple(sorted(axes))),
}


def along_a_chain(x, axes):
    """JAX permutes in the order of the mesh alone. One device sends nothing, one receives zeros."""
    return lax.ppermute(x, axes, [(i, i + 1) for i in range(lax.axis_size(axes) - 1)])


@pytest.fixture
def everything_exchanged(monkeypatch):
    """Small arrays too."""
    monkeypatch.setattr("moejax.comm.cpu.gloo.LARGE", 0)


def run(body):
    spec = P(("a", "b", "c"))
    return jax.jit(jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False))


def exchanged(body, mesh=MESH, processes=None):
    """With the exchange of a mesh; as if its devices were of these processes."""
    connected = exchange.connected(mesh)
    return run(in_order(body, connected._replace(processes=processes or connected.processes)))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8])
@pytest.mark.parametrize("axes", ["a", ("b",), "c", ("c", "a"), ("a", "b", "c")])
def test_collectives_give_what_those_of_jax_give(everything_exchanged, axes, dtype):
    """Whole numbers, which add up to the same in any order; all collectives in one program."""
    x = np.random.default_rng(0).integers(-9, 9, (64, 8, 3)).astype(dtype)

    def every(x):
        return {name: collective(x, axes) for name, collective in COLLECTIVES.items()}

    wanted = run(every)(x)
    ours = exchanged(every).lower(x).compile()
    for name, y in ours(x).items():
        np.testing.assert_array_equal(np.asarray(y), np.asarray(wanted[name]), err_msg=name)
    text = ours.as_text()
    assert "moejax_exchange_start" in text
    assert not re.search(
        r" (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)\(", text
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.int8])
@pytest.mark.parametrize(
    ("processes", "axes"),
    [((0, 0, 0, 0, 1, 1, 1, 1), ("c", "a")), ((2, 0, 1, 0, 2, 1, 0, 2), ("a", "b", "c"))],
)
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
def test_along_rings_too(everything_exchanged, name, axes, processes, dtype):
    """Parts of odd numbers of bytes, larger than what a socket gives at once."""
    x = np.random.default_rng(0).integers(-9, 9, (64, 8, 4099)).astype(dtype)
    wanted = run(lambda x: COLLECTIVES[name](x, axes))(x)
    ours = exchanged(lambda x: COLLECTIVES[name](x, axes), processes=processes)
    np.testing.assert_array_equal(np.asarray(ours(x)), np.asarray(wanted))
    in_rings = name != "reduce_scatter" or dtype != np.int8  # which rings do not add up
    assert ("moejax_exchange_start_ring" in ours.lower(x).as_text()) == in_rings


def test_a_sum_between_two_numbers_of_bfloat16_is_the_even_one(everything_exchanged):
    """Above 256 they are 2 apart, so 257 is as far from 256 as from 258, of which half is odd."""
    x = np.zeros((8, 8, 8, 3), np.float32)  # device, then its rows
    x[[0, 1]] = [[[[256]]], [[[1]]]]  # of the first ring: devices 0, 1, 4, 5
    x[[2, 3]] = [[[[-258]]], [[[-1]]]]
    x = x.reshape(64, 8, 3).astype(jnp.bfloat16)
    ours = exchanged(
        lambda x: COLLECTIVES["all_reduce"](x, ("c", "a")), processes=(0, 0, 0, 0, 1, 1, 1, 1)
    )
    assert "moejax_exchange_start_ring" in ours.lower(x).as_text()
    sums = np.asarray(ours(x), np.float32).reshape(8, -1)
    np.testing.assert_array_equal(sums[[0, 1, 4, 5]], 256)
    np.testing.assert_array_equal(sums[[2, 3, 6, 7]], -260)


def test_devices_are_found_in_the_order_of_the_mesh(everything_exchanged):
    """A mesh may list devices in any order."""
    mesh = Mesh(np.array(jax.devices()[:8])[::-1].reshape(2, 2, 2), ("a", "b", "c"))
    x = np.arange(64.0).reshape(64, 1)

    def body(x):
        return lax.all_to_all(x, ("a", "c"), 0, 0, tiled=True)

    def on(mesh, body):
        spec = P(("a", "b", "c"))
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return np.asarray(jax.jit(mapped)(x))

    ours = on(mesh, in_order(body, exchange.connected(mesh)))
    np.testing.assert_array_equal(ours, on(mesh, body))


def test_messages_far_larger_than_a_sockets_buffer_arrive():
    """Both ways at once: neither side waits for the other to read first."""
    x = np.random.default_rng(0).standard_normal((8 * 8, 2**18), np.float32)
    ours = exchanged(lambda x: COLLECTIVES["all_to_all"](x, ("a", "b", "c")))
    wanted = x.reshape(8, 8, -1).swapaxes(0, 1).reshape(x.shape)
    np.testing.assert_array_equal(np.asarray(ours(x)), wanted)


@pytest.mark.parametrize("said", [b"", struct.pack("!qq", 3, 99), struct.pack("!qq", 7, 0)])
def test_strangers_at_the_port_change_nothing(monkeypatch, everything_exchanged, said):
    """While devices connect: one who says nothing, a device that is not here, or one that is."""
    share, strangers = peers._share, []

    def shared(name, value):
        if name == "addresses":
            for _ in range(3):
                strangers.append(socket.create_connection(value[0][:2]))
                strangers[-1].sendall(said)
        return share(name, value)

    monkeypatch.setattr(peers, "_share", shared)
    exchange.disconnect()
    x = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    ours = exchanged(lambda x: COLLECTIVES["all_to_all"](x, ("a", "b", "c")))
    wanted = x.reshape(8, 8, -1).swapaxes(0, 1).reshape(x.shape)
    np.testing.assert_array_equal(np.asarray(ours(x)), wanted)
    assert len(strangers) == 3
    for stranger in strangers:
        stranger.close()


def test_what_the_library_refuses_is_text_and_no_crash():
    exchange.connected(MESH)
    library = exchange._library()
    assert library.moejax_connect(99, 0, 0) == b"the device is not of this process"
    assert library.moejax_connect(0, 1, 0) == b"device 1 is connected already"
    assert library.moejax_device(0) == b"the device has begun already"
    assert b"Bad file descriptor" in library.moejax_connect(0, 98, 10**6)


LOST = """
import resource, socket, struct, threading, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from moejax.comm.cpu import exchange

library = exchange._library()
exchange._register()

def begin(x, wait_s):
    groups, size = np.array([0, 1]), np.int64(2)
    call, after = "moejax_exchange_start", jnp.uint32(0)
    started = exchange._start(call, x, after, x.shape, groups=groups, size=size, gather=False)
    late = jax.pure_callback(lambda n: time.sleep(wait_s) or n, started.number, started.number)
    return started._replace(number=late).end()

# Gone, a message of another size, another message; before the program waits for it, and after.
for said in (b"", struct.pack("=QQ", 0, 99), struct.pack("=QQ", 7, 16)):
    for ends_s, wait_s in ((0.0, 0.3), (0.3, 0.0)):
        mine, other = socket.socketpair()
        assert library.moejax_device(0) is None
        assert library.moejax_connect(0, 1, mine.detach()) is None
        threading.Timer(ends_s, lambda: (other.sendall(said), other.close())).start()
        try:
            print("arrived", jax.jit(begin, static_argnums=1)(jnp.ones((2, 4)), wait_s))
        except jax.errors.JaxRuntimeError as error:
            print(str(error).splitlines()[0])
        library.moejax_disconnect()

def refused(limit, number):
    # What the library says when the system gives no more of something.
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (number, before[1]))
    told = next(filter(None, map(library.moejax_device, range(100))))
    resource.setrlimit(limit, before)
    library.moejax_disconnect()
    return told.decode()

pages = int(Path("/proc/self/statm").read_text().split()[0])
print("refused:", refused(resource.RLIMIT_NOFILE, 3))
print("refused:", refused(resource.RLIMIT_AS, pages * resource.getpagesize() + 2**27))
"""


def test_a_failure_is_told_before_an_exchange_is_waited_for_and_after():
    command = [sys.executable, "-c", LOST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    gone, size, number = (
        "device 1 has gone: it closed its connection",
        "device 1 sends message 0 of 99 bytes where message 0 of 16 bytes was expected: the "
        "processes do not run the same program",
        "device 1 sends message 7 of 16 bytes where message 0 of 16 bytes was expected: the "
        "processes do not run the same program",
    )
    assert said[:6] == [gone, gone, size, size, number, number], done.stdout + done.stderr
    assert said[6:] == ["eventfd: Too many open files", "Resource temporarily unavailable"]


HALF = """
import socket, struct, threading
import jax, jax.numpy as jnp, numpy as np
from moejax.comm.cpu import exchange

library = exchange._library()
exchange._register()
(mine, left), (own, right) = socket.socketpair(), socket.socketpair()
assert library.moejax_device(0) is None
assert library.moejax_connect(0, 2, mine.detach()) is None
assert library.moejax_connect(0, 1, own.detach()) is None

def begin(x):
    ring, size, after = np.array([0, 1, 2]), np.int64(3), jnp.uint32(0)
    options = {"rings": ring, "places": ring, "size": size, "sum": True}
    return exchange._start("moejax_exchange_start_ring", x, after, x.shape, **options).end()

def neighbours():
    # Device 2 has sent one and a half of two numbers, and then sends the rest.
    part = struct.pack("=ii", 1000, 2000)
    left.sendall(struct.pack("=QQ", 0, 8) + part[:6])
    first = right.recv(16 + 8 + 16 + 4, socket.MSG_WAITALL)
    early = b""
    right.settimeout(0.3)
    try:
        early = right.recv(4)
        print("does not wait")
    except TimeoutError:
        print("waits")
    right.settimeout(None)
    left.sendall(part[6:] + struct.pack("=QQ", 1, 8) + struct.pack("=ii", 7, 8))
    rest = early + right.recv(4 - len(early), socket.MSG_WAITALL)
    print(*struct.unpack("=ii", first[40:] + rest))

thread = threading.Thread(target=neighbours)
thread.start()
y = jax.jit(begin)(jnp.array([[10, 20], [70000, 80000], [1, 2]], jnp.int32))
print(*y[0].tolist())
thread.join()
library.moejax_disconnect()
"""


def test_half_a_number_that_has_come_does_not_go_on_along_a_ring():
    """It would go on before this device's own is added to it. A socket gives any count of bytes."""
    command = [sys.executable, "-c", HALF]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = sorted(done.stdout.splitlines())
    assert said == ["17 28", "71000 82000", "waits"], done.stdout + done.stderr


def test_a_missing_compiler_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(program_cache.shutil, "which", lambda name: None)
    with pytest.raises(NotConnectedError, match=r"^there is no C\+\+ compiler"):
        exchange.load_library()


def test_what_the_compiler_complains_of_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = tmp_path / "exchange.cc"
    broken.write_text("#error no such thing\n")
    monkeypatch.setattr(exchange, "SOURCE", broken)
    with pytest.raises(NotConnectedError, match=r"^g\+\+ failed: .*no such thing"):
        exchange.load_library()
    assert not list((tmp_path / "cache" / "moejax").iterdir())


def test_a_compiler_that_dies_without_a_word_is_told_too(monkeypatch, tmp_path):
    monkeypatch.setattr(program_cache.shutil, "which", lambda name: "/bin/false")
    error = program_cache.compile_library(exchange.SOURCE, tmp_path / "library.so")
    assert error == "g++ failed: it ended with 1"


@pytest.mark.parametrize("damaged", [b"", b"no library"])
def test_a_cached_library_that_does_not_load_is_compiled_anew(monkeypatch, tmp_path, damaged):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = []

    def compile_library(source, library):
        compiled.append(library)
        library.parent.mkdir(exist_ok=True)
        whole = exchange._library()._name
        library.write_bytes(damaged if len(compiled) == 1 else Path(whole).read_bytes())

    monkeypatch.setattr(program_cache, "compile_library", compile_library)
    with pytest.raises(NotConnectedError, match="the library cannot be loaded"):
        exchange.load_library()
    assert exchange.load_library()._name == str(compiled[1])
    assert exchange.load_library()._name == str(compiled[0])
    assert len(compiled) == 2
