"""What enters beside a weight: its codec's state, and the step of the run for each layer."""

import jax.numpy as jnp
import numpy as np

from moejax.comm.weights.compressed import ReduceState
from moejax.comm.weights.residuals import attach_residuals, detach_residuals

LAYERS = 3


def test_states_enter_without_their_dimension_of_devices_and_leave_with_it():
    params = {"query": jnp.zeros((LAYERS, 2, 2, 2)), "table": jnp.zeros((2, 2))}
    parts = {"query": jnp.arange(LAYERS * 5.0).reshape(LAYERS, 1, 5), "table": jnp.ones((1, 5))}
    states = {name: ReduceState(part, None) for name, part in parts.items()}
    dims = {"query": "DHC", "table": "VD"}
    shards = attach_residuals(params, states, dims, jnp.int32(511))
    assert shards["query"].residual.state.parts.shape == (LAYERS, 5)
    np.testing.assert_array_equal(shards["query"].residual.step, [511] * LAYERS)
    assert shards["table"].residual.step == 511
    weights, left = detach_residuals(shards, dims)
    for name, part in parts.items():
        np.testing.assert_array_equal(weights[name], params[name])
        np.testing.assert_array_equal(left[name].parts, part)
