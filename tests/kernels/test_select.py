"""Which implementation each platform and shape gets, and that reasons come with it."""

from dataclasses import replace
from fnmatch import fnmatch

import jax
import pytest

from moejax.config.fields import change
from moejax.config.load import override
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.kernels import select
from moejax.kernels.select import (
    Hardware,
    hardware_of,
    select_attention,
    select_experts,
    select_kernels,
    select_quantize,
    select_quantized_rows,
)
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.runtime.patches import described_gpu
from moejax.step.train_step import build_step

CPU, TPU, HOPPER = Hardware("cpu"), Hardware("tpu"), Hardware("gpu", "9.0")
SHAPE = {"dtype": "bfloat16", "width": 2048, "hidden": 1024}
modern = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no Mosaic GPU")


@pytest.fixture(autouse=True)
def _without_tokamax(monkeypatch):
    monkeypatch.setattr(select, "INSTALLED", False)


def assert_chosen(choice, wanted):
    """The choice is `IMPLEMENTATION`, or `IMPLEMENTATION < DECLINED: REASON`; * is any text."""
    declined = [f" < {name}: {reason}" for name, reason in choice.declined]
    said = "".join([choice.implementation, *declined])
    assert fnmatch(said, wanted), said
    assert choice.reason


def test_a_mesh_without_devices_has_a_platform_and_no_capability():
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    assert hardware_of(mesh, "cpu") == CPU
    assert hardware_of(mesh.abstract_mesh, "gpu") == Hardware("gpu")


@modern
@pytest.mark.parametrize(
    ("place", "changes", "wanted"),
    [
        (HOPPER, {}, "mosaic"),
        (Hardware("gpu", "10.0"), {}, "blocked < mosaic: it is for Hopper*10.0"),
        (CPU, {}, "blocked < mosaic: it is for GPUs, this is cpu"),
        (HOPPER, {"dtype": "float32"}, "blocked < mosaic: *float32"),
        (HOPPER, {"width": 72}, "blocked < mosaic: width 72*"),
        (HOPPER, {"hidden": 100}, "blocked < mosaic: *100*"),
        (TPU, {}, "megablox"),
        (TPU, {"dtype": "float32"}, "ragged_dot < megablox: *float32"),
        (TPU, {"width": 2880}, "ragged_dot < megablox: *2880*"),
        (TPU, {"hidden": 64}, "ragged_dot < megablox: *64*"),
    ],
)
def test_experts_by_place_and_shape(place, changes, wanted):
    assert_chosen(select_experts(place, "auto", **SHAPE | changes), wanted)


@pytest.mark.parametrize(
    ("place", "named", "declines"),
    [
        (CPU, "ragged_dot", None),
        (TPU, "megablox", None),
        pytest.param(HOPPER, "mosaic_e4m3", None, marks=modern),
        (HOPPER, "megablox", "it is for TPUs, this is gpu"),
        (CPU, "mosaic", "it is for GPUs, this is cpu"),
        (CPU, "mosaic_e4m3", "it is for GPUs"),
        (CPU, "tokamax", "it is"),
    ],
)
def test_a_named_implementation_is_taken_or_refused_but_never_replaced(place, named, declines):
    if declines is None:
        assert_chosen(select_experts(place, named, **SHAPE), named)
    else:
        with pytest.raises(InputError, match=f"is {named}, which declines: {declines}"):
            select_experts(place, named, **SHAPE)


@modern
@pytest.mark.parametrize(
    "words",
    ["", "moe.expert_bias=true"]
    + [f"model.activation={name}" for name in ("clamped_swiglu", "geglu", "relu2")],
    ids=str,
)
def test_biases_and_the_clamp_stand_between_the_products(words):
    cfg = override(Config(), ["model.dtype=bfloat16", *words.split()])
    choice = select_kernels(cfg, HOPPER)["experts"]
    assert_chosen(choice, "mosaic")
    assert ("biases and other than SwiGLU stand between" in choice.reason) == bool(words)


@modern
def test_blocks_by_size_and_rounding():
    assert_chosen(select_quantize(HOPPER, block=128), "mosaic")
    assert_chosen(select_quantize(HOPPER, block=100), "reference < mosaic: blocks of 100*")


