"""Exchanges between devices of several CPU processes, which overlap with computation.

XLA's CPU runtime calls gloo from the thread that runs the program: nothing computes until the bytes
have arrived. `exchange.cc` sends and receives in a thread of each device: one call begins an
exchange, another waits for it. The file is compiled when it is first needed and kept in the user's
cache; `comm.cpu.peers` connects the devices, and `comm.cpu.gloo` puts exchanges in place of large
collectives.
"""

import contextlib
import ctypes
import functools
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from moejax.comm.cpu.peers import NotConnectedError, connect_all
from moejax.runtime import program_cache

SOURCE = Path(__file__).with_name("exchange.cc")
CALLS = (
    "moejax_exchange_start",
    "moejax_exchange_start_pairs",
    "moejax_exchange_start_ring",
    "moejax_exchange_done",
    "moejax_hold",
)
Result = tuple[jax.Array, jax.Array]  # of an exchange, and its number
SUMS = (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32)  # dtypes that exchange.cc adds


class PendingExchange(NamedTuple):
    """A started exchange: the array that it receives, the one that it sends, and its number."""

    y: jax.Array
    x: jax.Array
    number: jax.Array

    def end(self) -> jax.Array:
        """Waits. Every started exchange must be waited for, even if its result is unused."""
        done = jax.ffi.ffi_call(
            "moejax_exchange_done",
            jax.ShapeDtypeStruct(self.y.shape, self.y.dtype),
            has_side_effect=True,
            input_output_aliases={0: 0},
        )
        return done(self.y, self.x, self.number)


class Exchange(NamedTuple):
    """The connected devices of a mesh, and collectives made of exchanges.

    Gathers and sums among several devices of several processes go along a ring, as NCCL's do: each
    part crosses the link between two hosts once. Other collectives send parts directly to their
    device.

    Attributes:
      device_ids: ids of the devices, in mesh order.
      processes: process of each device, in mesh order.
      axis_names, axis_sizes: names and sizes of the mesh axes.
    """

    device_ids: tuple[int, ...]
    processes: tuple[int, ...]
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    carries = ("all_to_all", "all_gather", "reduce_scatter", "psum", "psum_invariant", "ppermute")

    def run(self, name: str, x: jax.Array, after: jax.Array, **params: Any) -> Result:
        """Returns the collective's result and its number.

        Args:
          name: one of `carries`, but a ppermute: that is `start_transfer`, and a gather that makes
            a dimension is `start_gather`.
          after: the number of the exchange before, or any scalar that this one waits for. It
            begins when that one has begun.
          params: of JAX's primitive.
        """
        axes = params.get("axis_name", params.get("axes", ()))
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        size = lax.axis_size(axes)
        if not params.get("tiled", True):
            raise ValueError(f"{name} that makes or drops a dimension is not carried")
        if name == "all_to_all":
            if not params["split_axis"] == params["concat_axis"] == 0:
                raise ValueError(f"{name} of another dimension than the first is not carried")
            return self._send(x, axes, after, gather=False)
        if name == "all_gather":
            x_P, number = self._gather(x, axes, after)
            return jnp.concatenate(list(x_P), params["all_gather_dimension"]), number
        if name == "reduce_scatter":
            x_P = jnp.stack(jnp.split(x, size, axis=params["scatter_dimension"]))
            return self._sum(x_P, axes, after)
        x_P = jnp.pad(x.reshape(-1), (0, -x.size % size)).reshape(size, -1)
        total, number = self._sum(x_P, axes, after)
        x_P, number = self._gather(total, axes, number)
        return x_P.reshape(-1)[: x.size].reshape(x.shape), number

    def _gather(self, x: jax.Array, axes: Sequence[str], after: jax.Array) -> Result:
        """Returns the devices' x, stacked: [P, ...]."""
        move = self._along_rings if self._in_rings(axes) else self._send
        return move(x, axes, after, gather=True)

    def _sum(self, x_P: jax.Array, axes: Sequence[str], after: jax.Array) -> Result:
        """Returns this device's part of the sum of all devices' x, [...].

        Along a ring the sum is rounded at each device, else once, in the order of the devices.
        """
        if self._in_rings(axes) and x_P.dtype in SUMS:
            y_P, number = self._along_rings(x_P, axes, after, gather=False)
            return lax.dynamic_index_in_dim(y_P, lax.axis_index(axes), keepdims=False), number
        x_P, number = self._send(x_P, axes, after, gather=False)
        return jnp.sum(x_P, axis=0, dtype=x_P.dtype), number

    def _send(self, x: jax.Array, axes: Sequence[str], after: jax.Array, *, gather: bool) -> Result:
        """Sends x to all devices, or else part p of its first dimension to device p."""
        started = self._start_send(x, axes, after, gather=gather)
        return started.end(), started.number

    def _start_send(
        self, x: jax.Array, axes: Sequence[str], after: jax.Array, *, gather: bool
    ) -> PendingExchange:
        groups = self._grouped(self.device_ids, axes)
        members, size = groups.reshape(-1).astype(np.int64), np.int64(groups.shape[1])
        shape = (lax.axis_size(axes), *x.shape) if gather else x.shape
        return _start(
            "moejax_exchange_start", x, after, shape, groups=members, size=size, gather=gather
        )

    def _in_rings(self, axes: Sequence[str]) -> bool:
        """Returns whether groups along the axes span processes, and some share a process."""
        members = self._grouped(self.processes, axes)[0]
        return 1 < len(set(members)) < len(members)

    def _along_rings(
        self, x: jax.Array, axes: Sequence[str], after: jax.Array, *, gather: bool
    ) -> Result:
        """Gathers x, or sums it: each device's own part of the result is right."""
        groups = self._grouped(self.device_ids, axes)
        # A process's devices are neighbours, and the ring enters and leaves it once.
        places = np.argsort(self._grouped(self.processes, axes), axis=1, kind="stable")
        started = _start(
            "moejax_exchange_start_ring",
            x,
            after,
            (lax.axis_size(axes), *x.shape) if gather else x.shape,
            rings=np.take_along_axis(groups, places, axis=1).reshape(-1).astype(np.int64),
            places=places.reshape(-1).astype(np.int64),
            size=np.int64(groups.shape[1]),
            sum=not gather,
        )
        return started.end(), started.number

    def start_transfer(
        self,
        x: jax.Array,
        after: jax.Array,
        *,
        axis_name: Any,
        perm: Sequence[tuple[int, int]],
        **_: Any,
    ) -> PendingExchange:
        """Starts a ppermute. Arguments as of `run`."""
        axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        pairs = self._grouped(self.device_ids, axes)[:, np.array(perm, int).reshape(-1, 2)]
        members = pairs.reshape(-1).astype(np.int64)
        return _start("moejax_exchange_start_pairs", x, after, x.shape, pairs=members)

    def start_gather(
        self, x: jax.Array, after: jax.Array, *, axis_name: Any, all_gather_dimension: int, **_: Any
    ) -> PendingExchange:
        """Starts an all-gather that makes its first dimension. Arguments as of `run`."""
        if all_gather_dimension:
            raise ValueError("a gather along another new dimension than the first is not carried")
        axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        return self._start_send(x, axes, after, gather=True)

    def _grouped(self, numbers: Sequence[int], axes: Sequence[str]) -> np.ndarray:
        """Returns the devices' numbers, [groups, members], grouped along the axes.

        Members are in the order of parts.
        """
        found = np.array(numbers).reshape(self.axis_sizes)
        places = [self.axis_names.index(axis) for axis in axes]
        found = np.moveaxis(found, places, range(-len(axes), 0))
        return found.reshape(-1, lax.axis_size(axes))


