"""Every route, any routing: no choice is lost, and outputs and gradients are the oracle's."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from moejax.config.compression import Codecs, CodecSpec
from moejax.config.schema import Config, MeshConfig, MoEConfig
from moejax.kernels.experts.expert_weights import ExpertWeights
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.layout.route import ROUTES, build_route
from moejax.layout.spec import StepSpec
from moejax.moe.dispatch import drop_above, moe_ffn
from tests.cases import few

pytestmark = pytest.mark.usefixtures("unchecked_annotations")  # test_step_together checks them

TOKENS, D, F, E = 12, 4, 4, 16

# name -> mesh and chunks, forward and backward, on which the route differs from the others
CASES = {
    "duplicate": (MeshConfig(expert=4, tensor=2), (1, 1)),
    "split": (MeshConfig(expert=4, tensor=2), (3, 2)),
    "merge": (MeshConfig(expert=4, tensor=2, expert_weights="whole"), (2, 1)),
    "two_level": (MeshConfig(expert=8, nodes=2), (2, 2)),
    "two_level_merge": (MeshConfig(expert=4, tensor=2, expert_weights="folded", nodes=2), (2, 2)),
}


def runner(name, K):
    """The case's function; see `compiled`."""
    route = name.removesuffix(" trimmed")
    mesh_config, chunks = CASES[route]
    options = {"trim": True} if name != route else in_chunks(chunks)
    return compiled(mesh_config, route, K, DIMS, **options)


def in_chunks(chunks):
    return {"chunks": chunks[0], "chunks_backward": chunks[1]}


# Weights of experts, and their biases.
DIMS = ("EDUF", "EFD", "EUF", "ED")


@functools.cache
def compiled(mesh_config, route, K, letters=DIMS[:2], **options):
    """(global x, weights, experts, params, dy) -> (outputs, gradients)."""
    layout = build_layout(mesh_config)
    route = build_route(route, layout, **options)
    spec = StepSpec(layout, route, experts="reference")
    moe = MoEConfig(num_experts=E, experts_per_token=K, expert_hidden=F)
    tokens = P(layout.token_axes) if spec.route.replicated else P(layout.mesh_axes)
    params = tuple(layout.param_spec(dims, len(dims)) for dims in letters)
    copies = layout.size(layout.tensor) if spec.route.replicated else 1

    def forward(x_ND, weight_NK, expert_NK, params):
        return moe_ffn(x_ND, weight_NK, expert_NK, ExpertWeights(*params), moe, spec)[0]

    def device(x_ND, weight_NK, expert_NK, params, dy_ND):
        y_ND, pull = jax.vjp(
            lambda x, weight, params: forward(x, weight, expert_NK, params), x_ND, weight_NK, params
        )
        # What ranks hold copies of counts once: each takes a share of the cotangent.
        dx, dweight, dparams = pull(dy_ND / copies)
        if copies > 1:
            dx, dweight = jax.lax.psum((dx, dweight), layout.tensor)
        held = [{a for axes in layout.param_axes(d) for a in axes} for d in letters]
        dparams = tuple(
            jax.lax.psum(g, tuple(a for a in layout.mesh_axes if a not in axes))
            for g, axes in zip(dparams, held, strict=True)
        )
        return y_ND, dx, dweight, dparams

    mapped = jax.shard_map(
        device,
        mesh=build_mesh(layout, jax.devices()[:8]),
        in_specs=(tokens, tokens, tokens, params, tokens),
        out_specs=(tokens, tokens, tokens, params),
        check_vma=False,
    )
    return jax.jit(mapped)


@jax.jit
def dense(x_ND, weight_NK, expert_NK, params, dy_ND):
    """The same by every expert on every token."""

    def forward(x_ND, weight_NK, params):
        w_in, w_out, *biases = params
        b_in, b_out = biases or (0.0, 0.0)
        gate, up = jnp.moveaxis(jnp.einsum("ND,EDUF->NEUF", x_ND, w_in) + b_in, 2, 0)
        y_NED = jnp.einsum("NEF,EFD->NED", gate * jax.nn.sigmoid(gate) * up, w_out) + b_out
        hit_NKE = expert_NK[:, :, None] == jnp.arange(E)
        return jnp.einsum("NKE,NK,NED->ND", hit_NKE, weight_NK, y_NED)

    y_ND, pull = jax.vjp(forward, x_ND, weight_NK, params)
    return y_ND, *pull(dy_ND)


