"""Slots on their way between hosts, over TCP.

Every process of a program of several listens at one port of its own. A connection begins with a
line of JSON with the token that the processes agreed upon at the start; a connection without it is
closed. Two kinds are served: `put` stores the copy of a process of another host here, `get` reads
parts of the slots on this host. Both sides know beforehand how many bytes follow a line. Nothing
that arrives is executed.
"""

import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from moejax.runtime.meeting import line, listen
from moejax.train.memory.placement import Piece
from moejax.train.memory.slots import (
    CHUNK,
    NAMES,
    RECORD_BYTES,
    Slot,
    SlotError,
    check_record,
    open_slot,
    pieces_of,
    read_record,
    view_of,
)

LINE_BYTES = 1 << 16  # of a line of JSON
PATIENCE_S = 30.0  # without any byte, after which the other side counts as gone
FIRST_LINE_S = 10.0
RETRY_S = 0.1  # after the system refused a connection


class ExchangeError(Exception):
    """Another process refused a transfer or broke it off. The message says why."""


class Inbox(NamedTuple):
    """The slots for the copies of one sender.

    Attributes:
      nbytes: of each copy.
      slots: the two slots, of which a copy is written to one.
      lock: held while one of them is written.
    """

    nbytes: int
    slots: Sequence[Slot]
    lock: threading.Lock


class Listener:
    """Listens for connections that begin with the token, and answers each in a thread."""

    def __init__(self, listen_at: tuple[str, int], token: str):
        """Listens at an address (port 0: any port)."""
        self._token = token
        self._closed = threading.Event()
        self._socket = listen(*listen_at)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name=type(self).__name__, daemon=True).start()

    def answer(self, asked: dict[str, Any], reader: BinaryIO, connection: socket.socket) -> None:
        """Answers what the first line of a connection asks. Errors of what it says are sent."""
        raise NotImplementedError

    def close(self) -> None:
        """Stops listening."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the accept that waits
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed.wait(RETRY_S):
                    return
                continue  # too many files are open, or the caller has gone
            served = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            try:
                served.start()
            except RuntimeError:  # too many threads: the caller sees the connection end
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answers one connection. Closes it if it breaks off or comes from outside the run."""
        with connection, connection.makefile("rb") as reader, suppress(OSError, ExchangeError):
            connection.settimeout(FIRST_LINE_S)
            asked = read_line(reader)
            if not hmac.compare_digest(str(asked.get("token")).encode(), self._token.encode()):
                return
            connection.settimeout(PATIENCE_S)
            try:
                self.answer(asked, reader, connection)
            except (SlotError, KeyError, TypeError, ValueError) as error:
                connection.sendall(line({"error": f"{error}"[:500]}))


class Server(Listener):
    """Listens for the other processes of the run."""

    def __init__(self, listen_at: tuple[str, int], token: str, folder: Path):
        """Listens at an address (port 0: any port) and serves the slots of a folder."""
        self._folder = folder
        self.inboxes: Mapping[int, Inbox] = {}  # by sender; empty before the first save
        super().__init__(listen_at, token)

    def answer(self, asked: dict[str, Any], reader: BinaryIO, connection: socket.socket) -> None:
        """Takes the copy of another process, or gives parts of slots."""
        if asked.get("kind") == "put":
            self._take(asked, reader, connection)
            connection.sendall(line({"ok": True}))
        elif asked.get("kind") == "get":
            self._give(asked, reader, connection)

    def _take(self, asked: Mapping[str, Any], reader: BinaryIO, connection: socket.socket) -> None:
        """Writes the copy of a sender to the slot that it names."""
        inbox = self.inboxes.get(asked["process"])
        if inbox is None:
            raise SlotError("nothing is expected from that process")
        if asked["bytes"] != inbox.nbytes or not 0 < asked["record"] <= RECORD_BYTES:
            raise SlotError(f"{asked['bytes']} bytes were announced, {inbox.nbytes} are expected")
        slot = inbox.slots[(0, 1).index(asked["slot"])]
        with inbox.lock:
            slot.forget()
            slot.prepare(inbox.nbytes)
            connection.sendall(line({"go": True}))
            digest = read_into(reader, slot.bytes)
            text = np.empty(asked["record"], np.uint8)
            read_into(reader, text)
            record = check_record(json.loads(text.tobytes()))
            if (record["process"], record["bytes"]) != (asked["process"], inbox.nbytes):
                raise SlotError("the record is of another process")
            if record["sha256"] != digest:
                raise SlotError(f"digest {digest[:12]} arrived, not {record['sha256'][:12]}")
            slot.commit({name: x for name, x in record.items() if name != "digest"})

    def _give(self, asked: Mapping[str, Any], reader: BinaryIO, connection: socket.socket) -> None:
        """Sends boxes of a slot's pieces, one for each line that follows."""
        name = str(asked["name"])
        if not NAMES.fullmatch(name):  # a path, perhaps
            raise SlotError("no slot has that name")
        source = LocalSlot(self._folder, name)
        while (wanted := read_line(reader, end=True)) != {}:
            box = source.read(wanted["piece"], tuple(wanted["start"]), tuple(wanted["shape"]))
            connection.sendall(line({"bytes": box.nbytes}))
            send(connection, box.reshape(-1).view(np.uint8))


