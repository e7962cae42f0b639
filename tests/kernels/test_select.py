"""Which implementation each platform and shape gets, and that reasons come with it."""

import random
from dataclasses import replace
from itertools import combinations, product

import jax
import pytest

from moejax.config.checks import check
from moejax.config.fields import change
from moejax.config.schema import CompressionConfig, Config, MoEConfig
from moejax.errors import InputError
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
from moejax.runtime.patches import described_cudnn
from moejax.step.train_step import build_step

HOPPER = Hardware("gpu", "9.0")
SHAPE = {"dtype": "bfloat16", "width": 2048, "hidden": 1024}
modern = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no Mosaic GPU")


def test_a_mesh_without_devices_has_a_platform_and_no_capability():
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    assert hardware_of(mesh, "cpu") == Hardware("cpu")
    assert hardware_of(mesh.abstract_mesh, "gpu") == Hardware("gpu")


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        pytest.param(HOPPER, "mosaic", marks=modern),
        (Hardware("gpu", "10.0"), "blocked"),
        (Hardware("cpu"), "blocked"),
        (Hardware("tpu"), "megablox"),
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


@pytest.mark.parametrize(
    ("change", "said"),
    [({"dtype": "float32"}, "float32"), ({"width": 2880}, "2880"), ({"hidden": 64}, "64")],
)
def test_experts_on_tpus_by_shape(change, said):
    choice = select_experts(Hardware("tpu"), "auto", **(SHAPE | change))
    assert choice.implementation == "ragged_dot"
    ((name, reason),) = choice.declined
    assert name == "megablox"
    assert said in reason


def test_megablox_is_for_tpus():
    assert select_experts(Hardware("tpu"), "megablox", **SHAPE).implementation == "megablox"
    with pytest.raises(InputError, match="megablox, which declines: it is for TPUs, this is gpu"):
        select_experts(HOPPER, "megablox", **SHAPE)


@modern
def test_biases_and_the_clamp_stand_between_the_products():
    choice = select_experts(HOPPER, "auto", **SHAPE, plain=False)
    assert (choice.implementation, choice.declined) == ("mosaic", ())
    assert "clamped SwiGLU and biases stand between" in choice.reason
    model = replace(Config().model, dtype="bfloat16", activation="clamped_swiglu")
    for cfg in (
        replace(Config(), model=model),
        replace(
            Config(), model=replace(model, activation="swiglu"), moe=MoEConfig(expert_bias=True)
        ),
    ):
        assert "stand between" in select_kernels(cfg, HOPPER)["experts"].reason


def test_a_named_implementation_is_taken_or_refused_but_never_replaced():
    assert select_experts(Hardware("cpu"), "ragged_dot", **SHAPE).implementation == "ragged_dot"
    with pytest.raises(InputError, match="declines: it is for GPUs, this is cpu"):
        select_experts(Hardware("cpu"), "mosaic", **SHAPE)
    with pytest.raises(InputError, match="mosaic_e4m3, which declines: it is for GPUs"):
        select_experts(Hardware("cpu"), "mosaic_e4m3", **SHAPE)
    with pytest.raises(InputError, match="tokamax, which declines"):
        select_experts(Hardware("cpu"), "tokamax", **SHAPE)


@modern
def test_what_rounds_tokens_and_weights_is_taken_where_it_is_named_and_never_by_itself():
    assert select_experts(HOPPER, "auto", **SHAPE).implementation == "mosaic"
    assert select_experts(HOPPER, "mosaic_e4m3", **SHAPE).implementation == "mosaic_e4m3"
    with pytest.raises(InputError, match="width 72"):
        select_experts(HOPPER, "mosaic_e4m3", **(SHAPE | {"width": 72}))


@modern
def test_blocks_by_size_and_rounding():
    assert select_quantize(HOPPER, block=128).implementation == "mosaic"
    odd = select_quantize(HOPPER, block=100)
    assert odd.implementation == "reference"
    assert "100" in odd.declined[0][1]


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
    assert (choice.implementation, choice.declined) == ("mosaic", ())
    assert "quantises rows of dispatch, combine;" in choice.reason
    assert "those of dispatch_backward, combine_backward are only permuted" in choice.reason
    plain = {kind: names - {"int8", "e4m3"} for kind, names in QUANTISED.items()}
    choice = select_quantized_rows(HOPPER, plain, **ROWS)
    assert (choice.implementation, choice.declined) == ("separate", ())


