"""When a supervisor may decide (launch/supervisor.py): its clock is set, and nothing runs."""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.launch.modules import module

supervisor = module("supervisor")
assign, trainers = sys.modules["assign"], sys.modules["trainers"]
LOST_S = supervisor.LOST_S
RUNNING = assign.Assignment(3, 0, (0, 1), coordinator="127.0.0.1:1")


@pytest.fixture
def tick(clock):
    """Lets supervisor 0 of two look at a time; returns the generation that it follows then."""
    clock.now = 0.0
    one, host_1 = of_hosts(2), assign.Status(RUNNING, running_s=100.0)
    one._place.given, one._place.began = RUNNING, 0.0

    def look(now, answers):
        clock.now = now
        others = {1: host_1} if answers else {}
        one._tick(SimpleNamespace(here=lambda: {0: one._own} | others), Processes())
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


class Processes:
    """Stands for the processes of a host (launch/trainers.py); notes what is done to them."""

    def __init__(self, running=True, code=None, said=(), waiting_for=None, end_after=None):
        self.running, self.code, self.said, self.done = running, code, said, []
        self._waiting_for, self._end_after = waiting_for, end_after

    def waits(self, given):
        return self._waiting_for == given.generation

    def start(self, given):
        self.running = True
        self.done.append(f"start {given.generation}")

    def tell(self, given):
        self.done.append(f"tell {given.generation}")

    def kill(self):
        self.running = False
        self.done.append("kill")

    def signal(self, number):
        self.code = self._end_after
        self.done.append(signal.Signals(number).name)


