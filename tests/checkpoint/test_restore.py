"""Numbers that changed between memory and disk, where every file is as its manifest says."""

import dataclasses
import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tensorstore as ts
from rich.console import Console

from moejax.checkpoint import compatible as resumes
from moejax.checkpoint import restore, verify
from moejax.checkpoint.digests import add_up
from moejax.checkpoint.find import Saved, newest
from moejax.checkpoint.manifest import (
    MANIFEST,
    find_damage,
    finished_steps,
    read_manifest,
    write_manifest,
)
from moejax.checkpoint.restore import resume
from moejax.checkpoint.verify import restore_weights, wrong_numbers
from moejax.checkpoint.writer import Checkpoints, arrays_of
from moejax.comm.host import MEMORY_KIND
from moejax.config.load import to_dict
from moejax.config.schema import MemoryConfig
from moejax.errors import InputError
from moejax.runtime.processes import ALONE
from tests.cases import drawn_state, small_config, step_for
from tests.threads import everywhere

W_IN, W_OUT = (f"params.groups.0.blocks.0.moe.{name}" for name in ("w_in", "w_out"))
MESHES = [(1, 1, 1, 1), (1, 2, 2, 2), (2, 1, 4, 1)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of steps 1 and 2 of two expert layers, written on eight devices."""
    directory = tmp_path_factory.mktemp("written") / "checkpoints"
    train_step, state = case(MESHES[1])
    writer = Checkpoints(directory, keep=3)
    for step in (1, 2):
        writer.save(
            step, state._replace(step=state.step + step), {"config": to_dict(train_step.cfg)}
        )
    writer.close()
    return directory


@pytest.fixture
def directory(written, tmp_path):
    return shutil.copytree(written, tmp_path / "checkpoints")


def case(mesh):
    train_step = step_for(small_config(mesh, model={"num_layers": 2}))
    return train_step, drawn_state(train_step)


def rewrite(step, change, *keys, item="weights"):
    """Changes arrays in a step's files, and makes its manifest anew: as if so written at first."""
    for key in keys:
        base = {"driver": "ocdbt", "base": f"file://{step / item}/", "path": f"{key}/"}
        array = ts.open({"driver": "zarr", "kvstore": base}).result()
        values = array.read().result()
        change(values)
        array.write(values).result()
    facts = read_manifest(step)
    for name in ("format_version", "files", "digest"):
        del facts[name]
    (step / MANIFEST).unlink()
    write_manifest(step, facts)
    assert find_damage(step, read_manifest(step), "full") is None


def resumed(directory, mesh=MESHES[0], memory=MemoryConfig()):  # noqa: B008
    """The state that a run goes on with, and the notes of what was set aside."""
    cfg = dataclasses.replace(small_config(mesh, model={"num_layers": 2}), memory=memory)
    train_step, notes = step_for(cfg), []
    saved, _ = newest(directory, "full")

    def again():
        found, more = newest(directory, "full")
        return found, None, more

    console = Console(file=io.StringIO())
    found = resume(train_step, saved, again, ALONE, console, notes.append)
    return found and found.state, notes


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_what_was_saved_on_one_mesh_is_equal_on_any(directory, mesh):
    state, notes = resumed(directory, mesh)
    assert (int(state.step), notes) == (2, [])


def test_a_checkpoint_crosses_between_memories(directory):
    """Digests of arrays on the host are those of the same numbers on devices."""
    state, notes = resumed(directory, MESHES[1], MemoryConfig(optimizer="host", experts="host"))
    moved = state.params["groups"][0]["blocks"][0]["moe"]["w_in"]
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.shape == moved.shape]
    assert {x.sharding.memory_kind for x in (moved, *moments)} == {MEMORY_KIND}
    writer = Checkpoints(directory, keep=3)
    facts = {"config": read_manifest(directory / "2")["config"]}
    writer.save(3, state._replace(step=state.step + 1), facts)
    writer.close()
    here, more = resumed(directory, MESHES[1])
    assert (int(here.step), notes + more) == (3, [])
    wanted = case(MESHES[1])[1]
    jax.tree.map(np.testing.assert_array_equal, here.optimizer, wanted.optimizer)
    jax.tree.map(np.testing.assert_array_equal, here.params, wanted.params)


def swap(w):
    w[1, [3, 5]] = w[1, [5, 3]]


SWAPPED = "experts 3 and 5 of layer 1 ({}) are swapped"


