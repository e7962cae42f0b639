"""The processes of a program meet before JAX starts, so that one that is missing is named.

JAX would wait for all of them without a word, and end the process from C++ when some have not come.
Process 0 listens at the coordinator's address, hears who the others are, and lets all go on at
once; then JAX's coordination service takes over the same address. From its connection each process
knows the address at which the others reach it.
"""

import ipaddress
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from moejax.errors import InputError, MeetingError
from moejax.runtime.processes import Rank
from moejax.version import __version__

TIMEOUT_S = 300.0  # MOEJAX_MEETING_SECONDS overrides it
SAY_AFTER_S, SAY_EVERY_S = 5.0, 15.0
LONGEST = 1024  # bytes that a stranger may send
ANSWER_S = 10.0  # for a connection's first line


def meet(rank: Rank, listens_at: str) -> str:
    """Waits for all processes of the program. Returns this one's address for the others.

    Raises:
      MeetingError: if some have not come in time; it names them.
      InputError: if two are the same process, or differ in number or version, or if process 0
        cannot listen: JAX would end it without a message.
    """
    until = time.monotonic() + patience()
    if rank.index == 0:
        return _Host(rank, listens_at).wait(until)
    return _visit(rank, until)


def patience() -> float:
    """Returns how many seconds the processes wait for each other.

    Raises:
      InputError: if MOEJAX_MEETING_SECONDS is no such number.
    """
    text = os.environ.get("MOEJAX_MEETING_SECONDS", str(TIMEOUT_S))
    with suppress(ValueError):
        if 0 < float(text) < 1e6:
            return float(text)
    raise InputError(
        f"MOEJAX_MEETING_SECONDS is {text!r}. It is how long processes wait for each other at the "
        "start. It must be a number of seconds above 0. Correct it, or unset it."
    )


class _Waiting:
    """Reports the wait of a process, after a while and then now and again."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next = SAY_AFTER_S

    def say(self, text: str) -> None:
        waited = time.monotonic() - self._began
        if waited >= self._next:
            self._next = waited + SAY_EVERY_S
            print(f"moejax: {text} ({waited:.0f} s)", file=sys.stderr, flush=True)


class _Host:
    """Process 0: hears the others, and answers all of them once they are all there."""

    def __init__(self, rank: Rank, listens_at: str):
        self._rank = rank
        self._guests: dict[int, socket.socket] = {}
        self._refused: list[socket.socket] = []
        self._lock = threading.Lock()
        self._wrong: str | None = None
        host, _, port = listens_at.rpartition(":")
        try:
            if not 0 < int(port) < 1 << 16:
                raise ValueError("a port is between 1 and 65535")
            self._server = listen(host, int(port))
        except (OSError, ValueError) as error:
            raise InputError(
                f"process 0 cannot listen for the others. At {listens_at}: {error}. "
                f"MOEJAX_COORDINATOR must be an address of its machine and a free port. Correct "
                f"it, or name the address to listen at in JAX_COORDINATOR_BIND_ADDRESS."
            ) from error
        self._server.settimeout(0.2)

    def wait(self, until: float) -> str:
        waiting = _Waiting()
        try:
            with self._server:
                while missing := self._missing():
                    self._accept()
                    if self._wrong is not None:
                        raise InputError(self._wrong)
                    listed = _listed(missing)
                    waiting.say(f"process 0 waits for {listed} of {self._rank.count}")
                    if time.monotonic() > until:
                        raise MeetingError(
                            f"not all processes came. Process 0 waited at {self._rank.coordinator} "
                            f"for {listed} of {self._rank.count}. All must be started and reach "
                            "that address. Look at their logs, or at the firewall between them."
                        )
        except (InputError, MeetingError) as error:
            self._answer({"error": str(error), "input": isinstance(error, InputError)})
            raise
        address = _reached_at(self._guests.values())
        self._answer({"go": True, "address": address})
        return address

    def _missing(self) -> list[int]:
        with self._lock:
            # One that came and died is waited for again.
            for number in [n for n, guest in self._guests.items() if not _alive(guest)]:
                self._guests.pop(number).close()
            return [n for n in range(1, self._rank.count) if n not in self._guests]

    def _accept(self) -> None:
        with suppress(TimeoutError, ConnectionAbortedError):
            connection, address = self._server.accept()
            # A stranger that sends nothing must not keep the others waiting.
            hears = threading.Thread(target=self._hear, args=(connection, address), daemon=True)
            hears.start()

    def _hear(self, connection: socket.socket, address: Any) -> None:
        said = None
        connection.settimeout(ANSWER_S)
        with suppress(TimeoutError):
            said = _read(connection)
        if said is None or type(said.get("process")) is not int:
            connection.close()  # not one of ours
            return
        wrong = _difference(said, _introduction(self._rank))
        number = said["process"]
        with self._lock:
            if wrong is None and not 0 < number < self._rank.count:
                wrong = f"a process says that it is number {number} of {self._rank.count}"
            if wrong is None and number in self._guests and _alive(self._guests[number]):
                wrong = f"two processes say that they are process {number}, one at {address[0]}"
            if wrong is None and number in self._guests:
                self._guests.pop(number).close()
            if wrong is None:
                self._guests[number] = connection
            else:
                self._refused.append(connection)
                self._wrong = (
                    f"processes do not fit together. {wrong[0].upper()}{wrong[1:]}. Each has a "
                    "number of its own, and all run the same moejax. Start them with launch/, or "
                    "correct MOEJAX_PROCESS and MOEJAX_PROCESSES."
                )

    def _answer(self, answer: dict[str, Any]) -> None:
        with self._lock:
            for connection in (*self._guests.values(), *self._refused):
                with suppress(OSError), connection:
                    connection.sendall(line(answer))


def listen(host: str, port: int) -> socket.socket:
    """Listens at an address of this machine, in brackets or not; [::] is all, of IPv4 too."""
    family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=1024, dualstack_ipv6=both)


def _reached_at(connections: Iterable[socket.socket]) -> str:
    """Returns this machine's address in connections, one that is not the loopback if any is."""
    found = [ipaddress.ip_address(connection.getsockname()[0]) for connection in connections]
    plain = [getattr(address, "ipv4_mapped", None) or address for address in found]
    return str(min(plain, key=lambda address: address.is_loopback))


