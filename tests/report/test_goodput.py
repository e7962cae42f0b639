"""Goodput: the arithmetic on logs that are made up, and what a log cannot tell."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.errors import InputError
from moejax.report.goodput import (
    DOWN,
    INPUT,
    REPEATED,
    ROLLED_BACK,
    TRAINING,
    UNKNOWN,
    read_goodput,
)
from moejax.report.goodput_command import main


def write(run_dir, *events):
    """Writes a log of events (time, name, values)."""
    (run_dir / "events").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"time": time, "event": name, **values}) for time, name, values in events]
    (run_dir / "events" / "0.jsonl").write_text("\n".join(lines) + "\n")
    return run_dir


def start(begin, first, last, *, per_step=1.0, end=None):
    """A start of ten seconds, whose steps are told in pairs; it is killed unless `end` is given."""
    time = begin + 10
    events = [
        (begin, "begin", {"step": 0}),
        (begin + 4, "stage", {"stage": "start", "seconds": 4}),
        (time, "stage", {"stage": "compile", "seconds": 6}),
    ]
    for step in range(first, last, 2):
        time += 2 * per_step + 0.5
        told = {"first": step, "step": step + 1, "step_s": 2 * per_step, "input_s": 0.5}
        events.append((time, "steps", told))
    if end is not None:
        events.append((time, "end", {"step": last, **end}))
    return events, time


def test_a_run_without_a_fault(tmp_path):
    events, time = start(100, 1, 10, end={})
    found = read_goodput(write(tmp_path, *events))
    assert found.total == pytest.approx(time - 100)
    assert found.seconds[TRAINING] == 10
    assert found.seconds[INPUT] == 2.5
    assert (found.seconds["start"], found.seconds["compile"]) == (4, 6)
    assert found.share == pytest.approx(10 / 22.5)
    assert found.restarts == []


def test_steps_that_a_later_start_does_again_are_lost(tmp_path):
    one, killed = start(100, 1, 10)
    # From the checkpoint of step 5: of the pair 5, 6 one step is lost, of those behind all.
    two, _ = start(killed + 30, 6, 15, end={"error": "RunError"})
    found = read_goodput(write(tmp_path, *one, *two))
    assert found.seconds[REPEATED] == 5
    assert found.seconds[TRAINING] == 5 + 10
    assert found.seconds[DOWN] == 30
    (restart,) = found.restarts
    assert (restart.step, restart.lost, restart.down) == (5, 5, 30)
    assert restart.recovered == 30 + 10 + 2.5
    assert restart.how == "killed, or still running"


def test_steps_that_a_run_rolled_back_are_lost(tmp_path):
    one, time = start(100, 1, 10)
    restored = (time + 5, "stage", {"stage": "restore", "seconds": 5})
    # Back to step 6, on to 12; killed and gone on from 8, and there back to 3.
    more, time = start(time - 5, 7, 12)
    two, _ = start(time + 30, 9, 14)
    three, _ = start(time + 70, 4, 20, end={})
    events = [*one, restored, *more[3:], *two, *three[3:]]
    found = read_goodput(write(tmp_path, *events))
    # 7 to 10; then 9 to 14, and of what was before 4 to 8.
    assert found.seconds[ROLLED_BACK] == 4 + 6 + 5
    assert found.seconds[REPEATED] == 4, "9 to 12"
    assert found.seconds[TRAINING] == 3 + 16
    assert found.seconds["restore"] == 5
    (restart,) = found.restarts
    assert (restart.step, restart.lost) == (8, 4)


def test_a_hang_and_an_error_are_told(tmp_path):
    one, time = start(0, 1, 4)
    hang = (time + 7, "hang", {"step": 4, "text": "process 1 is behind"})
    two, _ = start(100, 3, 6, end={"error": "DivergedError"})
    three, _ = start(200, 3, 6, end={})
    found = read_goodput(write(tmp_path, *one, hang, *two, *three))
    assert [r.how for r in found.restarts] == ["process 1 is behind", "ended by DivergedError"]
    assert found.seconds[UNKNOWN] == 7  # what the hang took


def test_a_start_that_failed_before_a_step_loses_no_step(tmp_path):
    one, _ = start(0, 1, 4)
    nothing = [(50, "begin", {"step": 0}), (60, "stage", {"stage": "start", "seconds": 10})]
    two, _ = start(100, 3, 6, end={})
    found = read_goodput(write(tmp_path, *one, *nothing, *two))
    assert [r.lost for r in found.restarts] == [0, 0]
    assert found.restarts[0].recovered is None
    assert found.seconds[REPEATED] == 2


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 20), st.floats(0.1, 5)), min_size=1, max_size=6
    )
)
def test_all_time_is_in_one_class(tmp_path_factory, starts):
    run_dir, events, time = tmp_path_factory.mktemp("run"), [], 0.0
    for back, steps, per_step in starts:
        first = max(1, 20 - back)
        more, time = start(time + 3, first, first + steps, per_step=per_step)
        events += more
    found = read_goodput(write(run_dir, *events))
    assert found.total == pytest.approx(time - 3)
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert 0 <= found.share <= 1


def test_the_command_shows_it_and_half_a_line_does_not_disturb(tmp_path, capsys):
    events, killed = start(100, 1, 10)
    more, _ = start(killed + 30, 6, 15, end={})
    run_dir = write(tmp_path, *events, *more)
    with (run_dir / "events" / "0.jsonl").open("a") as file:
        file.write('{"time": 1e9, "eve')
    assert main([str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "steps done again" in shown
    assert main([str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goodput"] == pytest.approx(15 / sum(found["seconds"].values()))


@pytest.mark.parametrize("text", [None, "", "{}\n", "[1]\n"])
def test_a_directory_without_a_run_is_refused(tmp_path, capsys, text):
    if text is not None:
        write(tmp_path)
        (tmp_path / "events" / "0.jsonl").write_text(text)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(InputError):
        read_goodput(tmp_path)
