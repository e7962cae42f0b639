"""The memory of hosts in mid-run: a run that keeps arrays there ends in time, before none is left.

Pinned memory cannot be swapped out, so Linux would end the process instead, without a word.
"""

import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax

from moejax.comm.host import is_on_host
from moejax.config.checks.machine import machine_memory, memory_left
from moejax.config.schema import Config
from moejax.errors import HostAllocationError, HostMemoryError
from moejax.runtime.memory import POOL
from moejax.runtime.processes import Processes
from moejax.step.train_step import TrainStep
from moejax.train.records.summary import human_bytes

# Share of a machine below which a run ends: at least LEAST_BYTES, and at most MOST of it.
LEAST, LEAST_BYTES, MOST = 0.01, 2**29, 0.05
LOWER = "memory.optimizer, memory.experts, memory.residuals, checkpoint.memory_every"
NO_HOST_MEMORY = re.compile(r"RESOURCE_EXHAUSTED.*\bhost\b|alloc.*(\bon host\b|pinned)", re.I)


def keeps_on_host(cfg: Config) -> bool:
    """Returns whether a run keeps arrays or copies of its state in the memory of hosts."""
    memory = cfg.memory
    places = (memory.optimizer, memory.experts, memory.residuals)
    return "host" in places or cfg.checkpoint.memory_every is not None


def least_left(whole: int) -> int:
    """Returns the bytes of a machine's memory below which a run ends."""
    return int(min(max(LEAST * whole, LEAST_BYTES), MOST * whole))


class Needed(NamedTuple):
    """Bytes of hosts' memory that a save takes of a process.

    Orbax has no limit for them: it copies all that it may not copy later (0.12.8).

    Attributes:
      beside: while the next step runs, which cannot overwrite arrays that are being written.
      waited: where the next step waits for the save: copies of what is on devices.
    """

    beside: int
    waited: int


def needed_of(train_step: TrainStep) -> Needed:
    """Returns what a save takes of one process."""
    arrays = jax.tree.leaves(train_step.abstract._replace(frozen=None))
    on_device = (
        0
        if train_step.platform == "cpu"
        else _written_here([x for x in arrays if not is_on_host(x)])
    )
    return Needed(_written_here(arrays), on_device)


def _written_here(arrays: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Returns the bytes of different shards on this process's devices."""
    total = 0
    for x in arrays:
        assert x.sharding is not None
        parts = x.sharding.addressable_devices_indices_map(x.shape).values()
        shard = jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
        total += len({str(part) for part in parts}) * shard.size * shard.dtype.itemsize
    return total


class Headroom:
    """The memory that a run's hosts have left.

    Attributes:
      short: why the run shall end; None while there is enough.
    """

    def __init__(self, needed: Needed, processes: Processes):
        """All processes call it."""
        self._needed, self._processes = needed, processes
        self._hosts = processes.hosts()
        self.short: str | None = None

    def look(self) -> None:
        """Sees whether this process's host has too little left."""
        whole, left = machine_memory(), memory_left()
        if left < least_left(whole):
            host = self._hosts[self._processes.index]
            self.short = f"{host} has {human_bytes(left)} left of {human_bytes(whole)}"

    def must_wait(self, safe: Callable[[], str]) -> bool:
        """Returns whether the next step must wait for a save that begins now. All call it.

        Args:
          safe: says which checkpoint there is.
        Raises:
          HostMemoryError: in all processes, if the save would not fit even so.
        """
        here = [*self._needed, memory_left(), machine_memory()]
        wait, everywhere = False, self._processes.gather(here)
        for host in dict.fromkeys(self._hosts):
            of_host = [x for x, name in zip(everywhere, self._hosts, strict=True) if name == host]
            beside, waited, *_ = map(sum, zip(*of_host, strict=True))
            left, whole = (min(x[at] for x in of_host) for at in (2, 3))
            if waited > left:
                raise HostMemoryError(
                    f"no memory of the host left for a checkpoint. {host} has {human_bytes(left)} "
                    f"left of {human_bytes(whole)}, a checkpoint takes {human_bytes(waited)}. "
                    f"{safe()}. {_what_helps()}"
                )
            wait |= beside > left - least_left(whole)
        return wait


def memory_full(short: str, step: int) -> HostMemoryError:
    """Returns the error of a run that has saved a step and ends, as a host has too little left."""
    return HostMemoryError(
        f"the memory of a host is almost full. {short}. Step {step} is saved. {_what_helps()}"
    )


def _what_helps() -> str:
    return (
        f"End what else runs there, give the container more, or keep less there ({LOWER}); the "
        "same command goes on."
    )


def lock_warnings(train_step: TrainStep, host_bytes: int, processes: Processes) -> list[str]:
    """Returns a warning if a process may lock less memory than its devices pin. All call it.

    Args:
      host_bytes: peak in the host's memory, of one device.
    """
    if train_step.platform == "cpu" or not host_bytes:  # CPUs pin nothing
        return []
    needed = host_bytes * len(jax.local_devices())
    for host, (taken, limit) in zip(
        processes.hosts(), processes.gather([needed, _locked_limit()]), strict=True
    ):
        if limit is not None and limit < taken:
            return [
                f"warning: a process on {host} may lock {human_bytes(limit)} of memory (ulimit "
                f"-l), and the run pins {human_bytes(taken)} there. Many drivers pin without it. "
                "If memory cannot be taken, run `ulimit -l unlimited` before it."
            ]
    return []


def _locked_limit() -> int | None:
    """Returns the bytes that this process may lock; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


@contextmanager
def naming_failed_allocation(train_step: TrainStep) -> Iterator[None]:
    """Turns the error of host memory that XLA could not take into one line.

    Raises:
      HostAllocationError: names the limit and what to do.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        said = str(error).partition("\n")[0]
        if not keeps_on_host(train_step.cfg) or not NO_HOST_MEMORY.search(said):
            raise
        limit = _locked_limit()
        locked = "any number of bytes" if limit is None else human_bytes(limit)
        raise HostAllocationError(
            f"memory of the host could not be taken. {said}. This process may lock {locked} "
            f"(ulimit -l), and XLA takes at most {os.environ.get(POOL, '64')} GiB for each device "
            f"({POOL}). Run `ulimit -l unlimited` before it (in a container: --ulimit memlock=-1), "
            f"raise {POOL}, or set memory.optimizer, memory.experts and memory.residuals to "
            "device; the same command goes on from the newest checkpoint."
        ) from error
