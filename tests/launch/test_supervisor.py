"""When a supervisor may decide (launch/supervisor.py): its clock is set, and nothing runs."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.launch.modules import module

supervisor = module("supervisor")
assign, trainers = sys.modules["assign"], sys.modules["trainers"]
LOST_S = supervisor.LOST_S
RUNNING = assign.Assignment(3, 0, (0, 1), coordinator="127.0.0.1:1")


class Others:
    """What the statuses say: of host 1 only while it answers."""

    def __init__(self, own):
        self.own, self.answers = own, True

    def here(self):
        status = assign.Status(RUNNING, running_s=100.0)
        return {0: self.own()} | ({1: status} if self.answers else {})


@pytest.fixture
def tick(monkeypatch):
    """Lets supervisor 0 of two look at a time; returns the generation that it follows then."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "say", lambda text: None)
    host = trainers.Host(0, ["true"], each=1, devices=None, logs=Path())
    one = supervisor.Supervisor(host, [("127.0.0.1", 1), ("127.0.0.1", 2)], assign.Rules(2))
    others = Others(lambda: one._own)
    nothing = SimpleNamespace(running=True, code=None, kill=lambda: None, tell=lambda given: None)
    one._place.given, one._place.began = RUNNING, 0.0

    def look(now, answers):
        clock.now, others.answers = now, answers
        one._tick(others, nothing)
        return one._place.given.generation

    for tenth in range(int(10 * LOST_S) + 10):
        assert look(tenth / 10, answers=True) == 3
    return look


def test_a_lost_host_is_left_out_by_one_that_heard_all_the_time(tick):
    assert tick(LOST_S + 1.1, answers=False) == 4


def test_a_supervisor_that_was_suspended_first_hears_the_others(tick):
    """Nobody has answered while it was: it does not know yet who is there."""
    begin = LOST_S + 11.0  # ten seconds after it last looked
    for tenth in range(int(10 * LOST_S)):
        assert tick(begin + tenth / 10, answers=False) == 3
    assert tick(begin + LOST_S + 0.1, answers=False) == 4


def test_a_supervisor_that_was_suspended_goes_on_when_all_answer(tick):
    begin = LOST_S + 11.0
    assert tick(begin, answers=True) == 3
    assert tick(begin + 1, answers=False) == 3  # one lost since is left out later
    assert 4 in (tick(begin + 1 + 0.1 * n, answers=False) for n in range(60))
