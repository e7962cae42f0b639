"""An exchange between devices of several CPU processes, beside which a program goes on computing.

XLA's CPU runtime calls gloo from the thread that runs the program: nothing computes until the bytes
have arrived. `exchange.cc` sends and receives in a thread of each device: one call begins an
exchange, another waits for it. It is compiled when it is first needed and kept in the user's cache;
`comm.gloo` puts it in place of large collectives.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import distributed
from jax.sharding import Mesh

SOURCE = Path(__file__).with_name("exchange.cc")
WAIT_MILLISECONDS = 600_000  # how long a process may take to reach its first program
CALLS = (
    "moejax_exchange_start",
    "moejax_exchange_start_pairs",
    "moejax_exchange_done",
    "moejax_hold",
)
NO_LIBRARY = "none"  # in place of an address
PAIR = struct.Struct("!qq")  # the device that connects, and the one that it connects to


class Begun(NamedTuple):
    """An exchange that has begun: what it receives, what it sends, its number."""

    y: jax.Array
    x: jax.Array
    number: jax.Array

    def end(self) -> jax.Array:
        """Waits for it where the result is used. What has begun must end, whatever is needed."""
        done = jax.ffi.ffi_call(
            "moejax_exchange_done",
            jax.ShapeDtypeStruct(self.y.shape, self.y.dtype),
            has_side_effect=True,
            input_output_aliases={0: 0},
        )
        return done(self.y, self.x, self.number)


class Exchange(NamedTuple):
    """The connected devices of a mesh, and the collectives that are made of exchanges.

    Attributes:
      device_ids: of the devices, in mesh order.
      axis_names, axis_sizes: of the mesh.
    """

    device_ids: tuple[int, ...]
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    carries = ("all_to_all", "all_gather", "reduce_scatter", "psum", "psum_invariant", "ppermute")

    def run(
        self, name: str, x: jax.Array, after: jax.Array, **params: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the collective's result, sums in the order of the devices, and its number.

        Args:
          name: one of `carries`, but a ppermute: that is `begin_transfer`.
          after: the number of the exchange before, or any scalar that this one waits for. It
            begins when that one has begun.
          params: of JAX's primitive.
        """
        axes = params.get("axis_name", params.get("axes", ()))
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        size = lax.axis_size(axes)
        if name == "all_to_all":
            assert params["tiled"]
            assert params["split_axis"] == params["concat_axis"] == 0
            return self._swap(x, axes, after)
        if name == "all_gather":
            assert params["tiled"]
            x_P, number = self._gather(x, axes, after)
            return jnp.concatenate(list(x_P), params["all_gather_dimension"]), number
        if name == "reduce_scatter":
            assert params["tiled"]
            x_P = jnp.stack(jnp.split(x, size, axis=params["scatter_dimension"]))
            x_P, number = self._swap(x_P, axes, after)
            return jnp.sum(x_P, axis=0, dtype=x.dtype), number
        x_P = jnp.pad(x.reshape(-1), (0, -x.size % size)).reshape(size, -1)
        x_P, number = self._swap(x_P, axes, after)
        x_P, number = self._gather(jnp.sum(x_P, axis=0, dtype=x.dtype), axes, number)
        return x_P.reshape(-1)[: x.size].reshape(x.shape), number

    def _swap(
        self, x_P: jax.Array, axes: Sequence[str], after: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Sends part p of the first dimension to device p; part p of the result came from it."""
        return self._call(x_P, axes, after, x_P.shape, gather=False)

    def _gather(
        self, x: jax.Array, axes: Sequence[str], after: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the devices' x, stacked: [P, ...]."""
        return self._call(x, axes, after, (lax.axis_size(axes), *x.shape), gather=True)

    def _call(
        self,
        x: jax.Array,
        axes: Sequence[str],
        after: jax.Array,
        shape: tuple[int, ...],
        *,
        gather: bool,
    ) -> tuple[jax.Array, jax.Array]:
        groups = self._groups(axes)
        members, size = groups.reshape(-1).astype(np.int64), np.int64(groups.shape[1])
        begun = _begin(
            "moejax_exchange_start", x, after, shape, groups=members, size=size, gather=gather
        )
        return begun.end(), begun.number

    def begin_transfer(
        self,
        x: jax.Array,
        after: jax.Array,
        *,
        axis_name: Any,
        perm: Sequence[tuple[int, int]],
        **_: Any,
    ) -> Begun:
        """Begins a ppermute. Arguments as of `run`."""
        axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        pairs = self._groups(axes)[:, np.array(perm, int).reshape(-1, 2)]
        members = pairs.reshape(-1).astype(np.int64)
        return _begin("moejax_exchange_start_pairs", x, after, x.shape, pairs=members)

    def _groups(self, axes: Sequence[str]) -> np.ndarray:
        """The devices [groups, members] that communicate along the axes, in the order of parts."""
        ids = np.array(self.device_ids).reshape(self.axis_sizes)
        ids = np.moveaxis(ids, [self.axis_names.index(axis) for axis in axes], range(-len(axes), 0))
        return ids.reshape(-1, lax.axis_size(axes))


def _begin(
    call: str, x: jax.Array, after: jax.Array, shape: tuple[int, ...], **attributes: Any
) -> Begun:
    results = (jax.ShapeDtypeStruct(shape, x.dtype), jax.ShapeDtypeStruct((), jnp.uint32))
    start = jax.ffi.ffi_call(call, results, has_side_effect=True)
    y, number = start(x, after, **attributes)
    return Begun(y, x, number)


def hold(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Returns x, and keeps the memory of the other arrays from being used again before this point.

    XLA gives the memory of a sent array to whatever the program makes next, which then waits until
    the array has left.
    """
    call = jax.ffi.ffi_call(
        "moejax_hold",
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        has_side_effect=True,  # else it would go where nothing uses x
        input_output_aliases={0: 0},
    )
    return call(x, *others)


def connected(mesh: Mesh) -> Exchange | None:
    """Returns the exchange of a mesh; None if it cannot be compiled here.

    The first call connects all devices of the program, so every process makes it.
    """
    if not _connect():
        return None
    ids = tuple(int(device.id) for device in mesh.devices.flat)
    return Exchange(ids, tuple(mesh.axis_names), tuple(mesh.devices.shape))


@functools.cache
def _connect() -> bool:
    """Connects each device of this process to each other device, and registers the calls.

    Returns False, and says so, if any process has no library: all processes then go without.
    """
    library = _load()
    host = socket.gethostbyname(socket.gethostname())
    with socket.create_server((host, 0), backlog=1024) as server:
        address = f"{host}:{server.getsockname()[1]}" if library else NO_LIBRARY
        addresses = _addresses(address)
        if NO_LIBRARY in addresses:
            if library:  # else `_load` has said why
                who = addresses.index(NO_LIBRARY)
                _say(f"process {who} has no library for it")
            return False
        _connect_devices(library, server, addresses)
    _register()
    return True


@functools.cache
def _register() -> None:
    """Tells XLA of the calls, once in a process."""
    library = _load()
    for name in CALLS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")


def disconnect() -> None:
    """Ends the connections, because this process leaves its program. Nothing is under way then."""
    if _connect.cache_info().currsize and _connect():
        _load().moejax_disconnect()
    _connect.cache_clear()


def _addresses(own: str) -> list[str]:
    """Where each process listens."""
    client = distributed.global_state.client
    if client is None:
        return [own]
    key = "moejax/exchange/{}"
    client.key_value_set(key.format(jax.process_index()), own)
    processes = range(jax.process_count())
    return [client.blocking_key_value_get(key.format(n), WAIT_MILLISECONDS) for n in processes]


def _connect_devices(library: Any, server: socket.socket, addresses: list[str]) -> None:
    """The device with the higher id connects to the other, and says who it is."""
    here = [device.id for device in jax.local_devices()]

    def hand_over(own: int, peer: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        numbers = ctypes.c_int64(own), ctypes.c_int64(peer)
        library.moejax_connect(*numbers, ctypes.c_int(connection.detach()))

    for own in here:
        library.moejax_device(ctypes.c_int64(own))
    for device in jax.devices():
        host, port = addresses[device.process_index].rsplit(":", 1)
        for own in here:
            if own > device.id:
                connection = socket.create_connection((host, int(port)))
                connection.sendall(PAIR.pack(own, device.id))
                hand_over(own, device.id, connection)
    for _ in range(sum(device.id > own for own in here for device in jax.devices())):
        connection, _ = server.accept()
        peer, own = PAIR.unpack(connection.recv(PAIR.size, socket.MSG_WAITALL))
        hand_over(own, peer, connection)


def _load() -> Any:
    """Compiles the library unless the cache has it; None, with a line, if it cannot."""
    digest = hashlib.sha256(SOURCE.read_bytes() + jax.__version__.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moejax"
    library = cache / f"exchange-{digest}.so"
    if not library.exists() and (reason := compile_library(SOURCE, library)) is not None:
        _say(reason)
        return None
    return ctypes.CDLL(str(library))


def _say(reason: str) -> None:
    print(f"Collectives do not run beside compute: {reason}. gloo carries them.", file=sys.stderr)


def compile_library(source: Path, library: Path) -> str | None:
    """Makes a library of foreign functions; returns the reason why it could not."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "there is no C++ compiler (g++)"
    command = [compiler, "-O2", "-w", "-shared", "-fPIC", "-std=c++17", "-pthread"]
    command += [f"-I{jax.ffi.include_dir()}", str(source), "-o"]
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            subprocess.run(
                [*command, str(built)],
                check=True,
                capture_output=True,
                text=True,
                errors="replace",  # of a compiler whose language is not ours
            )
            built.replace(library)
    except subprocess.CalledProcessError as error:
        return f"g++ failed: {error.stderr.strip().splitlines()[0]}"
    except OSError as error:
        return f"{error.filename or library.parent}: {error.strerror}"
    return None
