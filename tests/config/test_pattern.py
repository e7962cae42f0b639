"""Kinds of blocks: every block is in one group, in order, and groups repeat as their kinds do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config.pattern import BlockKind, block_kinds, layer_groups, shortest
from moejax.config.schema import LinearConfig, ModelConfig

DENSE, MOE = BlockKind("dense"), BlockKind("moe")


def model(layers, first_dense=0, moe_every=1, full_every=None, window=None):
    return ModelConfig(
        num_layers=layers,
        first_dense_layers=first_dense,
        moe_every=moe_every,
        full_attention_every=full_every,
        sliding_window=window,
    )


@pytest.mark.parametrize(
    ("cfg", "wanted"),
    [
        (model(4), [((MOE,), 4)]),
        (model(4, moe_every=None), [((DENSE,), 4)]),
        (model(61, first_dense=3), [((DENSE,), 3), ((MOE,), 58)]),
        (model(5, moe_every=2), [((DENSE, MOE), 2), ((DENSE,), 1)]),
        (
            model(8, first_dense=1, moe_every=3),
            [((DENSE,), 1), ((DENSE, DENSE, MOE), 2), ((DENSE,), 1)],
        ),
        (
            model(9, first_dense=1, moe_every=3),
            [((DENSE,), 1), ((DENSE, DENSE, MOE), 2), ((DENSE,), 2)],
        ),
    ],
)
def test_blocks_without_windows_are_grouped_by_their_mlps(cfg, wanted):
    assert layer_groups(cfg) == wanted


def test_windows_alternate_inside_a_pattern():
    near, far = BlockKind("moe", 128), BlockKind("moe")
    assert layer_groups(model(24, full_every=2, window=128)) == [((near, far), 12)]
    assert layer_groups(model(5, full_every=3, window=128)) == [
        ((near, near, far), 1),
        ((near,), 2),
    ]


def test_a_pattern_is_as_long_as_both_kinds_take_to_repeat():
    cfg = model(14, moe_every=2, full_every=3, window=8)
    (first, repeats), (rest, once) = layer_groups(cfg)
    assert (len(first), repeats) == (6, 2)
    assert [kind.mlp for kind in first] == ["dense", "moe"] * 3
    assert [kind.window for kind in first] == [8, 8, None] * 2
    assert (rest, once) == ((BlockKind("dense", 8), BlockKind("moe", 8)), 1)


def test_layers_before_the_stages_and_their_chunks_are_groups_of_their_own():
    cfg = ModelConfig(num_layers=7, first_dense_layers=1, layers_before_stages=2)
    assert [repeats for _, repeats in layer_groups(cfg)] == [1, 2, 4]
    cfg = ModelConfig(num_layers=9, layers_before_stages=1, stage_chunks=2)
    assert [repeats for _, repeats in layer_groups(cfg)] == [1, 4, 4]


@given(
    layers=st.integers(1, 30),
    first_dense=st.integers(0, 5),
    moe_every=st.none() | st.integers(1, 4),
    full_every=st.none() | st.integers(2, 5),
)
def test_groups_are_the_blocks_in_order(layers, first_dense, moe_every, full_every):
    first_dense = 0 if moe_every is None else min(first_dense, layers - 1)
    cfg = model(layers, first_dense, moe_every, full_every, window=4)
    kinds = [kind for pattern, repeats in layer_groups(cfg) for kind in pattern * repeats]
    assert kinds == block_kinds(cfg)
    full = [index for index, kind in enumerate(kinds) if kind.window is None]
    assert full == ([] if full_every is None else list(range(full_every - 1, layers, full_every)))
    experts = [index for index, kind in enumerate(kinds) if kind.mlp == "moe"]
    first = layers if moe_every is None else first_dense + moe_every - 1
    assert experts == list(range(first, layers, moe_every or 1))


def table(text, **settings):
    """A model of which each letter is a layer: D a dense one, E one with experts."""
    mlps = tuple("dense" if letter == "D" else "experts" for letter in text)
    return ModelConfig(num_layers=len(text), layer_mlps=mlps, **settings)


def letters(groups):
    return [("".join("D" if kind == DENSE else "E" for kind in p), n) for p, n in groups]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("DDDEDE", [("D", 2), ("DE", 2)]),
        ("EDEDEDDD", [("ED", 3), ("D", 2)]),
        ("EDDDDE", [("E", 1), ("D", 4), ("E", 1)]),
        ("DEEDEEEEEE", [("DEE", 2), ("E", 4)]),
        ("D" + "E" * 60, [("D", 1), ("E", 60)]),
    ],
)
def test_a_table_of_layers_is_cut_into_the_fewest_blocks_that_repeat(text, wanted):
    assert letters(layer_groups(table(text))) == wanted


@given(text=st.text("DE", min_size=1, max_size=24), before=st.integers(0, 5))
def test_groups_of_any_table_are_its_blocks_in_order(text, before):
    before = min(before, len(text) - 1)
    groups = layer_groups(table(text, layers_before_stages=before))
    assert "".join(pattern * repeats for pattern, repeats in letters(groups)) == text
    ends = [sum(len(p) * n for p, n in groups[: i + 1]) for i in range(len(groups))]
    assert before == 0 or before in ends


def test_windows_of_any_table_are_those_of_its_blocks():
    sees = ("full", "window", "window", "full", "full")
    cfg = ModelConfig(num_layers=5, sliding_window=8, layer_attention=sees)
    assert [kind.window for kind in block_kinds(cfg)] == [None, 8, 8, None, None]
    assert shortest(cfg)["layer_attention"] == sees


def test_blocks_of_linear_attention_are_all_but_those_that_attend():
    linear = LinearConfig("gated_delta")
    cfg = ModelConfig(num_layers=8, linear=linear, full_attention_every=4)
    delta = BlockKind("moe", mixer="gated_delta")
    assert layer_groups(cfg) == [((delta, delta, delta, MOE), 2)]
    assert ModelConfig(num_layers=8, linear=linear, **shortest(cfg)) == cfg
    sees = ("window", "linear", "full", "linear")
    cfg = ModelConfig(num_layers=4, linear=linear, sliding_window=8, layer_attention=sees)
    kinds = [(kind.mixer, kind.window) for kind in block_kinds(cfg)]
    linear, full = ("gated_delta", None), ("grouped", None)
    assert kinds == [("grouped", 8), linear, full, linear]
    assert shortest(cfg)["layer_attention"] == sees


def test_layers_may_be_attention_an_mlp_or_experts_alone():
    """Nemotron-H; a table without experts is that of a dense model."""
    linear = LinearConfig("mamba2")
    sees = ("linear", "none", "linear", "none", "full", "none")
    cfg = ModelConfig(num_layers=6, linear=linear, layer_attention=sees)
    cfg = replace(cfg, layer_mlps=("none", "experts", "none", "experts", "none", "dense"))
    mamba, attention = BlockKind("none", mixer="mamba2"), BlockKind("none")
    experts, mlp = BlockKind("moe", mixer="none"), BlockKind("dense", mixer="none")
    assert layer_groups(cfg) == [((mamba, experts), 2), ((attention, mlp), 1)]
    assert replace(cfg, **shortest(cfg)) == cfg
    assert (cfg.parts, cfg.expert_layers, cfg.has_experts) == (6, 2, True)
    dense = replace(cfg, moe_every=None, layer_mlps=("none", "dense") * 3)
    assert replace(dense, **shortest(dense)) == dense
    assert not dense.has_experts


@given(
    layers=st.integers(1, 12),
    first_dense=st.integers(0, 5),
    moe_every=st.none() | st.integers(1, 5),
    full_every=st.none() | st.integers(2, 5),
    window=st.sampled_from([None, 4]),
)
def test_equal_blocks_have_the_same_shortest_settings(
    layers, first_dense, moe_every, full_every, window
):
    cfg = model(layers, first_dense, moe_every, full_every, window)
    short = ModelConfig(num_layers=layers, **shortest(cfg))
    assert block_kinds(short) == block_kinds(cfg)
    assert shortest(short) == shortest(cfg)
    assert (short.layer_mlps, short.layer_attention) == ((), ())
    mlps = ["experts" if kind.mlp == "moe" else "dense" for kind in block_kinds(cfg)]
    said = shortest(ModelConfig(num_layers=layers, layer_mlps=tuple(mlps)))
    assert said["first_dense_layers"] == short.first_dense_layers
    assert said["moe_every"] == short.moe_every
    assert short.expert_layers == mlps.count("experts")
