import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.comm import wire
from moejax.comm.jaxprs import inner_jaxprs, opened
from moejax.config.schema import MeshConfig, MoEConfig, RouterConfig
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.moe.layer import MoEStats
from moejax.step.loss import next_token_loss, router_losses, sum_nll, target_nll
from tests.cases import assert_close

B, T, D, V = 2, 6, 5, 16


def plain(x_BTD, w_DV, target_BT, cap=None):
    """The same by log_softmax over the whole vocabulary."""
    logit_BTV = x_BTD @ w_DV
    log_BTV = jax.nn.log_softmax(logit_BTV if cap is None else cap * jnp.tanh(logit_BTV / cap))
    chosen_BT = jnp.take_along_axis(log_BTV, jnp.maximum(target_BT, 0)[..., None], axis=2)[..., 0]
    return -jnp.sum(jnp.where(target_BT >= 0, chosen_BT, 0))


def one_by_one(x_BTD, w_DV, target_BT):
    """`plain` of each target."""
    places = np.ndindex(target_BT.shape)
    found = [plain(x_BTD[None, None, b, t], w_DV, target_BT[None, None, b, t]) for b, t in places]
    return np.array(found).reshape(target_BT.shape)


def random_case(seed=0, shape=(B, T, D, V), scale=1.0):
    rng = np.random.default_rng(seed)
    b, t, d, v = shape
    x_BTD = scale * rng.standard_normal((b, t, d), np.float32)
    w_DV = rng.standard_normal((d, v), np.float32)
    target_BT = rng.integers(-1, v, (b, t), dtype=np.int32)
    return x_BTD, w_DV, target_BT


@functools.cache
def layout_of(tensor):
    return build_layout(MeshConfig(tensor=tensor))


@functools.cache
def sharded(tensor, chunk_tokens, weight=1.0, cap=None):
    """(x, w, target) -> sum and its gradients, the vocabulary over `tensor` devices."""
    layout = layout_of(tensor)
    mesh = build_mesh(layout, jax.devices()[:tensor])

    def body(x_BTD, w_Dv, target_BT):
        def share(x_BTD, w_Dv):
            total = sum_nll(x_BTD, w_Dv, target_BT, layout, chunk_tokens=chunk_tokens, cap=cap)
            # Devices' losses add up to the loss, as in the step.
            return weight * total / tensor, total

        (_, total), (dx, dw) = jax.value_and_grad(share, (0, 1), has_aux=True)(x_BTD, w_Dv)
        # Each device holds the part of dx that its slice of the vocabulary gives.
        return total, wire.all_reduce(dx, layout.tensor), dw

    by_vocabulary = P(None, "tensor")
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P(), by_vocabulary, P()),
        out_specs=(P(), P(), by_vocabulary),
        check_vma=False,
    )
    return jax.jit(mapped)


def wanted(x_BTD, w_DV, target_BT, cap=None):
    total, gradients = jax.value_and_grad(plain, (0, 1))(x_BTD, w_DV, target_BT, cap)
    return total, *gradients


# Chunks of 1, of a number that divides no part, of some, of all, and more than there are.
@pytest.mark.parametrize(
    ("tensor", "chunk_tokens"), [(2, 1), (1, 5), (8, 5), (2, 4), (1, B * T), (8, 1000)]
)
def test_the_sum_and_its_gradients_are_those_of_log_softmax(tensor, chunk_tokens):
    case = random_case()
    assert_close(sharded(tensor, chunk_tokens)(*case), wanted(*case), terms=B * T * V)


def test_a_cap_on_logits_has_its_gradient():
    """The cap is near the size of the logits, so that it bends them."""
    case = random_case()
    found = sharded(2, 5, cap=1.5)(*case)
    assert_close(found, wanted(*case, cap=1.5), terms=B * T * V)
    assert float(found[0]) < 0.9 * float(wanted(*case)[0])


