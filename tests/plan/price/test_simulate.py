import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.plan.price.simulate import Task, simulate

POLICIES = {"pipe": "fifo", "line": "priority", "air": "shared"}
# Durations divide by every number of tasks that may share a stream, again after each event, so that
# times in floating point are exact and ties are ties.
UNIT = 12**7
LAYER = [
    Task("dense", "compute", 4),
    Task("all-to-all", "slow", 3, (0,)),
    Task("gather", "fast", 2, (0,)),
    Task("experts", "compute", 5, (1, 2)),
    Task("all-to-all back", "slow", 3, (3,)),
]


@st.composite
def schedules(draw, streams=("compute", *POLICIES), most=7, compute_share=(0.0, 0.25, 0.5)):
    # Few streams, so that tasks meet on them.
    some = draw(st.lists(st.sampled_from(streams), min_size=1, max_size=3, unique=True))
    tasks = []
    for place in range(draw(st.integers(1, most))):
        # Four may share at once.
        full = sum(task.stream == "air" for task in tasks) == 4
        stream = draw(st.sampled_from([s for s in some if s != "air" or not full] or ["pipe"]))
        after = draw(st.sets(st.integers(0, place - 1), max_size=3)) if place else set()
        tasks.append(
            Task(
                f"task {place}",
                stream,
                float(draw(st.integers(0, 4)) * UNIT),
                tuple(sorted(after)),
                draw(st.integers(-1, 1)),
                0.0 if stream == "compute" else draw(st.sampled_from(compute_share)),
            )
        )
    return tasks


def by_hand(tasks):
    """Start and end of each task, as floats."""
    simulation = ByHand(tasks, POLICIES)
    simulation.run()
    return tuple(tuple(map(float, times)) for times in (simulation.start, simulation.end))


class ByHand:
    """The same rules with exact numbers, and everything looked at anew at every event."""

    def __init__(self, tasks, policies):
        self.tasks, self.policies = tasks, policies
        self.left = [Fraction(task.seconds) for task in tasks]
        self.start, self.end, self.ready = ([None] * len(tasks) for _ in range(3))
        self.now, self.running = Fraction(0), set()
        self.streams = sorted({task.stream for task in tasks})

    def key(self, place):
        task = self.tasks[place]
        if task.stream == "compute":
            return (place,)
        first = -task.priority * (self.policies.get(task.stream, "fifo") == "priority")
        return (first, self.ready[place], place)

    def waiting(self, stream):
        places = [p for p, at in enumerate(self.ready) if at is not None and self.start[p] is None]
        return sorted((p for p in places if self.tasks[p].stream == stream), key=self.key)

    def may_start(self, stream):
        if stream != "compute" and self.policies.get(stream) == "shared":
            return self.waiting(stream)
        return self.waiting(stream)[: not any(self.on(p) == stream for p in self.running)]

    def on(self, place):
        return self.tasks[place].stream

    def speed(self, place):
        if self.on(place) == "compute":
            return 1 - min(1, sum(Fraction(self.tasks[p].compute_share) for p in self.running))
        return Fraction(1, sum(self.on(p) == self.on(place) for p in self.running))

    def run(self):
        while any(e is None for e in self.end):
            self.do_joins()
            for stream in self.streams:
                for place in self.may_start(stream):
                    self.start[place] = self.now
                    self.running.add(place)
            self.go_to_next_end()

    def do_joins(self):
        """Tasks of zero seconds start and end at once, and may make others ready."""
        while True:
            for place, task in enumerate(self.tasks):
                if self.ready[place] is None and all(self.end[p] is not None for p in task.after):
                    self.ready[place] = self.now
            idle = [s for s in self.streams if self.may_start(s)]
            joins = [p for s in idle for p in self.waiting(s) if self.left[p] == 0]
            if not joins:
                return
            self.start[joins[0]] = self.end[joins[0]] = self.now

    def go_to_next_end(self):
        speeds = {place: self.speed(place) for place in sorted(self.running)}
        times = (self.left[p] / rate for p, rate in speeds.items() if rate)
        step = min(times, default=Fraction(0))
        self.now += step
        for place, rate in speeds.items():
            self.left[place] -= step * rate
            if self.left[place] == 0:
                self.end[place] = self.now
                self.running.discard(place)


