"""Which implementation each platform and shape gets, and that reasons come with it."""

from dataclasses import replace

import jax
import pytest

from moejax.config import CompressionConfig, Config
from moejax.errors import InputError
from moejax.kernels.select import (
    Place,
    place_of,
    select_attention,
    select_experts,
    select_kernels,
    select_quantize,
)

HOPPER = Place("gpu", "9.0")
SHAPE = {"dtype": "bfloat16", "width": 2048, "hidden": 1024}
modern = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no Mosaic GPU")


def test_a_mesh_without_devices_has_a_platform_and_no_capability():
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    assert place_of(mesh, "cpu") == Place("cpu")
    assert place_of(mesh.abstract_mesh, "gpu") == Place("gpu")


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        pytest.param(HOPPER, "mosaic", marks=modern),
        (Place("gpu", "10.0"), "blocked"),
        (Place("cpu"), "blocked"),
        (Place("tpu"), "ragged_dot"),
    ],
)
def test_experts_by_place(place, wanted):
    choice = select_experts(place, "auto", **SHAPE)
    assert choice.implementation == wanted
    assert choice.reason
    assert bool(choice.declined) == (wanted == "blocked")


@modern
@pytest.mark.parametrize(
    ("change", "said"),
    [({"dtype": "float32"}, "float32"), ({"width": 72}, "width 72"), ({"hidden": 100}, "100")],
)
def test_experts_by_shape(change, said):
    ((name, reason),) = select_experts(HOPPER, "auto", **(SHAPE | change)).declined
    assert name == "mosaic"
    assert said in reason


def test_a_named_implementation_is_taken_or_refused_but_never_replaced():
    assert select_experts(Place("cpu"), "ragged_dot", **SHAPE).implementation == "ragged_dot"
    with pytest.raises(InputError, match="declines: it is for GPUs, this is cpu"):
        select_experts(Place("cpu"), "mosaic", **SHAPE)
    with pytest.raises(InputError, match="tokamax, which declines"):
        select_experts(Place("cpu"), "tokamax", **SHAPE)


@modern
def test_blocks_by_size_and_rounding():
    assert select_quantize(HOPPER, block=128).implementation == "mosaic"
    assert select_quantize(HOPPER, block=64, stochastic=True).declined
    odd = select_quantize(HOPPER, block=100)
    assert odd.implementation == "reference"
    assert "100" in odd.declined[0][1]


def test_older_jax_takes_the_reference_and_says_so(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    choice = select_quantize(HOPPER, block=128)
    assert choice.implementation == "reference"
    assert "it needs JAX 0.11" in choice.declined[0][1]


@pytest.mark.parametrize(
    ("platform", "dtype", "wanted"),
    [("gpu", "bfloat16", "cudnn"), ("gpu", "float32", "blocked"), ("cpu", "bfloat16", "blocked")],
)
def test_attention_by_platform_and_dtype(platform, dtype, wanted):
    assert select_attention(platform, dtype).implementation == wanted


def test_each_operation_of_a_run_has_a_choice():
    cfg = Config()
    assert set(select_kernels(cfg, Place("cpu"))) == {"attention", "experts"}
    dense = replace(cfg, model=replace(cfg.model, moe_every=None))
    compressed = replace(dense, compression=CompressionConfig(preset="hybrid"))
    assert set(select_kernels(compressed, Place("cpu"))) == {"attention", "quantize"}


def test_required_kernels_are_not_replaced():
    with pytest.raises(InputError, match="`kernels` is required, but cudnn declines attention"):
        select_kernels(replace(Config(), kernels="required"), Place("cpu"))


@modern
def test_required_kernels_run_where_they_can():
    cfg = Config()
    model = replace(cfg.model, dtype="bfloat16", width=256)
    moe = replace(cfg.moe, expert_hidden=128)
    cfg = replace(cfg, model=model, moe=moe, kernels="required")
    found = select_kernels(replace(cfg, compression=CompressionConfig(preset="strong")), HOPPER)
    taken = {name: choice.implementation for name, choice in found.items()}
    assert taken == {"attention": "cudnn", "experts": "mosaic", "quantize": "mosaic"}