@functools.cache
def nats(tensor, chunk_tokens):
    """(x, w, target) -> nats of each target, the vocabulary over `tensor` devices."""
    layout = layout_of(tensor)
    mapped = jax.shard_map(
        functools.partial(target_nll, layout=layout, chunk_tokens=chunk_tokens),
        mesh=build_mesh(layout, jax.devices()[:tensor]),
        in_specs=(P(), P(None, "tensor"), P()),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(mapped)


@pytest.mark.parametrize(("tensor", "chunk_tokens"), [(1, 5), (2, 4), (8, 1000)])
def test_nats_of_each_target_are_those_of_log_softmax(tensor, chunk_tokens):
    x_BTD, w_DV, target_BT = random_case()
    target_BT[1, 3] = -1
    nll_BT = nats(tensor, chunk_tokens)(x_BTD, w_DV, target_BT)
    assert not np.any(nll_BT[target_BT < 0])
    assert_close(nll_BT, one_by_one(x_BTD, w_DV, target_BT), terms=B * T * V)


@pytest.mark.parametrize("chunk_tokens", [3, 4, 6])
def test_tokens_of_a_prime_number_are_cut_in_chunks_too(chunk_tokens):
    """The last chunk has fewer; what fills it up changes no sum and no gradient."""
    case = random_case(shape=(1, 7, D, V))
    assert_close(sharded(1, chunk_tokens)(*case), wanted(*case), terms=7 * V)
    nll_BT = nats(1, chunk_tokens)(*case)
    assert_close(nll_BT, one_by_one(*case), terms=7 * V)


def equations(jaxpr):
    """Every equation of a program, those of loops and calls too."""
    for eqn in opened(jaxpr).eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(509, 128), (8191, 128), (8191, 4096)])
def test_no_number_of_tokens_goes_token_by_token(tokens, chunk_tokens):
    """At most twice as many chunks as the fewest, and at most so many rows for nothing."""
    fewest = -(-tokens // chunk_tokens)
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, tokens, D), (D, V))]
    targets = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    for function in (sharded(1, chunk_tokens), nats(1, chunk_tokens)):
        traced = jax.make_jaxpr(function)(*floats, targets)
        (scan,) = [eqn for eqn in equations(traced) if eqn.primitive.name == "scan"]
        count, rows = scan.outvars[-1].aval.shape[:2]  # of gradients of rows, or of nats
        assert fewest <= count == scan.params["length"] < 2 * fewest
        assert rows <= chunk_tokens
        assert tokens <= count * rows < tokens + fewest


@pytest.mark.parametrize("tensor", [1, 8])
def test_targets_left_out_change_nothing(tensor):
    x_BTD, w_DV, target_BT = random_case(1)
    target_BT[0, 2] = -1
    other = x_BTD.copy()
    other[0, 2] = 100
    found, changed = (sharded(tensor, 4)(x, w_DV, target_BT) for x in (x_BTD, other))
    jax.tree.map(np.testing.assert_array_equal, found, changed)
    assert not np.any(found[1][0, 2])
    assert np.any(found[1][0, 1])
    for value in sharded(tensor, 4)(x_BTD, w_DV, np.full_like(target_BT, -1)):
        np.testing.assert_array_equal(value, 0)


@pytest.mark.parametrize("tensor", [1, 8])
def test_large_logits_stay_finite(tensor):
    case = random_case(3, scale=1e4)
    got = sharded(tensor, 5)(*case)
    assert all(np.isfinite(x).all() for x in got)
    assert_close(got, wanted(*case), terms=B * T * V)


def test_gradients_scale_with_the_weight_of_the_sum():
    case = random_case(4)
    total, *plain_gradients = sharded(2, 4)(*case)
    scaled_total, *scaled = sharded(2, 4, weight=0.25)(*case)
    assert float(total) == float(scaled_total)
    for one, quarter in zip(plain_gradients, scaled, strict=True):
        # A power of two scales floats exactly.
        np.testing.assert_array_equal(0.25 * np.asarray(one), quarter)


