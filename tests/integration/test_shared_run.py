"""The train command where other numbers of devices share a sequence at each start."""

import signal

import numpy as np
import pytest

from moejax.errors import STOPPED
from tests.integration.runs import describe, final_state, records, run, run_until

STEPS = 30
CONFIG = describe(STEPS, sample=0, simulated_devices=8, replica=1, fsdp=2)


def share(devices):
    """The words of a run that so many devices share a sequence in."""
    words = [f"--config.mesh.context={devices}"]
    return [*words, "--config.mesh.context_stripe=4"] if devices > 1 else words


@pytest.mark.exhaustive
def test_a_run_goes_on_with_other_numbers_of_devices_that_share(place, straight):
    """A stop on one, then on four, then to the end on two; losses are those of a run on one."""
    run_dir = place / "shared"
    words = [f"--config.run_dir={run_dir}"]
    for devices, step in ((1, 6), (4, 16)):
        code, _, err = run_until(place, step, signal.SIGTERM, *words, *share(devices))
        assert code == STOPPED, err
        last = records(run_dir)[-1]["step"]
        assert step <= last < STEPS, "the signal came too late to prove anything"
    code, out, err = run(place, *words, *share(2))
    assert code == 0, err
    assert f"resuming at step {last}" in out
    assert "mesh.context" in out, "a changed setting is told"
    got, wanted = (
        {one["step"]: one["loss"] for one in records(folder, "step")}
        for folder in (run_dir, straight[0])
    )
    assert len(got) >= STEPS - 3, "all but the first step of each start"
    for step, loss in got.items():
        assert loss == pytest.approx(wanted[step], rel=2e-5)
    for have, want in zip(final_state(run_dir)[1], final_state(straight[0])[1], strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-2, atol=1e-4)
