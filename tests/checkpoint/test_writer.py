import functools
import json
import re
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.checkpoint.digests import add_up
from moejax.checkpoint.find import locate, newest
from moejax.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    find_damage,
    finished_steps,
    read_manifest,
)
from moejax.checkpoint.writer import (
    Checkpoints,
    OtherProcessError,
    commit,
    prune,
    restore_items,
    restore_state,
    tell_first,
)
from moejax.comm.weights.compressed import ReduceState
from moejax.errors import InputError, RunError
from moejax.step.state import TrainState
from tests.cases import drawn_state, small_config, step_for
from tests.checkpoint.test_manifest import write_step
from tests.threads import everywhere

MESHES = [(1, 1, 1, 1), (1, 1, 8, 1), (2, 1, 2, 2), (1, 2, 2, 2), (8, 1, 1, 1)]


@functools.cache
def case(mesh=(1, 1, 1, 1), name="adamw"):
    """A trainer and, on the first mesh, a state."""
    train_step = step_for(
        small_config(mesh, optimizer={"name": name}, router={"bias_update_rate": 0.01})
    )
    return train_step, drawn_state(train_step) if mesh == (1, 1, 1, 1) else None


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with checkpoints of steps 1 and 2, written once; tests damage copies."""
    directory = tmp_path_factory.mktemp("written") / "checkpoints"
    _, state = case()
    writer = Checkpoints(directory, keep=3)
    for step in (1, 2):
        writer.save(step, state, {"config": {"run_dir": f"step {step}"}})
    writer.close()
    return directory


@pytest.fixture
def directory(written, tmp_path):
    return shutil.copytree(written, tmp_path / "checkpoints")


def bits(tree):
    return [(np.asarray(x).dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def largest_file(path):
    return max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_checkpoint_restores_to_the_same_bits_on_any_mesh(written, mesh):
    train_step, _ = case(mesh)
    saved, notes = newest(written, "full")
    assert (saved.step, notes) == (2, [])
    restored = restore_state(saved, train_step.abstract)
    assert bits(restored) == bits(case()[1])
    same = jax.tree.map(lambda x, a: x.sharding == a.sharding, restored, train_step.abstract)
    assert all(jax.tree.leaves(same))


def test_keys_of_files_are_those_of_earlier_versions(tmp_path):
    """Attributes of the state were renamed; checkpoints keep the names they had."""
    residuals = {"w": ReduceState(jnp.ones((2, 3)), jnp.ones((1, 3)))}
    weights = {"w": jnp.ones(4)}
    state = TrainState(jnp.int32(1), jnp.int32(0), weights, weights, weights, residuals)
    writer = Checkpoints(tmp_path, keep=1)
    writer.save(1, state, {})
    writer.wait()
    saved, _ = newest(tmp_path, "full")
    assert bits(restore_state(saved, jax.tree.map(spec_of, state))) == bits(state)
    writer.close()
    keys = {
        item: set(json.loads((saved.path / item / "_METADATA").read_text())["tree_metadata"])
        for item in ("weights", "reduction")
    }
    assert keys["reduction"] == {"('codecs.w.parts',)", "('codecs.w.total',)"}
    assert keys["weights"] == {"('params.w',)", "('balance.w',)"}


def spec_of(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[1:3])
def test_a_checkpoint_written_on_any_mesh_restores_on_one_device(tmp_path, mesh):
    train_step, _ = case(mesh, "muon")
    state = train_step.init()
    writer = Checkpoints(tmp_path, keep=1)
    writer.save(7, state, {})
    assert writer.wait() == 7
    restored = restore_state(newest(tmp_path, "full")[0], case(name="muon")[0].abstract)
    writer.close()
    assert bits(restored) == bits(state)


def test_the_manifest_lists_every_file_and_keeps_the_facts(written):
    path = written / "2"
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["format_version"] == FORMAT_VERSION
    assert (manifest["step"], manifest["config"]) == (2, {"run_dir": "step 2"})
    present = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    assert set(manifest["files"]) == present - {MANIFEST}


def flip_a_bit(path):
    flip(largest_file(path), 100)


def cut_short(path):
    file = largest_file(path)
    file.write_bytes(file.read_bytes()[:-1])


def lose_a_file(path):
    largest_file(path).unlink()


DAMAGES = {flip_a_bit: "has digest", cut_short: "bytes, expected", lose_a_file: "is missing"}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(directory, damage):
    damage(directory / "2")
    saved, notes = newest(directory, "full")
    assert saved.step == 1
    assert saved.manifest["config"] == {"run_dir": "step 1"}
    assert len(notes) == 1
    assert notes[0].startswith("checkpoint 2 set aside as 2.corrupt: ")
    assert DAMAGES[damage] in notes[0]
    assert sorted(p.name for p in directory.iterdir() if p.is_dir()) == ["1", "2.corrupt"]


@pytest.mark.parametrize("position", [0, 0.3, 0.6, 1])
def test_a_bit_flipped_anywhere_in_any_file_is_found(written, tmp_path, position):
    path = shutil.copytree(written / "2", tmp_path / "2")
    manifest = read_manifest(path)
    for name, facts in manifest["files"].items():
        if not facts["bytes"]:
            continue
        offset = int(position * (facts["bytes"] - 1))
        flip(path / name, offset)
        assert name in find_damage(path, manifest, "full")
        flip(path / name, offset)
    assert find_damage(path, manifest, "full") is None


def test_checking_sizes_alone_sees_what_is_short_and_not_what_is_flipped(directory):
    flip_a_bit(directory / "2")
    assert newest(directory, "size")[0].step == 2
    cut_short(directory / "2")
    assert newest(directory, "size")[0].step == 1


def test_when_all_are_damaged_no_process_starts_again_silently(directory):
    for step in ("1", "2"):
        lose_a_file(directory / step)
    one, other = map(str, everywhere(2, lambda p: newest(directory, "full", p)))
    assert one == other
    assert re.match(r"no whole checkpoint in .*2\.corrupt.*1\.corrupt", one)
    # Nor does the next attempt, which finds only what was set aside.
    with pytest.raises(InputError, match="no whole checkpoint"):
        newest(directory, "full")


def test_what_a_killed_save_leaves_is_swept(directory):
    half = directory / "3.orbax-checkpoint-tmp-0"
    (half / "weights").mkdir(parents=True)
    (half / "weights" / "part").write_bytes(b"half")
    (directory / "2" / MANIFEST).unlink()
    saved, notes = newest(directory, "full")
    assert saved.step == 1
    assert notes == ["checkpoint 2 set aside as 2.unfinished: no manifest"]
    names = sorted(p.name for p in directory.iterdir() if p.is_dir())
    assert names == ["1", "2.unfinished"]


def test_a_step_that_was_set_aside_before_can_be_set_aside_again(directory):
    for name in ("2.corrupt", "2.unfinished"):
        shutil.copytree(directory / "1", directory / name)
    kept = shutil.copytree(directory / "2", directory.parent / "kept")
    flip_a_bit(directory / "2")
    assert newest(directory, "full")[0].step == 1
    shutil.copytree(kept, directory / "2")
    (directory / "2" / MANIFEST).unlink()
    assert newest(directory, "full")[0].step == 1


def test_a_step_set_aside_does_not_keep_the_run_from_saving_it_again(directory):
    flip_a_bit(directory / "2")
    saved, _ = newest(directory, "full")
    train_step, state = case()
    writer = Checkpoints(directory, keep=3)
    assert saved.step == 1
    writer.save(2, state, {})
    writer.wait()
    assert bits(restore_state(newest(directory, "full")[0], train_step.abstract)) == bits(state)
    writer.close()


def test_a_directory_without_checkpoints_is_a_new_run(tmp_path):
    assert newest(tmp_path / "absent", "full") == newest(tmp_path, "full") == (None, [])


def test_only_the_newest_are_kept_and_all_of_them_are_whole(tmp_path):
    _, state = case()
    writer = Checkpoints(tmp_path, keep=2)
    finished = []
    for step in (10, 20, 100):
        writer.save(step, state, {})
        finished.append(writer.wait())
    writer.close()
    assert finished == [10, 20, 100]
    assert sorted(finished_steps(tmp_path)) == [20, 100]
    assert newest(tmp_path, "full")[0].step == 100


def small_state():
    """Counters, weights and moments of a model of two arrays."""
    weights = {"w": jnp.arange(8.0), "b": jnp.ones((3, 2))}
    return TrainState(jnp.int32(1), jnp.int32(0), weights, {"e": jnp.ones(3)}, weights, {})


def test_what_cannot_be_read_back_is_not_called_whole(tmp_path):
    """In such a folder Orbax commits a step without its numbers, and says nothing (0.12)."""
    directory = tmp_path / "exp[lr=1e-3]"
    writer = Checkpoints(directory, keep=2)
    writer.save(1, small_state(), {})
    missing = r"cannot be read back\. .*/1: counters/skipped is not there"
    with pytest.raises(RunError, match=missing):
        writer.wait()
    writer.close()
    assert (directory / "1").is_dir()
    assert finished_steps(directory) == []


def test_a_clock_that_is_set_during_a_save_does_not_end_it(tmp_path, monkeypatch):
    """Orbax measures its timeouts on the wall clock, which jumps by 30 hours here."""
    right, asked = time.time, []

    def jumping():
        if threading.current_thread().name == "async_save":
            asked.append(1)
        return right() + 30 * 3600 * (len(asked) > 2)

    monkeypatch.setattr(time, "time", jumping)
    _, state = case()
    writer = Checkpoints(tmp_path, keep=2)
    writer.save(1, state, {"config": {}})
    assert writer.wait() == 1
    writer.close()
    assert len(asked) > 2, "the clock was not set during the save"
    assert newest(tmp_path, "full")[0].step == 1


def test_weights_are_located_by_run_directory_checkpoints_or_step(directory):
    for source in (directory.parent, directory, directory / "2"):
        assert locate(str(source), "full").step == 2
    assert locate(str(directory / "1"), "full").step == 1


def test_a_source_without_checkpoint_says_what_is_there(directory, tmp_path):
    with pytest.raises(InputError, match=r"no finished checkpoint at .*Found nothing"):
        locate(str(tmp_path / "absent"), "full")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(InputError, match=r"Found notes\.txt"):
        locate(str(tmp_path / "other"), "full")


def test_a_damaged_source_is_refused_and_left_as_it_is(directory):
    flip_a_bit(directory / "2")
    with pytest.raises(InputError, match="checkpoint is damaged"):
        locate(str(directory.parent), "full")
    assert (directory / "2").is_dir()


def test_weights_can_be_read_without_the_optimizer(directory):
    # Adam's moments would not fit Muon's state; weights alone do.
    shutil.rmtree(directory / "2" / "optimizer")
    train_step, _ = case((2, 1, 2, 2), "muon")
    read = restore_items(directory / "2", train_step.abstract, ("weights",))
    state = case()[1]
    assert list(read) == ["weights"]
    assert bits(read["weights"]["params"]) == bits(state.params)
    assert bits(read["weights"]["balance"]) == bits(state.router_bias)


@pytest.mark.parametrize("number", [0, 1])
def test_damage_that_one_process_finds_is_refused_by_all(directory, number):
    # Two processes compare the digests of every other file each.
    names = [n for n, f in read_manifest(directory / "2")["files"].items() if f["bytes"]]
    flip(directory / "2" / names[number], 0)
    one, other = everywhere(2, lambda processes: newest(directory, "full", processes))
    assert one == other
    assert one[0].step == 1
    assert one[1][0].startswith("checkpoint 2 set aside as 2.corrupt: ")


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


def empty(step):
    (step / "weights" / "data").write_bytes(b"")


def test_a_newer_step_that_is_not_whole_does_not_push_out_an_older_one(tmp_path):
    for number in (10, 20, 30, 40):
        write_step(tmp_path, number)
    empty(tmp_path / "40")
    (tmp_path / "30" / MANIFEST).write_text("{")
    prune(tmp_path, 2)
    assert sorted(finished_steps(tmp_path)) == [10, 20, 30, 40]
    shutil.rmtree(tmp_path / "30")
    write_step(tmp_path, 30)
    prune(tmp_path, 2)
    assert sorted(finished_steps(tmp_path)) == [20, 30, 40]
    assert json.loads((tmp_path / "20" / MANIFEST).read_text())["step"] == 20
