"""Views: tensors and parameters are each other's, whole and in parts."""

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from moejax.hf.views import TILE, View, copy


@st.composite
def views(draw):
    """A view of up to four letters, any order and joining, some at one position, some paired."""
    dims = draw(st.permutations("DHCEUF"))[: draw(st.integers(1, 4))]
    sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=len(dims), max_size=len(dims))))
    at = draw(st.lists(st.sampled_from(dims), unique=True, max_size=len(dims) - 1))
    free = draw(st.permutations([letter for letter in dims if letter not in at]))
    cuts = sorted(draw(st.lists(st.integers(0, len(free)), max_size=3)))
    ends = [0, *cuts, len(free)]
    groups = tuple("".join(free[a:b]) for a, b in itertools.pairwise(ends))
    size = dict(zip(dims, sizes, strict=True))
    paired = None
    if draw(st.booleans()):
        letter = draw(st.sampled_from(free))
        rotated = 2 * draw(st.integers(0, size[letter] // 2))
        paired = (letter, draw(st.integers(0, size[letter] - rotated)), rotated)
    places = tuple((letter, draw(st.integers(0, size[letter] - 1))) for letter in at)
    return View("".join(dims), sizes, groups, places, paired)


def parameter(view):
    return np.arange(math.prod(view.sizes), dtype=np.float32).reshape(view.sizes)


def free_values(view, values):
    return values[tuple(dict(view.at).get(letter, slice(None)) for letter in view.dims)]


def fill(view, tensor, box):
    """The part of the parameter that a tensor gives; -1 where it holds nothing."""
    out = np.full([stop - start for start, stop in box.values()], -1, np.float32)
    read = []

    def part(ranges):
        read.append(math.prod(stop - start for start, stop in ranges))
        return tensor[tuple(slice(*r) for r in ranges)]

    view.fill(out, box, part)
    return out, sum(read)


@hypothesis.given(views(), st.data())
def test_a_tensor_gives_back_the_values_it_was_made_of(view, data):
    values = parameter(view)
    tensor = view.to_tensor(free_values(view, values))
    assert tensor.shape == view.shape
    box = {}
    for letter, size in view.size.items():
        start = data.draw(st.integers(0, size - 1))
        box[letter] = (start, data.draw(st.integers(start, size)))
    out, read = fill(view, tensor, box)
    index = tuple(slice(*r) for r in box.values())
    held = np.zeros(view.sizes, bool)
    held[tuple(dict(view.at).get(letter, slice(None)) for letter in view.dims)] = True
    np.testing.assert_array_equal(out, np.where(held, values, -1)[index])
    if view.paired is None:
        assert read == np.sum(held[index]), "what is not needed was read"


@pytest.mark.parametrize(
    ("dims", "sizes", "groups", "at", "wanted"),
    [
        ("DHC", (3, 2, 4), ("HC", "D"), (), lambda w: w.reshape(3, 8).T),
        ("HCD", (2, 4, 3), ("D", "HC"), (), lambda w: w.reshape(8, 3).T),
        ("EDUF", (2, 3, 2, 5), ("F", "D"), (("E", 1), ("U", 0)), lambda w: w[1, :, 0].T),
        # Fused experts: gate rows, then up rows; and gpt-oss: gate and up by turns.
        (
            "EDUF",
            (2, 3, 2, 5),
            ("E", "UF", "D"),
            (),
            lambda w: np.stack([np.concatenate([e[:, 0], e[:, 1]], axis=1).T for e in w]),
        ),
        (
            "EDUF",
            (2, 3, 2, 5),
            ("E", "D", "FU"),
            (),
            lambda w: np.stack([w[:, :, 0], w[:, :, 1]], axis=-1).reshape(2, 3, 10),
        ),
        ("D", (3,), ("", "D"), (), lambda w: w[None]),
    ],
)
def test_tensors_have_the_layouts_of_the_families(dims, sizes, groups, at, wanted):
    view = View(dims, sizes, groups, at)
    values = parameter(view)
    np.testing.assert_array_equal(view.to_tensor(free_values(view, values)), wanted(values))


@pytest.mark.parametrize("first", [0, 3, 4])
def test_rotary_pairs_become_halves_and_the_other_channels_stay(first):
    view = View("ZHC", (2, 3, 8), ("HC", "Z"), (), ("C", first, 4))
    ours = parameter(view)
    theirs = view.to_tensor(ours).reshape(3, 8, 2)
    others = [c for c in range(8) if not first <= c < first + 4]
    np.testing.assert_array_equal(theirs[:, others], ours.transpose(1, 2, 0)[:, others])
    # The pair (2 i, 2 i + 1) of the tensor is (i, i + R / 2) of the parameter.
    for i in range(2):
        np.testing.assert_array_equal(theirs[:, first + 2 * i], ours[:, :, first + i].T)
        np.testing.assert_array_equal(theirs[:, first + 1 + 2 * i], ours[:, :, first + 2 + i].T)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
@pytest.mark.parametrize(
    ("held", "wanted"), list(itertools.product(["float32", "bfloat16"], repeat=2))
)
def test_large_copies_are_what_numpy_assigns(order, held, wanted):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((TILE + 3, 2, TILE + 5), np.float32).astype(held).transpose(order)
    target = np.empty(values.shape, wanted)
    copy(target, values)
    assert target.tobytes() == values.astype(wanted).tobytes()
