"""The step on every mesh, of every kind of model, against the one-device oracle, one by one.

test_step_together has several at once, and runs by default.
"""

import dataclasses
from itertools import product

import jax
import numpy as np
import pytest

from moejax.config.schema import RopeConfig
from tests.cases import (
    CERTAIN,
    assert_close,
    part_of,
    place,
    small_config,
    spread,
    step_for,
)
from tests.step.against_oracle import (
    MESH_OF_ONE,
    TERMS,
    check_against_oracle,
    oracle_case,
)

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

MESHES = [
    (1, 1, 1, 8),
    (1, 1, 8, 1),
    (8, 1, 1, 1),
    (1, 8, 1, 1),
    (1, 2, 4, 1),
    (2, 1, 2, 2),
    (1, 2, 2, 2),
    (2, 2, 1, 2),
]
# Without a capacity: of so few tokens a bucket overflows, on eight and on four devices.
IN_ROUNDS = [(1, 1, 8, 1), (1, 2, 4, 1)]
LAYOUTS = [("sequence", "hidden"), ("sequence", "folded"), ("replicated", "hidden")]
LAYOUTS += [("replicated", "folded")]
ROUTINGS = [(k, score) for k in (1, 2, 8) for score in ("softmax", "sigmoid")]


def on_meshes():
    """Every mesh with every layout that differs there, and with every routing."""
    for mesh, layout, routing in product(MESHES, LAYOUTS, ROUTINGS):
        if mesh[3] > 1 or layout == LAYOUTS[0]:  # a tensor axis of one has only one layout
            names = "-".join(map(str, (mesh, *layout, *routing)))
            yield pytest.param(mesh, *layout, *routing, id=names)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "activations", "weights", "k", "score"), list(on_meshes()))
def test_every_mesh_and_layout_gives_the_oracles_loss_and_gradients(
    mesh, activations, weights, k, score
):
    # Expert 0 is chosen by nobody; 16 experts are more than any axis here has devices.
    moe = {"num_experts": 16, "experts_per_token": k, "implementation": "reference"}
    if mesh not in IN_ROUNDS:
        moe |= CERTAIN
    cfg = small_config(
        mesh,
        activations=activations,
        expert_weights=weights,
        moe=moe,
        router={"score": score},
    )
    parts = check_against_oracle(
        cfg, bias=((0, -10.0),), path="rounds" if mesh in IN_ROUNDS else "certain"
    )
    assert int(parts.load_LE[0, 0]) == 0


@pytest.mark.exhaustive
def test_experts_in_e4m3_give_nearly_the_oracles_loss_and_gradients():
    """Each factor of a product errs by 2^-4 at most, evenly spread: 0.04 on average."""
    plain = small_config(moe={"implementation": "reference"})
    cfg = small_config((1, 1, 4, 2), moe={"implementation": "reference_e4m3", **CERTAIN})
    state, batch, told, wanted = oracle_case(plain, ())
    train_step = step_for(cfg)
    gradients, parts = train_step.gradients(spread(state, train_step), place(train_step, batch))
    assert 0 < abs(float(parts.nll) - told.nll) < 0.01 * told.nll
    np.testing.assert_array_equal(parts.load_LE, told.load)
    for have, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        off = np.linalg.norm(np.asarray(have) - want)
        assert off < 0.1 * np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crowded", "mesh"), part_of([3, 7], [(1, 1, 8, 1), (1, 1, 4, 2), (2, 1, 2, 2)], parts=6)
)
def test_all_tokens_to_one_expert_lose_nothing(crowded, mesh):
    cfg = small_config(mesh, moe={"experts_per_token": 1})
    parts = check_against_oracle(cfg, bias=((crowded, 10.0),), path="rounds")
    assert int(parts.load_LE[0, crowded]) == TERMS


