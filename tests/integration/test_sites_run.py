"""The train command with an outer loop: two sites of two devices, a process each."""

import signal

import numpy as np
import pytest

from moejax.errors import STOPPED
from tests.integration.runs import (
    REPOSITORY,
    assert_same_end,
    describe,
    evaluation,
    records,
    run,
    run_until,
)

STEPS = 24
CONFIG = describe(STEPS, sample=2, simulated_devices=4).replace(
    "tensor: 2}", "replica: 2}\nouter: {every: 5}"
)
LOCAL = (REPOSITORY / "launch" / "local", "--processes", 2, "--devices", 2)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(place):
    """The run directory and the output of an undisturbed run of two processes."""
    code, out, err = run(place, launcher=LOCAL)
    assert code == 0, out + err
    return place / "straight", out


def test_a_process_a_site_trains_as_one_process_does(place, two):
    code, _, err = run(place, f"--config.run_dir={place / 'one'}")
    assert code == 0, err
    for event, name in (("step", "loss"), ("eval", "nats_per_token")):
        one, several = ([r[name] for r in records(x, event)] for x in (place / "one", two[0]))
        np.testing.assert_allclose(several, one, rtol=1e-4)


def test_a_run_that_is_stopped_within_a_period_comes_to_the_same_bits(place, two):
    at = f"--config.run_dir={place / 'stopped'}"
    code, out, err = run_until(place, 7, signal.SIGTERM, at, launcher=LOCAL)
    assert code == STOPPED, out + err
    code, out, err = run(place, at, launcher=LOCAL)
    assert code == 0, out + err
    assert_same_end(place / "stopped", two[0])


def test_what_the_run_evaluates_is_what_its_checkpoint_holds(place, two):
    last = records(two[0], "final_eval")[-1]
    found = evaluation(place, "--run", two[0])
    assert found["nats_per_token"] == pytest.approx(last["nats_per_token"], rel=1e-5)
