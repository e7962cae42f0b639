"""Kinds of blocks: every block is in one group, in order, and groups repeat as their kinds do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config.pattern import BlockKind, block_kinds, layer_groups
from moejax.config.schema import ModelConfig

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
