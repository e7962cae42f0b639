"""Routing rules against the oracle's, and the balance losses at their fixed points."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config import MeshConfig, RouterConfig
from moejax.dims import build_layout
from moejax.moe import router
from moejax.moe.reference import moe_reference

ONE = build_layout(MeshConfig())


@settings(max_examples=20)
@given(
    score=st.sampled_from(["softmax", "sigmoid"]),
    renormalize=st.booleans(),
    groups=st.sampled_from([(1, 1), (4, 2), (2, 1)]),
    k=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_weights_equal_the_references(score, renormalize, groups, k, seed):
    cfg = RouterConfig(
        score=score,
        renormalize=renormalize,
        weight_scale=1.5,
        num_groups=groups[0],
        groups_per_token=groups[1],
    )
    rng = np.random.default_rng(seed)
    logit_NE = jnp.asarray(rng.standard_normal((6, 8)), jnp.float32)
    bias_E = jnp.asarray(rng.standard_normal(8) * 0.1, jnp.float32)
    routing = router.route(logit_NE, bias_E, cfg, k=k)
    dense = np.zeros((6, 8), np.float32)
    np.put_along_axis(dense, np.asarray(routing.expert_NK), np.asarray(routing.weight_NK), 1)
    # Logits enter the reference as x @ I.
    experts = (jnp.zeros((8, 8, 2, 1)), jnp.zeros((8, 1, 8)))
    _, wanted = moe_reference(logit_NE, jnp.eye(8), bias_E, *experts, cfg, k=k)
    np.testing.assert_allclose(dense, wanted, atol=1e-6)


def in_one_device_map(function, *args):
    """Runs per-device code on a mesh of one."""
    mesh = jax.make_mesh((1, 1, 1, 1), ONE.mesh_axes, devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return mapped(*args)


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_balance_loss_is_one_when_even_and_the_number_of_experts_when_collapsed(over):
    cfg = RouterConfig(balance_over=over)
    even = jnp.arange(8).reshape(8, 1) % 4
    for expert_NK, score_NE, wanted in [
        (even, jnp.full((8, 4), 0.25), 1.0),
        (jnp.zeros((8, 1), jnp.int32), jnp.eye(4)[jnp.zeros(8, jnp.int32)], 4.0),
    ]:
        routing = router.Routing(expert_NK, jnp.ones((8, 1)), score_NE)
        terms = [x[None] for x in router.balance_terms(routing, cfg, sequences=2)]
        (loss,) = router.balance_loss(*terms, cfg, k=1, layout=ONE)
        assert float(loss) == pytest.approx(wanted)


def test_z_loss_is_the_mean_squared_log_partition():
    logit_NE = jnp.log(jnp.array([[1.0, 1.0], [3.0, 5.0]]))
    loss = in_one_device_map(lambda x: router.z_loss(x, layout=ONE), logit_NE)
    assert float(loss) == pytest.approx((np.log(2) ** 2 + np.log(8) ** 2) / 2)


def test_devices_shares_of_the_losses_add_up_to_those_of_all_tokens():
    cfg, layout = RouterConfig(), build_layout(MeshConfig(replica=2, expert=2, tensor=2))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 1, 2, 2), layout.mesh_axes)
    spec, rng = jax.sharding.PartitionSpec, np.random.default_rng(0)
    logit_NE = jnp.asarray(rng.standard_normal((24, 4)), jnp.float32)

    def losses(logit_NE, layout):
        routing = router.route(logit_NE, jnp.zeros(4), cfg, k=2)
        load_SE, score_SE = router.balance_terms(routing, cfg, sequences=1)
        load_SE = jax.lax.psum(load_SE, layout.mesh_axes)
        (balance,) = router.balance_loss(load_SE[None], score_SE[None], cfg, k=2, layout=layout)
        return jax.lax.psum((router.z_loss(logit_NE, layout=layout), balance), layout.mesh_axes)

    mapped = jax.shard_map(
        lambda x: losses(x, layout),
        mesh=mesh,
        in_specs=spec(layout.mesh_axes),
        out_specs=spec(),
        check_vma=False,
    )
    wanted = in_one_device_map(lambda x: losses(x, ONE), logit_NE)
    np.testing.assert_allclose(mapped(logit_NE), wanted, rtol=24 * np.finfo(np.float32).eps)


def test_the_bias_moves_towards_idle_experts_by_its_rate():
    moved = router.update_bias(jnp.zeros(4), jnp.array([10, 0, 4, 2]), 0.5)
    np.testing.assert_array_equal(moved, [-0.5, 0.5, 0.0, 0.5])


def test_jitter_depends_on_the_global_position_alone():
    key = jax.random.key(0)
    whole = in_one_device_map(
        lambda k: router.jitter_noise((4, 6, 2), 0.1, k, ONE, first_position=0), key
    )
    mesh_cfg = MeshConfig(replica=2, expert=2, tensor=2)
    layout = build_layout(mesh_cfg)
    mesh = jax.make_mesh((2, 1, 2, 2), layout.mesh_axes)
    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        lambda k: router.jitter_noise(
            (1, 3, 2), 0.1, k, layout, first_position=3 * jax.lax.axis_index("tensor")
        ),
        mesh=mesh,
        in_specs=spec(),
        out_specs=spec(layout.token_axes, layout.tensor),
        check_vma=False,
    )
    np.testing.assert_array_equal(mapped(key), whole)
    assert np.abs(np.asarray(whole) - 1).max() <= 0.1
    assert np.asarray(whole).std() > 0.03


def test_of_equal_experts_the_first_is_chosen_with_weight_one():
    routing = router.route(jnp.zeros((3, 4)), jnp.zeros(4), RouterConfig(), k=1)
    np.testing.assert_allclose(routing.weight_NK, 1.0)
    np.testing.assert_array_equal(routing.expert_NK, 0)  # of equals the first
