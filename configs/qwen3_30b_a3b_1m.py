"""Qwen3-30B-A3B on sequences of 1,048,576 positions, one at a time, which all devices share.

Hardware: 64 GPUs of 141 GB (8 nodes of 8), with moejax[kernels] for attention to ranges of keys.
Command:  moejax train --config configs/qwen3_30b_a3b_1m.py --dry_run
The data is Python's own library until data.source, train_files and eval_files name token files
that `moejax prepare` made with the model's tokenizer.json.
Shapes: the published configuration (Qwen team 2025), as in configs/qwen3_30b_a3b.py. The released
model knows 40,960 positions: choose model.rope for more.
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/qwen3_30b_a3b_1m"
    # As the planner chooses for 8 nodes of 8 H200s: heads over tensor, positions over 32 devices.
    config.mesh.fsdp = 32
    config.mesh.tensor = 2
    config.mesh.expert_weights = "whole"
    config.mesh.context = 32

    config.model.vocab_size = 151936
    config.model.width = 2048
    config.model.num_layers = 48
    config.model.num_heads = 32
    config.model.num_kv_heads = 4
    config.model.head_width = 128
    config.model.qk_norm = "head"
    config.model.tie_embeddings = False
    config.model.dtype = "bfloat16"
    config.model.remat = "experts"
    config.model.rope.theta = 1e6
    config.moe.num_experts = 128
    config.moe.experts_per_token = 8
    config.moe.expert_hidden = 768
    config.moe.router.balance_loss = 0.001 * 8

    config.data.sequence_length = 1_048_576
    config.train.batch_sequences = 1
    config.train.num_steps = 10_000
    config.optimizer.learning_rate = 1e-4
    config.optimizer.warmup_steps = 200
    config.checkpoint.save_every = 100
    return config
