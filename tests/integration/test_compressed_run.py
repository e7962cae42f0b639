"""The train command with codecs: what they remember survives a stop, and is dropped with a word."""

import signal

import numpy as np
import pytest

from moejax.checkpoint.find import newest
from moejax.errors import STOPPED
from tests.integration.runs import (
    assert_same_end,
    describe,
    records,
    run,
    run_until,
)

STEPS = 24
CONFIG = (
    describe(STEPS, sample=0, simulated_devices=8, replica="null", nodes=2)
    + """
compression:
  dispatch: int8
  dense_gradient: "none,int4+feedback@5"
  expert_gradient: "loco"
  block: 16
"""
)


@pytest.mark.slow
def test_a_run_says_which_codecs_it_takes_and_learns(straight):
    run_dir, out = straight
    assert "codecs across nodes" in out
    said = [record["codecs"] for record in records(run_dir, "codecs")]
    assert said[0].startswith("expert_gradient loco")
    assert any("dense_gradient int4+feedback" in line for line in said)
    losses = [record["loss"] for record in records(run_dir, "step")]
    assert losses[-1] < losses[0]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bits_with_what_codecs_remember(place, straight):
    run_dir = place / "stopped"
    words = [f"--config.run_dir={run_dir}"]
    step = int(np.random.default_rng().integers(8, 18))
    code, _, err = run_until(place, step, signal.SIGTERM, *words)
    assert code == STOPPED, err
    assert records(run_dir)[-1]["step"] < STEPS, "the signal came too late to prove anything"
    code, out, err = run(place, *words)
    assert code == 0, err
    assert "warning" not in out
    assert_same_end(straight[0], run_dir)
    saved, _ = newest(run_dir / "checkpoints", "full")
    assert (saved.path / "reduction").is_dir()