class LocalSlot:
    """Reads boxes of pieces from a slot of this host."""

    def __init__(self, folder: Path, name: str):
        self._record = read_record(folder, name)
        self._bytes = open_slot(folder, name, self._record)
        self._rooms = pieces_of(self._record)

    def read(self, piece: int, start: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        """Returns a part of a piece, contiguous.

        Args:
          piece: its position in the record.
          start: where the part begins in the whole array.
        """
        room, offset = self._rooms[piece]
        inside = [begin - of for begin, of in zip(start, room.start, strict=True)]
        for begin, size, whole in zip(inside, shape, room.shape, strict=True):
            if not 0 <= begin <= begin + size <= whole:
                raise SlotError(f"piece {piece} has no such part")
        cut = tuple(slice(begin, begin + size) for begin, size in zip(inside, shape, strict=True))
        return np.ascontiguousarray(view_of(self._bytes, room, offset)[cut]).reshape(shape)


class RemoteSlot:
    """Reads boxes of pieces from a slot of another host."""

    def __init__(self, address: tuple[str, int], token: str, name: str):
        self._connection = socket.create_connection(address, timeout=PATIENCE_S)
        self._reader = self._connection.makefile("rb")
        self._connection.sendall(line({"token": token, "kind": "get", "name": name}))

    def read(self, number: int, piece: Piece, start: tuple[int, ...], out: np.ndarray) -> None:
        """Reads a part of a piece into a contiguous array.

        Args:
          number: the piece's position in the record.
        """
        asked = {"piece": number, "start": list(start), "shape": list(out.shape)}
        self._connection.sendall(line(asked))
        answer = read_line(self._reader)
        if answer.get("bytes") != out.nbytes:
            raise ExchangeError(f"{piece.key}: {answer.get('error', 'another size was given')}")
        read_into(self._reader, out.reshape(-1).view(np.uint8))

    def close(self) -> None:
        """Ends the connection."""
        self._reader.close()
        self._connection.close()


def put(
    address: tuple[str, int], token: str, slot: int, data: np.ndarray, record: Mapping[str, Any]
) -> None:
    """Sends bytes and their record to a process of the next host. Returns when it has both.

    Args:
      slot: 0 or 1.
    Raises:
      ExchangeError: if the other process refuses them.
      OSError: if it does not answer for `PATIENCE_S`.
    """
    text = json.dumps(record).encode()
    first = {
        "token": token,
        "kind": "put",
        "process": record["process"],
        "slot": slot,
        "bytes": data.size,
        "record": len(text),
    }
    connection = socket.create_connection(address, timeout=PATIENCE_S)
    with connection, connection.makefile("rb") as reader:
        connection.sendall(line(first))
        answer = read_line(reader)
        if answer.get("go") is not True:
            raise ExchangeError(str(answer.get("error", "it was refused")))
        send(connection, data)
        send(connection, text)
        answer = read_line(reader)
    if answer.get("ok") is not True:
        raise ExchangeError(str(answer.get("error", "no answer")))


def send(connection: socket.socket, data: np.ndarray | bytes) -> None:
    """Sends bytes in parts. The connection's timeout holds for each part.

    With `sendall` it would hold for all of them together.
    """
    left = memoryview(data)
    while left:
        left = left[connection.send(left[:CHUNK]) :]


def read_line(reader: BinaryIO, *, end: bool = False) -> dict[str, Any]:
    """Reads an object from a line of JSON.

    Args:
      end: whether the connection may end here; the result is then empty.
    Raises:
      ExchangeError: if there is none, or it is longer than `LINE_BYTES`.
    """
    text = reader.readline(LINE_BYTES)
    if end and not text:
        return {}
    try:
        if not text.endswith(b"\n"):
            raise ValueError
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExchangeError("the other side ended, or sent no line of JSON") from error
    if not isinstance(found, dict):
        raise ExchangeError("the other side sent no object")
    return found


def read_into(reader: BinaryIO, out: np.ndarray) -> str:
    """Fills bytes from a connection. Returns their SHA-256.

    Raises:
      ExchangeError: if the connection ends before all bytes have come.
    """
    digest = hashlib.sha256()
    whole, at = memoryview(out), 0
    while at < len(whole):
        count = reader.readinto(whole[at : at + CHUNK])  # type: ignore[attr-defined]
        if not count:
            raise ExchangeError(f"the connection ended after {at:,} of {len(whole):,} bytes")
        digest.update(whole[at : at + count])
        at += count
    return digest.hexdigest()
