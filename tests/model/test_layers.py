"""Norms where little is to be normalised; how weights are drawn, of attention and experts too."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.model.layers import RMSNorm
from tests.cases import small_config, step_for


@pytest.mark.parametrize("size", [0.0, 1e-6, 1e-3, 1.0])
def test_epsilon_is_added_to_the_mean_square(size):
    x_ND = size * np.array([[1.0, -1.0, 2.0, 0.0], [0.5, 0.5, 0.5, 0.5]], np.float32)
    squares_N1 = np.mean(x_ND.astype(np.float64) ** 2, axis=1, keepdims=True)
    wanted = x_ND / np.sqrt(squares_N1 + 1e-5)
    np.testing.assert_allclose(RMSNorm(4, 1e-5)(jnp.asarray(x_ND)), wanted, rtol=1e-6)


@pytest.mark.slow
def test_weights_are_drawn_as_the_config_says():
    """With its deviation; those that add to the residual stream with less, by the depth."""
    model = {"width": 64, "mlp_hidden": 256, "num_layers": 3, "head_width": 16, "vocab_size": 512}
    moe = {"expert_hidden": 64, "num_shared_experts": 2}
    more = {"first_dense_layers": 1, "tie_embeddings": False, "attention_bias": True}
    cfg = small_config(model=model | more, moe=moe)
    found = jax.tree_util.tree_flatten_with_path(step_for(cfg).init().params)[0]
    less = cfg.model.init_deviation / math.sqrt(2 * 3)
    seen = set()
    for path, x in found:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        seen.add(name)
        if name == "scale" or name.startswith("b_"):
            assert np.all(np.asarray(x) == (name == "scale"))
            continue
        wanted = less if name in ("w_o", "w_out") else cfg.model.init_deviation
        # Of n draws the deviation is known to 1 / sqrt(2 n); five times that.
        assert np.std(x) == pytest.approx(wanted, rel=5 / math.sqrt(2 * x.size)), path
        assert abs(np.mean(x)) < 5 * wanted / math.sqrt(x.size), path
    assert {"w_q", "w_o", "w_in", "w_out", "w_router", "table", "project", "scale", "b_q"} <= seen
