"""Adapters of frozen weights: their gradients, and the step.

The oracle knows no adapters: it gives the gradient of the whole weights, from which that of the
factors follows by the chain rule.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.comm.weights.adapters import Adapter
from moejax.config.schema import IndexerConfig, LinearConfig, LoraConfig
from moejax.errors import InputError
from moejax.plan.trace.reader import collectives
from moejax.step.adapters import init_adapters
from moejax.step.model import check_adapters
from moejax.step.train_step import build_step
from tests.cases import (
    CERTAIN,
    GEMMA,
    NEMOTRON,
    assert_close,
    place,
    random_batch,
    small_config,
    spread,
    step_for,
)
from tests.oracle import oracle_loss
from tests.step.against_oracle import TERMS, not_constant

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

# The factors of every kind of matrix, spelt out: what `adapter_dims` derives.
FACTORS = {
    "DHC": ("DA", "AHC"),
    "DH": ("DA", "AH"),
    "DGC": ("DA", "AGC"),
    "HCD": ("HCA", "AD"),
    "DUF": ("DA", "AUF"),
    "FD": ("FA", "AD"),
    "DE": ("DA", "AE"),
    "EDUF": ("EDA", "EAUF"),
    "EFD": ("EFA", "EAD"),
    "VD": ("VA", "AD"),
    "DV": ("DA", "AV"),
    "DZ": ("DA", "AZ"),
    "ZD": ("ZA", "AD"),
    "EZUF": ("EZA", "EAUF"),
    "EFZ": ("EFA", "EAZ"),
    "ZHC": ("ZA", "AHC"),
    "ZIJ": ("ZA", "AIJ"),
    "DJ": ("DA", "AJ"),
    "DI": ("DA", "AI"),
    "UDO": ("UDA", "AO"),
}
SCALE = 1.5
GROUPED = {"qk_norm": "head"}
# Latent attention, and multi-token prediction, which has a matrix of its own.
LATENT = {"attention": "latent", "head_width": 10, "rope_width": 6, "value_width": 4}
LATENT |= {"q_latent": 8, "kv_latent": 16, "predict_ahead": 1}
# Adapters of the indexer too, which change its choice and have no gradient.
SPARSE = LATENT | {"attention": "sparse", "indexer": IndexerConfig(heads=6, width=8, keys=5)}
DELTA = LinearConfig("gated_delta", 4, 8, key_width=6, value_width=4)
DELTA = {"linear": DELTA, "full_attention_every": 2, "attention_gate": True}
KIMI = LinearConfig("kimi_delta", 4, 4, key_width=6, value_width=8)
KIMI = {"linear": KIMI, "full_attention_every": 2}
BIASES = {"expert_bias": True, "router_bias": True, "shared_gate": True}


def adapted(mesh=(1, 1, 1, 1), kind="grouped", *, nodes=None, lora=None, **changes):
    """A model with every kind of matrix, all of them with adapters."""
    model = {"num_layers": 2, "first_dense_layers": 1, "tie_embeddings": False}
    gemma = GEMMA["model"], {**GEMMA["moe"], **CERTAIN}
    shared = {"num_shared_experts": 2, **CERTAIN}
    kinds = {"grouped": (GROUPED, shared), "latent": (LATENT, {**shared, **BIASES})}
    kinds |= {"gated delta net": (DELTA, shared), "norms and heads of Gemma 4": gemma}
    kinds |= {"Kimi's delta attention": (KIMI, shared), "sparse": (SPARSE, shared)}
    kinds |= {"Mamba-2, experts at a latent": (NEMOTRON["model"], NEMOTRON["moe"] | CERTAIN)}
    model, moe = model | kinds[kind][0], kinds[kind][1]
    cfg = small_config(mesh, model=model, moe=moe, **changes)
    lora = LoraConfig(**{"rank": 4, "alpha": 4 * SCALE, "targets": ("*",), **(lora or {})})
    return dataclasses.replace(cfg, lora=lora, mesh=dataclasses.replace(cfg.mesh, nodes=nodes))


def flat(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


@functools.cache
def first(kind="grouped"):
    """A first state on one device, whose adapters and biases are not zero, and a batch."""
    cfg = adapted(kind=kind)
    state = jax.tree.map(np.asarray, step_for(cfg).init())
    state = state._replace(frozen=jax.tree_util.tree_map_with_path(not_constant, state.frozen))
    rng = np.random.default_rng(1)

    def moved(adapter):
        assert not np.any(adapter.b)
        return adapter._replace(b=rng.normal(0, 0.2, adapter.b.shape).astype(np.float32))

    params = jax.tree.map(moved, state.params, is_leaf=lambda x: isinstance(x, Adapter))
    return state._replace(params=params), random_batch(cfg)


def whole(weight, letters, adapter):
    """The weight with its adapter, stacked layers in front."""
    if adapter is None:
        return weight
    a, b = FACTORS[letters]
    formula = f"...{a},...{b}->...{letters}"
    return weight + SCALE * np.einsum(formula, adapter.a, adapter.b, dtype=np.float64)


@functools.cache
def wanted(kind):
    """The oracle's loss on the sum, and the gradients of the factors by the chain rule."""
    cfg, (state, batch) = adapted(kind=kind), first(kind)
    dims = step_for(cfg).model.frozen_dims
    sums = jax.tree.map(jnp.float32, jax.tree.map(whole, state.frozen, dims, state.params))
    plain = dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, capacity_factor=None))
    loss = functools.partial(oracle_loss, router_bias=state.router_bias, batch=batch, cfg=plain)
    (_, parts), gradients = jax.value_and_grad(loss, has_aux=True)(sums)

    def chain(gradient, letters, adapter):
        if adapter is None:
            return None
        (a, b), gradient = FACTORS[letters], np.asarray(gradient, np.float64)
        return Adapter(
            SCALE * np.einsum(f"...{letters},...{b}->...{a}", gradient, adapter.b),
            SCALE * np.einsum(f"...{a},...{letters}->...{b}", adapter.a, gradient),
        )

    return parts, jax.tree.map(chain, gradients, dims, state.params)


