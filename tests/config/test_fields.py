"""The list of settings: frozen, documented, with defaults that obey their own rules."""

from moejax.config.fields import (
    check_value,
    fields,
)
from moejax.config.load import (
    describe_fields,
)

# A setting more is a promise more: argue for it in the change that adds it.
FIELD_NAMES = [
    "checkpoint.allow_changed_data",
    "checkpoint.init_from",
    "checkpoint.keep",
    "checkpoint.save_every",
    "checkpoint.verify",
    "compression.adapt_every",
    "compression.block",
    "compression.combine",
    "compression.combine_backward",
    "compression.dense_gradient",
    "compression.dispatch",
    "compression.dispatch_backward",
    "compression.expert_gradient",
    "compression.preset",
    "compression.start_layer",
    "compression.weights",
    "data.eval_files",
    "data.isolate_documents",
    "data.repeat",
    "data.sequence_length",
    "data.shuffle",
    "data.source",
    "data.train_files",
    "kernels",
    "lora.alpha",
    "lora.base_dtype",
    "lora.rank",
    "lora.targets",
    "mesh.activations",
    "mesh.expert",
    "mesh.expert_weights",
    "mesh.fsdp",
    "mesh.nodes",
    "mesh.platform",
    "mesh.replica",
    "mesh.simulated_devices",
    "mesh.tensor",
    "model.attention_bias",
    "model.dtype",
    "model.first_dense_layers",
    "model.head_width",
    "model.init_deviation",
    "model.mlp_hidden",
    "model.moe_every",
    "model.norm_epsilon",
    "model.num_heads",
    "model.num_kv_heads",
    "model.num_layers",
    "model.qk_norm",
    "model.remat",
    "model.rope.beta_fast",
    "model.rope.beta_slow",
    "model.rope.factor",
    "model.rope.high_frequency_factor",
    "model.rope.low_frequency_factor",
    "model.rope.scaling",
    "model.rope.theta",
    "model.rope.trained_length",
    "model.scan_layers",
    "model.sliding_window",
    "model.tie_embeddings",
    "model.vocab_size",
    "model.width",
    "moe.capacity_factor",
    "moe.expert_hidden",
    "moe.experts_per_token",
    "moe.implementation",
    "moe.num_experts",
    "moe.num_shared_experts",
    "moe.router.balance_loss",
    "moe.router.balance_over",
    "moe.router.bias_update_rate",
    "moe.router.groups_per_token",
    "moe.router.jitter",
    "moe.router.num_groups",
    "moe.router.renormalize",
    "moe.router.score",
    "moe.router.weight_scale",
    "moe.router.z_loss",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.clip_norm",
    "optimizer.epsilon",
    "optimizer.final_fraction",
    "optimizer.learning_rate",
    "optimizer.muon_learning_rate",
    "optimizer.muon_momentum",
    "optimizer.name",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "plan.codecs",
    "plan.mode",
    "plan.replan",
    "plan.routing",
    "plan.seconds",
    "plan.topology",
    "route",
    "route_chunks",
    "route_chunks_backward",
    "route_trim",
    "run_dir",
    "train.batch_sequences",
    "train.eval_batches",
    "train.eval_every",
    "train.gradient_dtype",
    "train.log_every",
    "train.max_skipped",
    "train.micro_batches",
    "train.num_steps",
    "train.reduction_bytes",
    "train.sample_prompt",
    "train.sample_tokens",
    "train.seed",
]


def test_the_list_of_settings_is_frozen():
    assert sorted(fields()) == FIELD_NAMES


def test_every_setting_has_help_and_a_default_that_obeys_its_own_rule():
    for field in fields().values():
        assert field.help
        assert check_value(field, field.default) == field.default


def test_describe_fields_lists_each_setting_with_its_type_and_range():
    rows = {name: rest for name, *rest in describe_fields()}
    assert list(rows) == list(fields())
    assert rows["moe.num_experts"][:2] == ["int", 8]
    assert rows["moe.num_experts"][3] == "at least 1"
    assert rows["moe.capacity_factor"][0] == "float | None"
    assert rows["data.train_files"][0] == "tuple[str, ...]"
    assert rows["moe.router.jitter"][3] == "at least 0 and at most 0.5"
    assert rows["model.dtype"][3] == "one of float32, bfloat16"
