"""The fit of startup and bandwidth to measured times."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.plan.probe.fit import fit_link

SIZES = tuple(2**power for power in range(14, 27, 2))


@given(st.floats(-7, -3), st.floats(5, 12))
def test_fit_finds_the_line_that_made_the_points(startup, rate):
    startup, rate = 10**startup, 10**rate
    link = fit_link([(size, startup + size / rate) for size in SIZES])
    for size in SIZES:
        assert link.seconds(size) == pytest.approx(startup + size / rate, rel=1e-3)
    assert link.error < 1e-3
    assert [size for size, _ in link.points] == list(SIZES)


@given(st.floats(-6, -3), st.floats(6, 9), st.integers(0, 2**32 - 1))
def test_fit_stands_noise_and_one_call_that_was_held_up(startup, rate, seed):
    startup, rate = 10**startup, 10**rate
    random = np.random.default_rng(seed)
    points = []
    for place, size in enumerate(SIZES):
        factor = 1 + random.uniform(-0.05, 0.05)
        factor *= 3 if place == seed % len(SIZES) else 1
        points.append((size, (startup + size / rate) * factor))
    link = fit_link(points)
    off = [abs(link.seconds(size) / (startup + size / rate) - 1) for size in SIZES]
    # Relative errors: small messages count as large ones do. Both ends hang on two points or so.
    assert np.median(off) < 0.15
    assert link.error < 0.2


@pytest.mark.parametrize("late", range(len(SIZES)))
def test_one_late_call_among_exact_ones_does_not_bend_the_line(late):
    """Without less weight on it, one at either end bends startup or rate by 8 % and more."""
    exact = [(size, 1e-4 + size / 1e9) for size in SIZES]
    link = fit_link([(s, 3 * t if n == late else t) for n, (s, t) in enumerate(exact)])
    assert link.startup_s == pytest.approx(1e-4, rel=0.01)
    assert link.bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert (link.bends == ()) == (late < len(SIZES) - 1)


def test_the_largest_sizes_cost_what_they_took_where_no_line_fits_them():
    """Calls larger than a cache take three times as long; between sizes there is no jump."""
    points = [(s, (1e-4 + s / 1e9) * (3 if s == SIZES[-1] else 1)) for s in SIZES]
    link = fit_link(points)
    assert link.bytes_per_s == pytest.approx(1e9, rel=0.01)
    for size, seconds in points:
        assert link.seconds(size) == pytest.approx(seconds, rel=0.01)
    between = np.geomspace(SIZES[-2], SIZES[-1], 9)
    ratios = [link.seconds(size) / (1e-4 + size / 1e9) for size in between]
    assert ratios == sorted(ratios)
    assert link.seconds(4 * SIZES[-1]) == pytest.approx(3 * (1e-4 + 4 * SIZES[-1] / 1e9), rel=0.01)


def test_a_line_that_would_start_below_zero_starts_there():
    """Through (1000, 1 us) and (2000, 3 us) it would start at -1 us. From zero the best slope for
    sizes over times of 1 and 2/3 GB/s is their sum over that of their squares."""
    link = fit_link([(1000, 1e-6), (2000, 3e-6)])
    assert link.startup_s == pytest.approx(1e-9)  # the least that is written
    assert link.bytes_per_s == pytest.approx(1e9 * (1 + 4 / 9) / (1 + 2 / 3), rel=1e-6)


@given(st.lists(st.floats(1e-6, 10), min_size=7, max_size=7))
def test_fit_of_anything_is_a_link(seconds):
    link = fit_link(list(zip(SIZES, seconds, strict=True)))
    assert link.startup_s > 0
    assert link.bytes_per_s > 0
    assert np.isfinite([link.startup_s, link.bytes_per_s, link.error]).all()


def test_times_that_do_not_grow_are_all_startup():
    link = fit_link([(size, 1e-3) for size in SIZES])
    assert link.seconds(SIZES[0]) == pytest.approx(1e-3, rel=0.05)
    assert link.seconds(SIZES[-1]) == pytest.approx(1e-3, rel=0.05)
    # No more than a hundred times what the largest achieved.
    assert link.bytes_per_s == pytest.approx(100 * SIZES[-1] / 1e-3, rel=1e-3)
