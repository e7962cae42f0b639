"""A process follows the place that its supervisor writes down."""

import json
import os
import threading
import time

import pytest

from moejax.errors import InputError, NoMeshError
from moejax.runtime.assignment import VARIABLE, changes_hosts, find_assignment
from moejax.train.start import claim, no_mesh_errors


@pytest.fixture
def place(tmp_path, monkeypatch):
    path = tmp_path / "0.json"
    monkeypatch.setenv(VARIABLE, str(path))
    for name in ("MOEJAX_COORDINATOR", "MOEJAX_PROCESSES", "MOEJAX_PROCESS"):
        monkeypatch.setenv(name, "as it was")

    def write(generation, process, coordinator="", processes=2, why="host 1 leaves"):
        place = {"generation": generation, "process": process, "processes": processes}
        time.sleep(0.01)  # files changed within a tick of the clock look the same
        path.write_text(json.dumps({**place, "coordinator": coordinator, "why": why}))

    write(3, 1, "old:1", processes=3)
    return write


def test_without_a_supervisor_there_is_none(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert find_assignment() is None
    assert not changes_hosts()


def test_a_proposed_change_is_seen_and_taken_once_it_is_made(place, tmp_path):
    mine = find_assignment()
    assert mine.proposed is None
    place(4, 0)
    assert mine.proposed == "host 1 leaves"
    assert mine.proposed == "host 1 leaves", "also when the file has not changed since"

    def make():
        while not (tmp_path / "0.waits").exists():
            time.sleep(0.01)
        assert (tmp_path / "0.waits").read_text() == "4"
        place(4, 0, "new:2")

    supervisor = threading.Thread(target=make)
    supervisor.start()
    assert mine.take()
    supervisor.join()
    names = ("MOEJAX_COORDINATOR", "MOEJAX_PROCESSES", "MOEJAX_PROCESS")
    assert [os.environ[name] for name in names] == ["new:2", "2", "0"]
    assert mine.proposed is None


def test_a_change_that_is_replaced_before_it_is_made(place, tmp_path):
    mine = find_assignment()
    place(4, 0)
    assert mine.proposed

    def replace():
        while not (tmp_path / "0.waits").exists():
            time.sleep(0.01)
        place(5, 1)
        while (tmp_path / "0.waits").read_text() != "5":
            time.sleep(0.01)
        place(5, 1, "new:3")

    supervisor = threading.Thread(target=replace)
    supervisor.start()
    assert mine.take()
    supervisor.join()
    assert os.environ["MOEJAX_PROCESS"] == "1"


def test_a_process_that_is_no_longer_wanted_is_told(place):
    mine = find_assignment()
    place(4, None)
    assert mine.proposed
    assert not mine.take()


def test_a_mesh_that_does_not_fit_is_told_apart_where_hosts_change(place, monkeypatch):
    with (
        pytest.raises(NoMeshError, match=r"no mesh fits 3 devices\. a rule"),
        no_mesh_errors([1, 2, 3]),
    ):
        raise InputError("a rule")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(InputError, match="a rule"), no_mesh_errors([1, 2, 3]):
        raise InputError("a rule")


def test_a_run_waits_for_the_one_before_to_let_its_directory_go(tmp_path):
    before = claim(tmp_path)
    with pytest.raises(InputError):
        claim(tmp_path, 0.3)
    threading.Timer(0.3, before.close).start()
    claim(tmp_path, 30).close()