@st.composite
def routings(draw, counts=(1, 8)):
    """Every token's distinct experts, from even to all the same; some choices are dropped (E)."""
    K = draw(st.sampled_from(counts))
    favour = draw(st.sampled_from([0.0, 1.0, 100.0]))  # of low-numbered experts
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    score = rng.gumbel(size=(8 * TOKENS, E)) - favour * np.arange(E)
    expert_NK = np.argsort(-score, axis=1)[:, :K]
    dropped = rng.random(expert_NK.shape) < draw(st.sampled_from([0.0, 0.3]))
    return np.where(dropped, E, expert_NK).astype(np.int32), seed


def random_operands(expert_NK, seed, letters=DIMS[:2]):
    """Tokens, weights, the given experts, parameters and a cotangent."""
    rng = np.random.default_rng(seed)
    N, K = expert_NK.shape
    x_ND, dy_ND = (rng.standard_normal((N, D)).astype(np.float32) for _ in range(2))
    weight_NK = rng.uniform(0.1, 1, (N, K)).astype(np.float32)
    sizes = {"E": E, "D": D, "U": 2, "F": F}
    params = tuple(
        rng.standard_normal([sizes[letter] for letter in dims]).astype(np.float32)
        for dims in letters
    )
    return x_ND, weight_NK, expert_NK, params, dy_ND


USUAL = [("merge", 8)]  # what `make test` runs
SLOW = [("duplicate", 1), ("two_level_merge", 8)]
# Each K is two programs more. One choice tells merging routes from others in nothing, and where
# nothing merges many choices are as many rows.
RARE = [("split", 1), ("split trimmed", 8), ("two_level", 8), ("merge", 1)]
RARE += [("duplicate", 8), ("split", 8), ("two_level", 1), ("two_level_merge", 1)]
RARE += [("split trimmed", 1), ("two_level_merge trimmed", 8)]


def with_choices():
    """Each route with one K or both."""
    for cases, marks in ((USUAL, ()), (SLOW, pytest.mark.slow), (RARE, pytest.mark.exhaustive)):
        yield from (pytest.param(*case, marks=marks) for case in cases)


@pytest.mark.parametrize(("name", "k"), list(with_choices()))
@few(12)
@given(data=st.data())
def test_no_choice_is_lost_on_any_route_at_any_skew(name, k, data):
    case = data.draw(routings(counts=[k]))
    operands = random_operands(*case, DIMS)
    N, K = case[0].shape
    got = runner(name, K)(*operands)
    wanted = dense(*operands)
    # An entry adds up at most all tokens' K terms; rounding grows no faster than their number.
    bound = N * K * np.finfo(np.float32).eps
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        want = np.asarray(want)
        error = np.max(np.abs(np.asarray(have) - want))
        assert error <= bound * max(1, np.max(np.abs(want)))


@pytest.mark.slow
def test_a_weight_of_zero_has_a_gradient_of_zero_and_spoils_no_other():
    """The source divides by the weight what experts found; a score may underflow to zero."""
    expert_NK = np.random.default_rng(5).integers(0, E, (8 * TOKENS, 1)).astype(np.int32)
    x_ND, weight_NK, *others = random_operands(expert_NK, 5, DIMS)
    weight_NK[::3] = 0
    got, wanted = (run(x_ND, weight_NK, *others)[2] for run in (runner("split", 1), dense))
    wanted = np.where(weight_NK == 0, 0, wanted)
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-4, atol=1e-4)


# Where each row meets its experts whole and its results are summed at the source, in order of
# choice. What they are compared with is compiled once.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "options", "K"),
    [
        ("two_level", {}, 2),
        ("split", {"trim": True}, 2),
        pytest.param("split", in_chunks((3, 2)), 8, marks=pytest.mark.exhaustive),
        pytest.param("two_level", {"chunks": 4}, 8, marks=pytest.mark.exhaustive),
    ],
)
def test_routes_that_add_in_the_same_order_give_the_same_bits(route, options, K):
    # Every device sends every expert equally many rows: nothing overflows into rounds.
    rng = np.random.default_rng(K)
    expert_NK = rng.permutation(E)[np.arange(8 * TOKENS * K) % E].reshape(-1, K).astype(np.int32)
    x_ND, weight_NK, expert_NK, _, dy_ND = random_operands(expert_NK, seed=K)
    # A product with a signed permutation rounds nothing, in whichever order it adds zeros. So all
    # that differs between routes is how they add up results.
    gate, up, out = (signed_permutations(rng) for _ in range(3))
    operands = (x_ND, weight_NK, expert_NK, (np.stack((gate, up), axis=2), out), dy_ND)
    mesh = MeshConfig(expert=8, nodes=2)
    wanted = compiled(mesh, "split", K)(*operands)
    got = compiled(mesh, route, K, **options)(*operands)
    assert bits(got[:3]) == bits(wanted[:3])  # outputs, gradients of x and of weights
    if route == "split" and "chunks" not in options:  # the experts' gradients too
        assert bits(got[3]) == bits(wanted[3])


