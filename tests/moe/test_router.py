"""Routing rules against the oracle's, and the router's losses against the libraries'."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config.load import load_config
from moejax.config.schema import MeshConfig, RouterConfig
from moejax.layout.layout import build_layout
from moejax.moe import router
from tests.oracle import moe_reference

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/golden/from_transformers.json").read_text())
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
    dense = weight_table(routing, 8)
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


def balance_of(routings: list[router.Routing], cfg: RouterConfig, *, k: int) -> np.ndarray:
    """The balance loss of each layer, on one device."""
    terms = [router.balance_terms(one, cfg, sequences=1) for one in routings]
    counted_LSE, score_LSE = (jnp.stack(each) for each in zip(*terms, strict=True))
    return np.asarray(router.balance_loss(counted_LSE, score_LSE, cfg, k=k, layout=ONE))


@pytest.mark.parametrize("case", GOLDEN["balance"], ids=lambda case: case["name"])
def test_the_balance_loss_is_transformers_over_k(case):
    """Theirs is K when even, ours 1; of several layers theirs pools tokens, ours is a mean.

    The two differ where layers do: by E times the covariance, over the layers, of an expert's share
    of assignments and its mean score. Layers that are alike, and one layer, agree.
    """
    logit_LNE, k, cfg = jnp.array(case["logits"]), case["k"], RouterConfig(renormalize=False)
    E = logit_LNE.shape[2]
    routings = [router.route(logit_NE, jnp.zeros(E), cfg, k=k) for logit_NE in logit_LNE]
    share_LE = np.stack([np.mean(weight_table(r, E) > 0, axis=0) / k for r in routings])
    mean_LE = np.stack([np.mean(r.score_NE, axis=0) for r in routings])
    apart = np.mean((share_LE - share_LE.mean(axis=0)) * (mean_LE - mean_LE.mean(axis=0)), axis=0)
    ours = balance_of(routings, cfg, k=k).mean() - E * np.sum(apart)
    # Sums of some tens of numbers around one.
    assert case["loss"] == pytest.approx(k * ours, rel=1e-5)
    assert (len(case["logits"]) == 1 or case["logits"][0] == case["logits"][1]) == np.allclose(
        apart, 0
    )


def weight_table(routing: router.Routing, num_experts: int) -> np.ndarray:
    dense_NE = np.zeros((routing.expert_NK.shape[0], num_experts), np.float32)
    np.put_along_axis(dense_NE, np.asarray(routing.expert_NK), np.asarray(routing.weight_NK), 1)
    return dense_NE


@pytest.mark.parametrize(
    ("config", "published", "when_even", "layers"),
    [
        # Coefficient, what their loss is when even, and over how many layers it is a sum.
        ("mixtral_8x7b", 0.02, 2, 1),  # transformers: K, layers pooled
        ("qwen3_30b_a3b", 0.001, 8, 1),  # transformers
        ("olmoe_1b_7b", 0.01, 1, 1),  # megablocks: a mean over layers
        ("deepseek_v3", 0.0001, 1, 61 - 3),  # the paper's equation 17, of each layer with experts
    ],
)
def test_published_configs_weigh_balance_as_published(config, published, when_even, layers):
    cfg = load_config(ROOT / f"configs/{config}.py")
    assert cfg.moe.router.balance_loss == pytest.approx(published * when_even * layers)


def test_the_sequence_loss_counts_the_best_scores_and_not_what_the_bias_chose():
    """DeepSeek-V3's equation 18 has s, not s + b, and no groups."""
    options = {"score": "sigmoid", "num_groups": 2, "groups_per_token": 1}
    logit_NE = jnp.array([[3.0, 1.0, 2.0, 0.0], [3.0, 2.0, 1.0, 0.0]] * 2)
    bias_E = jnp.array([-1.0, 0.0, 0.0, 1.0])
    cfg = RouterConfig(balance_over="sequence", **options)
    routing = router.route(logit_NE, bias_E, cfg, k=2)
    assert np.sort(routing.expert_NK).tolist() == [[2, 3]] * 4
    counted_SE, score_SE = router.balance_terms(routing, cfg, sequences=2)
    assert counted_SE.tolist() == [[2, 1, 1, 0]] * 2
    np.testing.assert_allclose(np.sum(score_SE, axis=1), 2, rtol=1e-6)
    counted_SE, _ = router.balance_terms(routing, RouterConfig(**options), sequences=2)
    assert counted_SE.tolist() == [[0, 0, 4, 4]]


def test_z_loss_is_the_mean_squared_log_partition():
    logit_NE = jnp.log(jnp.array([[1.0, 1.0], [3.0, 5.0]]))
    loss = in_one_device_map(lambda x: router.z_loss(x, layout=ONE), logit_NE)
    assert float(loss) == pytest.approx((np.log(2) ** 2 + np.log(8) ** 2) / 2)