@modern
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block": 100}, "blocks of 100"),
        ({"width": 2880}, "rows of 23 blocks"),
        ({"width": 9216}, "rows of 72 blocks"),
        ({"width": 64}, "rows of 1 blocks"),
        ({"block": 256, "choices": 12}, "12 tiles"),
    ],
)
def test_rows_that_fill_no_tile_are_moved_and_quantised_in_turn(change, said):
    choice = select_quantized_rows(HOPPER, QUANTISED, **(ROWS | change))
    assert choice.implementation == "separate"
    ((name, reason),) = choice.declined
    assert name == "mosaic"
    assert said in reason


@modern
@pytest.mark.parametrize("change", [{"width": 1024}, {"width": 7168}, {"width": 2000}])
def test_rows_that_fill_tiles(change):
    choice = select_quantized_rows(HOPPER, QUANTISED, **(ROWS | change))
    assert choice.implementation == "mosaic"
    choice = select_quantized_rows(HOPPER, QUANTISED, **(ROWS | {"block": 256}))
    assert choice.implementation == "mosaic"


def test_older_jax_takes_the_reference_and_says_so(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    choice = select_quantize(HOPPER, block=128)
    assert choice.implementation == "reference"
    assert "it needs JAX 0.11" in choice.declined[0][1]


# OLMoE's heads and length, four sequences at a time: a mask of 128 MiB.
ATTENTION = {"dtype": "bfloat16", "width": 128, "length": 4096, "sequences": 4, "isolated": True}


@pytest.mark.parametrize(
    ("place", "change", "wanted"),
    [
        (HOPPER, {}, "cudnn_masked"),
        (HOPPER, {"isolated": False}, "cudnn"),
        (HOPPER, {"isolated": False, "length": 131_073, "sequences": 64}, "cudnn"),
        (HOPPER, {"length": 8192, "sequences": 8}, "cudnn_masked"),  # 1 GiB
        (HOPPER, {"width": 256}, "cudnn_masked"),
        (Hardware("gpu", "8.0"), {}, "cudnn_masked"),
        (Hardware("gpu", "10.0"), {"width": 256}, "cudnn_masked"),
        (Hardware("gpu"), {}, "cudnn_masked"),
    ],
)
def test_attention_by_cudnn(place, change, wanted):
    choice = select_attention(place, **(ATTENTION | change))
    assert (choice.implementation, choice.declined) == (wanted, ())


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        (Hardware("cpu"), {}, "it is for GPUs, this is cpu"),
        (HOPPER, {"dtype": "float32"}, "it takes bfloat16, this is float32"),
        (HOPPER, {"width": 100}, "heads are 100 wide. It takes multiples of 8 up to 256"),
        (HOPPER, {"width": 264}, "heads are 264 wide"),
        (HOPPER, {"value_width": 264}, "heads are 264 wide"),
        (HOPPER, {"sinks": True}, "takes no sinks (model.attention_sinks)"),
        (
            Hardware("gpu", "8.0"),
            {"width": 192, "value_width": 128},
            "heads are 192 wide. It takes multiples of 8 up to 128",
        ),
        (
            Hardware("gpu", "8.6"),
            {"width": 136},
            "heads are 136 wide. It takes multiples of 8 up to 128",
        ),
        (Hardware("gpu", "7.5"), {}, "from compute capability 8.0, this is 7.5"),
        (Hardware("gpu", "gfx942"), {}, "this is gfx942"),
        (HOPPER, {"length": 4095}, "an even number of positions, this is 4095"),
        (HOPPER, {"length": 131_072, "sequences": 1}, "a mask of 32.0 GiB. At most 1 is given"),
        (HOPPER, {"length": 8192, "sequences": 9}, "a mask of 1.1 GiB"),
    ],
)
def test_why_cudnn_does_not_run_attention(place, change, said):
    choice = select_attention(place, **(ATTENTION | change))
    assert choice.implementation == "blocked"
    ((name, reason),) = choice.declined
    assert name == "cudnn"
    assert said in reason


@pytest.mark.parametrize("isolated", [True, False])
def test_slices_take_a_mask_of_their_queries_alone(isolated):
    change = {"isolated": isolated, "slices": 4}
    choice = select_attention(HOPPER, **(ATTENTION | change))
    assert choice.implementation == "cudnn_masked"
    assert ("keeps documents apart" in choice.reason) == isolated
    ((_, reason),) = select_attention(
        HOPPER, **(ATTENTION | change | {"sequences": 2**20})
    ).declined
    assert ("slices would be kept in order" in reason) == (not isolated)
    assert "isolate_documents" not in reason
    ((name, reason),) = select_attention(Hardware("tpu"), **(ATTENTION | change)).declined
    assert (name, reason.endswith("here are 4 slices")) == ("splash", True)


