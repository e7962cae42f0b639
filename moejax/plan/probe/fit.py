"""Fits startup and bandwidth to measured times, by relative errors, so that small calls count too.

NumPy and SciPy only.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moejax.plan.cluster.topology import Link

ROUNDS = 20
# Residuals above this many times the median count less (Huber), so that a call delayed by other
# work on the machine does not bend the line.
ROBUST = 2.0
STEADY = 0.01  # a residual below this is never an outlier
BENT = 1.1  # times the line's seconds: the largest calls that take longer are no noise
LEAST_STARTUP_S = 1e-9
# Smallest share of the largest call's time that is attributed to its bytes: equal times would
# otherwise give an infinite rate.
UNSEEN = 0.01


def fit_link(points: Sequence[tuple[int, float]]) -> Link:
    """Returns the link that fits the measured times best, by relative error.

    Minimises the sum of (predicted / measured - 1)^2 over startup and 1 / rate, both positive,
    with less weight on outliers. `error` is the median of |predicted / measured - 1|. `bends` has
    the deviation of the largest sizes from the line.

    Args:
      points: (bytes on the wire of a device, seconds), of at least two sizes.
    """
    if len({size for size, _ in points}) < 2:
        raise ValueError("one size tells no startup from bandwidth")
    x, t = np.array(points, np.float64).T
    weight = np.ones_like(t)
    startup, slope = 0.0, 0.0
    for _ in range(ROUNDS):
        startup, slope = _bounded_line(x, t, weight)
        residual = np.abs((startup + slope * x) / t - 1)
        usual = max(ROBUST * float(np.median(residual)), STEADY)
        weight = np.minimum(1, usual / np.maximum(residual, 1e-12))
    error = float(np.median(np.abs((startup + slope * x) / t - 1)))
    measured = tuple((int(size), float(seconds)) for size, seconds in points)
    line = Link(max(startup, LEAST_STARTUP_S), 1 / slope, error, measured)
    return replace(line, bends=_bends(line))


def _bends(line: Link) -> tuple[tuple[int, float], ...]:
    """Returns the sizes of the largest calls and their times over the line's, if longer.

    Only the largest: a small call that was held up, or one that meets a kernel's buffers, is noise
    beside the delays of a step. Larger calls of a step count like the largest one.
    """
    off = [(size, seconds / line.seconds(size)) for size, seconds in sorted(line.points)]
    straight = max((place for place, (_, times) in enumerate(off) if times <= BENT), default=-1)
    if straight in (-1, len(off) - 1):
        return ()
    return ((off[straight][0], 1.0), *off[straight + 1 :])


def _bounded_line(x: np.ndarray, t: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Weighted least squares of (a + b x) / t against 1, with a >= 0 and b large enough to see."""
    from scipy.optimize import lsq_linear  # a sixth of what a run imports

    w = np.sqrt(weight)
    columns = np.stack([w / t, w * x / t], axis=1)
    scale = np.linalg.norm(columns, axis=0)
    last = int(np.argmax(x))
    least = np.array([0.0, UNSEEN * t[last] / x[last]]) * scale
    startup, slope = lsq_linear(columns / scale, w, bounds=(least, np.inf), method="bvls").x / scale
    return float(startup), float(slope)