def _visit(rank: Rank, until: float) -> str:
    """Tells process 0 that this process is there, and waits for its answer."""
    assert rank.coordinator is not None
    host, _, port = rank.coordinator.rpartition(":")
    waiting, reason = _Waiting(), ""
    while time.monotonic() < until:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5) as connection:
                connection.sendall(line(_introduction(rank)))
                own = _reached_at([connection])
                answer = _wait_for_word(connection, rank, waiting, until)
                reason = "a run that has begun answers there, or another program"
        except (OSError, ValueError) as error:
            own, answer, reason = "", None, str(getattr(error, "strerror", None) or error)
        if answer is not None and answer.get("go") is True:
            # Over the loopback process 0 is on this machine, and has heard how others reach it.
            return str(answer["address"]) if ipaddress.ip_address(own).is_loopback else own
        if answer is not None:
            kind = InputError if answer.get("input") else MeetingError
            raise kind(str(answer.get("error", "process 0 ended the start")))
        waiting.say(f"process {rank.index} waits for process 0 at {rank.coordinator}: {reason}")
        time.sleep(0.2)
    raise MeetingError(
        f"process 0 did not come. Process {rank.index} waited at {rank.coordinator}: {reason}. It "
        "must be started and reachable there. Look at its log, or at the firewall between them."
    )


def _wait_for_word(
    connection: socket.socket, rank: Rank, waiting: _Waiting, until: float
) -> dict[str, Any] | None:
    """Returns process 0's answer; None if it has gone, or it is not process 0 that answers.

    Raises:
      TimeoutError: if the time is up.
    """
    connection.settimeout(1)
    while time.monotonic() < until:
        try:
            return _read(connection)
        except TimeoutError:
            waiting.say(f"process {rank.index} is there, and waits for the others")
    raise TimeoutError("it has not answered")


def _introduction(rank: Rank) -> dict[str, Any]:
    return {"moejax": __version__, "process": rank.index, "processes": rank.count}


def _difference(said: dict[str, Any], own: dict[str, Any]) -> str | None:
    """Returns a text about a difference that another process must not have, if any."""
    for name, what in (("processes", "a program of that many processes"), ("moejax", "version")):
        if said.get(name) != own[name]:
            theirs = str(said.get(name))[:40]
            return f"process {said['process']} has {what}: {theirs}, process 0: {own[name]}"
    return None


def line(value: Mapping[str, Any]) -> bytes:
    """Returns an object as a line of JSON."""
    return json.dumps(value).encode() + b"\n"


def _read(connection: socket.socket) -> dict[str, Any] | None:
    """Returns the object in a connection's first line; None if there is none.

    Raises:
      TimeoutError: if nothing came in the connection's time.
    """
    text = b""
    try:
        while b"\n" not in text and len(text) < LONGEST:
            part = connection.recv(LONGEST)
            if not part:
                return None
            text += part
        found = json.loads(text)
    except TimeoutError:
        raise
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _alive(connection: socket.socket) -> bool:
    """Returns whether the other end of a connection is still there."""
    try:
        connection.settimeout(0)
        return connection.recv(1, socket.MSG_PEEK) != b""
    except (BlockingIOError, TimeoutError):
        return True
    except OSError:
        return False


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"process{'es' if len(numbers) > 1 else ''} {shown}{more}"
