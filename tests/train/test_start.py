"""What a run goes on from: which checkpoint is chosen, and what of it is kept."""

import dataclasses
import shutil
from functools import partial

import pytest

from moejax.errors import InputError
from moejax.runtime.processes import ALONE
from moejax.settings import to_dict
from moejax.train.checkpoint import Checkpoints
from moejax.train.manifest import MANIFEST, read_manifest, write_manifest
from moejax.train.start import choose, counted
from tests.cases import small_config, trainer_for


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of steps 1 and 2, and the trainer that they are of."""
    directory = tmp_path_factory.mktemp("written") / "checkpoints"
    trainer = trainer_for(dataclasses.replace(small_config(), run_dir="run"))
    state = trainer.init()
    writer = Checkpoints(directory, keep=3)
    for step in (1, 2):
        writer.save(step, state._replace(step=state.step + step), {"config": to_dict(trainer.cfg)})
    writer.close()
    return directory, trainer


@pytest.fixture
def run(written, tmp_path, monkeypatch):
    """A run directory with a copy of them: its config, its trainer, its checkpoints."""
    monkeypatch.chdir(tmp_path)
    return written[1].cfg, written[1], shutil.copytree(written[0], tmp_path / "run/checkpoints")


def pretend(path, step):
    """Makes a step another one: its name and its manifest, digest and all, but not its state."""
    facts = {"step": step, "config": read_manifest(path)["config"]}
    (path / MANIFEST).unlink()
    write_manifest(path, facts)
    path.rename(path.with_name(str(step)))


def test_a_state_of_its_step_is_taken(run):
    cfg, trainer, _ = run
    saved, _, notes = choose(cfg, ALONE)
    assert counted(saved, trainer, partial(choose, cfg, ALONE), ALONE) == (saved, [])
    assert (saved.step, notes) == (2, [])


def test_a_state_of_another_step_is_set_aside_for_the_one_before(run):
    cfg, trainer, steps = run
    pretend(steps / "2", 9)
    saved, _, notes = choose(cfg, ALONE)
    assert (saved.step, notes) == (9, []), "name, manifest and files agree"
    saved, notes = counted(saved, trainer, partial(choose, cfg, ALONE), ALONE)
    assert saved.step == 1
    assert notes == ["checkpoint 9 set aside as 9.corrupt: its state is of step 2"]


def test_states_that_are_all_of_other_steps_stop_the_run(run):
    cfg, trainer, steps = run
    for step in (1, 2):
        pretend(steps / str(step), step + 7)
    saved, _, _ = choose(cfg, ALONE)
    with pytest.raises(InputError, match=r"no whole checkpoint in .*8\.corrupt.*9\.corrupt"):
        counted(saved, trainer, partial(choose, cfg, ALONE), ALONE)
