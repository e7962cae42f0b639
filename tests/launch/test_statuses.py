"""Which hosts answer (launch/statuses.py): real sockets of this machine, and short times."""

import json
import socket
import sys
import threading
import time
from contextlib import suppress

import pytest

from tests.launch.modules import module, wait_for

statuses = module("statuses")
Status = sys.modules["assign"].Status
REFUSED_S = 0.3


@pytest.fixture
def listening(monkeypatch):
    """Starts what a host asks and answers; ends all."""
    monkeypatch.setattr(statuses, "ASK_EVERY_S", 0.02)
    monkeypatch.setattr(statuses, "REFUSED_S", REFUSED_S)
    addresses = [("127.0.0.1", statuses.free_port("127.0.0.1")) for _ in range(2)]
    running = []

    def listen(host):
        status = Status(running_s=float(host))
        running.append(statuses.Statuses(addresses, host, lambda: status))
        return running[-1]

    yield listen
    for one in running:
        one.close()


def test_a_host_that_refused_and_came_later_is_there_from_then_on(listening):
    first = listening(0)
    wait_for(lambda: first._refused)
    assert list(first.here()) == [0]
    time.sleep(REFUSED_S)  # longer than a host that is there may refuse
    listening(1)
    wait_for(lambda: 1 in first._heard)
    wait_for(lambda: 1 in first.here())
    assert first.here()[1].running_s == 1.0


def test_a_host_that_ended_is_gone_once_it_refused_for_a_while(listening):
    first, second = listening(0), listening(1)
    wait_for(lambda: 1 in first.here())
    second.close()
    began = time.monotonic()
    wait_for(lambda: 1 not in first.here())
    assert REFUSED_S <= time.monotonic() - began < statuses.LOST_S


def test_a_free_port_is_any_that_the_system_gives():
    ports = {statuses.free_port("127.0.0.1") for _ in range(5)}
    assert min(ports) >= 1024
    assert len(ports) > 1


@pytest.mark.parametrize(
    ("heard", "refused", "there"),
    [
        (None, None, False),
        (0.0, None, True),
        (4.9, None, True),
        (5.1, None, False),
        (0.1, 0.2, True),  # it may have been begun again
        (0.1, 0.4, False),
    ],
)
def test_a_host_is_there_as_long_as_it_was_heard_of_and_does_not_refuse(
    listening, heard, refused, there
):
    first = listening(0)
    first._over.set()  # its threads end, and what they heard stays as it is
    time.sleep(0.1)
    first._heard.clear()
    first._refused.clear()
    now = time.monotonic()
    if heard is not None:
        first._heard[1] = (Status(), now - heard)
    if refused is not None:
        first._refused[1] = now - refused
    assert (1 in first.here()) == there


@pytest.mark.parametrize(
    "answer",
    [b"", b"no json\n", b'{"assignment": 3}\n', b"[" * 100_000 + b"\n", b"x" * (1 << 17)],
    ids=["nothing", "no json", "another", "nested", "long"],
)
def test_what_else_answers_at_a_hosts_address_is_no_status(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with suppress(OSError), server.accept()[0] as connection:
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert statuses._read(server.getsockname()) is None
        thread.join()


def test_a_status_may_come_in_parts_and_ends_with_its_line():
    status = Status(said=("x" * 300,) * 20, running_s=3.0)
    text = json.dumps(status.to_json()).encode()
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def serve():
            with server.accept()[0] as connection:
                for part in (text[:3], text[3:], b"\n"):
                    connection.sendall(part)
                    time.sleep(0.05)
                over.wait(10)  # it stays open

        thread = threading.Thread(target=serve)
        thread.start()
        began = time.monotonic()
        assert statuses._read(server.getsockname()) == status
        assert time.monotonic() - began < statuses.ANSWER_S
        over.set()
        thread.join()


def test_who_says_nothing_is_given_up_after_a_while(monkeypatch):
    monkeypatch.setattr(statuses, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            statuses._read(server.getsockname())
        assert 0.2 < time.monotonic() - began < 5