def test_older_jax_takes_the_reference_and_says_so(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    choice = select_quantize(HOPPER, block=128)
    assert_chosen(choice, "reference < mosaic: it needs JAX 0.11*")


ROWS = {"block": 128, "width": 2048, "dtype": "bfloat16", "choices": 8}
QUANTISED = {
    "dispatch": {"int8"},
    "combine": {"bfloat16", "e4m3"},
    "dispatch_backward": set(),
    "combine_backward": {"bfloat16"},
}


@modern
def test_rows_of_tokens_are_quantised_as_they_move_where_a_class_is_quantised():
    choice = select_quantized_rows(HOPPER, QUANTISED, **ROWS)
    assert "quantises rows of dispatch, combine;" in choice.reason
    assert "those of dispatch_backward, combine_backward are only permuted" in choice.reason
    plain = {kind: names - {"int8", "e4m3"} for kind, names in QUANTISED.items()}
    assert_chosen(select_quantized_rows(HOPPER, plain, **ROWS), "separate")


@modern
@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "mosaic"),
        ({"width": 1024}, "mosaic"),
        ({"width": 7168}, "mosaic"),
        ({"width": 2000}, "mosaic"),
        ({"block": 256}, "mosaic"),
        ({"block": 100}, "separate < mosaic: blocks of 100*"),
        ({"width": 2880}, "separate < mosaic: rows of 23 blocks*"),
        ({"width": 9216}, "separate < mosaic: rows of 72 blocks*"),
        ({"width": 64}, "separate < mosaic: rows of 1 blocks*"),
        ({"block": 256, "choices": 12}, "separate < mosaic: 12 tiles*"),
    ],
)
def test_rows_that_fill_no_tile_are_moved_and_quantised_in_turn(changes, wanted):
    assert_chosen(select_quantized_rows(HOPPER, QUANTISED, **ROWS | changes), wanted)


# OLMoE's heads and length, four sequences at a time: a mask of 128 MiB.
ATTENTION = {"dtype": "bfloat16", "width": 128, "length": 4096, "sequences": 4, "isolated": True}
AMPERE = Hardware("gpu", "8.0")
UNEQUAL = {"width": 192, "value_width": 128}  # DeepSeek-V3's heads: of queries and keys, of values


@pytest.mark.parametrize(
    ("place", "changes", "wanted"),
    [
        (HOPPER, {}, "cudnn_masked"),
        (HOPPER, {"isolated": False}, "cudnn"),
        (HOPPER, {"isolated": False, "length": 131_073, "sequences": 64}, "cudnn"),
        (HOPPER, {"length": 8192, "sequences": 8}, "cudnn_masked"),  # 1 GiB
        (HOPPER, {"width": 256}, "cudnn_masked"),
        (AMPERE, {}, "cudnn_masked"),
        (Hardware("gpu", "10.0"), {"width": 256}, "cudnn_masked"),
        (Hardware("gpu"), {}, "cudnn_masked"),
        (CPU, {}, "blocked < cudnn: it is for GPUs, this is cpu"),
        (
            HOPPER,
            {"dtype": "float32"},
            "blocked < cudnn: it takes bfloat16, this is float32 < tokamax: *",
        ),
        (
            HOPPER,
            {"width": 100},
            "blocked < cudnn: heads are 100 wide*multiples of 8 up to 256 < tokamax: *",
        ),
        (HOPPER, {"width": 264}, "blocked < cudnn: heads are 264 wide*"),
        (HOPPER, {"value_width": 264}, "blocked < cudnn: heads are 264 wide*"),
        (HOPPER, {"sinks": True}, "blocked < cudnn: *takes no sinks (model.attention_sinks)*"),
        (
            AMPERE,
            UNEQUAL,
            "blocked < cudnn: heads are 192 wide*multiples of 8 up to 128 < tokamax: *",
        ),
        (Hardware("gpu", "7.5"), {}, "blocked < cudnn: *capability 8.0, this is 7.5 <*"),
        (Hardware("gpu", "gfx942"), {}, "blocked < cudnn: *this is gfx942 <*"),
        (
            HOPPER,
            {"length": 4095},
            "blocked < cudnn: *even number of positions, this is 4095 < tokamax: *",
        ),
        (HOPPER, {"length": 131_072, "sequences": 1}, "blocked < cudnn: *32.0 GiB. At most 1*"),
        (HOPPER, {"length": 8192, "sequences": 9}, "blocked < cudnn: *a mask of 1.1 GiB*"),
        (TPU, {}, "splash"),
        (TPU, {"isolated": False, "length": 4100}, "splash"),
        (TPU, {"sinks": True, "width": 64}, "splash"),
        (TPU, UNEQUAL, "splash"),
        (TPU, {"dtype": "float32"}, "blocked < splash: *float32"),
        (TPU, {"length": 2**20, "window": 1024}, "splash"),
        (
            TPU,
            {"length": 2**20, "window": 4096},
            "blocked < splash: *of 4096 among 1048576*",
        ),
        (TPU, {"width": 100}, "blocked < splash: heads are 100 wide*"),
        (TPU, {"value_width": 512}, "blocked < splash: heads are 512 wide*"),
        (TPU, {"slices": 4}, "splash"),
    ],
)
def test_attention_by_place_and_shape(place, changes, wanted):
    assert_chosen(select_attention(place, **ATTENTION | changes), wanted)


