"""Runs with copies of hot experts: the losses of a run without, and a resume to the bit."""

import dataclasses

import jax
import numpy as np
import pytest

import moejax
from moejax.train import loop
from tests.train import small_runs

SLOTS = {
    "without": {},
    "now": {"slots": 1},
    "last": {"slots": 2, "slots_from": "last"},
}


@pytest.fixture(autouse=True, scope="module")
def short_runs(unchecked_annotations):
    """Leaves out of runs what is long and not looked at here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "finish", lambda run, state: run.record_saved(run.checkpoints.wait()))
        patch.setattr(loop, "measure_peak", lambda devices, dtype: 1e12)
        yield


def config(run_dir, name, **train):
    """A run of eight experts on four devices, without a balance loss: some are hot."""
    cfg = small_runs.config(run_dir, every=5, batch_sequences=8, **train)
    router = dataclasses.replace(cfg.moe.router, balance_loss=0.0)
    more = {"num_experts": 8, "capacity_factor": None, "router": router, **SLOTS[name]}
    mesh = dataclasses.replace(cfg.mesh, replica=None, expert=4)
    return dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, **more), mesh=mesh)


def losses(run):
    return dict(zip(run.metrics["loss"].steps, run.metrics["loss"].values, strict=True))


def until(step, cfg):
    """Runs up to a step, and goes on from a checkpoint before it next time."""

    def stop(run):
        if run.step == step:
            raise KeyError("stopped")

    with pytest.raises(KeyError, match="stopped"):
        moejax.run_training(cfg, quiet=True, on_step=stop, every=1)


@pytest.mark.slow
def test_fifty_losses_are_those_of_a_run_without_and_a_resume_ends_with_the_same_bits(tmp_path):
    runs = {}
    for name in SLOTS:
        cfg = config(tmp_path / name, name, num_steps=50)
        runs[name] = moejax.run_training(cfg, quiet=True)
    wanted = losses(runs["without"])
    assert max(wanted) == 50
    for name in ("now", "last"):
        np.testing.assert_allclose(
            list(losses(runs[name]).values()), list(wanted.values()), rtol=1e-5
        )
        assert runs[name].state.load_LE is None or np.any(runs[name].state.load_LE)

    cfg = config(tmp_path / "stopped", "last", num_steps=50)
    until(30, cfg)
    resumed = moejax.run_training(cfg, quiet=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, runs["last"].state)


@pytest.mark.slow
def test_a_run_goes_on_with_other_slots(tmp_path):
    """From none to copies by the step before, whose load no checkpoint has; and back."""
    alone = moejax.run_training(config(tmp_path / "alone", "without", num_steps=15), quiet=True)
    changed = tmp_path / "changed"
    until(6, config(changed, "without", num_steps=15))
    until(11, config(changed, "last", num_steps=15))
    run = moejax.run_training(config(changed, "without", num_steps=15), quiet=True)
    np.testing.assert_allclose(losses(run)[15], losses(alone)[15], rtol=1e-5)
