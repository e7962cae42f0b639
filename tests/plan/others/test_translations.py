"""What holds for the translations to every trainer: real names, allowed values, the same sizes."""

import itertools
import math

import pytest

from moejax.config.compression import PRESETS, STAGES
from moejax.layout.route import ROUTES
from moejax.plan.others import maxtext, megatron, torchtitan
from moejax.plan.others.gaps import CLASSES
from moejax.plan.others.shapes import MAXTEXT, TORCHTITAN
from moejax.plan.others.translation import sizes_of
from moejax.plan.search.space import REMATS
from tests.plan.others.plans import KNOWN, PUBLISHED, every_mesh, model, plan

TO = {
    "maxtext": lambda cfg: maxtext.to_maxtext(cfg, "gpu"),
    "megatron": lambda cfg: megatron.to_megatron(cfg, 8),
    "torchtitan": torchtitan.to_torchtitan,
}
EACH = pytest.mark.parametrize("trainer", TO)


def wrong(trainer, translation):
    """Names that the trainer's parser does not know, and values that it does not allow."""
    known = KNOWN[trainer]
    names = [option.name for option in translation.options]
    found = [name for name in names if name not in known["names"]]
    found += [name for name in names if names.count(name) > 1]
    for option in translation.options:
        choices, values = known["choices"].get(option.name), option.value
        for value in values if isinstance(values, tuple) else (values,):
            if choices and value not in choices:
                found.append(f"{option.name}={value}")
    return found


@pytest.mark.exhaustive
@EACH
@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_values_are_those_of_the_trainers_parser_on_every_mesh(trainer, name):
    plans = every_mesh(name)
    assert len(plans) > 20
    for cfg in plans:
        assert not wrong(trainer, TO[trainer](cfg))


@pytest.mark.slow
@EACH
def test_names_and_values_are_known_whatever_the_plan_chose(trainer):
    tensors = ({"tensor": 1, "expert": 32}, {"tensor": 4, "expert": 8})
    layouts = itertools.product(("sequence", "replicated"), ("hidden", "folded", "whole"))
    rest = [
        {"model__remat": remat, "route": route, "route_chunks": chunks, "mesh__gather_dense": when}
        for remat, route in itertools.product(REMATS, ROUTES)
        for chunks, when in ((1, "use"), (4, "step"))
    ]
    for (activations, weights), mesh in itertools.product(layouts, tensors):
        sizes = {f"mesh__{axis}": size for axis, size in mesh.items()}
        layout = {"mesh__activations": activations, "mesh__expert_weights": weights}
        for values in rest:
            cfg = model("DeepSeek-V3", mesh__fsdp=2, mesh__replica=1, **sizes, **layout, **values)
            assert not wrong(trainer, TO[trainer](cfg))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("micro", [1, 4])
def test_sizes_multiply_to_all_devices_and_batches_to_the_batch(name, micro):
    for cfg in every_mesh(name, train__micro_batches=micro):
        sizes = sizes_of(cfg)
        assert sizes.devices == 64
        assert sizes.rows * sizes.data * sizes.micro_batches == 1024
        assert math.prod(sizes.across.values()) == 8
        check_maxtext(cfg)
        check_megatron(cfg)
        check_torchtitan(cfg)


def check_maxtext(cfg):
    its = TO["maxtext"](cfg)
    axes = [option for option in its.options if option.name.endswith("_parallelism")]
    inside = math.prod(option.value for option in axes if option.name.startswith("ici"))
    across = math.prod(option.value for option in axes if option.name.startswith("dcn"))
    assert (inside, across) == (8, 8)
    assert its.value("num_slices") == 8
    steps, share = its.value("gradient_accumulation_steps"), its.value("per_device_batch_size")
    assert 64 * steps * share == 1024


