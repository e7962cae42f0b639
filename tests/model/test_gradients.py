"""Gradients in bfloat16: rounded, but every sum over many tokens is added up in float32."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.comm.jaxprs import inner_jaxprs, opened, scan_operands
from moejax.config.fields import change
from moejax.config.schema import Config, DataConfig
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.step.state import Batch
from moejax.step.train_step import build_step
from tests.cases import place, small_config, step_for
from tests.compose.features import check_combination, plain

# Rounding to bfloat16 changes a number by at most this share of it.
HALF_STEP = 2.0**-8
# Arrays of the model below that are rounded on the longest way forward and back: about 15 of a
# block forward (norms, projections, biases, rotation, probabilities, products, residual sums),
# twice that back, for two blocks, and a few around them. Roundings are independent of each other,
# so their errors add up as squares do.
ROUNDINGS = 100
BOUND = math.sqrt(ROUNDINGS) * HALF_STEP

TOKENS, LENGTH, VOCABULARY = 16_384, 64, 64


def config_in(dtype: str, **model) -> Config:
    """One dense and one expert layer of all experts, so that no rounding moves a token."""
    usual = {"dtype": dtype, "num_layers": 2, "first_dense_layers": 1, "attention_bias": True}
    model = usual | model | {"num_heads": 4, "num_kv_heads": 2, "head_width": 8}
    biased = {"expert_bias": True, "router_bias": True, "num_shared_experts": 1}
    cfg = small_config(
        model=model,
        moe={"num_experts": 4, "experts_per_token": 4, "shared_gate": True, **biased},
        train={"batch_sequences": TOKENS // LENGTH},
    )
    return dataclasses.replace(cfg, data=DataConfig(sequence_length=LENGTH))


def text_like_batch() -> Batch:
    """Tokens of which every fourth is the same, as the space is in text."""
    rng = np.random.default_rng(0)
    shape = (TOKENS // LENGTH, LENGTH + 1)
    drawn = rng.integers(0, VOCABULARY, shape)
    token = np.where(rng.random(shape) < 0.25, 0, drawn).astype(np.int32)
    return Batch(token[:, :-1].copy(), token[:, 1:].copy(), np.zeros_like(token[:, 1:]))


MORE = {"attention_sinks": True, "attention_output_bias": True, "rope_width": 6}
LATENT = {"attention": "latent", "attention_bias": False, "rope_width": 4, "kv_latent": 16}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "model",
    [
        {"qk_norm": "full", "tie_embeddings": False},
        pytest.param(
            {"qk_norm": "head", "tie_embeddings": True, **MORE}, marks=pytest.mark.exhaustive
        ),
        pytest.param({**LATENT, "q_latent": 16, "value_width": 4}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda model: model.get("attention", model.get("qk_norm")),
)
def test_bfloat16_changes_every_gradient_by_its_rounding_alone(model):
    state = step_for(config_in("float32", **model)).init()
    # Weights that bfloat16 holds: both compute with the same.
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), state.params)
    state = state._replace(params=params)
    found = {}
    for dtype in ("float32", "bfloat16"):
        train_step = step_for(config_in(dtype, **model))
        found[dtype] = train_step.gradients(state, place(train_step, text_like_batch()))[0]
    flat = {name: jax.tree_util.tree_flatten_with_path(tree)[0] for name, tree in found.items()}
    for (path, want), (_, have) in zip(flat["float32"], flat["bfloat16"], strict=True):
        off = np.linalg.norm(have - want) / np.linalg.norm(want)
        assert off <= BOUND, f"{jax.tree_util.keystr(path)}: off by {off:.1%} > {BOUND:.1%}"


# What adds up; a product's sums are not among them: every backend adds them up in float32 and
# rounds once, which the test above measures. Sums over devices have a dtype of their own to be
# set (`train.gradient_dtype`).
SUMS = ("reduce_sum", "cumsum", "cumlogsumexp", "reduce_window_sum", "reduce")
SCATTERS = ("scatter-add", "scatter_add")


def sums_in_two_bytes(jaxpr) -> list[str]:
    """The equations that add numbers up, however few, and keep the sum in two bytes meanwhile.

    A scatter into rows is one, whatever the number of rows; a sum over dimensions of one element is
    none; a loop is one whose carry is added to as it is.
    """
    found = []
    for eqn in opened(jaxpr).eqns:
        name = eqn.primitive.name
        if name in SCATTERS and in_two_bytes(eqn.invars[0]):
            found.append(str(eqn))
        if name in SUMS and in_two_bytes(eqn.outvars[0]):
            terms = eqn.invars[0].aval.size // max(eqn.outvars[0].aval.size, 1)
            if terms > 1 or (name == "cumsum" and eqn.invars[0].aval.size > 1):
                found.append(str(eqn))
        if name in ("scan", "while"):
            found += running_sums(eqn)
        for inner in inner_jaxprs(eqn):
            found += sums_in_two_bytes(inner)
    return found


def running_sums(eqn) -> list[str]:
    """The additions of a loop's body that add to a carry in two bytes and hand the sum on."""
    if eqn.primitive.name == "scan":
        body = opened(eqn.params["jaxpr"])
        before = scan_operands(eqn.params, body.invars)[1]
    else:
        body = opened(eqn.params["body_jaxpr"])
        before = body.invars[eqn.params["body_nconsts"] :]
    adds = {e.outvars[0]: e for e in body.eqns if e.primitive.name in ("add", "add_any")}
    carried = zip(before, body.outvars, strict=False)
    return [
        str(adds[after])
        for first, after in carried
        if in_two_bytes(first) and after in adds and first in adds[after].invars
    ]