def _start(
    call: str, x: jax.Array, after: jax.Array, shape: tuple[int, ...], **attributes: Any
) -> PendingExchange:
    results = (jax.ShapeDtypeStruct(shape, x.dtype), jax.ShapeDtypeStruct((), jnp.uint32))
    start = jax.ffi.ffi_call(call, results, has_side_effect=True)
    y, number = start(x, after, **attributes)
    return PendingExchange(y, x, number)


def hold(x: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """Returns x, and keeps the memory of the other arrays from being used again before this point.

    XLA gives the memory of a sent array to whatever the program makes next, which then waits until
    the array has left.
    """
    call = jax.ffi.ffi_call(
        "moejax_hold",
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        has_side_effect=True,  # else XLA would drop it if nothing uses x
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
    processes = tuple(int(device.process_index) for device in mesh.devices.flat)
    return Exchange(ids, processes, tuple(mesh.axis_names), tuple(mesh.devices.shape))


@functools.cache
def _connect() -> bool:
    """Connects each device of this process to each other device, and registers the calls.

    Returns False, and says why, if any process failed: then gloo serves all processes.
    """
    try:
        connect_all(_begin_devices, _hand_over)
    except NotConnectedError as error:
        print(
            f"Collectives do not run beside compute: {error}. gloo carries them.", file=sys.stderr
        )
        with contextlib.suppress(NotConnectedError):
            _library().moejax_disconnect()
        return False
    _register()
    return True


def _begin_devices() -> None:
    library = _library()
    for device in jax.local_devices():
        _check(library.moejax_device(ctypes.c_int64(device.id)))


def _hand_over(own: int, peer: int, connection: socket.socket) -> None:
    """Gives a connection to the device that owns it."""
    connection.setblocking(False)
    numbers = ctypes.c_int64(own), ctypes.c_int64(peer), ctypes.c_int(connection.fileno())
    _check(_library().moejax_connect(*numbers))
    connection.detach()


def _check(wrong: bytes | None) -> None:
    if wrong is not None:
        raise NotConnectedError(wrong.decode())


@functools.cache
def _register() -> None:
    library = _library()
    for name in CALLS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")


def disconnect() -> None:
    """Ends the connections, because this process leaves its program. Nothing is under way then."""
    if _connect.cache_info().currsize and _connect():
        _library().moejax_disconnect()
    _connect.cache_clear()


@functools.cache
def _library() -> Any:
    library = load_library()
    for tells in (library.moejax_device, library.moejax_connect):
        tells.restype = ctypes.c_char_p  # the error
    library.moejax_sent.restype = ctypes.c_uint64
    return library


def load_library() -> Any:
    """Loads the library of `exchange.cc`.

    Raises:
      NotConnectedError: if it cannot be compiled or loaded.
    """
    try:
        return program_cache.load_library(SOURCE, CALLS)
    except program_cache.LibraryError as error:
        raise NotConnectedError(str(error)) from error
