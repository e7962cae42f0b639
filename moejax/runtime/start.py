"""Starts JAX as the config asks, and measures the devices' peak."""

import ipaddress
import os
import socket
import time
from collections import Counter
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp

from moejax.config.schema import MeshConfig
from moejax.errors import InputError
from moejax.runtime.assignment import changes_hosts
from moejax.runtime.interrupt import interruptible
from moejax.runtime.jax_settings import fix_settings
from moejax.runtime.meeting import meet
from moejax.runtime.memory import take_share
from moejax.runtime.patches import coordination_client, make_cpu_client_with
from moejax.runtime.processes import Processes, find_rank
from moejax.runtime.program_cache import keep_programs

THREADS = 4  # of XLA, for each simulated device
_address = "127.0.0.1"  # see `own_address`


def own_address() -> str:
    """Returns the address at which the program's other processes reach this one."""
    return _address


def join() -> Processes:
    """Joins the program of several processes that a launcher of `launch/` started, if any.

    Must run before anything else touches a device. On CPU the processes talk through gloo, at
    `own_address`. Process 0 listens at the coordinator's address alone, see
    `coordinator_listens_at`.

    Raises:
      InputError: if the launcher's variables contradict each other, or the coordinator's address
        is not one of process 0's machine.
      MeetingError: if some processes do not come.
    """
    global _address
    fix_settings()
    rank = find_rank()
    if rank.count == 1:
        if changes_hosts():  # this process may have been one of several
            jax.config.update("jax_cpu_collectives_implementation", None)
        return Processes()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would replace the SIGTERM handler of `runtime.interrupt`.
    jax.config.update("jax_enable_preemption_service", False)
    listens_at = coordinator_listens_at(rank.coordinator or "")
    _address = meet(rank, listens_at)
    make_cpu_client_with(own_address)
    with interruptible():
        jax.distributed.initialize(
            coordinator_address=rank.coordinator,
            num_processes=rank.count,
            process_id=rank.index,
            coordinator_bind_address=listens_at,
            # Under Slurm it would give each process only one GPU.
            cluster_detection_method="deactivate",
        )
    # JAX keeps the client that sends messages to itself; Orbax takes it from here too.
    return Processes(rank.index, rank.count, coordination_client())


def leave() -> None:
    """Leaves the program, so that this process can join another. Its arrays are gone then.

    The processes of the program call it together.
    """
    if coordination_client() is not None:
        jax.distributed.shutdown()
    jax.clear_caches()
    jax.extend.backend.clear_backends()


def coordinator_listens_at(coordinator: str) -> str:
    """Returns the ADDRESS:PORT at which process 0 listens.

    It is the coordinator's own address: JAX's default is all addresses of the machine, without
    authentication. JAX_COORDINATOR_BIND_ADDRESS, JAX's own variable, overrides it. If the
    coordinator's name leads to the loopback here (Debian's 127.0.1.1), process 0 listens at all
    addresses, because other machines could not reach it otherwise.
    """
    if bound := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return bound
    host, _, port = coordinator.rpartition(":")
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:  # only process 0 must have this address
        return coordinator
    inside = all(ipaddress.ip_address(address).is_loopback for address in addresses)
    everywhere = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
    return f"{everywhere}:{port}" if inside and _is_name_of_a_machine(host) else coordinator


def _is_name_of_a_machine(host: str) -> bool:
    """Returns whether `host` is a name other than `localhost`, and not an address."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host != "localhost"
    return False


def simulated_here(mesh: MeshConfig) -> int | None:
    """Returns this process's share of the config's simulated devices; None: none is simulated.

    Raises:
      InputError: if processes cannot share them equally, or the launcher asks for another number.
    """
    total, rank = mesh.simulated_devices, find_rank()
    if total is None or rank.coordinator is None:
        return total
    count = rank.count
    if total % count:
        raise InputError(
            f"{count} processes cannot share {total} devices. mesh.simulated_devices is of the "
            f"whole program. It must be a multiple of the processes. Start another number of "
            f"processes, or set mesh.simulated_devices={-(-total // count) * count}."
        )
    asked = os.environ.get("JAX_NUM_CPU_DEVICES", str(total // count))
    if asked != str(total // count):
        raise InputError(
            f"launcher and config differ. {count} processes of {asked} devices were started, "
            f"mesh.simulated_devices is {total}, of the whole program. They must be equal. Start "
            f"{total // count} devices a process, or set mesh.simulated_devices to the product."
        )
    return total // count


def start(mesh: MeshConfig) -> list[Any]:
    """Chooses the platform, simulates CPU devices if asked, and returns the program's devices.

    Devices are sorted by process. Must run before anything else touches a device.

    Raises:
      InputError: if the hardware is missing, if JAX has already simulated other devices,
        or if some processes have more devices than others.
    """
    fix_settings()
    if mesh.platform is not None:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(mesh.platform, mesh.platform))
    if (simulated := simulated_here(mesh)) is not None:
        _simulate(simulated)
    take_share()
    keep_programs()
    try:
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
    # JAX asserts that a platform it knows nothing of has devices.
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or "no device of that platform was found"
        raise InputError(
            f"no {mesh.platform or 'usable'} device. JAX says: {reason}. mesh.platform must name "
            f"hardware that is present. Install moejax[cuda13] or moejax[tpu], or set "
            f"mesh.platform=cpu."
        ) from error
    counts = Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"process {index} has {counts[index]}" for index in sorted(counts))
        raise InputError(
            f"processes have different numbers of devices. {listed}. All must have as many. Start "
            f"each with the same devices: CUDA_VISIBLE_DEVICES, or JAX_NUM_CPU_DEVICES on CPU."
        )
    return devices


def _simulate(count: int) -> None:
    """Makes `count` CPU devices in this process. The config overrides XLA_FLAGS."""
    jax.config.update("jax_platforms", "cpu")
    # A thread that waits in a collective does nothing else. XLA has one for each device or core: a
    # device that waits in two collectives at a time takes the thread that another one needs.
    os.environ.setdefault("PJRT_NPROC", str(max(THREADS * count, os.cpu_count() or 1)))
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:  # JAX has started: in a notebook, by an earlier run.
        present = len(jax.local_devices(backend="cpu"))
        if present != count:
            raise InputError(
                f"JAX has already started. It has {present} CPU devices, mesh.simulated_devices is "
                f"{count}. Their number cannot change in a process. Restart it, or set "
                f"mesh.simulated_devices={present}."
            ) from error


def platform_of(devices: list[Any]) -> str:
    """Returns "cpu", "gpu" or "tpu"."""
    name: str = devices[0].platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


def measure_peak(devices: list[Any], dtype: str) -> float:
    """Returns FLOP/s of a large matrix product over devices of this process.

    The best of five at least, and of up to fifteen within a second, because others may use the
    machine. On CPU simulated devices share it, so one product, which uses all cores, is the peak
    of them all.
    """
    on_cpu = platform_of(devices) == "cpu"
    size = 1536 if on_cpu else 8192
    x = jax.device_put(jnp.ones((size, size), dtype), devices[0])
    multiply = jax.jit(lambda a, b: a @ b)
    jax.block_until_ready(multiply(x, x))
    seconds: list[float] = []
    while len(seconds) < 5 or (len(seconds) < 15 and sum(seconds) < 1):
        seconds.append(_timed(multiply, x))
    return 2 * size**3 / min(seconds) * (1 if on_cpu else len(devices))


def _timed(function: Any, x: jax.Array) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(function(x, x))
    return time.perf_counter() - begin
