"""Measures a device's rates while all others are as busy: products, memory, copies to its host."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.comm.host import MEMORY_KIND, on_host
from moejax.plan.cluster.device import Device
from moejax.plan.cluster.topology import Host
from moejax.plan.probe.timer import AXES, ROUNDS, ProgressFn, Stopwatch, meet

# CPUs are slow and have small caches; other devices need large sizes to be filled.
PRODUCTS = {"cpu": (64, 128, 256, 512), "gpu": (256, 512, 1024, 2048, 4096, 8192)}
PRODUCTS["tpu"] = PRODUCTS["gpu"]
DTYPES = ("float32", "bfloat16")
ROWS = 512  # floats of a gathered row
VALUES, COLUMNS = 2**19, 256  # of exponentials and sums
# An H200 has 60 MB of cache.
MEMORY = {"cpu": 2**25, "gpu": 2**30, "tpu": 2**28}  # bytes of a copy, larger than any cache
CACHED = {"cpu": (2**21, 2**22, 2**23, 2**24)}  # of arrays that a cache may hold
# Bytes of a copy: more than any cache, and so many that a call costs little beside them.
HOST_COPIES = {"cpu": 2**25, "gpu": 2**28, "tpu": 2**28}
SMALL = 16  # dependent small operations


def probe_device(
    watch: Stopwatch,
    *,
    name: str,
    platform: str,
    memory_bytes: int,
    quick: bool,
    progress: ProgressFn,
) -> Device:
    """Returns the rates of a device; of fewer sizes and dtypes if `quick`."""
    dtypes = DTYPES[:1] if quick else DTYPES
    sizes = PRODUCTS[platform][1::2] if quick else PRODUCTS[platform]
    products = {}
    for dtype in dtypes:
        progress(f"matrix products, {dtype}")
        products[dtype] = tuple(_product(watch, size, dtype) for size in sizes)
    progress("memory")
    copy_bytes = MEMORY[platform]
    cached = () if quick else CACHED.get(platform, ())
    copies = tuple((2.0 * size, _copy_rate(watch, size)) for size in cached)
    computed = {}
    if cached:
        progress("exponentials and sums")
        computed["exponentials_per_s"] = _values_rate(watch, lambda x: jnp.exp(-x))
        computed["reductions_per_s"] = _values_rate(
            watch, lambda x: x - 1e-3 * jnp.sum(x * x, axis=-1, keepdims=True)
        )
    gathering = _gather_seconds(watch, copy_bytes)
    progress("small operations")
    startup_s = _small_seconds(watch)
    return Device(
        name=name,
        platform=platform,
        memory_bytes=memory_bytes,
        products=products,
        copy_bytes_per_s=_copy_rate(watch, copy_bytes),
        gather_bytes_per_s=2 * copy_bytes / gathering,
        startup_s=startup_s,
        copies=copies,
        **computed,
    )


def _product(watch: Stopwatch, size: int, dtype: str) -> tuple[float, float]:
    def start() -> Any:
        # Not a constant, whose product takes a GPU less power and so less time.
        x = jnp.sin(jnp.arange(size * size, dtype=jnp.float32)).reshape(size, size).astype(dtype)
        return x, x / size

    flops = 2.0 * size**3
    return flops, flops / watch.seconds(lambda both: both[0] @ both[1], start)


def _copy_rate(watch: Stopwatch, size: int) -> float:
    """Returns the bytes a second that an elementwise operation on an array reads and writes."""
    seconds = watch.seconds(lambda x: x * 1.0001 + 0.1, lambda: jnp.zeros(size // 4))
    return 2 * size / seconds


def _values_rate(watch: Stopwatch, operate: Callable[[jax.Array], jax.Array]) -> float:
    """Returns the values a second of an operation on rows, an array that a cache holds."""
    return VALUES / watch.seconds(operate, lambda: jnp.full((VALUES // COLUMNS, COLUMNS), 0.1))


def _gather_seconds(watch: Stopwatch, size: int) -> float:
    """Returns the seconds of a gather of rows in another order."""
    count = size // (4 * ROWS)
    order = np.random.default_rng(0).permutation(count)

    def start() -> Any:
        return jnp.zeros((count, ROWS)), jnp.asarray(order, jnp.int32)

    return watch.seconds(lambda both: jnp.take(both[0], both[1], axis=0, mode="clip"), start)


def _small_seconds(watch: Stopwatch) -> float:
    """Returns the seconds of one of `SMALL` dependent operations; sums, which XLA does not fuse."""

    def operate(x: jax.Array) -> jax.Array:
        for _ in range(SMALL):
            x = x + jnp.sum(x) * 1e-9
        return x

    return watch.seconds(operate, lambda: jnp.ones(256)) / SMALL


def probe_host(
    watch: Stopwatch, platform: str, memory_bytes: int, progress: ProgressFn
) -> Host | None:
    """Returns the rates of copies each way; None where devices cannot reach the host's memory.

    Args:
      memory_bytes: of the host's memory, for the devices of a node together.
    """
    kinds = {memory.kind for memory in watch.mesh.local_devices[0].addressable_memories()}
    if MEMORY_KIND not in kinds:
        return None
    progress("copies between host and device")
    device = NamedSharding(watch.mesh, P(AXES))
    host, size = on_host(device), HOST_COPIES[platform]
    shape = (watch.mesh.devices.size, size // 4)
    space = jax.memory.Space
    away = jax.jit(lambda x: jax.device_put(x, space.Host), out_shardings=host)
    back = jax.jit(lambda x: jax.device_put(x, space.Device), out_shardings=device)
    x = jax.jit(lambda: jnp.ones(shape), out_shardings=device)()
    leaving, coming = _host_seconds(watch, away, x), _host_seconds(watch, back, away(x))
    return Host(size / coming, size / leaving, memory_bytes)


def _host_seconds(watch: Stopwatch, copy: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Returns the seconds of a copy in the fastest run, on the slowest device."""
    processes = watch.processes
    processes.compile(copy, x)
    seconds = []
    for _ in range(ROUNDS):
        meet(processes)
        began = time.perf_counter()
        jax.block_until_ready(copy(x))
        seconds.append(max(processes.gather(time.perf_counter() - began)))
    return min(seconds)
