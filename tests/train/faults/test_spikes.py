"""Losses that jump are found, and noise is not."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.train.faults.spikes import LEAST, STEPS, WINDOW, Spike, Spikes

SCALES = st.floats(1e-3, 1e3)


def told(spikes, losses, first=1):
    """The spikes in a row of losses."""
    found = [spikes.after(step, float(loss)) for step, loss in enumerate(losses, first)]
    return [one for one in found if one is not None]


def noise(seed, count, *, level=3.0, deviation=0.05):
    return np.random.default_rng(seed).normal(level, deviation, count)


@given(st.integers(0, 99), st.integers(LEAST, 3 * WINDOW), SCALES, st.integers(20, 1000))
def test_a_shift_of_the_level_is_found_at_its_third_step_whatever_the_unit(
    seed, before, scale, shift
):
    losses = noise(seed, before + 10)
    losses[before:] += shift * 0.05
    (spike,) = told(Spikes(6.0), losses * scale)
    assert (spike.first, spike.step) == (before + 1, before + STEPS)
    assert spike.loss == losses[before + STEPS - 1] * scale
    assert spike.median == pytest.approx(3 * scale, rel=0.02)


@settings(max_examples=25)
@given(st.integers(0, 99), st.sampled_from(["normal", "uniform", "laplace"]), SCALES)
def test_noise_is_no_spike(seed, kind, scale):
    rng = np.random.default_rng(seed)
    draw = {"normal": rng.normal, "laplace": rng.laplace, "uniform": rng.uniform}[kind]
    assert told(Spikes(6.0), (3 + 0.1 * draw(size=1000)) * scale) == []


@given(st.integers(0, 99), st.floats(5, 100))
def test_a_steep_descent_and_single_bad_batches_are_no_spike(seed, steepness):
    losses = 2.5 + 8.3 / (1 + np.arange(600) / steepness) + noise(seed, 600, level=0)
    losses[100::10] += 50  # two of three steps in a row may be high
    losses[101::10] += 50
    assert told(Spikes(6.0), losses) == []


def test_losses_that_are_all_alike_have_no_spikes_in_their_last_bits():
    losses = 2 + np.random.default_rng(0).integers(0, 2, 1000) * 2.0**-9
    losses[:900] = 2
    assert told(Spikes(6.0), losses) == []


def test_a_spike_is_told_once_and_a_level_that_stays_is_the_new_one():
    spikes = Spikes(6.0)
    assert told(spikes, noise(0, 200)) == []
    assert not spikes.suspected
    suspected = []
    for step, loss in enumerate(noise(1, STEPS, level=9), 201):
        spikes.after(step, loss)
        suspected.append(spikes.suspected)
    assert suspected == [True, True, False], "saves go on once it is told"
    assert told(spikes, noise(2, WINDOW - STEPS, level=9), 204) == []
    assert (spikes.in_a_row, spikes.losses, spikes.suspected) == (0, [], False)
    # The new level: another jump from there is found, as soon as there are losses enough.
    (again,) = told(spikes, [*noise(3, LEAST, level=9), 30, 31, 32, 33], 1000)
    assert again == Spike(1000 + LEAST, 1002 + LEAST, 32.0, pytest.approx(9, abs=0.1))


def test_a_spike_that_ends_is_forgotten_and_none_is_looked_for_without_a_threshold():
    spikes = Spikes(6.0)
    losses = [*noise(0, 100), 20, 20, *noise(1, 50), 20, 20, 20, *noise(2, 50), 30, 30, 30]
    assert [spike.step for spike in told(spikes, losses)] == [155, 208]
    assert told(Spikes(None), losses) == []


@given(st.integers(0, 99), st.integers(0, 300))
def test_who_goes_on_from_what_was_seen_decides_as_if_nothing_had_been_between(seed, cut):
    rng = np.random.default_rng(seed)
    losses = noise(seed, 300)
    losses[rng.integers(0, 290, 6)[:, None] + np.arange(4)] += 5
    straight, first = Spikes(6.0), Spikes(6.0)
    expected = told(straight, losses)
    found = told(first, losses[:cut])
    kept = json.loads(json.dumps([first.losses, first.in_a_row]))  # as in a manifest
    assert [*found, *told(Spikes(6.0, *kept), losses[cut:], cut + 1)] == expected
