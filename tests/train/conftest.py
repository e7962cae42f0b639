"""Runs without compiled programs, closed when a test ends."""

import numpy as np
import pytest

from tests.train.running import build_run, metrics


@pytest.fixture
def running(tmp_path):
    """`build_run` in the test's own directory."""
    opened = []

    def build(cfg, **options):
        opened.append(build_run(cfg, tmp_path, **options))
        return opened[-1]

    yield build
    for run, _ in opened:
        run.records.close()


@pytest.fixture
def training(running):
    """A run whose steps only count; named ones measure else, and skip what is not finite."""

    def build(cfg, bad=(), seen=None):
        measured = dict(bad)

        def step(state, batch):
            number = int(state.step) + 1
            if seen is not None:
                seen.append(np.asarray(batch.token_BT))
            values = measured.get(number, {})
            finite = all(np.isfinite(values.get(name, 1.0)) for name in ("loss", "norm"))
            skipped = state.skipped + (not finite)
            state = state._replace(step=np.int32(number), skipped=np.int32(skipped))
            return state, metrics(**values, skipped=skipped)

        return running(cfg, step=step)

    return build
