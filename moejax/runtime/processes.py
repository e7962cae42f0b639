"""The processes of one program, and how they agree on choices, errors and a stop.

JAX's coordination service carries the messages, so nothing here touches a device. The files of
`launch/` start the processes.
"""

import json
import os
import socket
import sys
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import jax
import numpy as np

from moejax.errors import (
    DivergedError,
    HostMemoryError,
    InputError,
    NoMeshError,
    ReplicasError,
    RunError,
    without_secrets,
)

T = TypeVar("T")
Json = Any
# Waits are cut into intervals so that Ctrl-C gets through.
POLL_MILLISECONDS = 1000
# In errors of gloo, of our exchanges (`comm/cpu/exchange.cc`) and of NCCL.
PEER_GONE = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "it closed its connection",
    "remote process exited",
)


BOOT = Path("/proc/sys/kernel/random/boot_id")  # drawn at each start of Linux


@dataclass(frozen=True)
class Rank:
    """The index of this process in its program."""

    coordinator: str | None  # address:port of process 0; None: not started by a launcher
    count: int
    index: int


def boot_id() -> str:
    """Returns an identity of this machine. Names do not suffice: hosts may share one."""
    with suppress(OSError):
        return BOOT.read_text().strip()
    return str(uuid.getnode())  # the address of a network card


NAMES = ("MOEJAX_COORDINATOR", "MOEJAX_PROCESSES", "MOEJAX_PROCESS")
# Variables of launchers and schedulers: the number of processes that they started, and the index of
# this one. Slurm's are of the step, which `srun` starts; a job's script has none.
SCHEDULERS = {
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),  # of MPICH and Intel MPI, and of PALS with PMI
    "mpirun of MVAPICH": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    "flux run": ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    "jsrun": ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    "torchrun": ("WORLD_SIZE", "RANK"),
}
# HPE's launcher says without PMI how many are on this host alone, and which one this is of all.
PALS = ("PALS_LOCAL_SIZE", "PALS_RANKID")


def find_rank() -> Rank:
    """Reads this process's rank from the environment variables that `launch/` sets.

    Raises:
      InputError: if the variables are incomplete, or contradict each other, a scheduler or JAX's.
    """
    coordinator, *numbers = map(os.environ.get, NAMES)
    if coordinator is None and numbers == [None, None]:
        _check_alone()
        return Rank(None, 1, 0)
    try:
        count, index = map(int, numbers)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        count, index = 0, 0
    if not 0 <= index < count or ":" not in (coordinator or ""):
        raise InputError(
            f"no place among processes. {_seen(*NAMES)}. They must be ADDRESS:PORT of process 0, "
            f"how many processes there are, and which one this is. Start with launch/local, or "
            f"unset them."
        )
    rank = Rank(coordinator, count, index)
    _check_clashes(rank)
    return rank


def _seen(*names: str) -> str:
    return ", ".join(f"{name} is {os.environ.get(name, 'not set')}" for name in names)


def _tasks() -> dict[str, int]:
    """Returns by scheduler the number of processes that it started for this program."""
    counts = {name: os.environ.get(count, "") for name, (count, _) in SCHEDULERS.items()}
    return {name: int(n) for name, n in counts.items() if n.isdecimal() and int(n) > 1}


def _check_alone() -> None:
    """Raises InputError if a scheduler has started processes that would each train alone."""
    found = [(f"{count}", name, SCHEDULERS[name][0]) for name, count in _tasks().items()]
    beside, number = (os.environ.get(name, "") for name in PALS)
    if beside.isdecimal() and number.isdecimal() and (int(beside) > 1 or int(number) > 0):
        count = max(int(beside), int(number) + 1)
        found.append((f"{count} or more", "mpiexec of PALS", PALS[0]))
    for count, name, variable in found:
        raise InputError(
            f"each of {count} processes would run alone. {name} has started them, "
            f"{_seen(NAMES[0])}. Processes of one program must know each other. Start with "
            f"launch/slurm.sbatch, or set {', '.join(NAMES)} in each; for a run of its own unset "
            f"{variable}."
        )


