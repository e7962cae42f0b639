"""What processes do together after a save, and which steps are kept."""

import json
import shutil

import jax.numpy as jnp
import pytest

from moejax.checkpoint.digests import add_up
from moejax.checkpoint.manifest import MANIFEST, find_damage, finished_steps, read_manifest
from moejax.checkpoint.writer import OtherProcessError, commit, prune, tell_first
from tests.checkpoint.test_manifest import write_step
from tests.threads import everywhere

KEY = "weights/params.groups.0.blocks.0.moe.w_in"


class HalfSums:
    """The sums of a process that has every other layer."""

    def __init__(self, processes):
        self.processes = processes

    def here(self):
        facts = add_up({KEY: jnp.arange(24.0).reshape(2, 3, 4)}).here()[KEY]
        layer = self.processes.index
        one = add_up({KEY: jnp.arange(24.0).reshape(2, 3, 4)[layer : layer + 1]}).here()[KEY]
        return {KEY: facts | {"parts": [[[layer, 0], [1, 3], 4, one["parts"][0][3]]]}}


def step_without_manifest(directory):
    step = write_step(directory, 60)
    (step / MANIFEST).unlink()
    return step


def test_two_processes_write_the_manifest_that_one_would(tmp_path):
    step = step_without_manifest(tmp_path)
    for _ in range(2):  # the same names again
        found = everywhere(2, lambda p: (commit(step, {"step": 60}, HalfSums(p), p), p._client)[1])
        assert found[0].kept == {}, "left in the service"
    manifest = read_manifest(step)
    assert find_damage(step, manifest, "full") is None
    whole = add_up({KEY: jnp.arange(24.0).reshape(2, 3, 4)})
    (step / MANIFEST).unlink()
    everywhere(1, lambda p: commit(step, {"step": 60}, whole, p))
    assert read_manifest(step) == manifest
    assert len(manifest["arrays"][KEY]["digests"]) == 2


def test_an_error_of_one_process_is_that_of_the_save(tmp_path):
    step = step_without_manifest(tmp_path)

    def run(processes):
        if processes.first:
            with pytest.raises(OtherProcessError, match=r"process 1: No space left on device"):
                commit(step, {"step": 60}, HalfSums(processes), processes)
        else:
            tell_first(step, OSError("No space left on device"), processes)

    everywhere(2, run)
    assert finished_steps(tmp_path) == []


def damage(step):
    (step / "weights" / "data").write_bytes(b"")


def test_a_newer_step_that_is_not_whole_does_not_push_out_an_older_one(tmp_path):
    for number in (10, 20, 30, 40):
        write_step(tmp_path, number)
    damage(tmp_path / "40")
    (tmp_path / "30" / MANIFEST).write_text("{")
    prune(tmp_path, 2)
    assert sorted(finished_steps(tmp_path)) == [10, 20, 30, 40]
    shutil.rmtree(tmp_path / "30")
    write_step(tmp_path, 30)
    prune(tmp_path, 2)
    assert sorted(finished_steps(tmp_path)) == [20, 30, 40]
    assert json.loads((tmp_path / "20" / MANIFEST).read_text())["step"] == 20