@pytest.mark.parametrize("isolated", [True, False])
def test_values_of_another_width_are_padded_for_cudnn_and_it_is_said(isolated):
    """DeepSeek-V3's heads: 192 channels of queries and keys, 128 of values."""
    change = {"width": 192, "value_width": 128, "isolated": isolated}
    choice = select_attention(HOPPER, **(ATTENTION | change))
    assert choice.implementation == ("cudnn_masked" if isolated else "cudnn")
    said = "heads of 192 channels of keys and 128 of values are padded to 192"
    assert choice.reason.endswith(said)
    same = select_attention(HOPPER, **(ATTENTION | change | {"value_width": 192}))
    assert "padded" not in same.reason


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, "splash"),
        ({"isolated": False}, "splash_whole"),
        ({"sinks": True, "width": 64}, "splash"),
        ({"width": 192, "value_width": 128}, "splash"),
        ({"dtype": "float32"}, "float32"),
        ({"length": 4100}, "4100"),
        ({"width": 100}, "heads are 100 wide"),
        ({"value_width": 512}, "heads are 512 wide"),
    ],
)
def test_attention_on_tpus(change, wanted):
    choice = select_attention(Hardware("tpu"), **(ATTENTION | change))
    if choice.implementation == "blocked":
        ((name, reason),) = choice.declined
        assert name == "splash"
        assert wanted in reason
    else:
        assert (choice.implementation, choice.declined) == (wanted, ())


def test_attention_of_a_run_sees_its_sequences_on_a_device():
    """8 x 8192 positions are a GiB of mask; more replicas or micro-batches have fewer at once."""
    cfg = Config()
    cfg = replace(
        cfg,
        model=replace(cfg.model, dtype="bfloat16"),
        data=replace(cfg.data, sequence_length=8192),
        train=replace(cfg.train, batch_sequences=32),
    )

    def chosen(cfg):
        return select_kernels(cfg, HOPPER)["attention"].implementation

    assert chosen(cfg) == "blocked"
    assert chosen(replace(cfg, data=replace(cfg.data, isolate_documents=False))) == "cudnn"
    assert chosen(replace(cfg, train=replace(cfg.train, micro_batches=4))) == "cudnn_masked"
    for axis in ("replica", "fsdp", "expert"):
        assert chosen(replace(cfg, mesh=replace(cfg.mesh, **{axis: 4}))) == "cudnn_masked"
    assert chosen(replace(cfg, mesh=replace(cfg.mesh, tensor=4))) == "blocked"


def test_attention_of_a_run_sees_its_values_and_sinks():
    model = replace(Config().model, dtype="bfloat16", head_width=192)
    latent = replace(model, attention="latent", value_width=128)
    choice = select_kernels(replace(Config(), model=latent), HOPPER)["attention"]
    assert "128 of values" in choice.reason
    sinks = replace(model, attention_sinks=True)
    choice = select_kernels(replace(Config(), model=sinks), HOPPER)["attention"]
    assert choice.implementation == "blocked"


def test_each_operation_of_a_run_has_a_choice():
    cfg = Config()
    assert set(select_kernels(cfg, Hardware("cpu"))) == {"attention", "experts"}
    dense = replace(cfg, model=replace(cfg.model, moe_every=None))
    compressed = replace(dense, compression=CompressionConfig(preset="hybrid"))
    assert set(select_kernels(compressed, Hardware("cpu"))) == {"attention", "quantize"}
    tokens = replace(cfg, compression=CompressionConfig(dispatch="bfloat16"))
    found = select_kernels(tokens, Hardware("cpu"))
    assert set(found) == {"attention", "experts", "quantize", "quantized_rows"}


def test_required_kernels_are_not_replaced():
    with pytest.raises(InputError, match="`kernels` is required, but cudnn declines attention"):
        select_kernels(replace(Config(), kernels="required"), Hardware("cpu"))