@pytest.mark.parametrize(
    ("place", "changes", "wanted"),
    [
        (HOPPER, {}, "cudnn_masked"),
        (HOPPER, {"isolated": False}, "cudnn"),
        (HOPPER, {"sinks": True}, "tokamax"),
        (HOPPER, {"length": 131_072}, "tokamax"),
        (HOPPER, {"slices": 4}, "tokamax"),
        (HOPPER, {"slices": 4, "isolated": False}, "tokamax"),
        (HOPPER, UNEQUAL | {"sinks": True}, "tokamax"),
        (Hardware("gpu", "10.0"), {"sinks": True}, "tokamax"),
        (Hardware("gpu"), {"sinks": True}, "tokamax"),
        (AMPERE, {"sinks": True}, "blocked < cudnn: * < tokamax: *this is 8.0"),
        (HOPPER, {"width": 264}, "blocked < cudnn: * < tokamax: *up to 256"),
        (HOPPER, {"dtype": "float32"}, "blocked < cudnn: * < tokamax: *this is float32"),
        (CPU, {"sinks": True}, "blocked < cudnn: it is for GPUs, this is cpu"),
    ],
)
def test_tokamax_attends_where_cudnn_declines(monkeypatch, place, changes, wanted):
    monkeypatch.setattr(select, "INSTALLED", True)
    assert_chosen(select_attention(place, **ATTENTION | changes), wanted)


@pytest.mark.parametrize("isolated", [True, False])
def test_slices_take_a_mask_of_their_queries_alone(isolated):
    form = ATTENTION | {"isolated": isolated, "slices": 4}
    choice = select_attention(HOPPER, **form)
    assert_chosen(choice, "cudnn_masked")
    assert ("keeps documents apart" in choice.reason) == isolated
    (_, reason), _ = select_attention(HOPPER, **form | {"sequences": 2**20}).declined
    assert ("slices would be kept in order" in reason) == (not isolated)
    assert "isolate_documents" not in reason


@pytest.mark.parametrize("isolated", [True, False])
def test_values_of_another_width_are_padded_for_cudnn_and_it_is_said(isolated):
    form = ATTENTION | UNEQUAL | {"isolated": isolated}
    choice = select_attention(HOPPER, **form)
    assert_chosen(choice, "cudnn_masked" if isolated else "cudnn")
    said = "heads of 192 channels of keys and 128 of values are padded to 192"
    assert choice.reason.endswith(said)
    assert "padded" not in select_attention(HOPPER, **form | {"value_width": 192}).reason


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", "blocked"),
        ("data.isolate_documents=false", "cudnn"),
        ("train.micro_batches=4", "cudnn_masked"),
        ("mesh.replica=4", "cudnn_masked"),
        ("mesh.fsdp=4", "cudnn_masked"),
        ("mesh.expert=4", "cudnn_masked"),
        ("mesh.tensor=4", "blocked"),
        ("model.attention_sinks=true data.isolate_documents=false", "blocked"),
        ("model.head_width=264 data.isolate_documents=false", "blocked"),
    ],
)
def test_attention_of_a_run_sees_its_sequences_on_a_device_and_its_heads(words, wanted):
    """8 x 8192 positions are a GiB of mask; more replicas or micro-batches have fewer at once."""
    usual = ["model.dtype=bfloat16", "data.sequence_length=8192", "train.batch_sequences=32"]
    choice = select_kernels(override(Config(), [*usual, *words.split()]), HOPPER)["attention"]
    assert choice.implementation == wanted


