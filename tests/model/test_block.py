"""The blocks of a pattern: each draws noise of its own, in whole sequences and in slices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.model.block import Pattern
from moejax.moe.router import Noise


class Told(SimpleNamespace):
    """Stands for a block; notes the noise that it is given."""

    def run(self, x_BtD, attend, noise):
        self.seen.append(noise)
        return x_BtD, None, []


@pytest.mark.usefixtures("unchecked_annotations")
def test_every_block_draws_by_its_place_in_the_pattern_also_in_slices():
    seen, x_BtD = [], jnp.zeros((1, 2, 4))
    pattern, noise = SimpleNamespace(blocks=[Told(seen=seen)] * 3), Noise(jax.random.key(5), 7)
    Pattern.__call__(pattern, x_BtD, jnp.zeros((1, 2), int), (), noise)
    Pattern.in_slice(pattern, x_BtD, (), [None] * 3, noise)
    wanted = [jax.random.key_data(jax.random.fold_in(noise.key, place)) for place in range(3)]
    found = [jax.random.key_data(one.key) for one in seen]
    np.testing.assert_array_equal(found, wanted * 2)
    assert [one.first_sequence for one in seen] == [7] * 6
