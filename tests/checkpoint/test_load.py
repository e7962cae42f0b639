"""Checkpoints read by name, without a device."""

import shutil

import jax
import numpy as np
import pytest

import moejax
from moejax.checkpoint.writer import Checkpoints
from moejax.errors import InputError
from tests.cases import drawn_state, small_config, step_for
from tests.checkpoint.test_writer import flip_a_bit


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two steps, its directory and its state."""
    state = drawn_state(step_for(small_config((1, 1, 2, 1))))
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    checkpoints = Checkpoints(directory, keep=2)
    for step in (1, 2):
        checkpoints.save(step, state, {"config": {"model": {"width": 1}}})
        checkpoints.wait()
    checkpoints.close()
    return directory, state


@pytest.mark.slow
def test_every_parameter_has_its_name_and_values(saved):
    directory, state = saved
    weights = moejax.load_checkpoint(directory.parent)
    assert weights.step == 2
    assert weights.config == {"model": {"width": 1}}
    expected = jax.tree.leaves((state.params, state.router_bias))
    assert len(weights) == len(expected)
    assert sum(array.size for array in weights.values()) == sum(leaf.size for leaf in expected)
    table = weights["embedding.table"]
    assert isinstance(table, np.ndarray)
    np.testing.assert_array_equal(table, state.params["embedding"]["table"])
    np.testing.assert_array_equal(weights.part("embedding.table", 3), table[3])


def test_a_step_is_chosen_and_a_name_that_is_not_there_is_a_key_error(saved):
    directory, _ = saved
    assert moejax.load_checkpoint(directory / "1").step == 1
    assert moejax.load_checkpoint(directory.parent, step=1).step == 1
    weights = moejax.load_checkpoint(directory.parent)
    with pytest.raises(KeyError):
        weights["no.such.name"]
    with pytest.raises(KeyError):
        weights.part("no.such.name", 0)
    with pytest.raises(InputError, match="no checkpoint of step 7"):
        moejax.load_checkpoint(directory.parent, step=7)
    with pytest.raises(InputError, match="must be full or size"):
        moejax.load_checkpoint(directory.parent, verify="none")


def test_a_damaged_checkpoint_is_not_read(saved, tmp_path):
    step = shutil.copytree(saved[0] / "2", tmp_path / "checkpoints" / "2")
    flip_a_bit(step)
    with pytest.raises(InputError, match="no whole checkpoint"):
        moejax.load_checkpoint(tmp_path)
