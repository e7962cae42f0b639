"""Rules between settings: what fits together, what contradicts, what would have no effect."""

import subprocess
import sys

import pytest

from moejax.config.checks import check
from moejax.config.load import from_dict
from moejax.config.schema import Config
from moejax.errors import InputError

LARGE = {
    "model.width": 64,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.vocab_size": 512,
    "moe.expert_hidden": 64,
    "data.sequence_length": 64,
    "train.batch_sequences": 64,
}


def error_of(run, *args):
    """Returns the message of the InputError that `run` raises; always a single line."""
    with pytest.raises(InputError) as caught:
        run(*args)
    message = str(caught.value)
    assert message.isprintable(), "a message is one line of printable characters"
    assert len(message) < 400
    return message


def test_the_defaults_pass():
    check(Config())


@pytest.mark.parametrize(
    "values",
    [
        {"mesh.expert": 4, "mesh.tensor": 2, "mesh.simulated_devices": 8},
        {"mesh.replica": None, "mesh.expert": 2, "mesh.simulated_devices": 8},
        {"mesh.expert": 2, "mesh.tensor": 2, "mesh.expert_weights": "folded"},
        {"mesh.tensor": 2, "mesh.activations": "replicated"},
        {"model.moe_every": None, "model.mlp_hidden": 64, "mesh.fsdp": 4, "mesh.tensor": 2},
        {"model.moe_every": 2, "model.mlp_hidden": 64},
        {"model.first_dense_layers": 3, "model.mlp_hidden": 64},
        {"moe.router.num_groups": 4, "moe.router.groups_per_token": 2},
        {"moe.router.num_groups": 8, "moe.router.groups_per_token": 2},
        {"moe.router.num_groups": 4, "moe.router.score": "sigmoid"},
        {"moe.router.bias_update_rate": 0.001, "moe.router.balance_over": "sequence"},
        {"model.activation": "clamped_swiglu", "model.activation_limit": 5.0},
        {"moe.shared_gate": True, "moe.num_shared_experts": 1},
        {"model.predict_ahead": 1, "train.predict_ahead_loss": 0.1},
        {"model.rope.scaling": "linear", "model.rope.factor": 2.0},
        {"model.rope.scaling": "llama3", "model.rope.factor": 2.0, "model.rope.trained_length": 64},
        {"model.rope.scaling": "yarn", "model.rope.factor": 2.0, "model.rope.beta_fast": 16.0},
        {"optimizer.name": "muon", "optimizer.muon_momentum": 0.9},
        {"data.source": "tokens", "data.train_files": ("a.bin",), "model.vocab_size": 100},
        {"data.source": "array_record", "data.train_files": ("a",), "data.eval_files": ("b",)},
        {"optimizer.warmup_steps": 200},
        {"profile.start_step": 198, "profile.num_steps": 3},
        {"optimizer.warmup_steps": 0.5, "train.num_steps": 3},
        {"train.seed": 2**32 - 1},
        {"train.micro_batches": 4, "mesh.fsdp": 8},
        {"train.micro_batches": 4, "mesh.stage": 4, "mesh.schedule": "combined_1f1b"},
    ],
)
def test_settings_that_fit_together_pass(values):
    check(from_dict(values))


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        (
            {"model.num_heads": 3},
            ["`model.num_heads` = 3", "`model.num_kv_heads` = 2", "Choose 1, 3"],
        ),
        ({"model.head_width": 33}, ["`model.head_width` = 33 is odd", "32 or 34"]),
        (
            {"model.first_dense_layers": 4},
            ["`model.first_dense_layers` = 4", "none of 4 layers", "model.moe_every=none"],
        ),
        ({"model.moe_every": 5}, ["`model.moe_every` = 5", "at most", "= 4"]),
        ({"model.layer_mlps": ("dense", "experts")}, ["has 2 entries for 4 layers"]),
        ({"model.layer_mlps": ("dense",) * 4}, ["names no block with experts"]),
        (
            {"model.layer_mlps": ("dense", "experts") * 2, "model.moe_every": None},
            ["`model.moe_every` is none"],
        ),
        (
            {"model.layer_attention": ("full",) * 4, "model.sliding_window": 9},
            ["leaves no block its window"],
        ),
        ({"model.moe_every": 3, "model.first_dense_layers": 2}, ["`model.moe_every` = 3", "= 2"]),
        (
            {
                "model.rope.scaling": "llama3",
                "model.rope.factor": 2.0,
                "model.rope.low_frequency_factor": 4.0,
            },
            ["low_frequency_factor` = 4.0 must be below", "high_frequency_factor` = 4.0"],
        ),
        (
            {"model.rope.scaling": "yarn", "model.rope.factor": 2.0, "model.rope.beta_slow": 40.0},
            ["`model.rope.beta_slow` = 40.0 must not be above `model.rope.beta_fast` = 32.0"],
        ),
        (
            {"model.rope.scaling": "yarn", "model.rope.factor": 2.0, "model.rope.theta": 1.0},
            ["`model.rope.theta` = 1.0", "must be above 1"],
        ),
        ({"model.vocab_size": 256}, ["`model.vocab_size` = 256", "257"]),
        ({"data.source": "tokens"}, ["`data.train_files` is empty", "`data.source` is tokens"]),
        ({"data.source": "array_record"}, ["`data.train_files` is empty", "array_record"]),
        ({"run_dir": ""}, ["`run_dir` has ''", "not empty"]),
        ({"run_dir": " "}, ["`run_dir` has ' '"]),
        ({"run_dir": "a\0b"}, ["`run_dir` has 'a\\x00b'", "null byte"]),
        ({"checkpoint.init_from": ""}, ["`checkpoint.init_from` has ''"]),
        (
            {"data.source": "tokens", "data.train_files": ("a", "")},
            ["`data.train_files` has ''"],
        ),
        (
            {"optimizer.warmup_steps": 201},
            ["`optimizer.warmup_steps` = 201", "`train.num_steps` = 200"],
        ),
        (
            {"profile.start_step": 199, "profile.num_steps": 3},
            ["`profile.start_step` = 199", "end after `train.num_steps` = 200"],
        ),
        (
            {"optimizer.warmup_steps": 1.5},
            ["`optimizer.warmup_steps` = 1.5 is neither whole nor below 1"],
        ),
        ({"optimizer.beta2": 1.0}, ["`optimizer.beta2` = 1.0 must be below 1"]),
        ({"optimizer.name": "muon", "optimizer.muon_momentum": 1.0}, ["must be below 1"]),
        ({"train.seed": 2**32}, ["`train.seed` = 4294967296", "32 bits"]),
        (
            {"moe.experts_per_token": 9},
            ["`moe.experts_per_token` = 9", "`moe.num_experts` = 8"],
        ),
        ({"moe.router.num_groups": 3}, ["= 8 is not a multiple", "= 3", "1, 2, 4, 8 groups"]),
        (
            {"moe.router.num_groups": 2, "moe.router.groups_per_token": 3},
            ["`moe.router.groups_per_token` = 3", "`moe.router.num_groups` = 2"],
        ),
        (
            {"moe.router.num_groups": 4, "moe.experts_per_token": 3},
            ["`moe.experts_per_token` = 3", "the 2 experts that a token can reach"],
        ),
        (
            {
                "moe.router.num_groups": 8,
                "moe.router.groups_per_token": 2,
                "moe.router.score": "sigmoid",
            },
            ["one expert in a group", "at most 4 groups"],
        ),
        (
            {"moe.num_experts": 6, "mesh.expert": 8},
            ["6 experts on an expert axis of 8: choose 1, 2, 3, 6 or change moe.num_experts"],
        ),
        (
            {"mesh.expert": 8, "mesh.tensor": 2, "mesh.expert_weights": "folded"},
            ["8 experts on an expert x tensor axis (folded) of 16: choose 1, 2, 4, 8"],
        ),
        (
            {"route": "duplicate", "mesh.expert": 2},
            ["`route` = duplicate", "`mesh.tensor` is 1", "Choose split"],
        ),
        (
            {"route": "duplicate", "mesh.tensor": 2, "mesh.expert_weights": "whole"},
            ["`route` = duplicate", "`mesh.expert_weights` is whole"],
        ),
        (
            {"moe.experts_per_token": 1},
            ["`moe.experts_per_token` = 1", "renormalize` = true", "router no gradient"],
        ),
        (
            {
                "moe.experts_per_token": 1,
                "model.first_dense_layers": 1,
                "lora.rank": 2,
                "lora.targets": ["groups.1.*"],
            },
            ["`moe.experts_per_token` = 1", "renormalize=false"],
        ),
        ({"model.sliding_window": 1}, ["`model.sliding_window` = 1", "itself alone"]),
        ({"data.sequence_length": 1}, ["`data.sequence_length` = 1", "itself alone"]),
        (
            {"route": "two_level_merge", "mesh.expert": 4, "moe.experts_per_token": 1},
            ["`moe.experts_per_token` is 1", "Choose two_level."],
        ),
        ({"mesh.tensor": 3}, ["`model.num_heads` = 4", "`mesh.tensor` = 3", "3 or 6 here"]),
        (
            {**LARGE, "model.num_kv_heads": 2, "mesh.tensor": 4},
            ["`model.num_kv_heads` = 2", "a tensor axis of 1, 2,"],
        ),
        ({**LARGE, "model.vocab_size": 511, "mesh.tensor": 8}, ["`model.vocab_size` = 511"]),
        ({**LARGE, "data.sequence_length": 60, "mesh.tensor": 8}, ["`data.sequence_length` = 60"]),
        ({**LARGE, "moe.expert_hidden": 60, "mesh.tensor": 8}, ["`moe.expert_hidden` = 60"]),
        (
            {**LARGE, "model.moe_every": 2, "model.mlp_hidden": 60, "mesh.tensor": 8},
            ["`model.mlp_hidden` = 60"],
        ),
        (
            {
                **LARGE,
                "mesh.expert_weights": "folded",
                "moe.expert_hidden": 60,
                "moe.num_shared_experts": 1,
                "mesh.tensor": 8,
            },
            ["moe.num_shared_experts x moe.expert_hidden` = 60"],
        ),
        (
            {"model.width": 100, "mesh.fsdp": 4, "mesh.expert": 2},
            ["`model.width` = 100", "= 4 x 2 = 8", "96 or 104"],
        ),
        (
            {"train.batch_sequences": 12, "mesh.replica": 2, "mesh.fsdp": 2, "mesh.expert": 2},
            ["`train.batch_sequences` = 12", "not divisible by 8", "8 or 16"],
        ),
        (
            {"train.batch_sequences": 12, "mesh.replica": None, "train.micro_batches": 5},
            ["`train.batch_sequences` = 12", "micro_batches 5", "10 or 15"],
        ),
        (
            {"train.batch_sequences": 2, "train.micro_batches": 4},
            ["`train.batch_sequences` = 2", "Choose 4."],
        ),
        (
            {"mesh.expert": 4, "mesh.tensor": 4, **LARGE, "mesh.simulated_devices": 8},
            [
                "mesh replica=1 x fsdp=1 x expert=4 x tensor=4 needs 16 devices, found 8 (cpu)",
                "1, 2, 4, 8",
                "mesh.simulated_devices=16",
            ],
        ),
        (
            {"mesh.replica": None, "mesh.simulated_devices": 8, "train.batch_sequences": 12},
            ["not divisible by 8 = mesh.replica 8"],
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values, fragments):
    message = error_of(check, from_dict(values))
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("values", "name", "reason"),
    [
        ({"model.moe_every": None, "moe.num_experts": 4}, "moe.num_experts", "`model.moe_every`"),
        ({"model.moe_every": None, "moe.router.z_loss": 0.1}, "moe.router.z_loss", "is none"),
        ({"model.moe_every": None, "mesh.expert": 2}, "mesh.expert", "is none"),
        (
            {"model.moe_every": None, "mesh.expert_weights": "folded", "mesh.tensor": 2},
            "mesh.expert_weights",
            "is none",
        ),
        (
            {"model.moe_every": None, "model.first_dense_layers": 1},
            "model.first_dense_layers",
            "is none",
        ),
        ({"model.mlp_hidden": 64}, "model.mlp_hidden", "every block has experts"),
        ({"mesh.expert_weights": "folded"}, "mesh.expert_weights", "`mesh.tensor` is 1"),
        ({"route_chunks": 2}, "route_chunks", "nothing is exchanged"),
        ({"model.moe_every": None, "route": "merge"}, "route", "no block has experts"),
        ({"mesh.activations": "replicated"}, "mesh.activations", "`mesh.tensor` is 1"),
        ({"compression.block": 64}, "compression.block", "`compression` is none"),
        ({"compression.start_layer": 1}, "compression.start_layer", "`compression` is none"),
        ({"route_chunks_backward": 2}, "route_chunks_backward", "nothing is exchanged"),
        ({"route_trim": True}, "route_trim", "nothing is exchanged"),
        *(
            ({"plan.mode": "hand", name: value}, name, "the planner is off")
            for name, value in [
                ("plan.topology", "h200:2"),
                ("plan.routing", "zipf:1"),
                ("plan.codecs", "hybrid"),
                ("plan.traces", 3),
                ("plan.seconds", 3),
                ("plan.replan", True),
            ]
        ),
        (
            {"moe.router.groups_per_token": 2},
            "moe.router.groups_per_token",
            "`moe.router.num_groups` is 1",
        ),
        ({"model.activation_limit": 5.0}, "model.activation_limit", "clamped_swiglu"),
        ({"moe.shared_gate": True}, "moe.shared_gate", "`moe.num_shared_experts` is 0"),
        ({"moe.shared_hidden": 7}, "moe.shared_hidden", "`moe.num_shared_experts` is 0"),
        (
            {"model.layer_mlps": ("dense", "experts") * 2, "model.first_dense_layers": 1},
            "model.first_dense_layers",
            "`model.layer_mlps`",
        ),
        (
            {"model.layer_attention": ("window", "full") * 2},
            "model.layer_attention",
            "`model.sliding_window` is none",
        ),
        ({"model.moe_every": None, "moe.expert_bias": True}, "moe.expert_bias", "no block has"),
        (
            {"model.predict_ahead": 1, "data.sequence_length": 1},
            "model.predict_ahead",
            "`data.sequence_length` is 1",
        ),
        ({"train.predict_ahead_loss": 0.1}, "train.predict_ahead_loss", "predict_ahead` is 0"),
        ({"model.rope.factor": 2.0}, "model.rope.factor", "linear or llama3 or yarn"),
        ({"model.rope.scaling": "yarn"}, "model.rope.scaling", "`model.rope.factor` is 1"),
        *(
            (
                {f"model.rope.{name}": 2, "model.rope.scaling": scaling, "model.rope.factor": 2.0},
                f"model.rope.{name}",
                "only `model.rope.scaling`",
            )
            for name, scaling in [
                ("trained_length", "linear"),
                ("low_frequency_factor", "yarn"),
                ("high_frequency_factor", "linear"),
                ("beta_fast", "llama3"),
                ("beta_slow", "linear"),
            ]
        ),
        ({"optimizer.muon_momentum": 0.9}, "optimizer.muon_momentum", "is not muon"),
        ({"optimizer.muon_learning_rate": 1}, "optimizer.muon_learning_rate", "is not muon"),
        (
            {"train.rollbacks": 3, "train.max_skipped": None},
            "train.rollbacks",
            "so no run goes back",
        ),
        (
            {"train.on_spike": "roll_back", "train.spike_threshold": None},
            "train.on_spike",
            "`train.spike_threshold` is none",
        ),
        (
            {"train.on_spike": "roll_back", "train.rollbacks": 0},
            "train.on_spike",
            "or `train.rollbacks` is 0",
        ),
        (
            {"optimizer.schedule": "constant", "optimizer.final_fraction": 0.2},
            "optimizer.final_fraction",
            "is constant",
        ),
        ({"data.train_files": ["a"]}, "data.train_files", "`data.source` is stdlib"),
        ({"data.eval_files": ["a"]}, "data.eval_files", "`data.source` is stdlib"),
        (
            {"data.source": "tokens", "data.train_files": ["a"], "train.eval_batches": 2},
            "train.eval_batches",
            "`data.eval_files` is empty",
        ),
        (
            {"train.sample_tokens": 0, "train.sample_prompt": "x"},
            "train.sample_prompt",
            "`train.sample_tokens` is 0",
        ),
        ({"mesh.schedule": "combined_1f1b"}, "mesh.schedule", "`mesh.stage` is 1"),
        (
            {
                "mesh.stage": 2,
                "mesh.fsdp": 2,
                "mesh.gather_dense": "step",
                "train.micro_batches": 2,
            },
            "mesh.gather_dense",
            "with stages all weights are gathered once a step",
        ),
        (
            {
                "mesh.stage": 2,
                "mesh.fsdp": 2,
                "mesh.gather_across": "step",
                "train.micro_batches": 2,
            },
            "mesh.gather_across",
            "with stages weights are gathered once a step",
        ),
        (
            {"mesh.fsdp": 8, "mesh.gather_across": "passes", "model.remat": "collectives"},
            "mesh.gather_across",
            "keeps gathered weights",
        ),
        (
            {"mesh.platform": "gpu", "mesh.simulated_devices": 8},
            "mesh.simulated_devices",
            "only CPU devices",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(values, name, reason):
    message = error_of(check, from_dict(values))
    assert message.startswith(f"`{name}` = ")
    assert "has no effect" in message
    assert reason in message


@pytest.mark.parametrize(
    "values",
    [
        {"route_chunks": 4},
        {"route_chunks_backward": 2},
        {"route_trim": True},
        {"mesh.gather_dense": "step"},
        {"mesh.expert_weights": "folded"},
        {"mesh.stage_keeps": "input"},
    ],
)
def test_what_takes_effect_on_a_mesh_that_the_planner_may_choose_is_not_refused(values):
    check(from_dict({"plan.mode": "auto"} | values))


@pytest.mark.parametrize(
    "values",
    [
        {"data.source": "tokens", "data.train_files": ["a"], "train.eval_every": None},
        {"mesh.expert": 2, "plan.seconds": None},
    ],
)
def test_switching_off_what_is_off_anyway_is_not_refused(values):
    check(from_dict(values))


def test_reading_and_checking_a_config_does_not_import_jax():
    code = (
        "import sys; from moejax.config.checks import check;"
        "from moejax.config.load import from_dict;"
        "check(from_dict({})); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "values",
    [
        {"moe.experts_per_token": 1, "moe.router.renormalize": False},
        {"moe.experts_per_token": 1, "lora.rank": 2},
        {"moe.experts_per_token": 1, "lora.rank": 2, "lora.targets": ["attention.*", "moe.w_in"]},
        {"model.sliding_window": 1, "model.attention_sinks": True},
        {"model.sliding_window": 2, "data.sequence_length": 2},
    ],
)
def test_what_has_a_gradient_or_needs_none_is_accepted(values):
    check(from_dict(values))


@pytest.mark.parametrize(
    "values", [{"moe.experts_per_token": 1}, {"data.sequence_length": 1}], ids=["router", "queries"]
)
def test_weights_that_are_not_trained_need_no_gradient(values):
    """Imported and saved models are evaluated, and compute the same as before."""
    check(from_dict(values), trained=False)
