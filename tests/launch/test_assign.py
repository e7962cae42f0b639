"""What the supervisors of hosts decide (launch/assign.py), without processes or clocks."""

import importlib
import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax import errors
from moejax.runtime import watch

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
assign, group = map(importlib.import_module, ("assign", "group"))
Assignment, Rules, Status = assign.Assignment, assign.Rules, assign.Status

FOUR = Rules(hosts=4)
RUNNING = Assignment(3, 0, (0, 1, 2, 3), coordinator="a:1")


def running(now=RUNNING, hosts=(0, 1, 2, 3), seconds=100.0, **values):
    """Statuses of hosts whose processes run."""
    return {h: Status(now, running_s=seconds, free=f"h{h}:1", **values) for h in hosts}


def decide(here, now=RUNNING, waited=0.0, rules=FOUR):
    return assign.decide(min(here), here, now, waited, rules)


def test_a_run_begins_when_all_hosts_are_there():
    here = {h: Status(free=f"h{h}:1") for h in range(4)}
    assert decide({h: here[h] for h in (0, 1, 3)}, None) is None
    first = decide(here, None)
    assert first.members == (0, 1, 2, 3)
    assert not first.coordinator
    known = {h: replace(status, assignment=first) for h, status in here.items()}
    assert decide(known, first).coordinator == "h0:1"
    assert decide(known | {2: here[2]}, first) is None, "host 2 has not taken note"
    assert decide(known | {2: replace(known[2], ready=False)}, first) is None


def test_after_a_while_it_begins_with_those_that_are_there_if_they_are_enough():
    here = {h: Status() for h in (1, 2)}
    assert decide(here, None, waited=301).members == (1, 2)
    refused = decide(here, None, waited=301, rules=Rules(4, min_hosts=3))
    assert refused.code == assign.MISSING
    assert "2 hosts of 4 came" in refused.why


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_lost_host_is_left_out(lost):
    here = {h: s for h, s in running().items() if h != lost}
    after = decide(here)
    assert after.members == tuple(h for h in range(4) if h != lost)
    assert after.generation == 4
    assert not after.planned
    assert f"host {lost} does not answer" in after.why
    assert after.tries == RUNNING.tries, "no failure of the run"


def test_half_goes_on_at_once_only_with_the_lowest_host():
    assert decide(running(hosts=(0, 2))).members == (0, 2)
    assert decide(running(hosts=(1, 3))) is None, "hosts 0 and 2 may be there, unreachable"
    assert decide(running(hosts=(1, 3)), waited=assign.HALF_S).members == (1, 3)


def test_less_than_half_waits_for_more():
    alone = decide(running(hosts=(2,)))
    assert alone.members == ()
    assert alone.needed == 2
    five = Assignment(3, 0, (0, 1, 2, 3, 4), coordinator="a:1")
    two = decide(running(five, (3, 4)), five, rules=Rules(hosts=5))
    assert (two.members, two.needed) == ((), 3), "the other three may go on"
    waiting = running(alone, (2,))
    assert decide(waiting, alone) is None
    both = waiting | {3: Status()}
    assert decide(both, alone).members == (2, 3)
    assert decide(waiting, alone, waited=301).members == (2,), "the run directory's lock decides"


def test_a_failure_starts_all_again_and_too_many_end_the_run():
    failed = running() | {2: Status(RUNNING, ended=137)}
    after = decide(failed)
    assert after.members == (0, 1, 2, 3)
    assert after.tries == 1
    tired = replace(RUNNING, tries=10)
    last = running(tired) | {2: Status(tired, ended=137)}
    assert decide(last, tired).code == assign.CRASH_LOOP
    healthy = running(tired, seconds=601.0) | {2: Status(tired, ended=137)}
    assert decide(healthy, tired).tries == 1, "it ran for long before"


def test_the_last_restart_that_is_allowed_is_made():
    now = replace(RUNNING, tries=9)
    after = decide(running(now) | {2: Status(now, ended=137)}, now)
    assert (after.code, after.tries) == (None, 10)


def test_the_host_whose_code_says_most_is_named():
    """Who loses a peer ends with 1, and who waits for it as hung."""
    ends = {0: Status(RUNNING, ended=1), 1: Status(RUNNING, ended=137)}
    ends[2] = Status(RUNNING, ended=assign.HANG)
    assert decide(running() | ends).why == "host 1 ended with 137"


def test_as_many_hosts_as_must_be_there_are_enough():
    three, four = Rules(4, min_hosts=3), Rules(4, min_hosts=4)
    left = running(hosts=(0, 1, 3))
    assert decide(left, rules=three).members == (0, 1, 3)
    waits = decide(left, rules=four)
    assert (waits.members, waits.needed, waits.code) == ((), 4, None)
    leaves = running() | {1: Status(RUNNING, running_s=100, leaving=True)}
    assert decide(leaves, rules=three).members == (0, 2, 3)
    assert decide(leaves, rules=four) is None, "it goes on as long as it can"


def test_hosts_that_are_lost_where_no_mesh_fitted_more_are_waited_for():
    now = Assignment(6, 0, (0, 1, 2), coordinator="a:1", unfit=(4,))
    after = decide(running(now, (0, 1)), now, rules=Rules(4, min_hosts=3))
    assert (after.members, after.needed, after.code) == ((), 3, None)


