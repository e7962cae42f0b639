"""What the supervisors of hosts decide (launch/assign.py), without processes or clocks."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax import errors
from moejax.runtime import watch
from tests.launch.modules import module

group = module("group")
assign = module("assign")
Assignment, Rules, Status = assign.Assignment, assign.Rules, assign.Status

FOUR = Rules(hosts=4)
RUNNING = Assignment(3, 0, (0, 1, 2, 3), coordinator="a:1")


def running(now=RUNNING, hosts=(0, 1, 2, 3), seconds=100.0, **values):
    """Statuses of hosts whose processes run."""
    return {h: Status(now, running_s=seconds, free=f"h{h}:1", **values) for h in hosts}


def but(now, ended, **values):
    """Statuses of hosts whose processes run, but for some that ended, by their exit codes."""
    here = running(now, now.members, **values)
    return here | {h: Status(now, ended=code) for h, code in ended.items()}


def decide(here, now=RUNNING, waited=0.0, rules=FOUR):
    return assign.decide(min(here), here, now, waited, rules)


THREE_HOSTS, FOUR_HOSTS = Rules(4, min_hosts=3), Rules(4, min_hosts=4)
WITHOUT_1 = replace(RUNNING, members=(0, 2, 3))
FIVE = replace(RUNNING, members=(0, 1, 2, 3, 4))
NINTH, TIRED = replace(RUNNING, tries=9), replace(RUNNING, tries=10)
UNFIT = Assignment(6, 0, (0, 1, 2), coordinator="a:1", unfit=(4,))
LAST = Assignment(9, 0, (0,), coordinator="a:1", unfit=(4, 3, 2))
PROPOSED = Assignment(4, 0, (0, 2, 3), planned=True)
WAITING = Assignment(4, 2, (), needed=2)  # for more than host 2
NO_MESH_FOR_1 = Assignment(5, 0, (), unfit=(1,), needed=1)
NO_MESH_FOR_3 = Assignment(5, 0, (), unfit=(3,), needed=3)
LEAVING_1 = running() | {1: Status(RUNNING, running_s=100, leaving=True)}
COMING_1 = running(WITHOUT_1, (0, 2, 3)) | {1: Status()}
SAVING = running(PROPOSED, ready=False)
ALONE = {2: Status(WAITING)}
WAIT = None  # the assignment stays

# By the sentence that is tested: the statuses, the assignment, and what must be decided.
DECISIONS = {
    "of four hosts three are waited with": ({h: Status() for h in (0, 1, 3)}, None, WAIT),
    "all hosts are there": ({h: Status() for h in range(4)}, None, {"members": (0, 1, 2, 3)}),
    "a lost first host is left out": (running(hosts=(1, 2, 3)), RUNNING, {"members": (1, 2, 3)}),
    "a lost host is left out": (
        running(hosts=(0, 1, 2)),
        RUNNING,
        {"members": (0, 1, 2), "generation": 4, "planned": False, "tries": RUNNING.tries},
    ),
    "half with the lowest host goes on": (running(hosts=(0, 2)), RUNNING, {"members": (0, 2)}),
    "hosts 0 and 2 may be there, unreachable": (running(hosts=(1, 3)), RUNNING, WAIT),
    "less than half waits": (running(hosts=(2,)), RUNNING, {"members": (), "needed": 2}),
    "it waits on": (ALONE, WAITING, WAIT),
    "until another comes": (ALONE | {3: Status()}, WAITING, {"members": (2, 3)}),
    "a failure starts all again": (
        but(RUNNING, {2: 137}),
        RUNNING,
        {"members": (0, 1, 2, 3), "tries": 1},
    ),
    "too many failures end the run": (but(TIRED, {2: 137}), TIRED, {"code": assign.CRASH_LOOP}),
    "the last restart is made": (but(NINTH, {2: 137}), NINTH, {"code": None, "tries": 10}),
    "ten minutes are no failure of the start": (
        but(TIRED, {2: 137}, seconds=600.1),
        TIRED,
        {"tries": 1},
    ),
    "the host whose code says most is named": (
        but(RUNNING, {0: 1, 1: 137, 2: assign.HANG}),
        RUNNING,
        {"why": "host 1 ended with 137"},
    ),
    "bad input would not pass": (but(RUNNING, {3: 2}), RUNNING, {"code": 2}),
    "a run that diverged would not pass": (but(RUNNING, {3: 4}), RUNNING, {"code": 4}),
    "a program at its end is left alone": (but(RUNNING, {1: 0}), RUNNING, WAIT),
    "so is one that stops": (but(RUNNING, {1: 3}), RUNNING, WAIT),
    "fewer hosts are tried where no mesh fits": (
        but(RUNNING, {0: assign.NO_MESH}),
        RUNNING,
        {"members": (0, 1, 2), "unfit": (4,)},
    ),
    "host 3 is a spare": (running(UNFIT), UNFIT, WAIT),
    "a spare takes the place of a lost host": (
        running(UNFIT, (0, 2, 3)),
        UNFIT,
        {"members": (0, 2, 3)},
    ),
    "four did not fit before": (
        but(UNFIT, {0: assign.NO_MESH}) | {3: Status(UNFIT)},
        UNFIT,
        {"members": (0, 1), "unfit": (4, 3)},
    ),
    "no mesh fits any number": (but(LAST, {0: assign.NO_MESH}), LAST, {"code": assign.NO_MESH}),
    "a host leaves": (LEAVING_1, RUNNING, {"planned": True, "members": (0, 2, 3)}),
    "a planned change counts anew": (
        running(TIRED) | {1: Status(TIRED, running_s=100, leaving=True)},
        TIRED,
        {"tries": 0},
    ),
    "a host comes": (
        COMING_1,
        WITHOUT_1,
        {"planned": True, "members": (0, 1, 2, 3), "why": "host 1 joins"},
    ),
    "others may come with it": (
        running(WITHOUT_1, (0, 2, 3), seconds=4.9) | {1: Status()},
        WITHOUT_1,
        WAIT,
    ),
    "after five seconds no others come": (
        running(WITHOUT_1, (0, 2, 3), seconds=5.0) | {1: Status()},
        WITHOUT_1,
        {"members": (0, 1, 2, 3)},
    ),
    "one has begun just now": (
        COMING_1 | {2: replace(COMING_1[2], running_s=1.0)},
        WITHOUT_1,
        WAIT,
    ),
    "a change is being saved": (SAVING, PROPOSED, WAIT),
    "a change whose process died is a restart": (
        SAVING | {2: Status(PROPOSED, ready=False, ended=1)},
        PROPOSED,
        {"planned": False},
    ),
    "the user stopped it meanwhile": (
        SAVING | {2: Status(PROPOSED, ready=False, ended=3)},
        PROPOSED,
        {"code": 3},
    ),
    "all hosts are asked to leave": (running(leaving=True), RUNNING, {"code": 3}),
    "hosts that no mesh fits wait": ({0: Status(NO_MESH_FOR_1)}, NO_MESH_FOR_1, WAIT),
    "two of three that no mesh fits are tried": (
        {h: Status(NO_MESH_FOR_3) for h in range(3)},
        NO_MESH_FOR_3,
        {"members": (0, 1)},
    ),
    "one of the three is not there": (
        {h: Status(NO_MESH_FOR_3) for h in range(2)},
        NO_MESH_FOR_3,
        WAIT,
    ),
}


def assert_decided(after, wanted):
    assert (after is None) == (wanted is WAIT), after
    assert {name: getattr(after, name) for name in wanted or {}} == (wanted or {})


@pytest.mark.parametrize(("here", "now", "wanted"), DECISIONS.values(), ids=DECISIONS)
def test_what_is_decided(here, now, wanted):
    assert_decided(decide(here, now), wanted)


@pytest.mark.parametrize(
    ("here", "now", "waited", "wanted"),
    [
        # Each at its limit, and just behind it.
        ({1: Status(), 2: Status()}, None, 300.0, WAIT),
        ({1: Status(), 2: Status()}, None, 300.1, {"members": (1, 2)}),
        (running(hosts=(1, 3)), RUNNING, 14.9, WAIT),
        (running(hosts=(1, 3)), RUNNING, 15.0, {"members": (1, 3)}),
        (SAVING, PROPOSED, 300.0, WAIT),
        (SAVING, PROPOSED, 300.1, {"planned": False}),
        (ALONE, WAITING, 301.0, {"members": (2,)}),  # the run directory's lock decides
        ({0: Status(NO_MESH_FOR_1)}, NO_MESH_FOR_1, 301.0, {"code": assign.MISSING}),
    ],
)
def test_what_waits_waits_no_longer_than_it_says(here, now, waited, wanted):
    assert_decided(decide(here, now, waited=waited), wanted)


@pytest.mark.parametrize(
    ("here", "now", "rules", "wanted"),
    [
        (running(hosts=(0, 1, 3)), RUNNING, THREE_HOSTS, {"members": (0, 1, 3)}),
        (running(hosts=(0, 1, 3)), RUNNING, FOUR_HOSTS, {"members": (), "needed": 4}),
        (running(FIVE, (3, 4)), FIVE, Rules(5), {"members": (), "needed": 3}),  # three may go on
        (LEAVING_1, RUNNING, THREE_HOSTS, {"members": (0, 2, 3)}),
        (LEAVING_1, RUNNING, FOUR_HOSTS, WAIT),  # it goes on as long as it can
        # Hosts that are lost where no mesh fitted more are waited for.
        (running(UNFIT, (0, 1)), UNFIT, THREE_HOSTS, {"members": (), "needed": 3, "code": None}),
        ({h: Status(NO_MESH_FOR_3) for h in range(3)}, NO_MESH_FOR_3, THREE_HOSTS, WAIT),
    ],
)
def test_fewer_hosts_than_asked_for_do_not_train(here, now, rules, wanted):
    assert_decided(decide(here, now, rules=rules), wanted)


def test_too_few_hosts_end_the_start():
    refused = decide({h: Status() for h in (1, 2)}, None, waited=301, rules=THREE_HOSTS)
    assert refused.code == assign.MISSING
    assert "2 hosts of 4 came" in refused.why


def test_hosts_start_once_all_have_taken_note_and_are_ready():
    first = decide({h: Status() for h in range(4)}, None)
    assert not first.coordinator
    known = {h: Status(first, free=f"h{h}:1") for h in range(4)}
    assert decide(known, first).coordinator == "h0:1"
    assert decide(known | {2: Status()}, first) is None
    assert decide(known | {2: replace(known[2], ready=False)}, first) is None


@given(st.permutations([Status(Assignment(g, i, ())) for g in (1, 2) for i in (0, 1)]))
def test_all_hosts_take_the_same_assignment_for_the_newest(statuses):
    assert assign.newest(statuses) == Assignment(2, 0, ())


@given(
    st.sets(st.integers(0, 5), min_size=1),
    st.sets(st.integers(0, 5), min_size=1),
    st.dictionaries(st.integers(0, 5), st.sampled_from([0, 1, 2, 3, 9, 124, 137])),
    st.booleans(),
    st.booleans(),
    st.floats(0, 1000),
)
def test_whatever_happens_a_decision_has_a_next_one(members, here, ended, going, planned, waited):
    now = Assignment(
        5, 0, tuple(sorted(members)), planned=planned, coordinator="a:1" if going else ""
    )
    statuses = {h: Status(now, ended=ended.get(h), running_s=50.0, free="f:1") for h in here}
    after = assign.decide(min(here), statuses, now, waited, Rules(6))
    if after is not None:
        assert after.generation >= now.generation
        assert set(after.members) <= here
        assert (after.generation, after.coordinator) != (now.generation, now.coordinator)


def test_a_status_is_read_back_and_anything_else_is_refused():
    status = Status(RUNNING, ready=False, ended=3, running_s=1.5, leaving=True, free="a:2")
    assert assign.from_json(json.loads(json.dumps(status.to_json()))) == status
    for wrong in (None, 3, [], {}, {"assignment": 1}, {"assignment": None, "other": 1}):
        assert assign.from_json(wrong) is None


def test_of_one_assignment_that_with_a_coordinator_is_the_newest():
    ready = Assignment(2, 0, (0,), coordinator="a:1")
    both = [Status(replace(ready, coordinator="")), Status(ready)]
    assert assign.newest(both) == assign.newest(both[::-1]) == ready


def test_exit_codes_are_those_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "formats" / "exit.md").read_text()
    known = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    said = ("done", "bad input", "asked to stop", "not all processes", "again and again", "no mesh")
    codes = (0, 2, 3, 6, 7, 9)
    names = ("DONE", "BAD_INPUT", "STOPPED", "MISSING", "CRASH_LOOP", "NO_MESH")
    for text, code, name in zip(said, codes, names, strict=True):
        assert re.search(rf"^\| {code} \| .*{text}", page, re.MULTILINE)
        assert getattr(assign, name) == code
    assert set(assign.FINAL) == {2, 4, 5, 8, 130} <= known
    assert (assign.HANG, assign.SIGABRT) == (watch.HANG, 128 + signal.SIGABRT) == (124, 134)
    assert set(group.CODES) == known
    assert (group.STOPPED, group.HANG, errors.STOPPED) == (3, 124, 3)
    assert group.SAID_BY_ALL == (2, 4, 8)
