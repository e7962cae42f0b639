"""Others at the coordinator's port: strangers, and processes of another run."""

import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.faults.lab import TRAIN, Lab, Trial, injected
from tests.integration.runs import find_member

Done = subprocess.CompletedProcess[str]

GREETINGS = (
    b"",
    b'{"moejax": "0.1", "proc',
    b'{"process": []}\n',
    b"[" * 5000,
    b"GET / HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)),  # what gRPC begins with
    random.Random(0).randbytes(3000) + b"\n",
)
HELD = 20  # connections that stay open
# Process 0 listens for so long before the other one comes.
LATE_S = 3
LATE = ("sh", "-c", f'test "$MOEJAX_PROCESS" = 0 || sleep {LATE_S}; exec "$@"', "sh", *TRAIN)


class Strangers:
    """They come to a run's coordinator from before it listens to its end; some stay.

    Attributes:
      refused: how many came before it listened.
      heard: when others were accepted, by the clock of `time.monotonic`.
    """

    def __init__(self) -> None:
        self.refused = 0
        self.heard: list[float] = []
        self._over = threading.Event()

    def begin(self, launcher: int) -> None:
        """Begins to come, once the launcher has started process 0."""
        self._thread = threading.Thread(target=self._come, args=(launcher,))
        self._thread.start()

    def end(self) -> None:
        """Ends it."""
        self._over.set()
        self._thread.join()

    def _come(self, launcher: int) -> None:
        address, held, number = coordinator_of(launcher), [], 0
        while not self._over.wait(0.05):
            number += 1
            try:
                connection = socket.create_connection(address, timeout=5)
            except OSError:
                self.refused += not self.heard
                continue
            self.heard.append(time.monotonic())
            with suppress(OSError):
                connection.sendall(GREETINGS[number % len(GREETINGS)])
            held.append(connection)
            if len(held) > HELD:
                held.pop(number % HELD).close()
        for connection in held:
            connection.close()


def coordinator_of(launcher: int) -> tuple[str, int]:
    """Returns host and port of the coordinator of the program that a launcher has started."""
    until = time.monotonic() + 30
    while True:
        with suppress(AssertionError, OSError):
            process = find_member(launcher, 0)
            text = Path(f"/proc/{process}/environ").read_text()
            entries = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
            host, _, port = entries["MOEJAX_COORDINATOR"].rpartition(":")
            return host, int(port)
        assert time.monotonic() < until, "the launcher has started nothing"
        time.sleep(0.02)


def visited(lab: Lab, name: str, step: int, visit: Callable[[int], None]) -> Trial:
    """A trial whose process 0 waits after a step until somebody has been there."""
    gone = lab.folder / f"{name}.gone"

    def fault(launcher: int) -> None:
        try:
            visit(launcher)
        finally:
            gone.touch()

    # A visit may take longer than the lab's deadline of a step.
    paused, words = injected("pause", 0, step + 1, gone), ("--config.watchdog.step_s=120",)
    return lab.trial(name, step, fault, paused, words=words)


def process_of_another_run(lab: Lab, name: str, launcher: int, patience_s: int = 4) -> Done:
    """Returns how a process ended that has the coordinator of a run, and is one of four.

    Args:
      name: of its run.
      patience_s: for so long it looks for its own process 0.
    """
    host, port = coordinator_of(launcher)
    variables = {
        "MOEJAX_COORDINATOR": f"{host}:{port}",
        "MOEJAX_PROCESSES": "4",
        "MOEJAX_PROCESS": "3",
        "MOEJAX_MEETING_SECONDS": str(patience_s),
        "JAX_NUM_CPU_DEVICES": "1",
    }
    return _run(lab, lab.program(name), variables)


def second_run(lab: Lab, name: str, host: str | None = None) -> Done:
    """Returns how a run ended that was started in the directory of a live one.

    Args:
      host: a name for a host of its own: no process, link or name of the first is seen there.
    """
    command = lab.command(name)
    command[command.index("--logs") + 1] += "-of-the-second"
    if host is not None:
        script = f'hostname {host}; ip link set lo up; exec "$@"'
        apart = ("unshare", "--uts", "--net", "--pid", "--fork", "--mount-proc")
        command = [*apart, "sh", "-c", script, "sh", *command]
    return _run(lab, command, {})


def _run(lab: Lab, command: list[str], variables: dict[str, str]) -> Done:
    how = lab.here
    return subprocess.run(command, **how | {"env": how["env"] | variables}, timeout=100)