WHOLE = {"expert_weights": "whole", "activations": "replicated"}
LATER = pytest.mark.exhaustive
PIECES = {"train": {"micro_batches": 1, "reduction_bytes": 512}}


@pytest.mark.parametrize(
    ("kind", "mesh", "changes"),
    [
        ("grouped", (1, 1, 1, 1), {}),
        ("grouped", (2, 1, 2, 2), {"expert_weights": "folded", "nodes": 2}),
        ("grouped", (1, 2, 2, 2), WHOLE),
        ("latent", (1, 2, 2, 2), {}),
        pytest.param("gated delta net", (1, 2, 2, 2), {}, marks=LATER),
        pytest.param("Kimi's delta attention", (1, 2, 2, 2), {}, marks=LATER),
        pytest.param("sparse", (1, 2, 2, 2), {}, marks=LATER),
        pytest.param("norms and heads of Gemma 4", (1, 2, 2, 2), {}, marks=LATER),
        pytest.param("Mamba-2, experts at a latent", (1, 2, 2, 2), {}, marks=LATER),
        pytest.param("grouped", (2, 2, 2, 1), PIECES, marks=LATER),
        pytest.param("latent", (1, 2, 2, 2), WHOLE, marks=LATER),
        pytest.param("latent", (2, 2, 1, 2), {"nodes": 4}, marks=LATER),
    ],
)
def test_gradients_of_adapters_follow_from_those_of_the_whole_weights(kind, mesh, changes):
    (state, batch), (wanted_parts, gradients) = first(kind), wanted(kind)
    train_step = step_for(adapted(mesh, kind, **changes))
    got, parts = train_step.gradients(spread(state, train_step), place(train_step, batch))
    bound = TERMS * np.finfo(np.float32).eps
    np.testing.assert_allclose(parts.nll, wanted_parts.nll, rtol=bound)
    if kind in ("latent", "sparse"):
        np.testing.assert_allclose(parts.ahead, wanted_parts.ahead, rtol=bound)
    assert_close(flat(got), flat(gradients), terms=TERMS)


def test_a_step_moves_adapters_and_leaves_frozen_weights_as_they_are():
    state, batch = first()
    train_step = step_for(adapted((1, 2, 2, 2), optimizer={"learning_rate": 1e-2}))
    after, metrics = train_step.step(spread(state, train_step), place(train_step, batch))
    assert float(metrics.gradient_norm) > 0
    before, now = flat(state.frozen), flat(after.frozen)
    assert [x.tobytes() for x in map(np.asarray, now.values())] == [
        x.tobytes() for x in before.values()
    ]
    for name, value in flat(after.params).items():
        assert np.any(np.asarray(value) != flat(state.params)[name]), name

    def check(x, described):
        assert (x.shape, x.dtype) == (described.shape, described.dtype)
        assert x.sharding.is_equivalent_to(described.sharding, x.ndim)

    jax.tree.map(check, after, train_step.abstract)


@pytest.mark.parametrize("kind", ["grouped", "latent"])
def test_a_step_in_bfloat16_has_the_gradients_of_float32_but_for_rounding(kind):
    """Adapters of every matrix, as an imported model in bfloat16 is trained."""
    cfg, (state, batch) = adapted(kind=kind), first(kind)
    narrow = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, dtype="bfloat16"))
    train_step = step_for(narrow)
    got, parts = train_step.gradients(spread(state, train_step), place(train_step, batch))
    wanted_parts, gradients = wanted(kind)
    np.testing.assert_allclose(parts.nll, wanted_parts.nll, rtol=2**-5)
    for name, want in flat(gradients).items():
        have = np.asarray(flat(got)[name], np.float64)
        # Rounding sends some tokens to other experts; a gradient still points the same way.
        cosine = np.sum(have * want) / np.sqrt(np.sum(have**2) * np.sum(want**2))
        assert cosine > 0.9, name


def test_first_adapters_change_nothing_and_do_not_depend_on_the_mesh():
    eight, (one, batch) = step_for(adapted((1, 2, 2, 2))), first()
    state = eight.init()
    for name, value in flat(state.params).items():
        assert np.any(np.asarray(value)) == name.endswith(".a")
        if name.endswith(".a"):
            np.testing.assert_array_equal(value, flat(one.params)[name])
    full = step_for(dataclasses.replace(eight.cfg, lora=LoraConfig()))
    batch = place(full, batch)
    assert eight.evaluate(state, batch) == full.evaluate(full.init(), batch)


