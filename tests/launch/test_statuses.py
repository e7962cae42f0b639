"""Which hosts answer (launch/statuses.py): real sockets of this machine, and short times."""

import sys
import time

import pytest

from tests.launch.modules import module

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


def wait_until(said):
    until = time.monotonic() + 10
    while not said():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_host_that_refused_and_came_later_is_there_from_then_on(listening):
    first = listening(0)
    wait_until(lambda: first._refused)
    assert list(first.here()) == [0]
    time.sleep(REFUSED_S)  # longer than a host that is there may refuse
    listening(1)
    wait_until(lambda: 1 in first._heard)
    wait_until(lambda: 1 in first.here())
    assert first.here()[1].running_s == 1.0


def test_a_host_that_ended_is_gone_once_it_refused_for_a_while(listening):
    first, second = listening(0), listening(1)
    wait_until(lambda: 1 in first.here())
    second.close()
    began = time.monotonic()
    wait_until(lambda: 1 not in first.here())
    assert REFUSED_S <= time.monotonic() - began < statuses.LOST_S