KINDS = [
    {"model": {"qk_norm": "head", "attention_bias": True, "tie_embeddings": False}},
    {"model": {"num_layers": 2, "first_dense_layers": 1, "scan_layers": False}},
    {"model": {"num_layers": 4, "moe_every": 2, "remat": "full"}},
    {"model": {"remat": "collectives"}, "moe": {"num_shared_experts": 2}},
    {"router": {"score": "sigmoid", "num_groups": 4, "groups_per_token": 2}},
    {"model": {"qk_norm": "full", "sliding_window": 5, "num_kv_heads": 4}},
    {"router": {"balance_over": "sequence", "renormalize": False, "weight_scale": 2.5}},
    {"router": {"score": "softmax", "num_groups": 4, "groups_per_token": 2}},
    # Sinks, biases, a window in every other block, part of a head rotated (gpt-oss).
    {
        "model": {
            "num_layers": 2,
            "sliding_window": 3,
            "full_attention_every": 2,
            "attention_sinks": True,
            "attention_bias": True,
            "attention_output_bias": True,
            "head_width": 8,
            "rope_width": 6,
            "rope": RopeConfig(
                scaling="yarn", factor=8.0, trained_length=16, truncate=False, attention_factor=1.2
            ),
        }
    },
    # Latent attention, with a latent of queries and without (DeepSeek-V3, V2-Lite).
    {
        "model": {
            "attention": "latent",
            "head_width": 10,
            "rope_width": 6,
            "value_width": 4,
            "q_latent": 8,
            "kv_latent": 16,
            "rope": RopeConfig(
                scaling="yarn", factor=8.0, trained_length=16, mscale=0.7, mscale_all_dim=1.0
            ),
        }
    },
    {
        "model": {
            "attention": "latent",
            "head_width": 6,
            "rope_width": 2,
            "value_width": 8,
            "kv_latent": 8,
            "num_layers": 2,
            "first_dense_layers": 1,
            "sliding_window": 5,
            "full_attention_every": 2,
            "remat": "full",
        }
    },
    {
        "model": {"activation": "clamped_swiglu", "activation_limit": 0.5},
        "moe": {"expert_bias": True, "router_bias": True},
    },
    {"moe": {"num_shared_experts": 2, "shared_gate": True}},
    {
        "model": {"predict_ahead": 1, "num_layers": 2, "first_dense_layers": 1},
        "train": {"predict_ahead_loss": 0.7},
    },
]


def join_kinds(numbers):
    """Several kinds at once, as changes of `small_config`."""
    changes = {"model": {}, "moe": {}, "router": {}, "train": {}}
    for number in numbers:
        for part, values in KINDS[number].items():
            changes[part] = changes[part] | values
    return changes


@pytest.mark.slow
def test_a_table_of_layers_gives_the_oracles_loss_and_gradients_on_a_mesh():
    table = {
        "num_layers": 5,
        "layer_mlps": ("experts", "dense", "experts", "dense", "dense"),
        "sliding_window": 3,
        "layer_attention": ("full", "window", "full", "window", "window"),
    }
    moe = {"num_shared_experts": 1, "shared_hidden": 10, **CERTAIN}
    check_against_oracle(small_config((1, 2, 2, 2), model=table, moe=moe), path="certain")


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (1, 1, 8, 1), (1, 2, 2, 2)])
@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_every_kind_of_model_gives_the_oracles_loss_and_gradients(mesh, changes):
    moe = CERTAIN | changes.get("moe", {})
    check_against_oracle(small_config(mesh, **(changes | {"moe": moe})), path="certain")


@pytest.mark.slow
def test_a_dense_model_gives_the_oracles_loss_and_gradients():
    cfg = small_config((2, 2, 1, 2), model={"moe_every": None})
    cfg = dataclasses.replace(cfg, moe=type(cfg.moe)())
    state, batch, told, wanted = oracle_case(dataclasses.replace(cfg, mesh=MESH_OF_ONE), ())
    train_step = step_for(cfg)
    gradients, parts = train_step.gradients(spread(state, train_step), place(train_step, batch))
    np.testing.assert_allclose(parts.nll, told.nll, rtol=TERMS * np.finfo(np.float32).eps)
    assert_close(gradients, wanted, terms=TERMS)
