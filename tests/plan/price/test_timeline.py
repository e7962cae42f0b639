import pytest
from hypothesis import given

from moejax.plan.price.simulate import simulate
from moejax.plan.price.timeline import Task
from tests.plan.price.test_simulate import POLICIES, schedules

LAYER = [
    Task("dense", "compute", 4),
    Task("all-to-all", "slow", 3, (0,)),
    Task("gather", "fast", 2, (0,)),
    Task("experts", "compute", 5, (1, 2)),
    Task("all-to-all back", "slow", 3, (3,)),
]


def test_says_what_ran_when_and_what_was_not_hidden():
    timeline = simulate(LAYER)
    assert timeline.seconds == 15
    assert timeline.lanes() == {"compute": [0, 3], "slow": [1, 4], "fast": [2]}
    # Two seconds of both links, one of the slow one, three more on the way back.
    assert timeline.exposed() == {"all-to-all": 2, "gather": 1, "all-to-all back": 3}


def test_what_slows_compute_is_blamed_for_what_compute_loses():
    tasks = [Task("dense", "compute", 6), Task("rows", "net", 4, (), 0, 0.25)]
    timeline = simulate(tasks)
    assert timeline.seconds == 7
    assert timeline.exposed() == {"rows": 1}


def test_nothing_is_an_empty_timeline():
    timeline = simulate([])
    assert (timeline.seconds, timeline.exposed()) == (0, {})


@given(tasks=schedules(most=20, compute_share=(0.0, 0.5, 0.75, 1.0)))
def test_computed_and_exposed_seconds_are_all_there_are(tasks):
    timeline = simulate(tasks, POLICIES)
    computed = sum(task.seconds for task in tasks if task.stream == "compute")
    exposed = timeline.exposed()
    assert all(seconds > 0 for seconds in exposed.values())
    assert computed + sum(exposed.values()) == pytest.approx(timeline.seconds)
