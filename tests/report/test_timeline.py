"""Which process failed first, and how much of long logs a page reads."""

import json

import pytest

from moejax.html import embed
from moejax.report import timeline
from moejax.report.goodput import Start, read_goodput
from moejax.report.page import run_data
from moejax.report.runs import RunRecord
from moejax.report.timeline import (
    KILLED,
    SHOWN_PROCESSES,
    first_failed,
    goodput_data,
)
from tests.report.runs import events_of_start, usual_run, write_events

HANG = {"event": "hang", "text": "process 2 is behind: it is in step 9. Process 0 waits 9 s."}


def data(folder):
    found = goodput_data(folder)
    assert found is not None
    return found


def ended(outcome, how, time=1.0):
    return Start(0.0, time, outcome=outcome, how=how)


OWN, LOST = "ended by ValueError", "ended by JaxRuntimeError"


@pytest.mark.parametrize(
    ("attempt", "first", "how"),
    [
        ({0: ended("hang", HANG["text"]), 1: ended("silent", "?")}, 2, HANG["text"]),
        ({0: ended("hang", "no process is behind the others")}, None, "no process is"),
        ({0: ended("error", LOST, 1), 1: ended("error", OWN, 2)}, 1, OWN),
        ({0: ended("error", OWN, 2), 1: ended("error", OWN, 1)}, 1, OWN),
        ({0: ended("silent", "?"), 1: ended("error", OWN)}, 1, OWN),
        ({0: ended("silent", "?"), 1: ended("error", LOST)}, 0, KILLED),
        ({0: ended("error", LOST, 2), 1: ended("error", LOST, 1)}, 1, LOST),
        ({0: ended("silent", "?", 3), 1: ended("silent", "?", 2)}, None, KILLED),
        ({0: ended("ended", "ended"), 1: ended("silent", "?")}, 1, KILLED),
        ({0: ended("ended", "ended"), 1: ended("ended", "ended")}, None, "ended"),
        ({}, None, KILLED),
    ],
)
def test_who_failed_first(attempt, first, how):
    found = first_failed(attempt)
    assert found[0] == first
    assert found[1].startswith(how)


def test_a_restart_says_what_the_command_says_and_who_failed(tmp_path):
    folder = usual_run(tmp_path / "a")
    found, command = data(folder), read_goodput(folder)
    assert found["goodput"] == command.share
    assert sum(found["seconds"].values()) == pytest.approx(command.total)
    (row,) = found["restarts"]
    assert (row["first"], row["lost"], row["step"]) == (1, 100, 150)
    assert row["how"].startswith("process 1 is behind")
    assert found["recovery"] == [row["recovered"], row["recovered"]]
    assert [one["process"] for one in found["processes"]] == [0, 1]
    first, second = found["processes"][1]["starts"]
    assert (first[0], first[2], second[2]) == (0, "silent", "ended")
    assert first[1] == 10 + 250, "its last word is the last report of steps"
    assert len(found["processes"][0]["saves"]) == 5 + 7
    assert found["read_whole"]


def test_a_run_without_a_log_has_no_section(tmp_path):
    assert goodput_data(tmp_path) is None
    write_events(tmp_path, [{"event": "steps"}, {"time": 1.0, "event": "end", "step": 0}])
    assert goodput_data(tmp_path) is None


def test_a_process_that_failed_before_its_log_was_opened_shifts_nothing(tmp_path):
    one, two = events_of_start(0, 1, 50), events_of_start(1000, 1, 50, **HANG)
    three = events_of_start(2000, 1, 50, event="end")
    late = events_of_start(1001, 1, 50, event="end", error="ValueError")
    write_events(tmp_path, one + two + three, late + three)
    rows = data(tmp_path)["restarts"]
    assert [(row["first"], row["how"]) for row in rows] == [(None, KILLED), (2, HANG["text"])]


def test_the_page_of_a_run_of_months_stays_small(tmp_path, monkeypatch):
    most = {"SHOWN_RESTARTS": 20, "SHOWN_PROCESSES": 3, "SHOWN_STARTS": 15, "SHOWN_SAVES": 10}
    for name, value in most.items():
        monkeypatch.setattr(timeline, name, value)
    restarts = [
        events_of_start(1e6 + 1000 * number, 1 + 50 * number, 50 * number + 101)
        for number in range(31)
    ]
    events = [event for one in restarts for event in one]
    write_events(tmp_path, *[events] * 5)
    found = data(tmp_path)
    assert (len(found["restarts"]), found["restarts_left_out"]) == (20, 10)
    assert (found["number"], found["lost"]) == (30, 30 * 50)
    assert [one["process"] for one in found["processes"]] == [0, 1, 2]
    assert found["processes_left_out"] == 2
    assert {len(one["starts"]) for one in found["processes"]} == {15}
    assert {len(one["saves"]) for one in found["processes"]} == {9}
    last = max(one["time"] for one in events if one.get("stage") == "save") - 1e6
    assert found["processes"][0]["saves"][-1] == last
    monkeypatch.setattr(timeline, "READ_BYTES", 5 * 2**12)
    part = data(tmp_path)
    assert not part["read_whole"]
    assert part["number"] == 30, "goodput is of all"
    assert part["processes"][0]["starts"][-1] == found["processes"][0]["starts"][-1]
    assert len(embed(run_data(RunRecord("a", tmp_path)))) < 2**14


def test_a_process_that_failed_is_shown_however_many_there_are(tmp_path):
    well = events_of_start(0, 1, 50) + events_of_start(500, 1, 100, event="end")
    ill = events_of_start(0, 1, 50, event="end", error="ValueError")
    ill += events_of_start(500, 1, 100, event="end")
    write_events(tmp_path, *([well] * (SHOWN_PROCESSES + 4)), ill)
    shown = [one["process"] for one in data(tmp_path)["processes"]]
    assert shown[-1] == SHOWN_PROCESSES + 4
    assert len(shown) == SHOWN_PROCESSES


def test_damaged_lines_are_left_out(tmp_path):
    good = events_of_start(0, 1, 100, event="end")
    wrong = [
        {"time": 5.0, "event": "steps", "step": 3},
        {"time": 5.0, "event": "steps", "first": None, "step": 3},
        {"time": 5.0, "event": "stage", "stage": "save", "seconds": "x"},
        {"time": float("nan"), "event": "begin"},
        {"time": float("inf"), "event": "begin"},
        {"time": True, "event": "begin"},
        {"time": 10**400, "event": "begin"},
        {"time": -1.0, "event": "begin"},
    ]
    folder = write_events(tmp_path / "a", good)
    other = write_events(tmp_path / "b", [*good, *wrong])
    (other / "events" / "2.jsonl").write_bytes(b"[" * 5000 + b"\n\xff\n")
    (other / "events" / "notes.jsonl").write_text(json.dumps(good[0]))
    assert data(folder)["seconds"] == data(other)["seconds"]
    assert [one["process"] for one in data(other)["processes"]] == [0, 2]
