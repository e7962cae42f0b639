"""Mesh, layout, route, routing and kind of model against the one-device oracle.

Each value of each stands in at least one of `CASES`, several at once, so that a default run
compiles few programs. `make compose` takes each pair of features.
"""

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass, field

import jax
import numpy as np
import pytest

from moejax.config.schema import IndexerConfig, LinearConfig, MoEConfig, RopeConfig
from moejax.layout.route import ROUTES
from tests.annotations import without_annotations
from tests.cases import (
    CERTAIN,
    GEMMA,
    MIMO,
    NEMOTRON,
    TRINITY,
    assert_close,
    one_device_state,
    part_of,
    place,
    random_batch,
    small_config,
    spread,
    step_for,
)
from tests.step.against_oracle import TERMS, check_against_oracle, only, oracle_case


@dataclass(frozen=True)
class Case:
    """A step; `kinds` are places in `KINDS`, `path` is the one that layers must take."""

    mesh: tuple[int, int, int, int]
    nodes: int = 1
    layout: tuple[str, str] = ("sequence", "hidden")
    route: str = "split"
    chunks: tuple[int, int] = (1, 1)  # forward and backward
    k: int = 2
    score: str = "softmax"
    kinds: tuple[int, ...] = field(default=())
    path: str = "certain"


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
            # Queries that grow with the position (Mistral 4).
            "rope": RopeConfig(query_growth=0.3, trained_length=3),
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
    # Norms of queries and keys behind rotary positions (Hunyuan), of results (OLMo 2); factors
    # (Granite).
    {
        "model": {
            "qk_norm": "rotated",
            "block_norm": "after",
            "embedding_scale": 3.0,
            "residual_scale": 0.4,
            "score_scale": 0.2,
            "logit_divisor": 1.7,
        }
    },
    # A gated delta net in all but each second block, whose attention has a gate (Qwen3-Next).
    {
        "model": {
            "num_layers": 2,
            "attention_gate": True,
            "zero_centered_norms": True,
            "qk_norm": "head",
            "rope_width": 2,
            "full_attention_every": 2,
            "linear": LinearConfig(
                form="gated_delta",
                key_heads=4,
                value_heads=8,
                key_width=6,
                value_width=4,
                convolution=3,
            ),
        }
    },
    # Channels that fade apart, and latent attention without positions (Kimi Linear).
    {
        "model": {
            "num_layers": 2,
            "attention": "latent",
            "positions": "none",
            "head_width": 6,
            "rope_width": 2,
            "value_width": 8,
            "kv_latent": 8,
            "full_attention_every": 2,
            "linear": LinearConfig(
                form="kimi_delta",
                key_heads=4,
                value_heads=4,
                key_width=6,
                value_width=8,
                convolution=3,
            ),
        }
    },
    GEMMA,
    # Five of up to sixteen keys, which an indexer chooses (DeepSeek-V3.2).
    {
        "model": {
            "num_layers": 2,
            "attention": "sparse",
            "head_width": 10,
            "rope_width": 6,
            "value_width": 4,
            "q_latent": 8,
            "kv_latent": 16,
            "indexer": IndexerConfig(heads=6, width=8, keys=5),
        }
    },
    NEMOTRON,
    {"model": MIMO},
    {"model": TRINITY},
    # Blocks that predict ahead and are not like the last one (MiMo-V2, Nemotron 3 Super).
    {"model": {"predict_ahead": 1, "ahead_block": ("window", "dense")}},
    {"model": {"predict_ahead": 1, "ahead_block": ("full", "experts")}},
]


