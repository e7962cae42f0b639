"""Goodput: the arithmetic on logs that are made up, and what a log cannot tell."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.errors import InputError
from moejax.report import goodput
from moejax.report.goodput import (
    DOWN,
    INPUT,
    REPEATED,
    ROLLED_BACK,
    TRAINING,
    UNKNOWN,
    main,
    read_goodput,
)
from moejax.report.timeline import goodput_data


def write(run_dir, *events):
    """Writes a log of events (time, name, values)."""
    (run_dir / "events").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"time": time, "event": name, **values}) for time, name, values in events]
    (run_dir / "events" / "0.jsonl").write_text("\n".join(lines) + "\n")
    return run_dir


def write_metrics(run_dir, *lines):
    """Writes metrics (time, name, step) of a run that goes back to step 6, if it does."""
    told = [dict(zip(("time", "event", "step"), line, strict=True), to=6) for line in lines]
    text = "".join(json.dumps(one) + "\n" for one in told)
    (run_dir / "metrics.jsonl").write_text(text + '{"time": 1e9, "event": "st')


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
    again = (time + 79, "stage", {"stage": "restore", "seconds": 5})
    events = [*one, restored, *more[3:], *two, again, *three[3:]]
    found = read_goodput(write(tmp_path, *events))
    # 7 to 10; then 9 to 14, and of what was before 4 to 8.
    assert found.seconds[ROLLED_BACK] == 4 + 6 + 5
    assert found.seconds[REPEATED] == 4, "9 to 12"
    assert found.seconds[TRAINING] == 3 + 16
    assert found.seconds["restore"] == 10
    (restart,) = found.restarts
    assert (restart.step, restart.lost) == (8, 4)


def test_logs_whose_first_steps_are_one_too_low_tell_of_nothing_rolled_back(tmp_path):
    """As moejax wrote them at first: behind a save, and at a stop."""
    events, time = start(100, 1, 4)
    events += [
        (time + 1, "stage", {"stage": "save", "step": 4, "seconds": 1}),
        (time + 4, "steps", {"first": 4, "step": 6, "step_s": 3}),  # of steps 5 and 6
        (time + 5, "stage", {"stage": "save", "step": 6, "seconds": 1}),
        (time + 6, "steps", {"first": 6, "step": 0, "step_s": 1}),  # the rest of step 6
        (time + 6, "end", {"step": 0}),
    ]
    more, _ = start(time + 16, 7, 8, end={})
    found = read_goodput(write(tmp_path, *events, *more))
    assert (found.seconds[ROLLED_BACK], found.seconds[REPEATED]) == (0, 0)
    assert found.seconds[TRAINING] == 4 + 3 + 1 + 2
    (restart,) = found.restarts
    assert (restart.step, restart.lost) == (6, 0)


def test_what_is_left_of_a_step_is_lost_with_it(tmp_path):
    one, time = start(100, 1, 4)
    one.append((time + 2, "steps", {"first": 5, "step": 4, "step_s": 2}))
    two, _ = start(time + 12, 3, 4, end={})
    found = read_goodput(write(tmp_path, *one, *two))
    assert found.seconds[REPEATED] == 2 + 2, "steps 3 and 4, and the rest of 4"
    assert found.seconds[TRAINING] == 2 + 2


def test_steps_that_metrics_tell_of_behind_the_last_event_are_lost_too(tmp_path):
    """A kill leaves metrics of each step, and events every ten seconds."""
    one, time = start(100, 1, 10)
    two, _ = start(time + 34, 6, 15, end={})
    run_dir = write(tmp_path, *one, *two)
    lines = [(time + step - 10, "step", step) for step in (9, 10, 12, 14)]
    lines += [(time + 34 + 10 + 2 + step - 6, "step", step) for step in (7, 8, 15)]
    write_metrics(run_dir, *lines, (time + 2, "note", 0))
    found = read_goodput(run_dir)
    (restart,) = found.restarts
    assert (restart.step, restart.lost) == (5, 9), "6 to 14, though events end at 10"
    assert restart.down == 30, "four seconds of 34 were steps 11 to 14"
    assert found.seconds[REPEATED] == 5 + 4
    assert found.seconds[TRAINING] == 5 + 10
    assert goodput_data(run_dir)["lost"] == 9, "the page says the same"


def test_metrics_of_steps_that_a_run_rolled_back_are_no_last_word(tmp_path):
    one, time = start(100, 1, 10)
    two, _ = start(time + 30, 7, 8, end={})
    run_dir = write(tmp_path, *one, *two)
    lines = [(100, "start", 0), (time + 2, "step", 12), (time + 3, "rolled_back", 12)]
    write_metrics(run_dir, *lines, (time + 9, "step", 7))
    (restart,) = read_goodput(run_dir).restarts
    assert (restart.step, restart.lost) == (6, 1), "7 was done again; 7 to 12 were rolled back"


def test_a_start_that_was_killed_before_its_first_report_lost_what_metrics_tell(tmp_path):
    one, time = start(100, 1, 10)
    two, killed = start(time + 30, 9, 9)  # its first step is 9, and no event tells of it
    three, _ = start(killed + 20, 9, 10, end={})
    run_dir = write(tmp_path, *one, *two, *three)
    lines = [(killed - 1, "start", 8), (killed + 1, "first_step", 9), (killed + 2, "step", 10)]
    write_metrics(run_dir, *lines)
    found = read_goodput(run_dir)
    assert [(r.step, r.lost) for r in found.restarts] == [(8, 2), (8, 2)]
    assert found.seconds[REPEATED] == 2 + 2


def test_every_class_of_time_has_a_colour_of_its_own():
    script = (Path(goodput.__file__).parent / "goodput.js").read_text()
    classes = re.search(r"const CLASSES = \{(.*?)\}", script, re.DOTALL)[1]
    known = dict(re.findall(r'"?([a-z][a-z ]+)"?: "(#[0-9a-f]{6})"', classes))
    wanted = {TRAINING, REPEATED, ROLLED_BACK, INPUT, DOWN, UNKNOWN, *goodput.CLASSES}
    assert set(known) == wanted
    assert len(set(known.values())) == len(wanted)


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