def check_megatron(cfg):
    """Expert sizes must divide the devices; what they leave holds copies or shards."""
    its = TO["megatron"](cfg)
    tensor = its.value("tensor-model-parallel-size")
    assert its.value("pipeline-model-parallel-size") == cfg.mesh.stage
    stage = 64 // cfg.mesh.stage
    experts = its.value("expert-model-parallel-size") * its.value("expert-tensor-parallel-size")
    assert stage % tensor == 0
    assert stage % experts == 0
    assert cfg.moe.num_experts % its.value("expert-model-parallel-size") == 0
    assert its.value("global-batch-size") == 1024
    assert 1024 % (its.value("micro-batch-size") * stage // tensor) == 0
    copies = {option.name: option.value for option in its.options}
    copies = copies.get("num-distributed-optimizer-instances", 1)
    assert stage // experts % copies == 0


def check_torchtitan(cfg):
    its = TO["torchtitan"](cfg)
    prefix = "parallelism.data_parallel_"
    copies, shard = (its.value(f"{prefix}{kind}_degree") for kind in ("replicate", "shard"))
    tensor = its.value("parallelism.tensor_parallel_degree")
    expert = its.value("parallelism.expert_parallel_degree")
    assert (copies, shard) == (cfg.mesh.replica, cfg.mesh.fsdp * cfg.mesh.expert)
    assert copies * shard * tensor * its.value("parallelism.pipeline_parallel_degree") == 64
    assert shard * tensor % expert == 0
    assert cfg.moe.num_experts % expert == 0
    assert 1024 % (its.value("training.local_batch_size") * copies * shard) == 0


@EACH
def test_every_codec_is_named_as_lost(trainer):
    cfg = plan("Qwen3-30B-A3B", mesh__fsdp=8, mesh__expert=8, compression__preset="strong")
    its = TO[trainer](cfg)
    lost = " ".join(gap.what for gap in its.gaps)
    assert its.package == KNOWN[trainer]["package"]
    for kind, codec in PRESETS["strong"].items():
        assert kind in STAGES or f"codec of {CLASSES[kind]} between nodes: {codec}" in lost


STAGED = {"mesh__stage": 4, "mesh__expert": 8, "mesh__fsdp": 2, "train__micro_batches": 16}


@EACH
def test_stages_are_the_trainers_pipeline(trainer):
    its = TO[trainer](plan("Qwen3-30B-A3B", compression__stage="int8", **STAGED))
    lost = " ".join(gap.what for gap in its.gaps)
    words = {
        "maxtext": ["dcn_pipeline_parallelism=4", "num_pipeline_microbatches=16"],
        "megatron": ["--pipeline-model-parallel-size 4", "--micro-batch-size 4"],
        "torchtitan": ["pipeline_parallel_degree 4", "pipeline_parallel_schedule 1F1B"],
    }
    assert all(word in its.command() for word in words[trainer])
    assert "codec of hidden states between pipeline stages" in lost
    assert ("the schedule 1f1b" in lost) == (trainer == "maxtext")


@EACH
def test_shared_sequences_are_translated_or_named(trainer):
    shared = {"mesh__fsdp": 8, "mesh__expert": 8, "mesh__context": 8, "mesh__context_stripe": 64}
    its = TO[trainer](plan("Qwen3-30B-A3B", **shared))
    assert not wrong(trainer, its)
    words = {
        "maxtext": [],
        "megatron": ["--context-parallel-size 8"],
        "torchtitan": ["context_parallel_degree 8", "data_parallel_shard_degree 8"],
    }
    assert all(word in its.command() for word in words[trainer])
    lost = " ".join(gap.what for gap in its.gaps)
    assert "8 devices share each sequence, dealt in stripes of 64 positions, keys by gather" in lost


@EACH
def test_chunks_and_slices_are_translated_or_named(trainer):
    its = TO[trainer](plan("Qwen3-30B-A3B", model__stage_chunks=2, **STAGED))
    assert not wrong(trainer, its)
    layers = "pipeline_parallel_layers_per_stage 6"  # of 48
    words = {
        "maxtext": ["pipeline_parallel_layers=48", "num_layers_per_pipeline_stage=6"],
        "megatron": ["--num-virtual-stages-per-pipeline-rank 2"],
        "torchtitan": [layers, "pipeline_parallel_schedule Interleaved1F1B"],
    }
    assert all(word in its.command() for word in words[trainer])
    its = TO[trainer](plan("Qwen3-30B-A3B", mesh__stage_slices=2, **STAGED))
    assert "2 slices of a sequence" in " ".join(gap.what for gap in its.gaps)


@EACH
def test_codecs_that_change_are_named_as_such(trainer):
    codec = {"compression__expert_gradient": "int8,int4+feedback@200"}
    cfg = plan("Qwen3-30B-A3B", mesh__fsdp=8, mesh__expert=8, **codec)
    lost = " ".join(gap.what for gap in TO[trainer](cfg).gaps)
    assert "int8 then int4+feedback, changed at steps of the run" in lost


@EACH
def test_a_plan_that_the_trainer_has_loses_nothing(trainer):
    cfg = plan("Qwen3-30B-A3B", mesh__fsdp=8, mesh__expert=8, model__remat="full")
    assert TO[trainer](cfg).gaps == ()


@EACH
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"route": "two_level_merge", "mesh__expert": 16, "mesh__fsdp": 4}, "two_level_merge"),
        ({"route_chunks": 4, "mesh__expert": 8, "mesh__fsdp": 8}, "chunks (4 forward"),
        ({"mesh__gather_dense": "step", "mesh__expert": 8, "mesh__fsdp": 8}, "once a step"),
        ({"train__reduction_bytes": 2**20, "mesh__fsdp": 64}, "pieces of 1 MiB"),
        ({"mesh__gather_across": "use", "mesh__fsdp": 64, "mesh__nodes": 8}, "across nodes first"),
        ({"memory__optimizer": "host", "mesh__fsdp": 64}, "host's memory: optimizer"),
        (
            {"mesh__expert_weights": "whole", "mesh__tensor": 2, "mesh__expert": 4}
            | {"mesh__fsdp": 8},
            "copy of each expert",
        ),
    ],
)
def test_what_is_lost_is_said(trainer, values, said):
    cfg = plan("Qwen3-30B-A3B", model__remat="full", **values)
    gaps = TO[trainer](cfg).gaps
    assert any(said in gap.what and gap.instead for gap in gaps), gaps


def test_names_of_models_are_those_of_the_packages_with_the_same_shape():
    for shape, name in MAXTEXT.items():
        assert KNOWN["maxtext"]["models"][name] == list(shape)
    for module, config in TORCHTITAN.values():
        assert config in KNOWN["torchtitan"]["registered"][module]


@EACH
def test_a_model_without_a_name_there_is_said_to_have_none(trainer):
    cfg = plan("OLMoE-1B-7B", mesh__fsdp=8, mesh__expert=8, model__remat="full")
    gaps = [gap.what for gap in TO[trainer](cfg).gaps]
    assert len(gaps) == 1
    words = {"maxtext": "by name", "megatron": "over all heads", "torchtitan": "registered config"}
    assert words[trainer] in gaps[0]