def loss_on_one_device(x_BTD, w_DV, target_BT, stats, router=None):
    layout = layout_of(1)
    body = functools.partial(
        next_token_loss,
        moe=MoEConfig(num_experts=4, experts_per_token=1, router=router or RouterConfig()),
        num_targets=jnp.array(8.0),
        micro_batches=2,
        layout=layout,
        chunk_tokens=4,
    )
    mesh = build_mesh(layout, jax.devices()[:1])
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped)(x_BTD, w_DV, target_BT, stats)


def test_the_loss_is_the_mean_over_targets_plus_the_routers_losses():
    case = random_case(5)
    # Two layers, eight tokens: of one the load is even, of the other all choose one expert.
    stats = MoEStats(
        load_E=jnp.array([[2, 2, 2, 2], [8, 0, 0, 0]]),
        counted_SE=jnp.array([[[2, 2, 2, 2]], [[8, 0, 0, 0]]]),
        score_SE=jnp.array([[[2.0, 2.0, 2.0, 2.0]], [[4.0, 4.0, 0.0, 0.0]]]),
        z=jnp.array([3.0, 5.0]),
        dropped=jnp.array([0, 3]),
        overflowed=jnp.array([7, 0]),
        rounds=jnp.array([2, 0]),
        entropy=jnp.array([1.0, 0.5]),
    )
    total = float(plain(*case))
    router = RouterConfig(balance_loss=0.5, z_loss=0.25)
    loss, parts = loss_on_one_device(*case, stats, router)
    assert float(parts.nll) == pytest.approx(total / 8, rel=1e-5)
    assert float(parts.balance) == pytest.approx((1 + 2) / 2 / 2)
    # Means over the two layers, and half of them is this micro-batch's share.
    routers = (0.5 * (1 + 2) / 2 + 0.25 * (3 + 5) / 2) / 2
    assert float(loss) == pytest.approx(total / 8 + routers, rel=1e-5)
    assert parts.load_LE.tolist() == [[2, 2, 2, 2], [8, 0, 0, 0]]
    assert parts.uneven_L3.tolist() == [[0, 7, 2], [3, 0, 0]]
    assert float(parts.entropy) == pytest.approx((1 + 0.5) / 2 / 2)
    # Over sequences the loss has counts of its own; what is reported is where tokens went.
    router = RouterConfig(balance_loss=0.5, z_loss=0.25, balance_over="sequence")
    counted = jnp.array([[[2, 2, 2, 2]], [[2, 2, 2, 2]]])
    _, parts = loss_on_one_device(*case, stats._replace(counted_SE=counted), router)
    assert float(parts.balance) == pytest.approx((1 + 1) / 2 / 2)
    assert parts.load_LE.tolist() == [[2, 2, 2, 2], [8, 0, 0, 0]]
    dense, parts = loss_on_one_device(*case, None)
    assert float(dense) == float(parts.nll) == pytest.approx(total / 8, rel=1e-5)
    assert parts.load_LE.shape == (0, 1)


def test_a_layers_rounds_are_counted_once_and_its_choices_on_every_device():
    layout = build_layout(MeshConfig(expert=2, tensor=2))
    whole = jnp.ones((1, 1, 4))
    numbers = jnp.ones(1, jnp.int32)
    stats = MoEStats(
        load_E=whole[:, 0].astype(jnp.int32),
        counted_SE=whole.astype(jnp.int32),
        score_SE=whole,
        z=jnp.ones(1),
        dropped=3 * numbers,
        overflowed=5 * numbers,
        rounds=2 * numbers,
        entropy=jnp.ones(1),
        replayed_2=jnp.array([[6, 7]]),
    )
    body = functools.partial(router_losses, moe=MoEConfig(num_experts=4), layout=layout)
    mesh = build_mesh(layout, jax.devices()[:4])
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    *_, load_LE, uneven_L3, replayed_L2 = jax.jit(mapped)(stats)
    assert load_LE.tolist() == [[4] * 4]
    assert uneven_L3.tolist() == [[4 * 3, 4 * 5, 2]]
    assert replayed_L2.tolist() == [[4 * 6, 4 * 7]]
