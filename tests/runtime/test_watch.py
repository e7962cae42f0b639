"""A hang is found, named after who is behind, and told apart from what is merely slow."""

import subprocess
import sys
import textwrap
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.runtime.processes import Processes
from moejax.runtime.watch import (
    HANG,
    Deadlines,
    Peer,
    Place,
    Watch,
    Watchdog,
    find_hang,
)

TIMES = {"step": 30, "input": 30, "save": 600, "evaluate": None, "compile": None}
LIMITS = Deadlines(TIMES, silent_s=20)
STEP = Place("step", 12, 40)


def test_a_stage_is_told_when_it_ends():
    told = []
    watch = Watch(lambda stage, step, seconds: told.append((stage, step, seconds >= 0)))
    watch.enter("compile")
    assert not watch.stepped  # SIGTERM loses nothing until then
    with watch.during("step", 3):
        assert watch.stepped
    watch.enter("save", 4)
    assert told == [
        ("start", 0, True),
        ("compile", 0, True),
        ("step", 3, True),
        ("compile", 0, True),
    ]
    assert watch.now[0] == Place("save", 4, 4)


BEHIND = "process 1 is behind: it is in input of step 12. Process 0 waits 31 s in step 12."


@pytest.mark.parametrize(
    ("own", "peers", "found"),
    [
        ((0, STEP, 29), {1: Peer(Place("input", 12, 39), 1), 2: Peer(STEP, 1)}, None),
        ((0, STEP, 31), {1: Peer(Place("input", 12, 39), 1), 2: Peer(STEP, 1)}, BEHIND),
        (
            (1, Place("input", 12, 39), 31),
            {0: Peer(STEP, 1)},
            "process 1 itself is behind: it has been 31 s in input of step 12",
        ),
        ((0, STEP, 31), {1: Peer(STEP, 1)}, "no process is behind"),  # a link or device is stuck
        ((0, STEP, 31), {}, "process 0 has been 31 s in step 12."),
        # One that is not heard of is named before the deadline, if this one does not go on either.
        ((0, STEP, 19), {1: Peer(STEP, 21)}, None),
        ((0, STEP, 21), {1: Peer(STEP, 21)}, "and was last heard of 21 s ago"),
        # A slow save or evaluation of another is no hang, nor is a silent compilation.
        ((0, STEP, 500), {1: Peer(Place("save", 12, 38), 5)}, None),
        ((0, STEP, 601), {1: Peer(Place("save", 12, 38), 5)}, "process 1 is behind: it is in save"),
        ((0, STEP, 601), {1: Peer(Place("evaluate", 12, 38), 5)}, None),
        ((0, STEP, 601), {1: Peer(Place("compile", 12, 38), 500)}, None),
        ((0, STEP, 500), {1: Peer(Place("save", 12, 38), 500)}, "process 1 is behind: it is in s"),
    ],
)
def test_a_hang_is_named_after_who_is_behind(own, peers, found):
    said = find_hang(own, peers, LIMITS)
    assert said is None if found is None else found in said


@given(
    waited=st.floats(0, 29.9),
    silent=st.floats(0, 19.9),
    stage=st.sampled_from(["step", "input", "save", "evaluate"]),
    others=st.lists(st.integers(30, 50), max_size=4),
)
def test_within_all_deadlines_nothing_hangs(waited, silent, stage, others):
    peers = {n + 1: Peer(Place("step", 12, entered), silent) for n, entered in enumerate(others)}
    assert find_hang((0, Place(stage, 12, 40), waited), peers, LIMITS) is None


class Client:
    """JAX's client for notes, of processes that are threads here; it can stop answering."""

    def __init__(self):
        self.notes, self.open = {}, threading.Event()
        self.open.set()

    def key_value_set(self, name, value, allow_overwrite):
        self.open.wait()
        self.notes[name] = value

    def key_value_dir_get(self, folder):
        self.open.wait()
        return [(n, v) for n, v in self.notes.items() if n.startswith(folder)]


@pytest.fixture
def fast(monkeypatch):
    for name, seconds in (("BEAT_S", 0.02), ("LOOK_S", 0.02), ("QUIET_S", 0.05)):
        monkeypatch.setattr(f"moejax.runtime.watch.{name}", seconds)


def watched(client, index, found, deadlines):
    watch = Watch()
    return watch, Watchdog(watch, deadlines, Processes(index, 2, client), found.append)


def until(condition):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 10
        time.sleep(0.01)


def test_two_processes_find_that_one_of_them_does_not_go_on(fast):
    client, found, limits = Client(), ([], []), Deadlines({"step": 0.4, "input": 0.4})
    (first, one), (second, two) = (watched(client, n, found[n], limits) for n in (0, 1))
    for step in range(1, 6):
        for watch in (first, second):
            watch.enter("input", step)
            time.sleep(0.02)
            watch.enter("step", step)
    first.enter("input", 6)
    second.enter("input", 6)
    first.enter("step", 6)
    until(lambda: all(found))
    assert "process 1 is behind: it is in input of step 6" in found[0][0]
    assert "process 1 itself is behind" in found[1][0]
    one.close(), two.close()


def test_a_process_tells_where_it_is_at_once(monkeypatch):
    monkeypatch.setattr("moejax.runtime.watch.BEAT_S", 60)
    client = Client()
    _, dog = watched(client, 1, [], Deadlines({}))
    until(lambda: "moejax/pulse/1" in client.notes)
    dog.close()


def test_a_coordinator_that_does_not_answer_is_named(fast):
    client, found, limits = Client(), [], Deadlines({"step": 60}, silent_s=0.4)
    watch, dog = watched(client, 1, found, limits)
    watch.enter("step", 3)
    time.sleep(0.1)
    client.open.clear()
    until(lambda: found)
    assert found[0].startswith("process 0 is behind")
    dog.close()
    client.open.set()


def test_a_process_that_has_stopped_telling_is_named(fast):
    """What it said last is still there, and read again and again."""
    client, found, limits = Client(), ([], []), Deadlines({"step": 60}, silent_s=0.4)
    (first, one), (second, two) = (watched(client, n, found[n], limits) for n in (0, 1))
    for watch in (first, second):
        watch.enter("step", 3)
    until(lambda: 1 in one._heard)
    time.sleep(0.5)
    assert not any(found)  # both tell
    two.close()
    until(lambda: found[0])
    assert found[0][0].startswith("process 1 is behind: it is in step 3")
    one.close()


def test_a_stage_without_a_deadline_may_take_any_time(fast):
    found = []
    watch = Watch()
    dog = Watchdog(watch, Deadlines({"step": 0.05}), hang=found.append)
    watch.enter("compile")
    time.sleep(0.3)
    assert not found
    watch.enter("step", 1)
    until(lambda: found)
    dog.close()


def test_a_hung_process_shows_its_stacks_and_ends_with_124():
    program = textwrap.dedent(
        """
        import time
        from moejax.runtime.watch import Deadlines, Watch, Watchdog
        watch = Watch()
        Watchdog(watch, Deadlines({"input": 0.3}))
        watch.enter("input", 7)
        def endless_loop():
            while True:
                pass
        try:
            endless_loop()
        finally:
            print("was not ended at once")
        """
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == HANG
    assert "moejax: hang: process 0 has been" in ended.stderr
    assert "endless_loop" in ended.stderr
    assert not ended.stdout
