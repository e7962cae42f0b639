"""Starts JAX as the config asks, and measures what the devices can do."""

import os
import time
from typing import Any

import jax
import jax.numpy as jnp

from moejax.config import MeshConfig
from moejax.errors import InputError


def join() -> None:
    """Joins the program that a launcher of `launch/` started this process for; else does nothing.

    Must run before anything else touches a device. On CPU the processes talk through gloo.
    """
    coordinator = os.environ.get("MOEJAX_COORDINATOR")
    if coordinator is None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=int(os.environ["MOEJAX_PROCESSES"]),
        process_id=int(os.environ["MOEJAX_PROCESS"]),
    )


def start(mesh: MeshConfig) -> list[Any]:
    """Chooses the platform, simulates CPU devices where asked, and returns the devices.

    Must run before anything else touches a device.

    Raises:
      InputError: if the hardware is not there, or JAX has already simulated other devices.
    """
    if mesh.platform is not None:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(mesh.platform, mesh.platform))
    if mesh.simulated_devices is not None:
        _simulate(mesh.simulated_devices)
    try:
        return jax.devices()
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"no {mesh.platform or 'usable'} device. JAX says: {reason}. mesh.platform must name "
            f"hardware that is present. Install moejax[cuda13] or moejax[tpu], or set "
            f"mesh.platform=cpu."
        ) from error


def _simulate(count: int) -> None:
    """Makes `count` CPU devices. The config wins over what XLA_FLAGS asks for."""
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:  # JAX has started: in a notebook, by an earlier run.
        found = len(jax.devices("cpu"))
        if found != count:
            raise InputError(
                f"JAX has already started. It has {found} CPU devices, mesh.simulated_devices is "
                f"{count}. Their number cannot change in a process. Restart it, or set "
                f"mesh.simulated_devices={found}."
            ) from error


def platform_of(devices: list[Any]) -> str:
    """Returns "cpu", "gpu" or "tpu"."""
    name: str = devices[0].platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def measure_peak(devices: list[Any], dtype: str) -> float:
    """Returns FLOP/s of a large matrix product over all devices.

    The best of five; on CPU simulated devices share the machine, so one product, which uses all
    cores, is the peak of them all. Takes under a second.
    """
    on_cpu = platform_of(devices) == "cpu"
    size = 1536 if on_cpu else 8192
    x = jax.device_put(jnp.ones((size, size), dtype), devices[0])
    multiply = jax.jit(lambda a, b: a @ b)
    jax.block_until_ready(multiply(x, x))
    seconds = min(_timed(multiply, x) for _ in range(5))
    return 2 * size**3 / seconds * (1 if on_cpu else len(devices))


def _timed(function: Any, x: jax.Array) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(function(x, x))
    return time.perf_counter() - begin
