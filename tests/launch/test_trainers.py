"""The processes of one host (launch/trainers.py): what they said, without starting any."""

import json
import sys

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
