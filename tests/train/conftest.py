"""Runs without compiled programs, closed when a test ends."""

import pytest

from tests.train.running import build_run


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


@pytest.fixture(autouse=True, scope="module")
def annotations(unchecked_annotations):
    """Leaves annotations unchecked: these tests trace whole steps, whose layers have tests."""