CASES = [
    Case((1, 1, 1, 8), k=1, score="sigmoid", kinds=(0, 4)),
    Case((1, 1, 8, 1), 2, route="two_level", chunks=(3, 2), score="sigmoid"),
    Case((8, 1, 1, 1), 4, k=8, kinds=(1, 5)),
    Case((1, 8, 1, 1), 2, k=1, kinds=(12,)),
    Case((1, 2, 4, 1), 1, route="merge", chunks=(2, 3), kinds=(2, 6)),
    Case((2, 1, 2, 2), 4, ("replicated", "hidden"), "duplicate", (1, 2), 8, kinds=(10, 11, 12, 13)),
    Case((1, 2, 2, 2), 4, ("sequence", "hidden"), "split", (3, 2), kinds=(3, 7, 21)),
    Case((2, 2, 1, 2), 2, ("replicated", "folded"), k=1, kinds=(16,)),
    Case((1, 1, 4, 2), 1, ("replicated", "hidden"), "duplicate", (2, 2), kinds=(11, 14)),
    Case((1, 1, 2, 4), 1, ("sequence", "whole"), "merge", (2, 1), kinds=(11, 12, 14)),
    Case((1, 1, 4, 2), 2, ("sequence", "folded"), "two_level_merge", (2, 2), kinds=(11, 12)),
    Case((2, 4, 1, 1), 4),
    Case((1, 2, 1, 4), kinds=(8, 11)),
    Case((1, 2, 2, 2), 1, chunks=(2, 3), kinds=(9, 12, 13)),
    Case((1, 2, 2, 2), 1, kinds=(12, 15)),
    # Without a capacity buckets overflow, or just do not.
    Case((1, 1, 8, 1), path="rounds"),
    Case((1, 1, 4, 2), 1, route="split", chunks=(3, 2), kinds=(11,), path="rounds"),
    Case((1, 1, 8, 1), 4, route="two_level_merge", chunks=(1, 2), k=8, kinds=(14,), path="rounds"),
    Case((2, 1, 4, 1), 4, route="two_level", k=8, path="usual"),
    # Others have their routes and kinds; more chunks, and other ways past full buckets.
    Case((1, 1, 8, 1), chunks=(6, 1)),
    Case((1, 1, 2, 4), chunks=(10, 10), k=8),
    Case((1, 1, 2, 4), route="merge", chunks=(4, 6), path="rounds"),
    Case((2, 1, 2, 2), route="duplicate", chunks=(1, 2), k=8, path="usual"),
    Case((1, 2, 2, 2), chunks=(3, 4), path="usual"),
    Case((1, 2, 2, 2), 1, kinds=(16,)),
    Case((1, 2, 2, 2), 1, chunks=(2, 3), kinds=(17,)),
    Case((1, 1, 4, 2), 2, ("replicated", "hidden"), "duplicate", kinds=(17,)),
    Case((1, 2, 2, 2), 1, route="merge", kinds=(18,)),
    Case((1, 1, 2, 4), 1, ("replicated", "hidden"), kinds=(11, 18)),
    Case((1, 2, 2, 2), 1, chunks=(2, 3), kinds=(19,)),
    Case((1, 1, 2, 4), 1, ("replicated", "hidden"), "duplicate", kinds=(19, 23)),
    Case((1, 2, 2, 2), 1, kinds=(20, 22)),
]

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
LAYOUTS = [("sequence", "hidden"), ("sequence", "folded"), ("sequence", "whole")]
LAYOUTS += [("replicated", "hidden"), ("replicated", "folded")]

# Three axes, most kinds of blocks and losses, and overflow rounds: what `make test` runs.
USUAL = [CASES[number] for number in (5, 17)]
# For `make test-all CASES=every`.
RARE = [CASES[number] for number in (1, 3, 8, 10, 11, 12, 15, *range(19, 25), 26, 28)]


def how_often(case):
    """The mark of a case: none, slow or exhaustive."""
    if case in USUAL:
        return ()
    return pytest.mark.exhaustive if case in RARE else pytest.mark.slow


# Annotations are checked once with each layout, and where buckets overflow.
CHECKED = {case.layout: case for case in CASES if case.path == "certain"}.values()


@pytest.fixture
def annotations(case):
    """Leaves annotations unchecked in most cases; layers have tests that check theirs."""
    with nullcontext() if case in CHECKED or case.path != "certain" else without_annotations():
        yield


def join_kinds(numbers):
    """Several kinds at once, as changes of `small_config`."""
    changes = {"model": {}, "moe": {}, "router": {}, "train": {}}
    for number in numbers:
        for part, values in KINDS[number].items():
            changes[part] = changes[part] | values
    return changes