@settings(max_examples=300)
@given(tasks=schedules())
def test_agrees_with_the_same_rules_done_by_hand(tasks):
    timeline = simulate(tasks, POLICIES)
    assert (timeline.start_s, timeline.end_s) == by_hand(tasks)


@given(tasks=schedules(most=5, compute_share=(0.0, 0.5, 1.0)))
def test_agrees_with_the_same_rules_where_communication_stalls_compute(tasks):
    assert simulate(tasks, POLICIES).end_s == by_hand(tasks)[1]


def test_who_joins_a_shared_stream_slows_the_others_from_then_on():
    tasks = [
        Task("one", "air", 6),
        Task("other", "air", 6),
        Task("before", "compute", 4),
        Task("late", "air", 3, (2,)),
    ]
    # Two have 2 each after 4 seconds; three have 3 more each after 9; two have the last 1 each.
    assert simulate(tasks, POLICIES).end_s == (15, 15, 4, 13)


def test_a_shorter_task_may_end_it_later_where_they_are_not():
    # Graham: the first product done early lets an unimportant transfer take the link first.
    def ends(first):
        return simulate(
            [
                Task("first", "compute", first),
                Task("unimportant", "net", 10, (0,)),
                Task("other", "copy", 2),
                Task("important", "net", 1, (2,)),
                Task("rest", "compute", 10, (3,)),
            ]
        ).seconds

    assert ends(3) == 13
    assert ends(1) == 22


def test_what_runs_is_never_interrupted_by_higher_priority():
    tasks = [
        Task("product", "compute", 1),
        Task("all-reduce", "net", 5),
        Task("all-reduce", "net", 5),
        Task("all-to-all", "net", 2, (0,), priority=1),
    ]
    assert simulate(tasks, {"net": "priority"}).start_s == (0, 0, 7, 5)
    assert simulate(tasks, {"net": "fifo"}).start_s == (0, 0, 5, 10)


def test_communication_slows_compute_by_what_it_occupies():
    def ends(*shares):
        tasks = [Task("product", "compute", 6)]
        return simulate([*tasks, *(Task("net", f"{n}", 4, (), 0, s) for n, s in enumerate(shares))])

    assert ends(0.5).seconds == 8  # 4 at half speed, 4 at full
    assert ends(1.0).seconds == 10  # stalled for 4
    assert ends(0.25, 0.25).seconds == 8
    assert ends(0.75, 0.75).seconds == 10  # never slower than standing still


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Task("late", "net", 1, (0,)), "not all earlier"),
        (Task("late", "net", 1, (-1,)), "not all earlier"),
        (Task("endless", "net", float("inf")), "not finite"),
        (Task("nothing", "net", float("nan")), "not finite"),
        (Task("greedy", "net", 1, (), 0, 1.5), "occupies"),
        (Task("both", "compute", 1, (), 0, 0.5), "occupies"),
    ],
)
def test_refuses_what_cannot_run(task, said):
    with pytest.raises(ValueError, match=said):
        simulate([task])
    with pytest.raises(ValueError, match="program order"):
        simulate([], {"compute": "fifo"})


def test_twenty_thousand_tasks_are_nothing_to_wait_for():
    tasks = []
    for place in range(20_000):
        stream = ("compute", "pipe", "compute", "air", "line")[place % 5]
        after = tuple({max(0, place - 3), max(0, place - 7)} - {place})
        compute_share = 0.0 if stream == "compute" else 0.1
        tasks.append(Task("work", stream, 1 + place % 7, after, place % 3, compute_share))
    start = time.process_time()
    simulate(tasks, POLICIES)
    # About 0.07 s on a server's core, and ten times that where annotations are checked.
    assert time.process_time() - start < 5


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
