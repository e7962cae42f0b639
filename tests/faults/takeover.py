"""A killed run of two processes is taken over by another count of processes, or another mesh."""

import shutil
import signal
from typing import NamedTuple

import numpy as np

from tests.faults.lab import STEPS, Lab, Trial, once_saved, recording, send
from tests.faults.recording import batches_of, steps_of
from tests.integration.runs import records

ROWS = 8  # of a global batch
SAVED = 10  # the newest checkpoint when the run is killed
# Devices' parts are added in another order: a few last bits in each sum, which the steps carry on.
# A wrong batch would be off by a hundredth or more.
TOLERANCE = 1e-4


class Other(NamedTuple):
    """Who takes a run over: processes, devices of each, further settings."""

    processes: int
    devices: int
    words: tuple[str, ...] = ()

    @property
    def launcher(self) -> tuple[str, ...]:
        """The launcher that starts them, and its flags."""
        return ("local", "--processes", str(self.processes), "--devices", str(self.devices))


SAME = Other(2, 2)
OTHERS = {
    "one process": Other(1, 4),
    "four processes": Other(4, 1),
    "half the devices": Other(
        1, 2, ("--config.mesh.simulated_devices=2", "--config.mesh.tensor=1")
    ),
    "twice the devices": Other(
        4, 2, ("--config.mesh.simulated_devices=8", "--config.mesh.replica=2")
    ),
    "another mesh": Other(2, 2, ("--config.mesh.expert=4", "--config.mesh.tensor=1")),
}


def kill(lab: Lab, name: str) -> Trial:
    """A run whose second process is killed after step 15, and which is not started again."""
    wrapped = recording(lab.folder / f"{name}-batches")
    fault = once_saved(lab.folder / name, SAVED, send(signal.SIGKILL, 1))
    return lab.trial(name, 15, fault, wrapped, restarts=0)


def take_over(lab: Lab, killed: str, name: str, other: Other) -> str:
    """Goes on with a copy of a killed run. Returns what it said."""
    shutil.copytree(lab.folder / killed, lab.folder / name)
    wrapped = recording(lab.folder / f"{name}-batches")
    done = lab.run(name, wrapped, other.launcher, other.words)
    assert done.returncode == 0, done.stdout
    assert f"resuming at step {SAVED} from" in done.stdout, done.stdout
    return done.stdout


def check_batches(lab: Lab, killed: str, name: str) -> None:
    """Checks that both trained on the batches of a run without a fault.

    Who took over trained on each that was left, once and in order.
    """
    straight = batches_of(lab.folder / "straight-batches", ROWS)
    assert list(straight) == list(range(STEPS))
    assert len(set(straight.values())) == STEPS, "batches must differ to prove anything"
    before = batches_of(lab.folder / f"{killed}-batches", ROWS)
    assert before == {step: straight[step] for step in range(len(before))}
    assert len(before) >= 15
    assert steps_of(lab.folder / f"{name}-batches") == list(range(SAVED, STEPS))
    after = batches_of(lab.folder / f"{name}-batches", ROWS)
    assert after == {step: straight[step] for step in range(SAVED, STEPS)}


def check_losses(lab: Lab, name: str) -> None:
    """Checks that losses are those of a run without a fault, but for the order of sums."""
    wanted, got = (
        {r["step"]: r["loss"] for r in records(lab.folder / run, "step")}
        for run in ("straight", name)
    )
    steps = range(SAVED + 2, STEPS + 1)  # the first after a start is not reported
    np.testing.assert_allclose(
        [got[s] for s in steps], [wanted[s] for s in steps], rtol=TOLERANCE, atol=0
    )
