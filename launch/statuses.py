"""How supervisors hear of each other: each gives its status, a line of JSON, to whoever connects.

Nothing that a connection sends is read, and a supervisor asks only the hosts it was told of, so a
stranger can learn the state of a run but not change it. Standard library only.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from assign import Status, from_json

ASK_EVERY_S = 0.3
ANSWER_S = 2.0  # for one answer
LOST_S = 5.0  # without an answer a host counts as lost
REFUSED_S = 2.0  # the same where the host refuses: its supervisor has ended
LONGEST = 1 << 16  # bytes of a status

Address = tuple[str, int]


class Statuses:
    """The statuses of all hosts, asked for in threads; this host's own is served."""

    def __init__(self, addresses: Sequence[Address], me: int, own: Callable[[], Status]):
        """Takes the address of every host's supervisor.

        Raises:
          OSError: if this host cannot listen at its own.
        """
        self._own, self._me = own, me
        self._heard: dict[int, tuple[Status, float]] = {}
        self._refused: dict[int, float] = {}  # since when
        self._over = threading.Event()
        host, port = addresses[me]
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._server = socket.create_server((str(address[0]), port), family=family)
        self._server.settimeout(0.5)
        threading.Thread(target=self._serve, daemon=True).start()
        for index, other in enumerate(addresses):
            if index != me:
                threading.Thread(target=self._ask, args=(index, other), daemon=True).start()

    def here(self) -> dict[int, Status]:
        """Returns the statuses of hosts that answer, in order, and this one's own."""
        now = time.monotonic()
        found = {
            index: status
            for index, (status, when) in self._heard.copy().items()
            if now - when < LOST_S and now - self._refused.get(index, now) < REFUSED_S
        }
        return dict(sorted({**found, self._me: self._own()}.items()))

    def close(self) -> None:
        """Ends the threads."""
        self._over.set()
        self._server.close()

    def _serve(self) -> None:
        while not self._over.is_set():
            with suppress(OSError):
                connection, _ = self._server.accept()
                with connection:
                    connection.settimeout(ANSWER_S)
                    connection.sendall(json.dumps(self._own().to_json()).encode() + b"\n")

    def _ask(self, index: int, address: Address) -> None:
        while not self._over.wait(ASK_EVERY_S):
            try:
                status = _read(address)
            except ConnectionRefusedError:
                self._refused.setdefault(index, time.monotonic())
            except OSError:
                self._refused.pop(index, None)
            else:
                self._refused.pop(index, None)
                if status is not None:
                    self._heard[index] = (status, time.monotonic())


def _read(address: Address) -> Status | None:
    """Returns the status of one host; None if something else answers there."""
    until, text = time.monotonic() + ANSWER_S, b""
    with socket.create_connection(address, ANSWER_S) as connection:
        while b"\n" not in text and len(text) < LONGEST and time.monotonic() < until:
            connection.settimeout(max(until - time.monotonic(), 0.01))
            part = connection.recv(LONGEST)
            if not part:
                break
            text += part
    try:
        return from_json(json.loads(text))
    except (ValueError, RecursionError):
        return None


def free_port(host: str) -> int:
    """Returns a port of this machine at which nobody listens now."""
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as free:
        free.bind((str(address[0]), 0))
        return free.getsockname()[1]