def in_two_bytes(var) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2


CHUNKS = {"pieces": "3 and 2 chunks"}
# Features of `make compose`, and settings that it has not.
STEPS = [
    ({"attention": "norms of all heads", "blocks": "first dense", "experts": "shared, gated"}, {}),
    (
        {"mesh": "replica 2, fsdp 2, expert 2, tensor 2", "attention": "norms of heads"}
        | {"prediction": "two tokens", "router": "jitter", **CHUNKS},
        {"moe.router.balance_over": "sequence"},
    ),
    (
        {"mesh": "expert 2, tensor 2", "layout": "replicated, hidden", "embeddings": "untied"}
        | {"attention": "norms of all heads", "experts": "biases, clamped", "recomputed": "full"}
        | {"router": "sigmoid, groups, bias moved", "route": "merge", **CHUNKS},
        {"moe.implementation": "reference"},
    ),
    (
        {"mesh": "expert 4", "nodes": "two nodes", "codecs": "strong", "route": "two_level_merge"}
        | {"attention": "sinks, biases, yarn", "micro-batches": "4 micro-batches"}
        | {"reduction": "in bfloat16"},
        {"moe.implementation": "ragged_dot", "moe.capacity_factor": 2.0},
    ),
    (
        {"mesh": "expert 4", "nodes": "two nodes", "codecs": "hybrid", "route": "two_level"}
        | {"attention": "latent of queries, window", "optimizer": "Muon", "pieces": "trimmed"},
        {"moe.implementation": "reference_e4m3", "moe.expert_bias": True},
    ),
    (
        {"mesh": "expert 2, tensor 2"},
        {"model.linear.form": "gated_delta", "model.linear.convolution": 3},
    ),
    (
        {"mesh": "expert 2, tensor 2"},
        {"model.linear.form": "kimi_delta", "model.linear.value_heads": 2},
    ),
    (
        {"mesh": "expert 2, tensor 2"},
        {"model.linear.form": "mamba2", "model.linear.convolution_bias": True}
        | {"model.linear.least_step": 0.01, "model.activation": "relu2", "moe.latent": 16},
    ),
    (
        {"mesh": "expert 2, tensor 2", "experts": "shared, gated", "layout": "replicated, hidden"}
        | {"route": "duplicate"},
        {"model.block_norm": "both", "model.activation": "geglu", "model.value_norm": True}
        | {"model.layer_scale": True, "model.logit_cap": 5.0, "model.sliding_window": 5}
        | {"model.full_attention_every": 2, "model.full_attention.keys_are_values": True}
        | {"moe.own_norms": True, "moe.expert_scale": True},
    ),
    (
        {"mesh": "expert 2, tensor 2", "adapters": "adapters", "recomputed": "collectives"}
        | {"micro-batches": "4 micro-batches"},
        {"lora.base_dtype": "bfloat16"},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("features", "others"), STEPS)
def test_no_sum_of_the_step_is_kept_in_two_bytes(features, others):
    """On a mesh that need not exist."""
    cfg = check_combination(tuple((dict(plain()) | features).items()))
    cfg = change(cfg, {"model.dtype": "bfloat16", **others})
    step = build_step(cfg, build_abstract_mesh(build_layout(cfg.mesh)), "cpu")
    found = sums_in_two_bytes(step.step.trace(step.abstract, step.abstract_batch()).jaxpr)
    assert not found, "\n".join(found)


def test_sums_in_two_bytes_are_found_where_they_are():
    x_ND, token_N = jnp.ones((300, 4), jnp.bfloat16), jnp.zeros(300, jnp.int32)

    def found(function, *arguments):
        return len(sums_in_two_bytes(jax.make_jaxpr(function)(*arguments)))

    def running(total, row):
        return total + row, None

    row_D = x_ND[0]
    assert found(jax.grad(lambda t: jnp.take(t, token_N, axis=0).astype("float32").sum()), x_ND)
    assert found(jax.grad(lambda b: (x_ND + b).astype("float32").sum()), row_D)
    assert found(lambda x: jax.lax.scan(running, row_D, x)[0], x_ND)
    assert found(jax.lax.cumsum, x_ND)
    wide = x_ND.astype(jnp.float32)
    assert not found(jax.grad(lambda t: jnp.take(t, token_N, axis=0).sum()), wide)
    assert not found(lambda x: jnp.sum(x, axis=0), x_ND)
    assert not found(lambda x: x.T @ x, x_ND)
