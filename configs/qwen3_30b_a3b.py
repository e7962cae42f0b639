"""Qwen3-30B-A3B: 30.5 B parameters, 3.3 B active, 128 experts, top 8, QK-norm by head.

Hardware: 64 GPUs of 80 GB or more (8 nodes of 8: fsdp across nodes, experts inside a node).
Command:  moejax train --config configs/qwen3_30b_a3b.py --dry_run
The data is Python's own library until data.source, train_files and eval_files name token files
that `moejax prepare` made with the model's tokenizer.json.
Shapes: the published configuration (Qwen team 2025).
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/qwen3_30b_a3b"
    config.mesh.fsdp = 8
    config.mesh.expert = 8

    config.model.vocab_size = 151936
    config.model.width = 2048
    config.model.num_layers = 48
    config.model.num_heads = 32
    config.model.num_kv_heads = 4
    config.model.head_width = 128
    config.model.qk_norm = "head"
    config.model.tie_embeddings = False
    config.model.dtype = "bfloat16"
    config.model.remat = "token_collectives"
    config.model.rope.theta = 1e6
    config.moe.num_experts = 128
    config.moe.experts_per_token = 8
    config.moe.expert_hidden = 768
    # Published as 0.001, on a loss that is K = 8 when even (`transformers`); this one is 1.
    config.moe.router.balance_loss = 0.001 * 8

    config.data.sequence_length = 4096
    config.train.batch_sequences = 512
    config.train.micro_batches = 4
    config.train.num_steps = 100_000
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 2000
    config.checkpoint.save_every = 1000
    return config
