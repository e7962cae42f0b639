"""When the loop keeps a state in memory, and when it throws away what it kept."""

import dataclasses
from contextlib import nullcontext

import pytest

from moejax.config.checks import check
from moejax.config.schema import CheckpointConfig, Config
from moejax.errors import DivergedError, InputError
from moejax.train.loop import run_to_end
from moejax.train.start import check_paths
from moejax.train.steps import run_steps
from tests.cases import small_config
from tests.train.running import BAD, initial_state


class Kept:
    """Stands for the copies in memory."""

    def __init__(self):
        self.steps, self.ended, self.closed = [], False, False

    def save(self, step, state, facts, waiting=None):
        seen = facts.pop("recent_losses")["losses"]
        assert facts == {"data_position": step, "skipped_data": []}
        assert 0 < len(seen) <= step, "as a checkpoint on disk has them"
        assert int(state["counters/step"]) == step
        with waiting or nullcontext():
            self.steps.append(step)

    def end(self):
        self.ended = True

    def close(self):
        self.closed = True


@pytest.fixture
def keeping(training):
    """A run with copies in memory; updates of the steps in `bad` fail."""

    def build(bad=(), *, max_skipped=None, **kept):
        settings = {"num_steps": 9, "eval_every": None, "max_skipped": max_skipped, "rollbacks": 0}
        kept = CheckpointConfig(**{"save_every": None, **kept})
        cfg = dataclasses.replace(small_config(train=settings), checkpoint=kept)
        run, _ = training(cfg, dict.fromkeys(bad, BAD))
        run.memory = Kept()
        return run

    return build


def test_every_so_many_steps_but_where_the_step_goes_to_disk(keeping):
    run = keeping(memory_every=2, save_every=4)
    run_steps(run, initial_state())
    assert run.checkpoints.steps == [4, 8, 9]
    assert run.memory.steps == [2, 6]


def test_nothing_is_kept_while_updates_are_skipped(keeping):
    run = keeping(bad={3, 4, 5}, memory_every=1)
    run_steps(run, initial_state())
    # A skipped update is known one step later; its weights are those of the step before it.
    assert run.memory.steps == [1, 2, 6, 7, 8]


def test_a_run_that_diverged_goes_back_to_the_checkpoint_that_is_named(keeping, monkeypatch):
    run = keeping(bad=range(3, 9), memory_every=1, max_skipped=3)
    monkeypatch.setattr(run.checkpoints, "close", lambda: None)
    with pytest.raises(DivergedError):
        run_to_end(run, initial_state())
    assert (run.memory.ended, run.memory.closed) == (True, True)


def test_a_run_that_fails_leaves_what_it_kept(keeping, monkeypatch):
    run = keeping(memory_every=1)
    monkeypatch.setattr(run.checkpoints, "close", lambda: None)
    monkeypatch.setattr(run.memory, "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_to_end(run, initial_state())
    assert (run.memory.ended, run.memory.closed) == (False, True)


def test_a_dry_run_sees_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    kept = CheckpointConfig(memory_every=5, memory_dir=str(tmp_path / "file" / "folder"))
    cfg = dataclasses.replace(small_config(), run_dir=str(tmp_path / "run"), checkpoint=kept)
    with pytest.raises(InputError, match=r"`checkpoint\.memory_dir` = .* cannot be written"):
        check_paths(cfg)


def test_a_folder_without_copies_has_no_effect():
    cfg = Config(checkpoint=CheckpointConfig(memory_dir="/tmp/other"))
    with pytest.raises(InputError, match=r"`checkpoint\.memory_every` is none"):
        check(cfg)
