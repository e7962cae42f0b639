"""The processes of one host (launch/trainers.py): what they said, without starting any."""

import json
import sys
from pathlib import Path

import pytest

from tests.launch.modules import module

trainers = module("trainers")
Assignment = sys.modules["assign"].Assignment


@pytest.fixture
def host(tmp_path):
    """Host 2, of two processes."""
    host = trainers.Host(2, ["true"], each=2, devices=None, logs=tmp_path)
    with trainers.Trainers(host, interrupts=None) as found:
        yield found


def test_processes_wait_for_the_change_that_they_saved_for_and_for_no_other(host):
    change = Assignment(4, 0, (0, 2), planned=True)
    first, second = (host._of(local).with_suffix(".waits") for local in (0, 1))
    first.write_text("4")
    assert not host.waits(change), "the second has not saved"
    second.write_text("3")
    assert not host.waits(change), "it saved for the change before"
    second.write_text("4")
    assert host.waits(change)


def test_processes_are_told_their_places_in_the_program(host):
    """Host 2 comes after host 0, whose two processes are 0 and 1."""
    host.tell(Assignment(5, 0, (0, 2, 3), planned=True, why="host 1 leaves", coordinator="a:1"))
    said = [json.loads(host._of(local).read_text()) for local in (0, 1)]
    assert [one["process"] for one in said] == [2, 3]
    for one in said:
        assert (one["processes"], one["generation"], one["coordinator"]) == (6, 5, "a:1")
    host.tell(Assignment(6, 0, (0, 3), planned=True))
    said = [json.loads(host._of(local).read_text()) for local in (0, 1)]
    assert [one["process"] for one in said] == [None, None]


class Group:
    """Stands for the processes of one start (launch/group.py)."""

    def __init__(self, interrupts, guard):
        self.started = []

    def start(self, place, command, variables, log):
        with log:
            log.write(b"begun ")
        self.started.append((place.name, variables))

    def kill(self):
        self.started = None


def test_processes_are_started_in_their_places_and_logs_are_kept(host, tmp_path, monkeypatch):
    monkeypatch.setattr(trainers, "Group", Group)
    host.start(Assignment(3, 0, (0, 2, 3), coordinator="a:1"))
    assert host.running
    for local, (name, variables) in enumerate(host._group.started):
        assert name == f"h2-{local}"
        assert variables["MOEJAX_HOST"] == "h2"
        assert variables["MOEJAX_COORDINATOR"] == "a:1"
        assert (variables["MOEJAX_PROCESS"], variables["MOEJAX_PROCESSES"]) == (str(2 + local), "6")
        told = json.loads(Path(variables["MOEJAX_ASSIGNMENT"]).read_text())
        assert told["process"] == 2 + local
    host.kill()
    assert not host.running
    host.start(Assignment(4, 0, (2,), coordinator="a:2"))
    assert [v["MOEJAX_PROCESS"] for _, v in host._group.started] == ["0", "1"]
    for local in (0, 1):
        assert (tmp_path / f"h2-{local}.log").read_text() == "begun begun ", "of both starts"


def test_another_launcher_begins_logs_anew_and_one_process_has_its_hosts_name(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(trainers, "Group", Group)
    (tmp_path / "h1.log").write_text("of before")
    alone = trainers.Host(1, ["true"], each=1, devices=None, logs=tmp_path)
    with trainers.Trainers(alone, interrupts=None) as found:
        found.start(Assignment(1, 0, (0, 1), coordinator="a:1"))
        assert [name for name, _ in found._group.started] == ["h1"]
    assert (tmp_path / "h1.log").read_text() == "begun "
