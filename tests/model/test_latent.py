"""Latent attention: what crosses the tensor axis, and which channels rotate.

tests/step holds its loss and gradients against the oracle, which takes scores in the latent.
"""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.config.schema import RopeConfig
from moejax.model.mixers.latent import LatentAttention, append_key, rotate_last
from moejax.model.rope import angles_at, rotate
from moejax.plan.trace.reader import collectives
from tests.cases import small_config, step_for

LATENT = {"attention": "latent", "head_width": 6, "rope_width": 2, "value_width": 4}
LATENT |= {"kv_latent": 16, "moe_every": None, "num_layers": 3}


def tensor_traffic(activations="sequence", **model):
    """Channels of a position that cross the tensor axis in each call, with the number of calls."""
    cfg = small_config((1, 1, 1, 4), activations=activations, model=LATENT | model)
    train_step = step_for(cfg)
    traced = train_step.gradients.trace(train_step.abstract, train_step.abstract_batch())
    found = collectives(traced.jaxpr.jaxpr)
    positions = cfg.train.batch_sequences * cfg.data.sequence_length
    calls = Counter()
    for one in found:
        if one.traffic == "activations":
            calls[one.kind, one.bytes // (4 * positions)] += one.calls
    return calls


@pytest.mark.usefixtures("unchecked_annotations")
def test_latents_are_gathered_where_queries_have_one_and_else_the_width_too():
    """Three blocks; forward gathers, and backward adds up what it gathered."""
    width, own = 32, 16 + 2
    found = tensor_traffic(q_latent=8)
    assert found["all_gather", 8 + own] == found["reduce_scatter", 8 + own] == 3
    found = tensor_traffic()
    assert found["all_gather", width + own] == found["reduce_scatter", width + own] == 3
    grouped = tensor_traffic(attention="grouped", head_width=6)
    # The MLP of each block and the end gather the width; attention, too.
    assert grouped["all_gather", width] == found["all_gather", width] + 3


@pytest.mark.usefixtures("unchecked_annotations")
def test_replicated_activations_gather_no_latent():
    found = tensor_traffic("replicated", q_latent=8)
    assert {kind for kind, _ in found} == {"all_reduce"}


def test_all_heads_share_one_key_that_rotates():
    rng = np.random.default_rng(0)
    plain = jnp.asarray(rng.standard_normal((2, 5, 8, 4)), jnp.float32)
    shared = jnp.asarray(rng.standard_normal((2, 5, 2)), jnp.float32)
    angles = angles_at(jnp.arange(5), 2, RopeConfig())
    k = np.asarray(append_key(plain, rotate(shared[:, :, None], angles)[:, :, 0]))
    np.testing.assert_array_equal(k[..., :4], plain)
    np.testing.assert_array_equal(k[..., 4:], np.broadcast_to(k[:, :, :1, 4:], (2, 5, 8, 2)))
    alone = rotate_last(shared[:, :, None], angles)
    np.testing.assert_array_equal(k[:, :, :1, 4:], alone)


def test_the_last_channels_of_queries_rotate():
    q = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 3, 6)), jnp.float32)
    turned = np.asarray(rotate_last(q, angles_at(jnp.arange(5), 2, RopeConfig())))
    np.testing.assert_array_equal(turned[..., :4], q[..., :4])
    np.testing.assert_array_equal(turned[:, 0], q[:, 0])  # the first position turns by nothing
    angle = np.arange(5)[:, None]
    first, second = np.asarray(q[..., 4]), np.asarray(q[..., 5])
    wanted = [first * np.cos(angle) - second * np.sin(angle)]
    wanted += [first * np.sin(angle) + second * np.cos(angle)]
    np.testing.assert_allclose(turned[..., 4:], np.stack(wanted, axis=-1), atol=1e-6)


@pytest.mark.usefixtures("unchecked_annotations")
def test_norms_of_latents_have_an_epsilon_of_their_own():
    """1e-6, whatever the model's other norms take: of numbers of 1e-3 it is as much as the mean."""
    cfg = small_config(model=LATENT | {"q_latent": 8, "norm_epsilon": 0.5})
    module = LatentAttention(cfg.model, None, step_for(cfg).model.spec, nnx.Rngs(params=0))
    for norm, width in ((module.q_norm, 8), (module.kv_norm, 16)):
        np.testing.assert_allclose(norm(jnp.full(width, 1e-3)), 0.5**0.5, rtol=1e-5)
