"""Slots travel between hosts, and strangers get nothing and change nothing."""

import json
import socket
import threading
import time

import numpy as np
import pytest

from moejax.runtime.meeting import line
from moejax.train.memory import exchange
from moejax.train.memory.exchange import (
    LINE_BYTES,
    ExchangeError,
    Inbox,
    LocalSlot,
    RemoteSlot,
    Server,
    put,
)
from moejax.train.memory.placement import Piece
from moejax.train.memory.slots import (
    Slot,
    check_slot,
    listed,
    names_in,
    read_record,
    sealed,
    sha256_of,
)

TOKEN, SIZE = "secret", 4 * 128
DATA = np.arange(SIZE // 4, dtype=np.float32).view(np.uint8)
PIECE = Piece("w", (2, 0), (8, 16), "float32")


@pytest.fixture
def server(tmp_path):
    """Process 0 of two; the other one sends to it."""
    server = Server(("127.0.0.1", 0), TOKEN, tmp_path)
    slots = [Slot(tmp_path, f"0-from-1-{s}") for s in (0, 1)]
    server.inboxes = {1: Inbox(SIZE, slots, threading.Lock())}
    yield server
    server.close()


def record(data=DATA, process=1, **changed):
    facts = {
        "step": 4,
        "process": process,
        "pieces": listed([(PIECE, 0)]),
        "bytes": data.size,
        "sha256": sha256_of(data),
    }
    return sealed(facts | changed)


def address(server):
    return "127.0.0.1", server.port


def test_what_is_sent_lies_there_with_its_record(server, tmp_path):
    put(address(server), TOKEN, 1, DATA, record())
    assert names_in(tmp_path) == ["0-from-1-1"]
    read = read_record(tmp_path, "0-from-1-1")
    assert read == record()
    check_slot(tmp_path, "0-from-1-1", read)


def test_parts_of_a_slot_are_fetched(server, tmp_path):
    put(address(server), TOKEN, 0, DATA, record())
    here, there = (
        LocalSlot(tmp_path, "0-from-1-0"),
        RemoteSlot(address(server), TOKEN, "0-from-1-0"),
    )
    whole = DATA.view(np.float32).reshape(8, 16)
    for start, shape in (((2, 0), (8, 16)), ((3, 4), (2, 5)), ((9, 15), (1, 1))):
        out = np.empty(shape, np.float32)
        there.read(0, PIECE, start, out)
        wanted = whole[start[0] - 2 : start[0] - 2 + shape[0], start[1] : start[1] + shape[1]]
        np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(here.read(0, start, shape), wanted)
    with pytest.raises(ExchangeError, match="no such part"):
        there.read(0, PIECE, (1, 0), np.empty((2, 2), np.float32))
    there.close()


def test_a_slot_without_numbers_has_a_record_all_the_same(server, tmp_path):
    nothing = np.empty(0, np.uint8)
    server.inboxes = {1: server.inboxes[1]._replace(nbytes=0)}
    put(address(server), TOKEN, 0, nothing, record(nothing, pieces=[]))
    check_slot(tmp_path, "0-from-1-0", read_record(tmp_path, "0-from-1-0"))


def said(server, *parts):
    """What the server answers to bytes; it has closed the connection then."""
    with socket.create_connection(address(server), timeout=10) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:  # closed before all was sent
                break
        try:
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(4096), b""))
        except OSError:
            return b""


FIRST = {"token": TOKEN, "kind": "put", "process": 1, "slot": 0, "bytes": SIZE, "record": 10}
GET = {"token": TOKEN, "kind": "get", "name": "0-from-1-0"}


