"""Files from elsewhere that are broken, by accident or on purpose, are refused in one line."""

import pytest

from tests.faults.untrusted import NEEDS, READERS, run, tally

TRIALS = 30, 1000  # of each reader: in every run of the tests, and in all


@pytest.mark.parametrize(
    "trials", [range(TRIALS[0]), pytest.param(range(*TRIALS), marks=pytest.mark.faults)]
)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_broken_file_is_read_or_refused(tmp_path, monkeypatch, reader, trials):
    if reader.__name__ in NEEDS:
        pytest.importorskip(NEEDS[reader.__name__])
    monkeypatch.chdir(tmp_path)
    found = tally(reader, tmp_path, trials)
    assert found.crashed == {}
    assert found.read + found.refused == len(trials)
    assert found.refused > 0 or reader is run  # whose lines may each be left out
