"""Every damage to a file of a checkpoint is found, or does no harm."""

import random
import shutil

import jax
import numpy as np
import pytest

from moejax.checkpoint.find import newest
from moejax.checkpoint.restore import restore_state
from moejax.checkpoint.writer import Checkpoints
from moejax.errors import InputError
from moejax.step.state import TrainState
from tests.cases import drawn_state, small_config, step_for
from tests.faults.damage import damage, files_of, spoil

TRIALS = 200


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a small state, and the state."""
    step = step_for(small_config((1, 1, 1, 1)))
    state = drawn_state(step)
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    checkpoints = Checkpoints(directory, keep=2)
    checkpoints.save(1, state._replace(step=state.step + 1), {"config": {}, "mesh": {}})
    checkpoints.wait()
    checkpoints.close()
    return directory, step.abstract, state._replace(step=state.step + 1)


def bits(state: TrainState):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def outcome(copy, what, same, abstract, state):
    """Returns whether damage to the only checkpoint was found; else its state is as it was.

    Args:
      same: whether the file is as before, so that there is nothing to find.
    """
    try:
        whole, _ = newest(copy, "full")
    except InputError as error:
        if "no whole checkpoint" in str(error):
            return True
        raise
    if whole is None:  # without its manifest it was never finished, and is set aside
        assert (copy / "1.unfinished").is_dir(), what
        return True
    assert same or what.startswith("add"), f"not found: {what}"
    assert bits(restore_state(whole, abstract)) == bits(state), what
    return False


@pytest.mark.parametrize(
    "seeds",
    [range(20), pytest.param(range(20, TRIALS), marks=pytest.mark.faults)],
    ids=["20 trials", f"{TRIALS - 20} more"],
)
def test_damage_is_found_or_does_no_harm(saved, tmp_path, seeds):
    directory, abstract, state = saved
    found = 0
    for seed in seeds:
        copy = tmp_path / str(seed)
        shutil.copytree(directory, copy)
        what, same = damage(copy / "1", random.Random(seed))
        found += outcome(copy, what, same, abstract, state)
    assert found > len(seeds) // 2


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["flip", "cut", "delete"])
def test_damage_to_every_file_is_found(saved, tmp_path, kind):
    directory, abstract, state = saved
    names = [path.relative_to(directory) for path in files_of(directory / "1")]
    assert len(names) > 10
    for number, name in enumerate(names):
        copy = tmp_path / str(number)
        shutil.copytree(directory, copy)
        before = (copy / name).read_bytes()
        spoil(copy / name, kind, random.Random(number))
        same = (copy / name).is_file() and (copy / name).read_bytes() == before
        assert outcome(copy, f"{kind} {name}", same, abstract, state) or not before, name
