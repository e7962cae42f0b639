"""Which mesh axes shard a parameter, by the letters of its dimensions."""

import pytest

from moejax.comm.weights.path import compressible, path_of
from moejax.config.schema import MeshConfig
from moejax.layout.layout import build_layout, is_product

LAYOUT = build_layout(MeshConfig(replica=1, fsdp=2, expert=2, tensor=2))
DENSE, TENSOR = ("fsdp", "expert"), ("tensor",)


@pytest.mark.parametrize(
    ("dims", "wanted"),
    [
        ("DHC", (DENSE, TENSOR, ())),
        ("HCD", (TENSOR, (), DENSE)),
        # To a latent, every tensor rank projects its own positions; from it, its own heads.
        ("DZ", (DENSE, ())),
        ("ZHC", (DENSE, TENSOR, ())),
        ("Z", ((),)),
        ("H", ((),)),
    ],
)
def test_the_letters_say_what_shards_a_parameter(dims, wanted):
    assert LAYOUT.param_axes(dims) == wanted


def test_weights_to_a_latent_are_copies_over_tensor_and_those_from_it_are_not():
    down, up = path_of("DZ", LAYOUT), path_of("ZHC", LAYOUT)
    assert (down.dim, down.gather, down.copies) == (0, DENSE, TENSOR)
    assert (up.dim, up.gather, up.copies) == (0, DENSE, ())


def test_products_are_told_from_biases_and_scales():
    products = {"DHC", "DGC", "HCD", "DZ", "ZHC", "DE", "EDUF", "EFD", "DUF", "FD", "VD", "DV"}
    others = {"D", "Z", "H", "C", "HC", "GC", "E", "ED", "EUF"}
    assert {dims for dims in products | others if is_product(dims)} == products
    assert {dims for dims in products | others if compressible(dims)} == products - {"DE"}
