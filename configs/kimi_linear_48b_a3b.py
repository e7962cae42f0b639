"""Kimi-Linear-48B-A3B: 49.1 B parameters, 3.5 B active, linear attention, 256 experts, top 8.

Kimi's delta attention in 20 of 27 blocks; a shared expert.
Hardware: 64 GPUs of 80 GB or more (8 nodes of 8: fsdp across nodes, experts inside a node).
Command:  moejax train --config configs/kimi_linear_48b_a3b.py --dry_run
The data is Python's own library until data.source, train_files and eval_files name token files
that `moejax prepare` made with the model's tokenizer.json.
Shapes: Kimi Team 2025, and the published configuration.
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/kimi_linear_48b_a3b"
    config.mesh.fsdp = 8
    config.mesh.expert = 8

    config.model.vocab_size = 163840
    config.model.width = 2304
    config.model.num_layers = 27
    config.model.attention = "latent"
    config.model.num_heads = 32
    config.model.head_width = 192
    config.model.positions = "none"
    config.model.rope_width = 64
    config.model.kv_latent = 512
    config.model.value_width = 128
    config.model.mlp_hidden = 9216
    config.model.first_dense_layers = 1
    config.model.norm_epsilon = 1e-05
    config.model.layer_attention = (*("linear",) * 3, "full") * 6 + ("linear", "linear", "full")
    config.model.tie_embeddings = False
    config.model.linear.form = "kimi_delta"
    config.model.linear.key_heads = 32
    config.model.linear.value_heads = 32
    config.model.linear.key_width = 128
    config.model.linear.value_width = 128
    config.model.dtype = "bfloat16"
    config.model.remat = "token_collectives"
    config.moe.num_experts = 256
    config.moe.experts_per_token = 8
    config.moe.expert_hidden = 1024
    config.moe.num_shared_experts = 1
    config.moe.router.score = "sigmoid"
    config.moe.router.weight_scale = 2.446
    # 0.0001 a layer, as DeepSeek-V3's, over 26 layers with experts.
    config.moe.router.balance_loss = 1e-4 * 26
    config.moe.router.balance_over = "sequence"
    config.moe.router.bias_update_rate = 0.001  # DeepSeek-V3's

    config.data.sequence_length = 4096
    config.train.batch_sequences = 256
    config.train.micro_batches = 2
    config.train.num_steps = 100_000
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 2000
    config.checkpoint.save_every = 1000
    return config