@pytest.mark.parametrize("code", [2, 4, 5, 8])
def test_what_no_start_would_mend_ends_all(code):
    assert decide(running() | {3: Status(RUNNING, ended=code)}).code == code


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_at_its_end_is_left_alone(code):
    ended = running() | {1: Status(RUNNING, ended=code)}
    assert decide(ended) is None
    assert decide({h: ended[h] for h in (0, 1, 2)}) is None, "host 3 has ended, and gone"


def test_fewer_hosts_are_tried_where_no_mesh_fits_and_the_others_stay_as_spares():
    after = decide(running() | {0: Status(RUNNING, ended=assign.NO_MESH)})
    assert after.members == (0, 1, 2)
    assert after.unfit == (4,)
    going = replace(after, coordinator="a:1")
    assert decide(running(going), going) is None, "host 3 is a spare"
    lost = {h: s for h, s in running(going).items() if h != 1}
    assert decide(lost, going).members == (0, 2, 3), "and takes the place of a lost one"
    fewer = decide(running(going) | {0: Status(going, ended=assign.NO_MESH)}, going)
    assert fewer.members == (0, 1), "four did not fit before"
    assert fewer.unfit == (4, 3)
    one = Assignment(9, 0, (0,), coordinator="a:1", unfit=(4, 3, 2))
    none = {0: Status(one, ended=assign.NO_MESH)}
    assert decide(none, one, rules=Rules(1)).code == assign.NO_MESH


def test_a_host_that_leaves_and_one_that_comes_change_the_run_as_planned():
    leaves = running() | {1: Status(RUNNING, running_s=100, leaving=True)}
    after = decide(leaves)
    assert after.planned
    assert after.members == (0, 2, 3)
    tired = replace(RUNNING, tries=5)
    assert decide(running(tired) | {1: replace(leaves[1], assignment=tired)}, tired).tries == 0
    three = replace(RUNNING, members=(0, 2, 3))
    comes = running(three, (0, 2, 3)) | {1: Status()}
    back = decide(comes, three)
    assert back.planned
    assert back.members == (0, 1, 2, 3)
    assert back.why == "host 1 joins"
    fresh = running(three, (0, 2, 3), seconds=1.0) | {1: Status()}
    assert decide(fresh, three) is None, "others may come with it"
    assert decide(comes | {2: replace(comes[2], running_s=1.0)}, three) is None, "one has begun now"


def test_a_planned_change_that_fails_becomes_a_restart():
    proposed = Assignment(4, 0, (0, 2, 3), planned=True)
    saving = running(proposed, ready=False)
    assert decide(saving, proposed) is None
    late = decide(saving, proposed, waited=assign.PLANNED_S + 1)
    assert not late.planned
    died = saving | {2: Status(proposed, ready=False, ended=1)}
    assert not decide(died, proposed).planned
    stopped = saving | {2: Status(proposed, ready=False, ended=3)}
    assert decide(stopped, proposed).code == 3, "the user stopped it meanwhile"


def test_the_run_stops_when_all_hosts_are_asked_to_leave():
    assert decide(running(leaving=True)).code == 3


def test_hosts_that_no_mesh_fits_do_not_begin_again_and_again():
    waiting = Assignment(5, 0, (), unfit=(1,), needed=1)
    alone = {0: Status(waiting)}
    assert decide(alone, waiting) is None
    assert decide(alone, waiting, waited=301).code == assign.MISSING
    three = Assignment(5, 0, (), unfit=(3,), needed=3)
    here = {h: Status(three) for h in range(3)}
    assert decide(here, three, rules=Rules(4, min_hosts=3)) is None, "two are too few"
    assert decide(here, three).members == (0, 1), "all that were waited for are there"
    assert decide({h: here[h] for h in (0, 1)}, three) is None, "one of them is not"


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


@pytest.mark.parametrize(
    ("now", "here", "waited", "changes"),
    [
        # Each at its limit, and just behind it.
        (None, {0: Status(), 1: Status()}, 300.0, False),
        (None, {0: Status(), 1: Status()}, 300.1, True),
        (RUNNING, running(hosts=(1, 3)), 14.9, False),
        (RUNNING, running(hosts=(1, 3)), 15.0, True),
        (replace(RUNNING, members=(0, 1)), running(replace(RUNNING, members=(0, 1))), 0, True),
        (
            replace(RUNNING, members=(0, 1)),
            running(replace(RUNNING, members=(0, 1)), seconds=4.9),
            0,
            False,
        ),
        (
            replace(RUNNING, members=(0, 1)),
            running(replace(RUNNING, members=(0, 1)), seconds=5.0),
            0,
            True,
        ),
    ],
)
def test_what_waits_waits_no_longer_than_it_says(now, here, waited, changes):
    assert (decide(here, now, waited=waited) is not None) == changes


@pytest.mark.parametrize(
    ("waited", "planned"), [(assign.PLANNED_S, None), (assign.PLANNED_S + 0.1, False)]
)
def test_a_planned_change_has_five_minutes_to_save(waited, planned):
    proposed = Assignment(4, 0, (0, 2, 3), planned=True)
    after = decide(running(proposed, ready=False), proposed, waited=waited)
    assert after is None if planned is None else after.planned is False
    assert assign.PLANNED_S == 300


@pytest.mark.parametrize(("seconds", "tries"), [(600.0, 6), (600.1, 1)])
def test_a_run_that_lasted_ten_minutes_begins_to_count_anew(seconds, tries):
    now = replace(RUNNING, tries=5)
    here = running(now, seconds=seconds) | {2: Status(now, ended=1)}
    assert decide(here, now).tries == tries


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