@pytest.fixture
def clock(monkeypatch):
    """A clock that sleeping alone moves on."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "say", lambda text: None)
    return clock


def of_hosts(count):
    """Supervisor 0 of so many."""
    host = trainers.Host(0, ["true"], each=1, devices=None, logs=Path())
    addresses = [("127.0.0.1", port + 1) for port in range(count)]
    return supervisor.Supervisor(host, addresses, assign.Rules(count))


@pytest.fixture
def one(clock):
    """Supervisor 0 of three, in the place that generation 3 has given it."""
    one = of_hosts(3)
    one._place = supervisor.Place(RUNNING, began=0.0, ended=1, said=("a word",))
    return one


PROPOSED = assign.Assignment(4, 0, (0, 1), planned=True)
AGAIN = assign.Assignment(4, 0, (0, 1))
AWAY = assign.Assignment(4, 0, (1, 2), planned=True)


def going(assignment):
    return replace(assignment, coordinator="127.0.0.1:9")


@pytest.mark.parametrize(
    ("given", "processes", "done", "ready"),
    [
        (AGAIN, Processes(), ["kill"], True),
        (PROPOSED, Processes(), ["tell 4"], False),
        (AWAY, Processes(), ["tell 4"], False),
        (PROPOSED, Processes(code=0), ["kill"], True),
        (PROPOSED, Processes(running=False), ["kill"], True),
    ],
)
def test_a_proposal_asks_processes_that_run_to_save_and_ends_the_others(
    one, given, processes, done, ready
):
    assert one._follow(given, processes) is None
    assert processes.done == done
    assert one._place == supervisor.Place(given, began=0.0, ready=ready)


@pytest.mark.parametrize(
    ("proposed", "processes", "done", "began"),
    [
        (PROPOSED, Processes(), ["tell 4"], 1000.0),
        (AGAIN, Processes(running=False), ["start 4"], 1000.0),
        (AWAY, Processes(), ["kill"], 0.0),
    ],
)
def test_once_all_are_ready_a_host_takes_its_place(one, proposed, processes, done, began):
    one._place = replace(one._place, given=proposed, ended=None)
    assert one._follow(going(proposed), processes) is None
    assert processes.done == done
    assert (one._place.began, one._place.ended) == (began, None)


@pytest.mark.parametrize("before", [None, RUNNING])
def test_a_host_that_never_heard_the_proposal_ends_as_one_that_failed(one, before):
    one._place = replace(one._place, given=before, ended=None)
    processes = Processes()
    assert one._follow(going(PROPOSED), processes) is None
    assert not processes.running
    assert "start 4" not in processes.done
    assert one._place.ended == supervisor.ABSENT


def test_a_host_that_leaves_has_left_once_others_have_its_place(one):
    one._asked.leaving = True
    one._place = replace(one._place, given=AWAY)
    assert one._follow(going(AWAY), Processes()) == supervisor.STOPPED


@pytest.mark.parametrize(
    ("tries", "seconds"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (6, 16), (7, 30), (9, 30)]
)
def test_the_pause_before_another_start_doubles_from_the_second_on(
    one, monkeypatch, tries, seconds
):
    paused = []
    monkeypatch.setattr(one._asked, "sleep", paused.append)
    proposed = replace(AGAIN, tries=tries)
    one._place = replace(one._place, given=proposed)
    one._follow(going(proposed), Processes(running=False))
    assert paused == [seconds]


@pytest.mark.parametrize(
    ("code", "end_after", "done", "seconds"),
    [
        (2, None, ["kill"], 0),
        (supervisor.STOPPED, 0, ["SIGTERM", "kill"], 0),
        (supervisor.STOPPED, None, ["SIGTERM", "kill"], 60),
    ],
)
def test_all_end_at_once_and_who_is_asked_to_stop_may_save(
    one, clock, code, end_after, done, seconds
):
    processes = Processes(end_after=end_after)
    given = assign.Assignment(4, 0, (), code=code)
    assert one._follow(given, processes) == code
    assert processes.done == done
    assert clock.now - 1000 == pytest.approx(seconds, abs=0.2)
    assert one._own.assignment == given, "the others hear it from this host's last status"


@pytest.mark.parametrize(
    ("given", "ready", "processes", "ended", "ready_then"),
    [
        (RUNNING, True, Processes(), None, True),
        (RUNNING, True, Processes(code=0), 0, True),
        (RUNNING, True, Processes(code=5), 5, True),
        (RUNNING, True, Processes(code=-9), 137, True),
        (RUNNING, True, Processes(running=False, code=5), None, True),
        (None, True, Processes(code=5), None, True),
        (PROPOSED, False, Processes(waiting_for=3), None, False),
        (PROPOSED, False, Processes(waiting_for=4), None, True),
        (PROPOSED, False, Processes(code=3), 3, False),
        (AWAY, False, Processes(code=3), None, True),
        (AWAY, False, Processes(code=1), 1, False),
        (AWAY, True, Processes(code=3), 3, True),
    ],
)
def test_how_processes_ended_or_that_they_wait_is_noted(
    one, given, ready, processes, ended, ready_then
):
    one._place = supervisor.Place(given, ready=ready)
    one._watch(processes)
    assert (one._place.ended, one._place.ready) == (ended, ready_then)
    over = given is not None and processes.code is not None and processes.done != []
    assert processes.done == ["kill"] * over
    assert over == (ended is not None or processes.code == 3)


def test_others_hear_the_beginnings_of_long_last_lines(one):
    one._place = supervisor.Place(RUNNING)
    one._watch(Processes(code=1, said=("x" * 299 + "yz", "short")))
    assert one._place.said == ("x" * 299 + "y", "short")


def status(assignment=RUNNING, **values):
    return assign.Status(assignment, **values)


@pytest.mark.parametrize(
    ("given", "ended", "running", "others", "leaving", "code"),
    [
        (RUNNING, 0, True, {}, False, 0),
        (RUNNING, 3, True, {}, False, 3),
        (RUNNING, 1, False, {}, True, None),  # a member that failed waits for the next assignment
        (RUNNING, None, True, {1: status(ended=0)}, True, None),
        # A spare ends with those that train.
        (AWAY, None, False, {1: status(AWAY, ended=0)}, False, 0),
        (AWAY, None, False, {2: status(AWAY, ended=3)}, False, 3),
        (AWAY, None, False, {1: status(AWAY, ended=3), 2: status(AWAY, ended=0)}, False, 0),
        (AWAY, None, False, {1: status(AWAY, ended=1)}, False, None),
        (AWAY, None, False, {1: status(RUNNING, ended=0)}, False, None),
        (AWAY, None, True, {1: status(AWAY, ended=0)}, False, None),
        # A host that is to leave goes when those that stay do not wait for it.
        (AWAY, None, False, {1: status(AWAY)}, True, None),
        (going(AWAY), None, False, {1: status(AWAY)}, True, 3),
        (going(AWAY), None, False, {1: status(AWAY)}, False, None),
        (assign.Assignment(4, 0, ()), None, False, {}, True, 3),
        (assign.Assignment(4, 0, ()), None, False, {}, False, None),
        (None, None, False, {}, True, 3),
        (None, None, False, {}, False, None),
    ],
)
def test_a_host_goes_when_the_program_has_ended_or_others_have_its_place(
    one, given, ended, running, others, leaving, code
):
    one._place = supervisor.Place(given, ended=ended)
    one._asked.leaving = leaving
    assert one._over(others, Processes(running=running)) == code


def test_who_is_asked_to_stop_while_no_run_begins_goes(one):
    one._place = supervisor.Place(None)
    one._asked.count = 1
    assert one._over({}, Processes(running=False)) == supervisor.STOPPED


END = assign.Assignment(4, 0, (), code=2)


@pytest.mark.parametrize(
    ("given", "others", "code", "seconds"),
    [
        (RUNNING, {1: status(ended=0)}, 0, 0.6),  # two of their questions
        (RUNNING, {1: status()}, 0, 30),
        (RUNNING, {1: status()}, 3, 30),
        (RUNNING, {1: status()}, 1, 10),
        (RUNNING, {1: status(), 2: status(ended=0)}, 0, 30),
        (RUNNING, {2: status(ended=None)}, 0, 0.6),  # no member
        (RUNNING, {1: status(AGAIN)}, 0, 0.6),  # it is elsewhere already
        (AWAY, {1: status(AWAY)}, 3, 0),  # nobody waits for one that was no member
        (None, {}, 3, 0),
        (END, {1: status(END)}, 2, 0.6),
        (END, {1: status(ended=2)}, 2, 10),  # it has not heard that all end
    ],
)
def test_a_host_answers_until_the_others_know_how_it_ended(
    one, clock, given, others, code, seconds
):
    one._place = supervisor.Place(given)
    assert one._linger(SimpleNamespace(here=lambda: others), code) == code
    assert clock.now - 1000 == pytest.approx(seconds, abs=0.15)


def test_who_is_asked_twice_does_not_wait_for_the_others(one, clock):
    one._place = supervisor.Place(RUNNING)
    one._asked.count = 2
    one._linger(SimpleNamespace(here=lambda: {1: status()}), 0)
    assert clock.now == 1000


def test_a_host_says_where_it_is_and_of_each_change_where_a_process_0_could_listen(one):
    one._place = supervisor.Place(PROPOSED, began=900.0, ended=7, said=("last",), ready=False)
    one._asked.leaving = True
    one._own = replace(one._own, assignment=RUNNING, free="old")
    one._say_status(1000.0)
    said, free = replace(one._own, free=""), one._own.free
    assert said == assign.Status(PROPOSED, False, 7, 100.0, ("last",), True)
    assert free.startswith("127.0.0.1:")
    one._say_status(1001.0)
    assert (one._own.free, one._own.running_s) == (free, 101.0), "the same as long as it waits"


@pytest.mark.parametrize(
    ("signals", "leaving", "count", "passed"),
    [
        (["SIGTERM"], True, 0, []),
        (["SIGINT"], False, 1, ["SIGINT"]),
        (["SIGTERM", "SIGTERM"], True, 1, ["SIGTERM"]),
        (["SIGTERM", "SIGINT"], True, 1, ["SIGINT"]),
        (["SIGINT", "SIGTERM"], True, 1, ["SIGINT"]),
    ],
)
def test_sigterm_lets_the_host_leave_and_all_else_reaches_its_processes(
    signals, leaving, count, passed
):
    asked, heard = supervisor.Asked(), Processes()
    asked.processes = [heard]
    for name in signals:
        asked._pass(signal.Signals[name], None)
    assert (asked.leaving, asked.count, heard.done) == (leaving, count, passed)


def test_an_ipv6_address_stands_in_brackets_before_its_port(one, monkeypatch):
    monkeypatch.setattr(supervisor, "free_port", {"127.0.0.1": 7, "::1": 8}.get)
    assert one._free() == "127.0.0.1:7"
    one._addresses[0] = ("::1", 1)
    assert one._free() == "[::1]:8"


def test_where_no_port_is_free_no_process_0_can_listen(one, monkeypatch):
    def refuse(host):
        raise OSError("no port")

    monkeypatch.setattr(supervisor, "free_port", refuse)
    assert one._free() == ""