def test_weight_gradients_of_chunks_are_added_up_in_float32():
    """In the spec, because a CPU would not round between two sums in bfloat16 either."""
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in [(8 * TOKENS, D), (8 * TOKENS, 1), (E, D, 2, F), (E, F, D)]
    ]
    x_ND, weight_NK, *params = arrays
    expert_NK = jax.ShapeDtypeStruct(weight_NK.shape, jnp.int32)
    run = compiled(MeshConfig(expert=8), "split", 1, chunks=8, chunks_backward=8)
    text = run.lower(x_ND, weight_NK, expert_NK, tuple(params), x_ND).as_text()
    for held in (f"{E // 8}x{D}x2x{F}", f"{E // 8}x{F}x{D}"):  # of the experts on a device
        sums = re.findall(rf"stablehlo.add .* : tensor<{held}x(\w+)>", text)
        assert len(sums) >= 7, "seven sums of eight chunks"
        assert set(sums) == {"f32"}


QUANTISED = ("two_level_merge",)  # by default: merged rows over two hops


def coded(**options):
    """Another format for each class of tokens."""
    names = {"dispatch": "int8", "combine": "e4m3"}
    names |= {"dispatch_backward": "int4", "combine_backward": "e5m2"}
    specs = {kind: CodecSpec(name, block=2, **options) for kind, name in names.items()}
    return {"codecs": Codecs(**specs)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUANTISED else pytest.mark.exhaustive)
        for name in sorted(ROUTES)
    ],
)
def test_rows_quantised_as_they_move_are_the_same_bits(name):
    """Outputs and all gradients, as routed: what the codecs see and what comes back is the same."""
    mesh, _ = CASES[name]
    mesh = dataclasses.replace(mesh, nodes=mesh.nodes or mesh.expert)
    rng = np.random.default_rng(3)
    expert_NK = np.argsort(rng.random((8 * TOKENS, E)), axis=1)[:, :2].astype(np.int32)
    expert_NK = np.where(rng.random(expert_NK.shape) < 0.2, E, expert_NK).astype(np.int32)
    operands = random_operands(expert_NK, seed=3)
    wanted = compiled(mesh, name, 2, **coded())(*operands)
    found = compiled(mesh, name, 2, **coded(rows_kernel="reference"))(*operands)
    assert bits(found) == bits(wanted)
    for have, plain in zip(*map(jax.tree.leaves, (found, dense(*operands))), strict=True):
        off = np.max(np.abs(np.asarray(have) - plain)) / np.max(np.abs(plain))
        assert 1e-3 < off < 0.5, "no codec stood in this, or a wrong one"


def signed_permutations(rng):
    """[E, D, F] with one entry of 1 or -1 in each row and column."""
    assert D == F
    signs = rng.choice([-1, 1], (E, D, 1)).astype(np.float32)
    return signs * np.stack([np.eye(D, dtype=np.float32)[rng.permutation(D)] for _ in range(E)])


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@given(routings(), st.integers(1, 4))
def test_capacity_keeps_the_first_tokens_of_each_expert(case, capacity):
    expert_NK = case[0][:12]
    kept = np.asarray(drop_above(jnp.asarray(expert_NK), capacity, num_experts=E)).reshape(-1)
    expert_A = expert_NK.reshape(-1)
    for a, expert in enumerate(expert_A):
        late = np.sum(expert_A[:a] == expert) >= capacity
        assert kept[a] == (E if late else expert)


def test_every_route_has_a_case_and_is_a_choice_of_the_config():
    (choices,) = (f.metadata["choices"] for f in dataclasses.fields(Config) if f.name == "route")
    assert set(CASES) == set(ROUTES) == set(choices)