def test_attention_of_a_run_sees_the_width_of_its_values():
    words = "model.dtype=bfloat16 model.head_width=192 model.attention=latent model.value_width=128"
    choice = select_kernels(override(Config(), words.split()), HOPPER)["attention"]
    assert "128 of values" in choice.reason


@pytest.mark.parametrize(
    ("words", "operations"),
    [
        ("", "attention experts"),
        ("model.moe_every=none compression=hybrid", "attention quantize"),
        ("compression.dispatch=bfloat16", "attention experts quantize quantized_rows"),
    ],
)
def test_each_operation_of_a_run_has_a_choice(words, operations):
    found = select_kernels(override(Config(), words.split()), CPU)
    assert " ".join(found) == operations


def test_required_kernels_are_not_replaced():
    with pytest.raises(InputError, match="`kernels` is required, but cudnn declines attention"):
        select_kernels(replace(Config(), kernels="required"), CPU)


@modern
def test_required_kernels_run_where_they_can():
    words = "model.dtype=bfloat16 model.width=1024 moe.expert_hidden=128 kernels=required"
    found = select_kernels(override(Config(), [*words.split(), "compression=strong"]), HOPPER)
    taken = {name: choice.implementation for name, choice in found.items()}
    kernels = dict.fromkeys(("experts", "quantize", "quantized_rows"), "mosaic")
    assert taken == kernels | {"attention": "cudnn_masked"}


SMALL = {
    "model.moe_every": None,
    "model.vocab_size": 264,
    "model.width": 32,
    "model.num_layers": 4,
    "model.num_heads": 8,
    "model.head_width": 8,
    "model.mlp_hidden": 32,
    "model.dtype": "bfloat16",
    "data.sequence_length": 256,
    "mesh.replica": 1,
    "train.batch_sequences": 2,
    "train.micro_batches": 2,
}
WHOLE = {"data.isolate_documents": False}
AHEAD = {"mesh.stage": 2, "model.predict_ahead": 1}
LATENT = {"model.attention": "latent", "model.kv_latent": 16, "model.rope_width": 4}
SLICES = {"mesh.stage_slices": 2, "model.layers_before_stages": 1, "model.num_layers": 5}


@pytest.mark.parametrize(
    ("place", "installed", "wanted"),
    [
        (CPU, True, "blocked < tokamax: *this is cpu"),
        (TPU, True, "splash"),
        (HOPPER, True, "tokamax"),
        (HOPPER, False, "blocked < tokamax: *Install*"),
        (Hardware("gpu", "10.0"), True, "tokamax"),
        (AMPERE, True, "blocked < tokamax: *this is 8.0"),
    ],
)
def test_devices_that_share_sequences_attend_to_ranges(place, installed, wanted, monkeypatch):
    monkeypatch.setattr(select, "INSTALLED", installed)
    shared = {"mesh.fsdp": 2, "mesh.context": 2, "mesh.context_stripe": 16}
    cfg = change(Config(), SMALL | shared | {"model.dtype": "bfloat16"})
    choices = select_kernels(cfg, place)
    assert_chosen(choices["attention"], wanted)
    assert "sliced_attention" not in choices


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("platform", "changes", "whole", "parts"),
    [
        ("gpu", WHOLE | AHEAD, "cudnn", "cudnn_masked"),
        ("tpu", AHEAD, "splash", "splash"),
        ("tpu", WHOLE | AHEAD | LATENT, "splash", "splash"),
        ("gpu", {"mesh.stage": 2} | SLICES, "cudnn_masked", "cudnn_masked"),
    ],
)
def test_parts_of_sequences_attend_by_a_kernel_that_takes_them(platform, changes, whole, parts):
    """Whole sequences of the same program keep the platform's own; both passes are traced."""
    cfg = change(Config(), SMALL | {"model.num_kv_heads": 8} | changes)
    with described_gpu():
        train_step = build_step(cfg, build_abstract_mesh(build_layout(cfg.mesh)), platform)
        shapes = train_step.abstract, train_step.abstract_batch()
        train_step.gradients.trace(*shapes)
        train_step.evaluate.trace(*shapes)
    spec = train_step.spec
    assert (spec.attention, spec.sliced_attention) == (whole, parts)
