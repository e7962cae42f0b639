"""The list of settings: frozen, documented, with defaults that obey their own rules."""

from moejax.config.fields import check_value, fields
from moejax.config.load import describe_fields

# A setting more is a promise more: argue for it in the change that adds it.
FIELD_NAMES = {
    "checkpoint": (
        "allow_changed_data copy_to init_from keep memory_dir memory_every save_every verify"
    ),
    "compression": (
        "block combine combine_backward dense_gradient dispatch dispatch_backward "
        "expert_gradient preset stage stage_gradient start_layer weights"
    ),
    "data": (
        "eval_files isolate_documents repeat sequence_length shuffle source train_files "
        "train_weights"
    ),
    "": "kernels route route_chunks route_chunks_backward route_trim run_dir",
    "lora": "alpha base_dtype rank targets",
    "memory": "experts optimizer residuals",
    "mesh": (
        "activations context context_exchange context_stripe expert expert_weights fsdp "
        "gather_across gather_dense nodes platform replica schedule simulated_devices stage "
        "stage_keeps stage_slices tensor"
    ),
    "model": (
        "activation activation_limit ahead_block attention attention_bias attention_gate "
        "attention_output_bias attention_sinks block_norm dtype embedding_scale "
        "first_dense_layers full_attention_every head_width init_deviation kv_latent "
        "layer_attention layer_mlps layer_scale layers_before_stages logit_cap logit_divisor "
        "mlp_hidden moe_every norm_epsilon num_heads num_kv_heads num_layers positions "
        "predict_ahead q_latent qk_norm remat residual_scale rope_width scan_layers score_scale "
        "sliding_window stage_chunks tie_embeddings value_norm value_scale value_width vocab_size "
        "width zero_centered_norms"
    ),
    "model.full_attention": "head_width keys_are_values num_kv_heads sinks theta turned_channels",
    "model.indexer": "heads keys width",
    "model.linear": (
        "convolution convolution_bias form key_heads key_width least_step value_heads value_width"
    ),
    "model.rope": (
        "attention_factor beta_fast beta_slow factor high_frequency_factor "
        "low_frequency_factor mscale mscale_all_dim query_growth scaling theta "
        "trained_length truncate"
    ),
    "moe": (
        "capacity_factor expert_bias expert_hidden expert_scale experts_per_token headroom "
        "implementation latent num_experts num_shared_experts own_norms router_bias shared_gate "
        "shared_hidden slots slots_from"
    ),
    "moe.router": (
        "balance_loss balance_over bias_update_rate forced groups_per_token jitter num_groups "
        "quantile_bins renormalize score weight_scale z_loss"
    ),
    "optimizer": (
        "beta1 beta2 clip_norm epsilon final_fraction learning_rate muon_learning_rate "
        "muon_momentum name schedule warmup_steps weight_decay"
    ),
    "outer": "codec every hub momentum order rate site sites",
    "plan": "codecs documents keep mode replan routing seconds sites topology traces",
    "profile": "num_steps start_step",
    "track": "mlflow wandb",
    "train": (
        "batch_sequences compare_every eval_batches eval_every gradient_dtype indexer_loss "
        "log_every "
        "max_skipped micro_batches num_steps on_spike predict_ahead_loss reduction_bytes "
        "rollbacks sample_prompt sample_tokens seed spike_threshold"
    ),
    "watchdog": "compile_s evaluate_s save_s silent_s start_s step_s",
}


def test_the_list_of_settings_is_frozen():
    groups = {}
    for group, _, name in (name.rpartition(".") for name in sorted(fields())):
        groups.setdefault(group, []).append(name)
    assert {group: " ".join(names) for group, names in groups.items()} == FIELD_NAMES


def test_every_setting_has_help_and_a_default_that_obeys_its_own_rule():
    for field in fields().values():
        assert field.help
        assert check_value(field, field.default) == field.default


def test_describe_fields_lists_each_setting_with_its_type_and_range():
    rows = {name: rest for name, *rest in describe_fields()}
    assert list(rows) == list(fields())
    assert rows["moe.num_experts"][:2] == ["int", 8]
    assert rows["moe.num_experts"][3] == "at least 1 and at most 100000"
    assert rows["moe.capacity_factor"][0] == "float | None"
    assert rows["data.train_files"][0] == "tuple[str, ...]"
    assert rows["data.train_weights"][0] == "tuple[float, ...]"
    assert rows["moe.router.jitter"][3] == "at least 0 and at most 0.5"
    assert rows["model.dtype"][3] == "one of float32, bfloat16"
    assert rows["model.layer_mlps"][3] == "a list of dense, experts, none"