def _check_clashes(rank: Rank) -> None:
    """Raises InputError if a scheduler or JAX's own variable says something else."""
    for name, count in _tasks().items():
        theirs = SCHEDULERS[name]
        if (str(rank.count), str(rank.index)) != (str(count), os.environ.get(theirs[1])):
            raise InputError(
                f"launcher and {name} differ. {_seen(*NAMES[1:], *theirs)}. Both must say the "
                f"same. Start one process a task, or unset {' and '.join(theirs)}."
            )
    if os.environ.get("JAX_COORDINATOR_ADDRESS", rank.coordinator) != rank.coordinator:
        raise InputError(
            f"two coordinators. {_seen(NAMES[0], 'JAX_COORDINATOR_ADDRESS')}. Both must say the "
            f"same. Unset the second: the first is the one that counts."
        )


class Processes:
    """The processes of a program. Every process makes the same calls in the same order.

    A context manager, which ends the process at once when it fails: waiting for the others, as
    JAX does at exit, would last as long as they wait for this one.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None):
        """Takes JAX's coordination client; a program of one process has none."""
        self.index, self.count, self._client = index, count, client
        self._rounds = 0
        self._gathered: str | None = None  # name of this process's value in the last gather
        # Weak: one program, such as a notebook, may make many functions.
        self._compiled: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        # All processes find these, so all of them exit normally.
        agreed = InputError | DivergedError | HostMemoryError | NoMeshError | ReplicasError
        if error is None or isinstance(error, agreed) or self.count == 1:
            return
        code = 1
        if isinstance(error, KeyboardInterrupt):
            print("moejax: stopped; the last finished checkpoint is intact", file=sys.stderr)
            code = 130
        elif isinstance(error, RunError):
            print(f"moejax: error: {without_secrets(str(error))}", file=sys.stderr)
            code = error.code
        elif (lost := _lost_peer(error)) is not None:
            text = f"process {self.index} lost another one, which failed before it: {lost}"
            print(f"moejax: error: {without_secrets(text)}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    @property
    def first(self) -> bool:
        """True if this process writes the run's records and talks to the user."""
        return self.index == 0

    def fresh(self) -> int:
        """Returns a number not used before, the same in all processes."""
        self._rounds += 1
        return self._rounds

    def gather(self, value: Json) -> list[Json]:
        """Returns the values of all processes, in the order of their numbers.

        The service, in process 0, holds the values of the last two gathers only.
        """
        if self.count == 1:
            return [value]
        names = [f"moejax/{self.fresh()}/{index}" for index in range(self.count)]
        self._client.key_value_set(names[self.index], json.dumps(value))
        values = [json.loads(self._wait_for(name)) for name in names]
        # A process with a value here has read the last gather's values: nobody needs them now.
        if self._gathered is not None:
            self._client.key_value_delete(self._gathered)
        self._gathered = names[self.index]
        return values

    def hosts(self) -> list[str]:
        """Returns the host name of each process. Hosts that share a name are told apart."""
        known = self.gather([socket.gethostname(), boot_id()])
        boots: dict[str, list[str]] = {}
        for name, boot in known:
            if boot not in boots.setdefault(name, []):
                boots[name].append(boot)
        several = {name: len(found) > 1 for name, found in boots.items()}
        return [f"{n} ({boots[n].index(boot) + 1})" if several[n] else n for n, boot in known]

    def together(self, make: Callable[[], T]) -> T:
        """Returns the result of `make`, unless it raises InputError in some process.

        Raises:
          InputError: the same in all processes.
        """
        if self.count == 1:
            return make()
        value, refused = None, None
        try:
            value = make()
        except InputError as error:
            refused = str(error)
        for message in self.gather(refused):
            if message is not None:
                raise InputError(message)
        return value  # type: ignore[return-value]

    def from_first(self, make: Callable[[], T]) -> T:
        """Calls `make` in process 0 only, and returns its result, JSON values, in all.

        Raises:
          InputError: the error of `make`, in all.
        """
        return self.gather(self.together(lambda: make() if self.first else None))[0]

    def compile(self, function: Any, *arguments: Any) -> Any:
        """Compiles a jitted function for these arguments; returns it once every process has.

        Otherwise the first process would wait in a collective, and gloo gives up on a peer after
        half a minute. Later calls with such arguments use this compiled program, and a later call
        of this returns it at once.
        """
        known, key = self._compiled.setdefault(function, {}), _signature(arguments)
        if key not in known:
            known[key] = function.lower(*arguments).compile()
            self.gather("compiled")
        return known[key]

    def publish(self, name: str, value: str) -> None:
        """Publishes a note for the other processes."""
        self._client.key_value_set(f"moejax/{name}", value, allow_overwrite=True)

    def notes(self, folder: str) -> dict[str, str]:
        """Returns the notes published so far under a name, without waiting."""
        entries = self._client.key_value_dir_get(f"moejax/{folder}")
        return {name.rpartition("/")[2]: value for name, value in entries}

    def send(self, name: str, value: str) -> None:
        """Sends a text to the process that calls `receive` with its name, from any thread."""
        self._client.key_value_set(f"moejax/{name}", value)

    def receive(self, name: str) -> str:
        """Waits for a text that was sent under a name, and takes it out of the service."""
        value = self._wait_for(f"moejax/{name}")
        self._client.key_value_delete(f"moejax/{name}")
        return value

    def _wait_for(self, name: str) -> str:
        while True:
            try:
                return self._client.blocking_key_value_get(name, POLL_MILLISECONDS)
            except Exception as error:  # JAX has no class for it
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


def _lost_peer(error: BaseException) -> str | None:
    """Returns JAX's message about a process that is gone; None for any other error.

    Its stack would tell where this process waited, and hide who failed.
    """
    text = str(error)
    told = isinstance(error, jax.errors.JaxRuntimeError) and any(x in text for x in PEER_GONE)
    return text.partition("\n")[0] if told else None


def _signature(arguments: Any) -> tuple[Any, ...]:
    """Returns a key: arguments with equal keys can use the same compiled program."""
    leaves, structure = jax.tree.flatten(arguments)
    shapes = [
        (np.shape(x), str(getattr(x, "dtype", type(x))), getattr(x, "sharding", None))
        for x in leaves
    ]
    return structure, tuple(shapes)


ALONE = Processes()


class Stop:
    """The step after which all processes stop, after one of them was asked to.

    Process 0 picks the step; no process may have passed it. While process 0 runs step s, others may
    have started s + 1, so it publishes s + 2. A process asks about s + 2 once s + 1 is finished,
    and process 0 started s + 1 only after publishing.
    """

    def __init__(self, processes: Processes):
        self._processes = processes
        # Notes of an earlier loop of the same program do not count.
        self._folder = f"stop{processes.fresh()}"
        self._asked, self._last = False, None

    def after(self, step: int, requested: bool) -> bool:
        """Returns whether to stop after `step`, which is running; the step before it is finished.

        Costs a message to process 0 and its answer, while the step runs.

        Args:
          requested: whether this process was asked to stop.
        """
        if self._processes.count == 1:
            return requested
        if requested and not self._asked:
            self._processes.publish(f"{self._folder}/asked", "")
            self._asked = True
        if self._last is None:
            notes = self._processes.notes(self._folder)
            if self._processes.first and notes:
                self._processes.publish(f"{self._folder}/after", str(step + 2))
                self._last = step + 2
            elif "after" in notes:
                self._last = int(notes["after"])
        return self._last is not None and step >= self._last