@pytest.mark.slow
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
        lambda k: router.jitter_noise((4, 6, 2), 0.1, router.Noise(k, 0), position_t=jnp.arange(6)),
        key,
    )
    mesh_cfg = MeshConfig(replica=2, expert=2, tensor=2)
    layout = build_layout(mesh_cfg)
    mesh = jax.make_mesh((2, 1, 2, 2), layout.mesh_axes)
    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        lambda k: router.jitter_noise(
            (1, 3, 2),
            0.1,
            router.Noise(k, jax.lax.axis_index(layout.token_axes)),
            position_t=3 * jax.lax.axis_index("tensor") + jnp.arange(3),
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


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_weight_that_is_always_one_gives_the_router_no_gradient(score, renormalize):
    """Rounding alone is left of it, which `config.checks.gradients` refuses to train by."""
    rng, cfg = np.random.default_rng(0), RouterConfig(score=score, renormalize=renormalize)
    logit_NE, factor_N1 = jnp.asarray(rng.normal(size=(9, 4))), jnp.asarray(rng.normal(size=(9, 1)))

    def loss(logit_NE):
        return jnp.sum(router.route(logit_NE, jnp.zeros(4), cfg, k=1).weight_NK * factor_N1)

    largest = float(jnp.max(jnp.abs(jax.grad(loss)(logit_NE))))
    assert largest < 1e-6 if renormalize else largest > 0.1


def test_entropy_is_one_where_scores_are_even_and_zero_where_one_expert_has_all():
    def found(score_NE):
        score_NE = jnp.asarray(score_NE, jnp.float32)
        return float(in_one_device_map(lambda x: router.entropy(x, layout=ONE), score_NE))

    assert found([[0.25] * 4]) == pytest.approx(1)
    assert found([[0, 1.0, 0, 0]]) == 0
    # Sigmoid scores do not sum to one: 2 and 2 of 4 are a half each, of four experts.
    assert found([[2.0, 2.0, 0, 0], [0.25] * 4]) == pytest.approx((0.5 + 1) / 2)
    assert found([[1.0]]) == 0  # a single expert: nothing to tell apart
    gradient = jax.grad(lambda x: in_one_device_map(lambda x: router.entropy(x, layout=ONE), x))
    assert not gradient(jnp.full((2, 4), 0.25)).any()


def test_given_choices_that_the_router_makes_too_count_in_any_order():
    """Both, one of the two, none; and a token whose choice is free."""
    own_NK = jnp.array([[0, 1], [2, 3], [0, 1], [0, 1]])
    given_NK = jnp.array([[1, 0], [3, 0], [2, 3], [-1, -1]])
    assert router.count_replayed(own_NK, given_NK).tolist() == [3, 6]


@settings(max_examples=6)
@given(
    groups=st.sampled_from([(1, 1), (4, 2), (2, 1), (8, 8), (4, 3)]),
    size=st.integers(2, 6),
    k=st.integers(1, 6),
    rows=st.integers(1, 9),
    first=st.integers(0, 5),
)
def test_experts_in_turn_are_different_even_and_of_few_groups(groups, size, k, rows, first):
    G, few = groups
    E, k = G * size, min(k, few * size)
    cfg = RouterConfig(num_groups=G, groups_per_token=few, forced="balanced")
    expert_NK = np.asarray(router.choose_in_turn(first * E, rows * E, E, cfg, k=k))
    assert all(len(set(chosen)) == k for chosen in expert_NK)
    assert all(len(set(chosen // size)) <= few for chosen in expert_NK)
    for row in np.split(expert_NK, rows):
        assert np.bincount(row.ravel(), minlength=E).tolist() == [k] * E
    # A device's tokens go on where those of the one before end.
    parts = [router.choose_in_turn(first * E + n, 1, E, cfg, k=k) for n in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts), expert_NK[:2])


def test_forced_experts_have_the_weights_of_their_scores():
    logit_NE = jax.random.normal(jax.random.key(0), (6, 4))
    forced_NK = jnp.array([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])
    cfg = RouterConfig(forced="balanced", renormalize=False)
    routing = router.route(logit_NE, jnp.zeros(4), cfg, k=2, given_NK=forced_NK)
    np.testing.assert_array_equal(routing.expert_NK, forced_NK)
    wanted = np.take_along_axis(np.asarray(jax.nn.softmax(logit_NE)), np.asarray(forced_NK), 1)
    np.testing.assert_allclose(routing.weight_NK, wanted, rtol=1e-6)
