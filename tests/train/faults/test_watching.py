"""The log of events: which steps each report is of, whatever lies between steps."""

import json
from types import SimpleNamespace

import pytest

from moejax.config.schema import WatchdogConfig
from moejax.report.goodput import REPEATED, ROLLED_BACK, read_goodput
from moejax.runtime import watch as watch_module
from moejax.runtime.watch import Watch
from moejax.train.faults import watching
from moejax.train.faults.watching import ProcessLog


@pytest.fixture
def watched(tmp_path):
    """A watch that writes a log, as that of a run does, and the log."""
    log = ProcessLog(tmp_path, 0)
    log.write("begin", step=0)
    yield Watch(log.ended), log
    log.close()


def go(watch, first, last, *, save=(), evaluate=()):
    """Enters the stages of some steps, as the loop does."""
    watch.enter("input", first)
    for step in range(first, last + 1):
        watch.enter("step", step)
        for stage in ("save",) * (step in save) + ("evaluate",) * (step in evaluate):
            with watch.during(stage, step):
                pass
        watch.enter("input", step + 1)


def events(run_dir, name):
    """The events of a name in the log."""
    lines = map(json.loads, (run_dir / "events" / "0.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


def reported(run_dir):
    """The first and the last step of each report of steps."""
    return [(line["first"], line["step"]) for line in events(run_dir, "steps")]


def test_a_step_is_in_one_report_whatever_follows_it(tmp_path, watched):
    watch, log = watched
    go(watch, 1, 8, save=(3, 6), evaluate=(3, 4))
    watch.enter("finish")
    log.flush()
    done = [step for first, last in reported(tmp_path) for step in range(first, last + 1)]
    assert done == list(range(1, 9))
    seconds = read_goodput(tmp_path).seconds
    assert (seconds[ROLLED_BACK], seconds[REPEATED]) == (0, 0)


def test_a_run_that_is_stopped_reports_no_step_below_its_last(tmp_path, watched):
    watch, log = watched
    go(watch, 61, 61)
    watch.enter("step", 62)
    with watch.during("save", 62):
        pass
    watch.enter("finish")  # of no step
    watch.enter("end", 0)
    log.flush()
    assert reported(tmp_path) == [(61, 62), (63, 62)], "the second is the rest of step 62"


def test_a_run_that_goes_back_begins_again_below(tmp_path, watched):
    watch, log = watched
    go(watch, 1, 6, save=(4,))
    watch.enter("step", 7)  # was started before the run knew
    watch.enter("restore", 7)
    go(watch, 5, 9)
    log.flush()
    assert reported(tmp_path) == [(1, 4), (5, 7), (5, 9)]


def test_steps_are_told_every_ten_seconds_and_with_the_stages_that_they_took(
    tmp_path, watched, monkeypatch
):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(watching, "time", clock)
    monkeypatch.setattr(watch_module, "time", clock)
    watch, log = Watch(watched[1].ended), watched[1]
    log._written = 0.0
    for step in range(1, 9):
        watch.enter("input", step)
        clock.now += 0.5
        watch.enter("step", step)
        clock.now += 2.0
    watch.enter("finish")
    log.flush()
    assert reported(tmp_path) == [(1, 5), (6, 8)], "the fifth ends after 12.5 seconds"
    spent = [(line["input_s"], line["step_s"]) for line in events(tmp_path, "steps")]
    assert spent == [(2.5, 10.0), (1.5, 6.0)]


def test_a_stage_that_goes_on_is_told_once_with_all_its_seconds(tmp_path, watched):
    _, log = watched
    for seconds in (1.0, 2.0):
        log.ended("evaluate", 4, seconds)
    log.ended("save", 4, 0.25)
    log.ended("evaluate", 8, 5.0)
    log.flush()
    stages = [(s["stage"], s["step"], s["seconds"]) for s in events(tmp_path, "stage")]
    assert stages == [("evaluate", 4, 3.0), ("save", 4, 0.25), ("evaluate", 8, 5.0)]


def test_each_stage_has_its_deadline():
    limits = dict(start_s=1, step_s=2, evaluate_s=3, save_s=4, compile_s=5, silent_s=6)
    found = watching.deadlines_of(WatchdogConfig(**{k: float(v) for k, v in limits.items()}))
    assert found.silent_s == 6
    by_limit = [("start", "plan", "restore"), ("input", "step"), ("evaluate", "sample")]
    by_limit += [("save", "finish"), ("compile",)]
    for limit, stages in enumerate(by_limit, 1):
        assert {found.by_stage[stage] for stage in stages} == {limit}


def test_a_hang_is_in_the_log_with_its_stage_before_the_process_ends(
    tmp_path, watched, monkeypatch
):
    watch, log = watched
    ended = []
    monkeypatch.setattr(watching, "end_process", lambda *what: ended.append(what))
    go(watch, 1, 3)
    watch.enter("save", 3)
    watching._end_hung(watch, log, "process 1 is behind")
    lines = list(map(json.loads, (tmp_path / "events" / "0.jsonl").read_text().splitlines()))
    assert lines[-2]["event"] == "steps"
    last = lines[-1]
    del last["time"]
    assert last == {"event": "hang", "step": 3, "stage": "save", "text": "process 1 is behind"}
    assert ended == [("process 1 is behind", tmp_path / "events" / "0.hang.txt")]
