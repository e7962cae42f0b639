"""Hosts with a supervisor each (`launch/host`), which a test takes away and brings back."""

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.runs import REPOSITORY, environment

sys.path.insert(0, str(REPOSITORY / "launch"))
namespaces = importlib.import_module("namespaces")
statuses = importlib.import_module("statuses")
STEP = re.compile(r"step (\d+)/\d+  loss (\S+)")


class Hosts:
    """Supervisors, the lines of all of them in the order that they came, and their ends."""

    def __init__(self, folder: Path, names: list[str], prefixes: list[tuple[str, ...]], command):
        """Takes the hosts' names and what starts a command on each; starts none."""
        self.folder, self.names, self._prefixes = folder, names, prefixes
        self._command = list(map(str, command))
        self.lines: list[tuple[float, int, str]] = []  # when, of which host, what
        self._running: dict[int, subprocess.Popen] = {}
        self._readers: list[threading.Thread] = []

    def start(self, number: int, *flags: str) -> None:
        """Starts a host's supervisor."""
        if number in self._running:  # it has left
            self._running.pop(number).wait(timeout=60)
        words = [sys.executable, str(REPOSITORY / "launch" / "host"), "--devices", "1"]
        words += ["--hosts", ",".join(self.names), "--me", self.names[number]]
        words += ["--logs", str(self.folder / "logs"), *flags, "--", *self._command]
        process = subprocess.Popen(
            [*self._prefixes[number], *words],
            env=environment(PYTHONUNBUFFERED="1"),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._running[number] = process
        reader = threading.Thread(target=self._read, args=(number, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, number: int, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        with process.stdout as out:
            for line in out:
                self.lines.append((time.monotonic(), number, line.rstrip()))

    def wait_for(self, pattern: str, since: int = 0, seconds: float = 120) -> int:
        """Waits for a line, and returns its place among `lines`."""

        def places() -> list[int]:
            rows = enumerate(self.lines[since:], since)
            return [at for at, (_, _, line) in rows if re.search(pattern, line)]

        self._wait(lambda: bool(places()), seconds, since)
        return places()[0]

    def _wait(self, ready: Callable[[], bool], seconds: float = 240, since: int = 0) -> None:
        until = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < until, self.text(since)[-5000:]
            time.sleep(0.05)

    def _steps(self, since: int = 0) -> list[tuple[float, int]]:
        """When steps were shown from a line on, and their numbers."""
        found = ((when, STEP.search(line)) for when, _, line in self.lines[since:])
        return [(when, int(step[1])) for when, step in found if step]

    def wait_for_step(self, step: int) -> None:
        """Waits until a step of at least this number is shown."""
        self._wait(lambda: any(number >= step for _, number in self._steps()))

    def wait_for_more(self, count: int) -> None:
        """Waits until so many steps more were shown."""
        before = len(self._steps())
        self._wait(lambda: len(self._steps()) >= before + count)

    def next_step(self, since: int) -> tuple[float, int]:
        """Waits for the first step that is shown after a line. Returns when, and its number."""
        self._wait(lambda: bool(self._steps(since)), 120, since)
        return self._steps(since)[0]

    def text(self, since: int = 0) -> str:
        """Returns the lines from one on, with their hosts."""
        return "\n".join(f"{number} {line}" for _, number, line in self.lines[since:])

    def leave(self, number: int) -> None:
        """Asks a host to leave."""
        os.kill(self._supervisor(number), signal.SIGTERM)

    def lose(self, number: int) -> None:
        """Ends a host as a power cut does: supervisor, guard and processes, without a word."""
        for pid in [self._supervisor(number), *self.trainers(number)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._running.pop(number).wait()

    def signal(self, number: int, what: int) -> None:
        """Sends a signal to the training process of a host."""
        for pid in self.trainers(number):
            os.kill(pid, what)

    def trainers(self, number: int) -> list[int]:
        """Returns the training processes of a host."""
        return [
            pid
            for pid, variables, words in _processes()
            if f"MOEJAX_HOST=h{number}" in variables and str(self.folder) in words
        ]

    def end(self) -> dict[int, int]:
        """Waits for all hosts. Returns their exit codes."""
        codes = {number: process.wait(timeout=900) for number, process in self._running.items()}
        for reader in self._readers:
            reader.join(10)
        return codes

    def kill(self) -> None:
        """Kills all hosts."""
        for number in list(self._running):
            if self._running[number].poll() is None:
                self.lose(number)
        for reader in self._readers:
            reader.join(10)

    def _supervisor(self, number: int) -> int:
        me = f"--me {self.names[number]} "
        return next(
            pid for pid, _, words in _processes() if "launch/host" in words and me in words
            and words.startswith(sys.executable)
        )  # fmt: skip


def _processes() -> Iterator[tuple[int, list[str], str]]:
    """Yields every process with its variables and its words."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (path / "environ").read_text(errors="replace").split("\0")
            yield int(path.name), variables, _words(int(path.name))


def _words(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


@contextmanager
def on_this_machine(folder: Path, count: int, command) -> Iterator[Hosts]:
    """Hosts that are ports of this machine."""
    names = [f"127.0.0.1:{statuses.free_port('127.0.0.1')}" for _ in range(count)]
    hosts = Hosts(folder, names, [()] * count, command)
    try:
        yield hosts
    finally:
        hosts.kill()


@contextmanager
def emulated(folder: Path, count: int, link: str, command) -> Iterator[Hosts]:
    """Hosts that are network namespaces, joined by shaped links; needs root, ip and tc."""
    with namespaces.Cluster(count, link, None) as cluster:
        prefixes = [cluster.prefix(number) for number in range(count)]
        hosts = Hosts(folder, cluster.addresses, prefixes, command)
        try:
            yield hosts
        finally:
            hosts.kill()
