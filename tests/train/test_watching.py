"""The log of events: which steps each report is of, whatever lies between steps."""

import json

import pytest

from moejax.report.goodput import REPEATED, ROLLED_BACK, read_goodput
from moejax.runtime.watch import Watch
from moejax.train.watching import ProcessLog


@pytest.fixture
def watched(tmp_path):
    """A watch that writes a log, as that of a run does, and the log."""
    log = ProcessLog(tmp_path, 0)
    log.write("begin", 0)
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


def reported(run_dir):
    """The first and the last step of each report of steps."""
    lines = map(json.loads, (run_dir / "events" / "0.jsonl").read_text().splitlines())
    return [(line["first"], line["step"]) for line in lines if line["event"] == "steps"]


def test_a_step_is_in_one_report_whatever_follows_it(tmp_path, watched):
    watch, log = watched
    go(watch, 1, 8, save=(3, 6), evaluate=(3, 4))
    watch.enter("finish")
    log.tell()
    done = [step for first, last in reported(tmp_path) for step in range(first, last + 1)]
    assert done == list(range(1, 9))
    seconds = read_goodput(tmp_path).seconds
    assert (seconds[ROLLED_BACK], seconds[REPEATED]) == (0, 0)


def test_a_run_that_is_stopped_reports_no_step_below_its_last(tmp_path, watched):
    watch, log = watched
    watch.enter("input", 61)
    watch.enter("step", 61)
    watch.enter("input", 62)
    watch.enter("step", 62)
    with watch.during("save", 62):
        pass
    watch.enter("finish")  # of no step
    watch.enter("end", 0)
    log.tell()
    assert reported(tmp_path) == [(61, 62), (63, 62)], "the second is the rest of step 62"


def test_a_run_that_goes_back_begins_again_below(tmp_path, watched):
    watch, log = watched
    go(watch, 1, 6, save=(4,))
    watch.enter("step", 7)  # was started before the run knew
    watch.enter("restore", 7)
    go(watch, 5, 9)
    log.tell()
    assert reported(tmp_path) == [(1, 4), (5, 7), (5, 9)]