@modern
def test_required_kernels_run_where_they_can():
    cfg = Config()
    model = replace(cfg.model, dtype="bfloat16", width=1024)
    moe = replace(cfg.moe, expert_hidden=128)
    cfg = replace(cfg, model=model, moe=moe, kernels="required")
    found = select_kernels(replace(cfg, compression=CompressionConfig(preset="strong")), HOPPER)
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
PLACES = {
    "cpu": ("cpu", {}, "blocked"),
    "gpu": ("gpu", {}, "cudnn_masked"),
    "gpu, whole": ("gpu", WHOLE, "cudnn"),
    "tpu": ("tpu", {}, "splash"),
    "tpu, whole": ("tpu", WHOLE, "splash_whole"),
}
# Settings that change how a program attends, as changes of a small model without experts.
SETTINGS = {
    "declined": {
        "none": {},
        "dtype": {"model.dtype": "float32"},
        "length": {"data.sequence_length": 250},  # and in two parts an odd number of positions
        "width": {"model.head_width": 12},
        "sinks": {"model.attention_sinks": True, "model.attention_bias": True},
    },
    "spread": {
        "one device": {},
        "stages": {"mesh.stage": 2},
        "chunks": {"mesh.stage": 2, "model.stage_chunks": 2},
        "slices": {"mesh.stage": 2, "mesh.stage_slices": 2},
        "inputs kept": {"mesh.stage": 2, "mesh.stage_keeps": "input"},
    },
    "tensor": {
        "one": {},
        "positions": {"mesh.tensor": 2},
        "replicated": {"mesh.tensor": 2, "mesh.activations": "replicated"},
    },
    "ahead": {"none": {}, "one": {"model.predict_ahead": 1}},
    "before": {"none": {}, "one": {"model.layers_before_stages": 1, "model.num_layers": 5}},
    "heads": {
        "grouped": {},
        "latent": {"model.attention": "latent", "model.kv_latent": 16, "model.rope_width": 4},
        "norms": {"model.qk_norm": "full"},
    },
    "window": {"none": {}, "5": {"model.sliding_window": 5}},
    "remat": {"none": {}, "full": {"model.remat": "full"}, "kept": {"model.remat": "attention"}},
}


def attending_config(place, chosen):
    settings = SMALL | PLACES[place][1]
    for name, value in chosen.items():
        settings |= SETTINGS[name][value]
    settings |= {} if "model.kv_latent" in settings else {"model.num_kv_heads": 8}
    return change(Config(), settings)


def is_refused(place, chosen):
    try:
        check(attending_config(place, chosen))
    except InputError:
        return True
    return False


def seen_pairs(chosen):
    """Pairs whose place's own kernel a run takes; where it declines, those with the reason."""
    pairs = combinations(sorted(chosen.items()), 2)
    return {pair for pair in pairs if chosen["declined"] == "none" or "declined" in dict(pair)}


def covering(place):
    """Returns runs in which every pair of settings occurs, and the pairs that are refused."""
    rng = random.Random(0)
    single = [[(name, value) for value in SETTINGS[name]] for name in sorted(SETTINGS)]
    every = [pair for one, other in combinations(single, 2) for pair in product(one, other)]
    refused = {pair for pair in every if is_refused(place, dict(pair))}
    left, found = set(every) - refused, []
    while left:
        first = dict(min(left))
        usual = {} if "declined" in first else {"declined": "none"}
        drawn = [
            {name: rng.choice(list(SETTINGS[name])) for name in SETTINGS} | usual | first
            for _ in range(100)
        ]
        drawn.sort(key=lambda chosen: -len(seen_pairs(chosen) & left))
        best = next(chosen for chosen in drawn if not is_refused(place, chosen))
        left -= seen_pairs(best)
        found.append(best)
    return found, refused


def trace_gradients(place, chosen):
    """Traces gradients and evaluation; returns what was built."""
    cfg = attending_config(place, chosen)
    with described_cudnn():
        mesh = build_abstract_mesh(build_layout(cfg.mesh))
        train_step = build_step(cfg, mesh, PLACES[place][0])
        shapes = train_step.abstract, train_step.abstract_batch()
        train_step.gradients.trace(*shapes)
        train_step.evaluate.trace(*shapes)
    return train_step.spec


AHEAD = {"spread": "stages", "ahead": "one"}


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("place", "chosen", "parts"),
    [
        ("gpu, whole", AHEAD, "cudnn_masked"),
        ("tpu", AHEAD, "blocked"),
        ("tpu, whole", AHEAD | {"heads": "latent"}, "blocked"),
        ("gpu", {"spread": "slices", "before": "one"}, "cudnn_masked"),
    ],
)
def test_parts_of_sequences_attend_by_a_kernel_that_takes_them(place, chosen, parts):
    """Whole sequences of the same program keep the platform's own."""
    spec = trace_gradients(place, chosen)
    assert (spec.attention, spec.sliced_attention) == (PLACES[place][2], parts)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("place", PLACES)
def test_every_pair_of_settings_that_change_attention_traces(place):
    found, refused = covering(place)
    assert {tuple(value for _, value in pair) for pair in refused} == {
        ("one", "slices"),  # ahead
        ("length", "slices"),
        ("sinks", "latent"),
    }
    for chosen in found:
        spec = trace_gradients(place, chosen)
        own = chosen["declined"] == "none"
        assert not own or spec.attention == PLACES[place][2], chosen
