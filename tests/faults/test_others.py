"""What others do to a run does not disturb it, or is told in one line."""

import json
import subprocess
import time

import pytest

from moejax.report.goodput import read_goodput
from moejax.report.page import page_data
from tests.faults.lab import STEPS, undisturbed, with_wrong_clock
from tests.faults.strangers import (
    LATE,
    LATE_S,
    Strangers,
    process_of_another_run,
    second_run,
    visited,
)
from tests.integration.runs import records
from tests.launch.test_emulate import needs_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.faults]


@pytest.mark.parametrize("member", [0, 1])
def test_a_wrong_and_jumping_clock_does_not_disturb(lab, member):
    name = f"clock-{member}"
    trial = lab.trial(name, 12, wrapped=with_wrong_clock(member))
    undisturbed(lab, name, trial)
    assert "hang" not in trial.out
    run_dir = lab.folder / name
    steps = [r["step"] for r in records(run_dir, "step")]
    assert steps == list(range(2, STEPS + 1))
    times = [
        json.loads(line)["time"]
        for line in (run_dir / "events" / f"{member}.jsonl").read_text().splitlines()
    ]
    assert max(abs(time.time() - t) for t in times) > 3600, "the clock was right"
    found = read_goodput(run_dir)
    assert min(found.seconds.values()) >= 0
    assert 0 <= found.share <= 1
    assert page_data([run_dir])


@pytest.mark.parametrize("host", [None, pytest.param("another", marks=needs_namespaces)])
def test_a_second_run_in_the_directory_is_refused(lab, host):
    name, ends = f"second-{host}", []
    trial = visited(lab, name, 12, lambda _: ends.append(second_run(lab, name, host)))
    assert ends[0].returncode == 2, ends[0].stdout
    lines = ends[0].stdout.splitlines()
    assert [line[:4] for line in sorted(lines)] == ["[p0]", "[p1]"], lines
    assert all("moejax: error: run directory is in use." in line for line in lines), lines
    undisturbed(lab, name, trial)


def test_strangers_at_the_coordinators_port_do_not_disturb(lab):
    strangers, met = Strangers(), []
    try:
        trial = lab.trial(
            "strangers",
            2,
            lambda _: met.append(len(strangers.heard)),
            wrapped=LATE,
            begun=strangers.begin,
        )
    finally:
        strangers.end()
    undisturbed(lab, "strangers", trial)
    assert strangers.refused > 0, "none came before the port was open"
    assert met[0] > 0, "none came before the first steps"
    assert len(strangers.heard) > met[0] + 20, "few came while it trained"


def test_a_process_of_another_run_does_not_disturb_one_that_trains(lab):
    ends = []
    trial = visited(
        lab, "visited", 12, lambda run: ends.append(process_of_another_run(lab, "visitor", run))
    )
    assert ends[0].returncode == 6, ends[0].stdout
    assert ends[0].stdout.count("\n") == 1, ends[0].stdout
    assert "a run that has begun answers there" in ends[0].stdout
    undisturbed(lab, "visited", trial)


def test_a_process_of_another_run_that_comes_to_the_start_ends_it_in_one_line(lab):
    late = tuple(word.replace(f"sleep {LATE_S}", "sleep 100") for word in LATE)
    first = subprocess.Popen(lab.command("met", late), **lab.here)
    try:
        visitor = process_of_another_run(lab, "visitor", first.pid, patience_s=60)
        out = first.communicate(timeout=60)[0]
    finally:
        first.terminate()
    assert (first.returncode, visitor.returncode) == (2, 2), out + visitor.stdout
    text = "moejax: error: processes do not fit together. Process 3 has a program of that many"
    assert out.count(text) == visitor.stdout.count(text) == 1
    assert not (lab.folder / "met").exists()
