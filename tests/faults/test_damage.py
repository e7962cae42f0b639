"""Every damage to a file of a checkpoint is found, or does no harm."""

import random
import shutil

import jax
import numpy as np
import pytest

from moejax.errors import InputError
from moejax.step.state import TrainState
from moejax.train.checkpoint import Checkpoints
from moejax.train.restore import restore_state
from moejax.train.saved import newest
from tests.cases import small_config, step_for

TRIALS = 200
KINDS = ("flip", "cut", "delete", "add", "copy of another")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a small state, and the state."""
    step = step_for(small_config((1, 1, 1, 1)))
    state = step.init()
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    checkpoints = Checkpoints(directory, keep=2)
    checkpoints.save(1, state._replace(step=state.step + 1), {"config": {}, "mesh": {}})
    checkpoints.wait()
    checkpoints.close()
    return directory, step.abstract, state._replace(step=state.step + 1)


def damage(step, draw):
    """Damages a file of a checkpoint. Returns what was done."""
    files = sorted(path for path in step.rglob("*") if path.is_file())
    path, kind = draw.choice(files), draw.choice(KINDS)
    content = path.read_bytes()
    if kind == "delete":
        path.unlink()
    elif kind == "add":
        (path.parent / "more").write_bytes(content)
    elif kind == "copy of another":
        path.write_bytes(draw.choice(files).read_bytes())
    elif kind == "cut" or not content:
        path.write_bytes(content[: draw.randrange(len(content) or 1)])
    else:
        place = draw.randrange(len(content))
        flipped = bytes([content[place] ^ (1 << draw.randrange(8))])
        path.write_bytes(content[:place] + flipped + content[place + 1 :])
    return f"{kind} {path.relative_to(step)}", path.is_file() and path.read_bytes() == content


def bits(state: TrainState):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


@pytest.mark.parametrize(
    "seeds",
    [range(20), pytest.param(range(20, TRIALS), marks=pytest.mark.faults)],
    ids=["20 trials", f"{TRIALS - 20} more"],
)
def test_damage_is_found_or_does_no_harm(saved, tmp_path, seeds):
    directory, abstract, state = saved
    found = harmless = 0
    for seed in seeds:
        copy = tmp_path / str(seed)
        shutil.copytree(directory, copy)
        what, same = damage(copy / "1", random.Random(seed))
        try:
            whole, _ = newest(copy, "full")
        except InputError as error:
            found += "no whole checkpoint" in str(error)
            continue
        if whole is None:  # without its manifest it was never finished, and is set aside
            assert (copy / "1.unfinished").is_dir(), what
            found += 1
            continue
        assert same or what.startswith("add"), f"not found: {what}"
        assert bits(restore_state(whole, abstract)) == bits(state), what
        harmless += 1
    assert found + harmless == len(seeds)
    assert found > len(seeds) // 2
