"""A run of two processes is killed, and others take it over: other counts, other meshes."""

import shutil
import signal

import numpy as np
import pytest

from tests.faults.lab import STEPS, recording, send
from tests.faults.recording import batches_of, steps_of
from tests.integration.runs import assert_same_end, records

pytestmark = [pytest.mark.slow, pytest.mark.faults]
ROWS = 8  # of a global batch
SAVED = 10  # the newest checkpoint when it is killed


@pytest.fixture(scope="module")
def killed(lab):
    """A run whose second process was killed after step 15, and which was not started again."""
    wrapped = recording(lab.folder / "killed-batches")
    trial = lab.trial("killed", 15, send(signal.SIGKILL, 1), wrapped, restarts=0)
    assert trial.code == 128 + signal.SIGKILL, trial.out
    return lab.folder / "killed"


def take_over(lab, killed, name, launcher, words=()):
    """Goes on with a copy of the killed run. Returns the run's directory."""
    shutil.copytree(killed, lab.folder / name)
    done = lab.run(name, recording(lab.folder / f"{name}-batches"), launcher, words)
    assert done.returncode == 0, done.stdout
    assert f"resuming at step {SAVED} from" in done.stdout
    return lab.folder / name


def same_batches(lab, name):
    """Whoever takes over trains on the batches that are left, and on each once."""
    straight = batches_of(lab.folder / "straight-batches", ROWS)
    assert list(straight) == list(range(STEPS))
    assert len(set(straight.values())) == STEPS, "batches must differ to prove anything"
    before = batches_of(lab.folder / "killed-batches", ROWS)
    assert before == {step: straight[step] for step in range(len(before))}
    assert len(before) >= 15
    assert steps_of(lab.folder / f"{name}-batches") == list(range(SAVED, STEPS))
    after = batches_of(lab.folder / f"{name}-batches", ROWS)
    assert after == {step: straight[step] for step in range(SAVED, STEPS)}


def losses(run_dir):
    """The loss of each step, of the last start that took it."""
    return {r["step"]: r["loss"] for r in records(run_dir, "step")}


@pytest.mark.parametrize(
    ("count", "devices", "words"),
    [
        (1, 4, ()),
        (4, 1, ()),
        (1, 2, ("--config.mesh.simulated_devices=2", "--config.mesh.tensor=1")),
        (4, 2, ("--config.mesh.simulated_devices=8", "--config.mesh.replica=2")),
        (2, 2, ("--config.mesh.expert=4", "--config.mesh.tensor=1")),
    ],
    ids=["1 of 4 devices", "4 of 1", "1 of 2", "4 of 2", "2 of 2, another mesh"],
)
def test_another_count_or_mesh_goes_on_with_the_same_batches(lab, killed, count, devices, words):
    name = f"taken-{count}-{devices}-{len(words)}"
    launcher = ("local", "--processes", str(count), "--devices", str(devices))
    run_dir = take_over(lab, killed, name, launcher, words)
    same_batches(lab, name)
    wanted, got = losses(lab.folder / "straight"), losses(run_dir)
    assert list(got)[-1] == STEPS
    # Devices' parts are added in another order: a few last bits in each sum, which the steps carry
    # on. A wrong batch would be off by a hundredth or more.
    steps = range(SAVED + 2, STEPS + 1)  # the first after a start is not reported
    np.testing.assert_allclose(
        [got[s] for s in steps], [wanted[s] for s in steps], rtol=1e-4, atol=0
    )


def test_the_same_count_and_mesh_goes_on_to_the_same_bits(lab, killed):
    launcher = ("local", "--processes", "2", "--devices", "2")
    run_dir = take_over(lab, killed, "taken-by-the-same", launcher)
    same_batches(lab, "taken-by-the-same")
    assert_same_end(lab.folder / "straight", run_dir)
