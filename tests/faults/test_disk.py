"""The disk of a run becomes full: it ends in one line, and goes on when there is room again."""

import re

import pytest

from tests.faults.disks import empty, fill, may_mount, small_disk
from tests.faults.lab import once_saved
from tests.integration.runs import assert_same_end

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(not may_mount(), reason="only root may mount a file system"),
]


@pytest.mark.parametrize("step", [12, 17])
def test_a_full_disk_ends_a_run_that_goes_on_when_there_is_room(lab, step):
    name = f"full-{step}"
    folder = lab.folder / name
    with small_disk(folder):
        trial = lab.trial(name, step, once_saved(folder, 10, fill(folder)))
        assert trial.code == 5, trial.out
        assert "[p0] Traceback" not in trial.out, trial.out
        said = re.findall(
            r"^\[p0\] moejax: error: no space left.*Free some", trial.out, re.MULTILINE
        )
        assert len(said) == 1, trial.out
        assert "launcher: restart" not in trial.out, trial.out
        empty(folder)
        done = lab.run(name)
        assert done.returncode == 0, done.stdout
        assert "resuming at step 10 from" in done.stdout
        assert_same_end(lab.folder / "straight", folder)