def routed(cfg, route, nodes, chunks):
    """The config with another route."""
    return dataclasses.replace(
        cfg,
        route=route,
        route_chunks=chunks[0],
        route_chunks_backward=chunks[1],
        mesh=dataclasses.replace(cfg.mesh, nodes=nodes),
    )


@pytest.mark.usefixtures("annotations")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=how_often(case)) for case in CASES],
    ids=lambda case: f"{case.route}-{case.mesh}-{case.path}",
)
def test_the_step_gives_the_oracles_loss_and_gradients(case):
    # Expert 0 is chosen by nobody; 16 experts are more than any axis here has devices.
    moe = {"num_experts": 16, "experts_per_token": case.k, "implementation": "reference"}
    if case.path == "certain":
        moe |= CERTAIN
    changes = join_kinds(case.kinds)
    activations, expert_weights = case.layout
    cfg = small_config(
        case.mesh,
        activations=activations,
        expert_weights=expert_weights,
        model=changes["model"],
        moe=moe | changes["moe"],
        router={"score": case.score} | changes["router"],
        train=changes["train"],
    )
    cfg = routed(cfg, case.route, case.nodes, case.chunks)
    parts = check_against_oracle(cfg, bias=((0, -10.0),), path=case.path)
    assert not parts.load_LE[:, 0].any()


def test_the_cases_together_have_every_value():
    def values(of):
        return {of(case) for case in CASES}

    assert values(lambda case: case.mesh) >= set(MESHES)
    assert values(lambda case: case.layout) == set(LAYOUTS)
    assert values(lambda case: case.route) == set(ROUTES)
    assert values(lambda case: case.k) == {1, 2, 8}
    assert values(lambda case: case.score) == {"softmax", "sigmoid"}
    assert {kind for case in CASES for kind in case.kinds} == set(range(len(KINDS)))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("unchecked_annotations")
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
@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("crowded", "mesh"), part_of([3, 7], [(1, 1, 8, 1), (1, 1, 4, 2), (2, 1, 2, 2)], parts=6)
)
def test_all_tokens_to_one_expert_lose_nothing(crowded, mesh):
    cfg = small_config(mesh, moe={"experts_per_token": 1})
    parts = check_against_oracle(cfg, bias=((crowded, 10.0),), path="rounds")
    assert int(parts.load_LE[0, crowded]) == TERMS


TABLE = {
    "num_layers": 5,
    "layer_mlps": ("experts", "dense", "experts", "dense", "dense"),
    "sliding_window": 3,
    "layer_attention": ("full", "window", "full", "window", "window"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_annotations")
def test_a_table_of_layers_and_a_dense_model_give_the_oracles_loss_and_gradients():
    moe = {"num_shared_experts": 1, "shared_hidden": 10, **CERTAIN}
    check_against_oracle(small_config((1, 2, 2, 2), model=TABLE, moe=moe), path="certain")
    dense = small_config((2, 2, 1, 2), model={"moe_every": None})
    check_against_oracle(dataclasses.replace(dense, moe=MoEConfig()), path="certain")


# What the oracle does not have: replicated activations, jitter, micro-batches.
NOT_IN_THE_ORACLE = {
    "duplicate": {"activations": "replicated"},
    "merge": {"router": {"jitter": 0.2}, "model": {"remat": "collectives"}},
    "two_level_merge": {"train": {"micro_batches": 2}, "router": {"balance_over": "sequence"}},
}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("route", NOT_IN_THE_ORACLE)
def test_routes_give_the_split_routes_gradients(route):
    cfg = small_config((1, 1, 4, 2), moe=CERTAIN, **NOT_IN_THE_ORACLE[route])

    def gradients(route, chunks):
        train_step = step_for(routed(cfg, route, 2, chunks))
        state = spread(one_device_state(train_step.cfg), train_step)
        with only("certain"):
            found, _ = train_step.gradients(state, place(train_step, random_batch(cfg)))
        return jax.tree.map(np.asarray, found)

    assert_close(gradients(route, (2, 2)), gradients("split", (1, 1)), terms=TERMS)
