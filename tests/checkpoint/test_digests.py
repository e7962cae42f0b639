"""Digests of numbers: the same on every mesh and by any processes, other for any change."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.checkpoint.digests import (
    BLOCK,
    add_up,
    cell_dims,
    digest_of_zeros,
    from_json,
    mixed,
    together,
)
from tests.cases import few

W_IN, NORM = "weights/params.groups.0.blocks.0.moe.w_in", "weights/params.norm.scale"
DTYPES = {
    "float32": np.uint32,
    "bfloat16": np.uint16,
    "int32": np.uint32,
    "float8_e4m3fn": np.uint8,
}


def drawn(shape, dtype="float32", seed=0):
    """Numbers of any bits, NaN and infinity too."""
    bits = np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)
    return bits.astype(DTYPES[dtype]).view(jnp.dtype(dtype))


def digest_on_host(cell):
    """The digest of one cell, from its numbers in memory of the host."""
    bits = np.ascontiguousarray(cell).reshape(-1).view(f"<u{cell.dtype.itemsize}")
    words = mixed(bits.astype(np.uint32), np.arange(bits.size, dtype=np.uint32))
    return "".join(f"{word.sum(dtype=np.uint32):08x}" for word in words)


def digests(arrays):
    return together([add_up(arrays).here()])


def cells_on_host(key, values):
    shape = values.shape[: cell_dims(key, values.ndim)]
    return np.array([digest_on_host(values[at]) for at in np.ndindex(shape)]).reshape(shape)


@few(12)
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    axes=st.permutations(["a", "b", "c", None, None]),
    places=st.permutations([1, 2, 3, 4]),
    seed=st.integers(0, 99),
)
def test_devices_give_what_the_host_gives_however_arrays_are_cut(dtype, axes, places, seed):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"))
    values = drawn((3, 4, 4, 2, 6), dtype, seed)
    spec = [None] * 5
    for place, axis in zip(places, axes, strict=False):
        spec[place] = axis
    x = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
    found = digests({W_IN: x})[W_IN]
    assert (found.cells == cells_on_host(W_IN, values)).all()
    assert (found.shape, found.dtype) == (values.shape, dtype)


@pytest.mark.parametrize(
    ("key", "shape", "cells"),
    [
        (W_IN, (3, 4, 8, 2, 5), (3, 4)),
        ("optimizer/groups.0.blocks.1.moe.w_out.0.mu", (3, 4, 8, 5), (3, 4)),
        ("weights/params.groups.0.blocks.0.moe.w_router", (3, 8, 4), (3,)),
        ("weights/params.groups.0.blocks.0.mlp.w_in", (3, 8, 2, 5), (3,)),
        ("weights/balance.groups.0.blocks.0.moe.bias", (3, 4), (3,)),
        ("weights/params.embedding.table", (8, 5), ()),
        ("counters/step", (), ()),
    ],
)
def test_cells_are_layers_and_experts(key, shape, cells):
    values = drawn(shape)
    found = digests({key: jnp.asarray(values)})[key]
    assert found.cells.shape == cells
    assert (found.cells == cells_on_host(key, values)).all()
    again = from_json(key, found.to_json())
    assert again[:2] == found[:2]
    assert (again.cells == found.cells).all()


@settings(max_examples=200)
@given(size=st.integers(1, 300), at=st.integers(0, 299), bit=st.integers(0, 31))
def test_one_flipped_bit_is_another_digest(size, at, bit):
    values = drawn(size)
    flipped = values.copy()
    flipped.view(np.uint32)[at % size] ^= np.uint32(1) << np.uint32(bit)
    assert digest_on_host(flipped) != digest_on_host(values)


@settings(max_examples=200)
@given(data=st.data(), size=st.integers(2, 100), constant=st.booleans())
def test_what_plain_sums_miss_is_another_digest(data, size, constant):
    """Two changed signs leave a sum of products as it was, swapped numbers leave any sum."""
    values = np.ones(size, np.float32) if constant else drawn(size)
    one, other = data.draw(st.permutations(range(size)))[:2]
    signs = values.copy()
    signs.view(np.uint32)[[one, other]] ^= np.uint32(1 << 31)
    assert digest_on_host(signs) != digest_on_host(values)
    values[one] = 3.0
    swapped = values.copy()
    swapped[[one, other]] = values[[other, one]]
    if values[other] != 3.0:
        assert digest_on_host(swapped) != digest_on_host(values)


def test_digests_of_many_cells_are_all_different():
    found = digests({W_IN: jnp.asarray(drawn((64, 64, 3)))})[W_IN]
    assert len(set(found.cells.flat)) == 64 * 64


@pytest.mark.parametrize("numbers", [1, BLOCK, BLOCK + 7])
def test_zeros_have_the_digest_of_zeros(numbers):
    assert digest_of_zeros(numbers) == digest_on_host(np.zeros(numbers, np.float32))
    assert digest_of_zeros(numbers) == str(digests({NORM: jnp.zeros(numbers)})[NORM].cells)


def test_the_digest_of_a_format_stays_what_it_is():
    """Another one would call every older checkpoint damaged."""
    values = np.arange(5, dtype=np.float32)
    assert digest_on_host(values) == "21d2ae6909bbb24a"


def test_processes_add_up_what_each_of_them_holds():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    values = drawn((2, 4, 6))
    x = jax.device_put(values, NamedSharding(mesh, PartitionSpec(None, "a", "b")))
    here = add_up({W_IN: x}).here()
    parts = here[W_IN]["parts"]
    assert len(parts) == 4
    shares = [{W_IN: here[W_IN] | {"parts": parts[index::2]}} for index in range(2)]
    assert (together(shares)[W_IN].cells == cells_on_host(W_IN, values)).all()
    with pytest.raises(ValueError, match="24 of 48 numbers were added up"):
        together(shares[:1])


def test_copies_count_once():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    values = drawn((2, 4, 6))
    x = jax.device_put(values, NamedSharding(mesh, PartitionSpec(None, "a")))
    here = add_up({W_IN: x}).here()
    assert sum(math.prod(p[1]) * p[2] for p in here[W_IN]["parts"]) == values.size
