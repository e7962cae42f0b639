"""Measures copies between the memories of devices and of their hosts, on all devices at once."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.comm.host import MEMORY_KIND, on_host
from moejax.plan.cluster.topology import Host
from moejax.plan.probe.timer import AXES, ROUNDS, ProgressFn, Stopwatch, meet

# Bytes of a copy: more than any cache, and so many that a call costs little beside them.
SIZES = {"cpu": 2**25, "gpu": 2**28, "tpu": 2**28}


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
    host, size = on_host(device), SIZES[platform]
    shape = (watch.mesh.devices.size, size // 4)
    space = jax.memory.Space
    away = jax.jit(lambda x: jax.device_put(x, space.Host), out_shardings=host)
    back = jax.jit(lambda x: jax.device_put(x, space.Device), out_shardings=device)
    x = jax.jit(lambda: jnp.ones(shape), out_shardings=device)()
    leaving, coming = (_seconds(watch, copy, array) for copy, array in ((away, x), (back, away(x))))
    return Host(size / coming, size / leaving, memory_bytes)


def _seconds(watch: Stopwatch, copy: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
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