@pytest.mark.parametrize(
    "parts",
    [
        (line(FIRST | {"token": "another"}), DATA.tobytes()),
        (line({"kind": "put"}), DATA.tobytes()),
        (b"GET / HTTP/1.1\r\n\r\n",),
        (b"[" * 50_000 + b"\n",),
        (b'"' + b"x" * (2 * LINE_BYTES),),
        (b"",),
        (line(GET | {"token": "another"}),),
    ],
)
def test_a_stranger_is_closed_without_an_answer(server, tmp_path, parts):
    put(address(server), TOKEN, 0, DATA, record())
    assert said(server, *parts) == b""
    check_slot(tmp_path, "0-from-1-0", read_record(tmp_path, "0-from-1-0"))


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        (FIRST | {"bytes": SIZE + 1}, "513 bytes were announced, 512 are expected"),
        (FIRST | {"bytes": "512"}, "are expected"),
        (FIRST | {"record": 1 << 40}, "are expected"),
        (FIRST | {"record": "x"}, "not supported"),
        (FIRST | {"process": 7}, "nothing is expected"),
        (FIRST | {"process": [1]}, "unhashable"),
        (FIRST | {"slot": 2}, "not in tuple"),
        (GET | {"name": "../../etc/passwd"}, "no slot has that name"),
        (GET | {"name": "0-from-1-1"}, "cannot be read"),
    ],
)
def test_what_is_not_expected_is_refused_before_it_is_read(server, tmp_path, asked, seen):
    put(address(server), TOKEN, 0, DATA, record())
    answer = said(server, line(asked))
    assert seen in json.loads(answer)["error"]
    check_slot(tmp_path, "0-from-1-0", read_record(tmp_path, "0-from-1-0"))


def test_half_of_what_was_announced_leaves_no_record(server, tmp_path):
    put(address(server), TOKEN, 0, DATA, record())
    assert said(server, line(FIRST), DATA.tobytes()[:100]) == line({"go": True})
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        (record(DATA[::-1].copy()), "arrived, not"),
        (record(process=2), "nothing is expected"),
        (record(bytes=8), "of another process"),
        ({**record(), "step": 5}, "another digest"),
        ({"format_version": 1}, "another digest"),
    ],
)
def test_a_record_of_something_else_is_refused(server, tmp_path, wrong, seen):
    wrong = {"process": 1, **wrong}
    with pytest.raises(ExchangeError, match=seen):
        put(address(server), TOKEN, 0, DATA, wrong)
    assert names_in(tmp_path) == []


def test_a_process_listens_on_when_the_system_has_no_more_threads(server, tmp_path, monkeypatch):
    start, refused = threading.Thread.start, []

    def start_second(thread):
        if not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_second)
    assert said(server, line(FIRST)) == b""
    put(address(server), TOKEN, 0, DATA, record())
    assert refused
    check_slot(tmp_path, "0-from-1-0", read_record(tmp_path, "0-from-1-0"))


def test_before_the_first_save_nothing_is_taken(server, tmp_path):
    server.inboxes = {}
    with pytest.raises(ExchangeError, match="nothing is expected"):
        put(address(server), TOKEN, 0, DATA, record())


def test_a_slow_link_may_take_longer_than_the_patience_as_long_as_bytes_pass(monkeypatch):
    monkeypatch.setattr(exchange, "PATIENCE_S", 0.5)
    data, took = np.zeros(40 << 20, np.uint8), []  # several times what the system holds back
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)

        def take():
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as reader:
                asked, began = json.loads(reader.readline()), time.monotonic()
                connection.sendall(line({"go": True}))
                for _ in range(40):
                    time.sleep(0.05)
                    reader.read(1 << 20)
                reader.read(asked["record"])
                took.append(time.monotonic() - began)
                connection.sendall(line({"ok": True}))

        thread = threading.Thread(target=take)
        thread.start()
        put(listening.getsockname(), TOKEN, 0, data, record(data))
        thread.join()
    assert took[0] > 3 * exchange.PATIENCE_S


def test_a_process_that_has_gone_is_an_error(server):
    server.close()
    with pytest.raises(OSError, match="refused"):
        put(address(server), TOKEN, 0, DATA, record())
