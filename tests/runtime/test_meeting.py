"""Processes meet before JAX starts; one that is missing or does not fit is named."""

import json
import socket
import threading
import time
from contextlib import suppress

import pytest

from moejax.errors import InputError, MeetingError
from moejax.runtime import meeting
from moejax.runtime.meeting import meet
from moejax.runtime.processes import Rank


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setenv("MOEJAX_MEETING_SECONDS", "20")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return f"127.0.0.1:{port}"


def start(address, index, count=3, listens_at=None):
    """Starts a process of the program in a thread. Returns the thread and how it ended."""
    ended = []

    def run():
        try:
            ended.append(meet(Rank(address, count, index), listens_at or address))
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def ends(started):
    """Returns the address that each was told, or its error."""
    for thread, _ in started:
        thread.join(30)
    return [ended[0] for _, ended in started]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_go_on_once_all_are_there(address, order):
    assert ends([start(address, index) for index in order]) == ["127.0.0.1"] * 3


def machine_address():
    """An address of this machine that is not its loopback; None: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial, suppress(OSError):
        trial.connect(("192.0.2.1", 9))  # sends nothing
        return trial.getsockname()[0]


@pytest.mark.skipif(machine_address() is None, reason="a machine with an address")
def test_each_knows_where_the_others_reach_it(address):
    """Process 0 listens everywhere, as on Debian, where its own name is the loopback's. Who is on
    its machine comes by that, and must be told where others reach the machine."""
    port, outside = address.rpartition(":")[2], machine_address()
    host = start(f"127.0.0.1:{port}", 0, listens_at=f"[::]:{port}")
    beside, other = start(f"127.0.0.1:{port}", 1), start(f"{outside}:{port}", 2)
    assert ends([host, beside, other]) == [outside] * 3


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_processes_meet_by_ipv6(address):
    place = f"[::1]:{address.rpartition(':')[2]}"
    assert ends([start(place, index) for index in range(3)]) == ["::1"] * 3


@pytest.mark.parametrize("place", ["192.0.2.1:4444", "127.0.0.1:99999", "127.0.0.1:x", "a b:1"])
def test_where_nobody_can_listen_is_bad_input(place):
    with pytest.raises(InputError, match=f"cannot listen for the others. At {place}"):
        meet(Rank(place, 2, 0), place)


def test_where_somebody_listens_is_bad_input():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match="in use"):
            meet(Rank(place, 2, 0), place)


def test_the_missing_ones_are_named_everywhere(address, monkeypatch, capfd):
    monkeypatch.setenv("MOEJAX_MEETING_SECONDS", "1.5")
    monkeypatch.setattr(meeting, "SAY_AFTER_S", 0.5)
    found = ends([start(address, index, count=4) for index in (0, 2)])
    assert [type(error) for error in found] == [MeetingError, MeetingError]
    assert all("processes 1, 3 of 4" in str(error) for error in found)
    assert "process 0 waits for processes 1, 3 of 4" in capfd.readouterr().err


def test_without_process_0_the_others_say_where_they_looked(address, monkeypatch):
    monkeypatch.setenv("MOEJAX_MEETING_SECONDS", "0.5")
    (error,) = ends([start(address, 1)])
    assert isinstance(error, MeetingError)
    assert f"waited at {address}: Connection refused" in str(error)


def test_two_with_the_same_number_are_refused(address):
    found = ends([start(address, index) for index in (0, 1, 1)])
    assert all(isinstance(error, InputError) for error in found)
    assert all("two processes say that they are process 1" in str(e).lower() for e in found)


def test_another_version_is_refused(address, monkeypatch):
    host = start(address, 0, count=2)
    said = {"moejax": "0.0.1", "process": 1, "processes": 2}
    with connect(address) as guest:
        guest.sendall(json.dumps(said).encode() + b"\n")
        answer = json.loads(guest.recv(4096))
    assert "Process 1 has version: 0.0.1" in answer["error"]
    assert isinstance(ends([host])[0], InputError)


def test_a_process_of_another_run_is_refused(address):
    host = start(address, 0, count=2)
    guest = start(address, 3, count=4)
    for error in ends([host, guest]):
        assert isinstance(error, InputError)
        text = "Process 3 has a program of that many processes: 4, process 0: 2"
        assert text in str(error)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "a run that has begun answers there, or another program"),
        (b"\0\0\x12\x04\0 gRPC\n", "a run that has begun answers there, or another program"),
        (None, "it has not answered"),
    ],
)
def test_what_answers_and_is_not_process_0_is_told(monkeypatch, said, reason):
    monkeypatch.setenv("MOEJAX_MEETING_SECONDS", "0.5")
    with socket.create_server(("127.0.0.1", 0)) as other:
        guest = start(f"127.0.0.1:{other.getsockname()[1]}", 1)
        other.settimeout(0.2)
        connections = []
        while not guest[1]:
            with suppress(TimeoutError):
                connections.append(other.accept()[0])
                if said is not None:
                    connections[-1].sendall(said)
                    connections[-1].close()
        for connection in connections:
            connection.close()
    (error,) = ends([guest])
    assert isinstance(error, MeetingError)
    assert f": {reason}. It must be" in str(error)


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[" * 5000, b'{"process": []}\n']
)
def test_a_stranger_does_not_disturb_the_meeting(address, said):
    host = start(address, 0, count=2)
    with connect(address) as stranger:
        stranger.sendall(said)
        assert ends([host, start(address, 1, count=2)]) == ["127.0.0.1"] * 2


def come(address, index):
    """Comes as a process of three, and returns the connection."""
    connection = connect(address)
    connection.sendall(meeting.line(meeting._introduction(Rank(address, 3, index))))
    return connection


def test_a_process_that_came_and_died_is_waited_for_again(address):
    """Whoever comes meanwhile must not go on without it."""
    host = start(address, 0)
    come(address, 1).close()
    time.sleep(0.3)
    with come(address, 2) as second:
        second.settimeout(0.7)
        with pytest.raises(TimeoutError):
            second.recv(1)
        assert ends([host, start(address, 1)]) == ["127.0.0.1"] * 2
        assert json.loads(second.recv(1024))["go"] is True


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan"])
def test_a_wrong_patience_is_refused(address, monkeypatch, text):
    monkeypatch.setenv("MOEJAX_MEETING_SECONDS", text)
    with pytest.raises(InputError, match="MOEJAX_MEETING_SECONDS"):
        meet(Rank(address, 2, 1), address)


def connect(address):
    """Connects to process 0 as soon as it listens."""
    host, port = address.split(":")
    until = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