def test_an_adapter_starts_from_the_seed_and_its_name_alone():
    fewer = step_for(adapted(lora={"targets": ("moe.w_in",)}))
    drawn = init_adapters(fewer.cfg.train.seed, fewer.dims, fewer.abstract.params)
    for name, value in flat(drawn).items():
        if name.endswith(".a"):
            np.testing.assert_array_equal(value, flat(first()[0].params)[name])
            assert 0.9 < np.max(np.abs(value)) * 32**0.5 <= 1  # uniform, for 32 inputs


def test_no_two_adapters_start_alike():
    """Neither those of two blocks nor those of two matrices of one block."""
    cfg = adapted(lora={"targets": ("attention.w_[qk]",)})
    train_step = step_for(cfg)
    drawn = flat(init_adapters(cfg.train.seed, train_step.dims, train_step.abstract.params))
    first = {name: np.asarray(value) for name, value in drawn.items() if name.endswith(".a")}
    assert len(first) == 4  # of w_q and w_k in the dense block and in the other
    assert len({value.tobytes() for value in first.values()}) == len(first)
    # A name decides the values for good: a saved seed must draw them again.
    value = first["groups.1.blocks.0.attention.w_q.a"]
    np.testing.assert_allclose(value[0, 0, :2], [0.00464812, 0.11272094], rtol=1e-5)


def test_frozen_matrices_may_take_half_the_memory():
    cfg = adapted((1, 2, 2, 2), lora={"base_dtype": "bfloat16"})
    train_step = step_for(cfg)
    state, given = train_step.init(), train_step.argument_bytes()
    for name, value in flat(state.frozen).items():
        kept = name.endswith((".scale", ".w_router"))
        assert value.dtype == ("float32" if kept else "bfloat16"), name
    wide = step_for(adapted((1, 2, 2, 2))).argument_bytes()
    assert given["frozen weights"] < 0.55 * wide["frozen weights"]
    assert (given["weights"], given["optimizer"]) == (wide["weights"], wide["optimizer"])
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), state.frozen)
    full = step_for(dataclasses.replace(cfg, lora=LoraConfig()))
    batch = place(full, random_batch(cfg))
    wanted = full.evaluate(full.init()._replace(params=rounded), batch)
    assert train_step.evaluate(state, batch) == wanted


def test_only_factors_are_reduced_and_have_moments():
    cfg = adapted((1, 2, 2, 2), lora={"rank": 1}, nodes=2)
    train_step = step_for(cfg)
    factors = sum(x.size for x in jax.tree.leaves(train_step.abstract.params))
    moments = sum(x.size for x in jax.tree.leaves(train_step.abstract.optimizer) if x.ndim)
    assert moments == 2 * factors
    full = step_for(dataclasses.replace(cfg, lora=LoraConfig()))
    assert 0 < reduced_bytes(train_step) < 0.25 * reduced_bytes(full)


def reduced_bytes(train_step):
    """Bytes of the operands of a step's reductions of gradients."""
    traced = train_step.gradients.trace(train_step.abstract, train_step.abstract_batch())
    return sum(
        c.bytes * c.calls for c in collectives(traced.jaxpr) if c.traffic.endswith("_gradient")
    )


REFUSED = {
    "a name that is none": ({"targets": ("attention.w_x",)}, ["attention.w_x", "fits no matrix"]),
    "a vector": ({"targets": ("norm.scale",)}, ["norm.scale", "fits no matrix"]),
    "no name": ({"targets": ()}, ["`lora.targets` is empty"]),
    "too large a rank": ({"rank": 33, "targets": None}, ["33", "attention.w_", "32 x 32"]),
    "too large for one": ({"rank": 9}, ["9", "moe.w_router", "32 x 8", "at most 8"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_do_not_fit_are_refused(case):
    lora, fragments = REFUSED[case]
    cfg = adapted(lora=lora)
    with pytest.raises(InputError) as raised:
        check_adapters(cfg)
    assert "\n" not in str(raised.value)
    for fragment in fragments:
        assert fragment in str(raised.value)
    with pytest.raises(InputError):
        build_step(cfg, None, "cpu")


def test_targets_are_names_of_a_block_or_of_one_group_of_layers():
    def targets(*patterns):
        params = step_for(adapted(lora={"targets": patterns or None})).abstract.params
        return set(flat(params))

    default = targets()
    assert default == targets("attention.*", "m*.w_in", "m*.w_out")
    ahead = set(flat(step_for(adapted(kind="latent", lora={"targets": None})).abstract.params))
    assert "predict_ahead.group.blocks.0.attention.w_dkv.a" in ahead
    assert not any("w_join" in name or "embedding" in name for name in ahead)
    assert targets("groups.1.*.w_in") == {
        f"groups.1.blocks.0.{part}.w_in.{factor}" for part in ("mlp", "moe") for factor in "ab"
    }
