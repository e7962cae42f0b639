"""How changed experts and layers are named."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.checkpoint.digests import ArrayDigests
from moejax.checkpoint.verify import SHOWN, differences, summary
from tests.checkpoint.test_digests import digest_on_host

PATH = "groups.1.blocks.{}.moe.{}"
NAMES = [
    f"weights/params.{PATH.format(block, name)}" for block in (0, 1) for name in ("w_in", "w_out")
]
DENSE = "weights/params.groups.0.blocks.0.mlp.w_in"  # two dense layers in front
MOMENT = f"optimizer/{PATH.format(0, 'w_in')}.0.mu"


def state(seed=0):
    """Two dense layers, then three times a pattern of two layers with four experts."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=(3, 4, 6)).astype(np.float32) for name in (*NAMES, MOMENT)}
    arrays[DENSE] = rng.normal(size=(2, 6, 2)).astype(np.float32)
    arrays["weights/params.embedding.table"] = rng.normal(size=(5, 6)).astype(np.float32)
    return arrays


def digests(arrays):
    found = {}
    for key, x in arrays.items():
        cells = x.shape[: {3: 2 if ".moe." in key else 1, 2: 0}[x.ndim]]
        texts = np.array([digest_on_host(x[at]) for at in np.ndindex(cells)]).reshape(cells)
        found[key] = ArrayDigests(x.shape, x.dtype.name, texts)
    return found


SAVED = digests(state())


def said(change):
    arrays = state()
    change(arrays)
    return differences(SAVED, digests(arrays))


def test_the_same_numbers_differ_in_nothing():
    assert said(lambda arrays: None) == []


def test_swapped_experts_of_a_layer_are_named():
    def swap(arrays):
        for name in NAMES[2:]:  # block 1 at its second repeat: 2 dense layers + 1 * 2 + 1
            arrays[name][1, [0, 3]] = arrays[name][1, [3, 0]]

    names = ", ".join(PATH.format(1, name) for name in ("w_in", "w_out"))
    assert said(swap) == [f"experts 0 and 3 of layer 5 ({names}) are swapped"]


def test_experts_swapped_across_layers_and_blocks_are_named():
    def swap(arrays):
        one, other = arrays[NAMES[0]], arrays[NAMES[2]]
        one[0, 1], other[2, 3] = other[2, 3].copy(), one[0, 1].copy()

    texts = said(swap)
    assert len(texts) == 1
    assert texts[0].startswith("expert 1 of layer 2 and expert 3 of layer 7 (")
    assert texts[0].endswith(f"{PATH.format(0, 'w_in')}, {PATH.format(1, 'w_in')}) are swapped")


def test_a_copy_of_another_expert_is_named():
    def copy(arrays):
        arrays[NAMES[0]][1, 3] = arrays[NAMES[0]][1, 0]
        arrays[NAMES[0]][2, 1] = arrays[NAMES[0]][1, 0]

    assert said(copy) == [
        f"expert 3 of layer 4 ({PATH.format(0, 'w_in')}) is a copy of expert 0",
        f"expert 1 of layer 6 ({PATH.format(0, 'w_in')}) is a copy of expert 0 of layer 4",
    ]


def test_a_lost_expert_and_a_changed_one_are_named():
    def lose(arrays):
        arrays[NAMES[1]][0, 2] = 0
        arrays[MOMENT][2, 1, 5] += 1e-7

    assert said(lose) == [
        f"expert 2 of layer 2 ({PATH.format(0, 'w_out')}) is all zeros",
        f"expert 1 of layer 6 (optimizer: {PATH.format(0, 'w_in')}.0.mu) is changed",
    ]


def test_layers_and_whole_arrays_are_named():
    def change(arrays):
        arrays[DENSE][[0, 1]] = arrays[DENSE][[1, 0]]
        arrays["weights/params.embedding.table"][2, 2] = np.nan

    assert sorted(said(change)) == [
        "layer 0 and layer 1 (groups.0.blocks.0.mlp.w_in) are swapped",
        "the array (embedding.table) is changed",
    ]


def test_many_differences_are_counted():
    texts = said(lambda arrays: arrays[NAMES[0]].__iadd__(1))
    assert len(texts) == 12
    assert summary(texts).endswith(f"; and {12 - SHOWN} differences more")
    assert summary(texts[:2]) == "; ".join(texts[:2])


def test_numbers_in_another_dtype_are_not_compared():
    x = jnp.asarray(state()[NAMES[0]]).astype("bfloat16")
    assert differences(SAVED, digests({NAMES[0]: np.asarray(x)})) == []


@settings(max_examples=100)
@given(
    key=st.sampled_from([*NAMES, MOMENT]),
    layer=st.integers(0, 2),
    expert=st.integers(0, 3),
    place=st.integers(0, 5),
    bit=st.integers(0, 31),
)
def test_a_flipped_bit_names_its_expert_and_no_other(key, layer, expert, place, bit):
    def flip(arrays):
        arrays[key].view(np.uint32)[layer, expert, place] ^= np.uint32(1) << np.uint32(bit)

    texts = said(flip)
    assert len(texts) == 1
    block = 1 if ".blocks.1." in key else 0
    assert texts[0].startswith(f"expert {expert} of layer {2 + 2 * layer + block} (")
    assert texts[0].endswith(" is changed")
