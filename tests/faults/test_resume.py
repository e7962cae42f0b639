"""A run of two processes is killed, and others take it over: other counts, other meshes."""

import signal

import pytest

from tests.faults.takeover import OTHERS, SAME, check_batches, check_losses, kill, take_over
from tests.integration.runs import assert_same_end

pytestmark = [pytest.mark.slow, pytest.mark.faults]


@pytest.fixture(scope="module")
def killed(lab):
    """The name of a run that was killed."""
    trial = kill(lab, "killed")
    assert trial.code == 128 + signal.SIGKILL, trial.out
    return "killed"


@pytest.mark.parametrize("who", OTHERS)
def test_another_count_or_mesh_goes_on_with_the_same_batches(lab, killed, who):
    take_over(lab, killed, who, OTHERS[who])
    check_batches(lab, killed, who)
    check_losses(lab, who)


def test_the_same_count_and_mesh_goes_on_to_the_same_bits(lab, killed):
    take_over(lab, killed, "the same", SAME)
    check_batches(lab, killed, "the same")
    assert_same_end(lab.folder / "straight", lab.folder / "the same")