@pytest.mark.slow
def test_misplaced_experts_are_named_and_the_step_before_is_taken(directory):
    rewrite(directory / "2", swap, W_IN, W_OUT)
    state, notes = resumed(directory)
    assert int(state.step) == 1
    names = "groups.0.blocks.0.moe.w_in, groups.0.blocks.0.moe.w_out"
    wrong = f"its numbers are not those that were saved: {SWAPPED.format(names)}"
    assert notes == [f"checkpoint 2 set aside as 2.corrupt: {wrong}"]
    assert finished_steps(directory) == [1]


@pytest.mark.slow
def test_changed_moments_and_counters_are_found(directory):
    moment = W_IN.removeprefix("params.") + ".0.nu"
    rewrite(directory / "2", lambda w: w.__iadd__(1), moment, item="optimizer")
    rewrite(directory / "1", lambda skipped: skipped.__iadd__(1), "skipped", item="counters")
    with pytest.raises(InputError, match=r"no whole checkpoint in .*1\.corrupt.*2\.corrupt"):
        resumed(directory)
    with pytest.raises(InputError, match="no whole checkpoint"):
        newest(directory, "full")


def test_weights_of_another_run_that_are_not_as_saved_are_refused(directory):
    rewrite(directory / "2", swap, W_IN)
    train_step, _ = case(MESHES[0])
    saved = Saved(2, directory / "2", read_manifest(directory / "2"))
    with pytest.raises(InputError, match=r"checkpoint is damaged.*experts 3 and 5 of layer 1"):
        restore_weights(saved, train_step.abstract, ALONE)
    saved = Saved(1, directory / "1", read_manifest(directory / "1"))
    assert restore_weights(saved, train_step.abstract, ALONE).keys() == {"params", "balance"}


def test_a_manifest_of_format_2_is_read_and_has_no_numbers_to_compare(directory):
    rewrite(directory / "2", swap, W_IN)
    facts = read_manifest(directory / "2")
    for name in ("format_version", "files", "digest", "arrays"):
        del facts[name]
    (directory / "2" / MANIFEST).unlink()
    write_manifest(directory / "2", facts, version=2)
    state, notes = resumed(directory)
    assert (int(state.step), notes) == (2, [])


def test_processes_compare_together_and_say_the_same(written, monkeypatch):
    """Each has one half of the parts, as if the other's devices were elsewhere."""
    manifest = read_manifest(written / "2")
    _, state = case(MESHES[1])
    arrays = arrays_of(state._replace(step=state.step + 2))
    assert wrong_numbers(manifest, arrays, ALONE) is None
    w_in = np.array(arrays[f"weights/{W_IN}"])
    swap(w_in)
    arrays[f"weights/{W_IN}"] = jax.device_put(w_in, arrays[f"weights/{W_IN}"].sharding)

    class Halves:
        """The sums of one process, of which the service passes on the half."""

        def __init__(self, processes):
            self.processes = processes

        def gather(self, here):
            index = self.processes.index
            half = {k: f | {"parts": f["parts"][index::2]} for k, f in here.items()}
            return self.processes.gather(half)

    sums = add_up(arrays)  # here: programs that two threads start may wait for each other
    monkeypatch.setattr(verify, "add_up", lambda _: sums)
    one, other = everywhere(2, lambda processes: wrong_numbers(manifest, arrays, Halves(processes)))
    assert one == other == SWAPPED.format("groups.0.blocks.0.moe.w_in")


@pytest.mark.parametrize(
    ("reduction", "files", "valid", "warned"),
    [
        ("same", ["reduction/a"], True, False),
        ("other", ["reduction/a", "weights/b"], False, True),
        ("other", ["weights/b"], False, False),  # there is nothing to drop
        (None, ["weights/b"], False, False),
    ],
)
def test_what_codecs_had_not_sent_is_read_where_it_is_valid_and_else_told(
    monkeypatch, reduction, files, valid, warned
):
    asked, shown = [], io.StringIO()
    monkeypatch.setattr(resumes, "fingerprint", lambda train_step: "same")
    monkeypatch.setattr(
        restore, "restore_state", lambda saved, abstract, reduction: asked.append(reduction)
    )
    saved = Saved(2, Path("there"), {"reduction": reduction, "files": dict.fromkeys(files)})
    restore._read(
        SimpleNamespace(abstract=SimpleNamespace(sites=None)), saved, Console(file=shown, width=200)
    )
    assert asked == [valid]
    assert ("codecs' state is dropped" in shown.getvalue()) == warned
    assert shown.getvalue().startswith("resuming at step 2 from there\n")
