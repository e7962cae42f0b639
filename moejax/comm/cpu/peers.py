"""Connections between the devices of several CPU processes, with nobody else at their ends.

Every process listens at the address at which the others reach it. The coordination service hands
out a token that process 0 draws, and tells each process where the others listen. A connection
begins with the token, the device that connects and the one that it connects to; the other side
answers. A connection that says anything else, or nothing in time, is closed and does not count. An
error in one process is known to all of them before any of them computes.
"""

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from moejax.errors import MeetingError
from moejax.runtime.meeting import listen
from moejax.runtime.patches import coordination_client
from moejax.runtime.start import own_address

WAIT_S = 600.0  # how long a process may take to reach its first program
POLL_MILLISECONDS = 1000  # waits are cut into intervals, so that Ctrl-C gets through
CONNECT_S = 120.0  # for all connections, once every process listens
HELLO_S = 10.0  # for a connection's first message
HELLO = struct.Struct("!32sqq")  # token, the device that connects, the one that it connects to
ANSWER = b"moejax"

Pair = tuple[int, int]  # a device of this process, and its peer
HandOver = Callable[[int, int, socket.socket], None]


class NotConnectedError(Exception):
    """Devices cannot be connected, or their library is missing. The message says why."""


class Address(NamedTuple):
    """The address at which a process listens, and the token that it drew."""

    host: str
    port: int
    token: str


def connect_all(begin: Callable[[], None], hand_over: HandOver) -> None:
    """Connects each device of this process to each other device; every process calls it.

    Args:
      begin: runs first; if it raises, all processes get the error.
      hand_over: takes a device of this process, its peer, and their connection.
    Raises:
      NotConnectedError: in all processes, if anything went wrong in any of them.
      MeetingError: if another process does not come.
    """
    with contextlib.ExitStack() as opened:
        servers: list[socket.socket] = []

        def address() -> Address:
            begin()
            server = opened.enter_context(listen(own_address(), 0))
            servers.append(server)
            return Address(own_address(), server.getsockname()[1], secrets.token_hex(16))

        addresses = [Address(*found) for found in _agree("addresses", address)]
        _agree("connections", lambda: _connect(servers[0], addresses, hand_over))


def _agree(name: str, make: Callable[[], Any]) -> list[Any]:
    """Returns the JSON values of `make` in each process; if it fails in one, all of them fail."""
    value, failed, index = None, None, jax.process_index()
    try:
        value = make()
    # The system refuses sockets by OSError, and threads by RuntimeError.
    except (NotConnectedError, OSError, RuntimeError) as error:
        failed = str(error)
    answers = _share(name, [value, failed])
    for number, (_, failed) in enumerate(answers):
        if failed is not None:
            raise NotConnectedError(failed if number == index else f"process {number}: {failed}")
    return [value for value, _ in answers]


def _share(name: str, value: Any) -> list[Any]:
    """Returns the JSON values of all processes, in the order of their numbers."""
    client = coordination_client()
    if client is None:
        return [value]
    folder, until = f"moejax/exchange/{name}", time.monotonic() + WAIT_S
    client.key_value_set(f"{folder}/{jax.process_index()}", json.dumps(value))
    found: list[Any] = []
    while len(found) < jax.process_count():
        key = f"{folder}/{len(found)}"
        try:
            found.append(json.loads(client.blocking_key_value_get(key, POLL_MILLISECONDS)))
        except Exception as error:  # JAX has no class for it
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() > until:
                raise MeetingError(
                    f"not all processes came to their first program. Process {len(found)} did not "
                    f"in {WAIT_S:.0f} s. All must run the same command. Look at its log."
                ) from error
    return found


def _connect(server: socket.socket, addresses: list[Address], hand_over: HandOver) -> None:
    """Connects devices: the one with the higher id calls the other, and says who it is."""
    here = [device.id for device in jax.local_devices()]
    token, until = addresses[0].token.encode(), time.monotonic() + CONNECT_S
    expected = {(own, peer.id) for own in here for peer in jax.devices() if peer.id > own}
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept_peers, server, token, expected, until)
        try:
            for peer in jax.devices():
                for own in (own for own in here if own > peer.id):
                    address = addresses[peer.process_index]
                    hand_over(own, peer.id, _call(address, token, (own, peer.id), until))
            came = accepted.result()
        except BaseException:
            expected.clear()  # nobody is waited for any more
            raise
    for (own, peer), connection in came.items():
        hand_over(own, peer, connection)


def _call(address: Address, token: bytes, pair: Pair, until: float) -> socket.socket:
    """Connects to a device of another process, which must answer."""
    who = f"device {pair[0]} to device {pair[1]} at {address.host} port {address.port}"
    with contextlib.ExitStack() as unless_done:
        try:
            seconds = max(until - time.monotonic(), 0.01)
            connection = socket.create_connection((address.host, address.port), timeout=seconds)
            unless_done.push(connection)
            connection.sendall(HELLO.pack(token, *pair))
            answer = connection.recv(len(ANSWER), socket.MSG_WAITALL)
        except OSError as error:
            reason = error.strerror or error
            raise NotConnectedError(f"no connection of {who}: {reason}") from error
        if answer != ANSWER:
            raise NotConnectedError(f"no connection of {who}: the other side closed it")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        unless_done.pop_all()
    return connection


def accept_peers(
    server: socket.socket, token: bytes, expected: set[Pair], until: float
) -> dict[Pair, socket.socket]:
    """Returns the connections of the expected pairs, which are taken out of the set.

    Args:
      expected: the wait ends when another thread empties it.
      until: deadline on the monotonic clock.
    Raises:
      NotConnectedError: if some have not come by then.
    """
    found: dict[Pair, socket.socket] = {}
    lock = threading.Lock()

    def hear(connection: socket.socket) -> None:
        pair = _read_hello(connection, token)
        with lock, contextlib.ExitStack() as unless_expected:
            unless_expected.push(connection)
            if pair in expected:
                expected.discard(pair)
                found[pair] = connection
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with contextlib.suppress(OSError):  # one that is gone fails when it is used
                    connection.sendall(ANSWER)
                unless_expected.pop_all()

    server.settimeout(0.05)
    while expected and time.monotonic() < until:
        with contextlib.suppress(TimeoutError, ConnectionAbortedError):
            connection, _ = server.accept()
            # A stranger that sends nothing must not keep the others waiting.
            threading.Thread(target=hear, args=(connection,), daemon=True).start()
    with lock:
        missing = sorted(expected)
        expected.clear()  # who comes later is closed
    if missing:
        for connection in found.values():
            connection.close()
        own, peer = missing[0]
        raise NotConnectedError(
            f"{len(missing)} connections were not made within {CONNECT_S:.0f} s, the first from "
            f"device {peer} to device {own}"
        )
    return found


def _read_hello(connection: socket.socket, token: bytes) -> Pair | None:
    """Returns the pair in a connection's first message; None if it is late or not one of ours."""
    said, until = b"", time.monotonic() + HELLO_S
    with contextlib.suppress(OSError):
        while len(said) < HELLO.size:
            connection.settimeout(max(until - time.monotonic(), 0.01))
            part = connection.recv(HELLO.size - len(said))
            if not part:
                return None
            said += part
        given, peer, own = HELLO.unpack(said)
        if hmac.compare_digest(given, token):
            return own, peer
    return None
