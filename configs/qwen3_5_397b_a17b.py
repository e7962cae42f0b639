"""Qwen3.5-397B-A17B: 396.3 B parameters, 17.3 B active, linear attention, 512 experts, top 10.

A gated delta net in three of four blocks; a shared expert.
Hardware: 512 GPUs of 141 GB (64 nodes of 8: fsdp across nodes, experts inside a node).
Command:  moejax train --config configs/qwen3_5_397b_a17b.py --dry_run
The data is Python's own library until data.source, train_files and eval_files name token files
that `moejax prepare` made with the model's tokenizer.json.
Shapes: the published configuration of the text model (Qwen team 2026); the heads of linear
attention are from memory, and fit the parameters of its name.
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/qwen3_5_397b_a17b"
    config.mesh.fsdp = 64
    config.mesh.expert = 8

    config.model.vocab_size = 248320
    config.model.width = 4096
    config.model.num_layers = 60
    config.model.num_heads = 32
    config.model.head_width = 256
    config.model.rope_width = 64
    config.model.zero_centered_norms = True
    config.model.qk_norm = "head"
    config.model.attention_gate = True
    config.model.full_attention_every = 4
    config.model.tie_embeddings = False
    config.model.rope.theta = 1e7
    config.model.linear.form = "gated_delta"
    config.model.linear.key_heads = 16
    config.model.linear.value_heads = 64
    config.model.linear.key_width = 128
    config.model.linear.value_width = 128
    config.model.dtype = "bfloat16"
    config.model.remat = "token_collectives"
    config.moe.num_experts = 512
    config.moe.experts_per_token = 10
    config.moe.expert_hidden = 1024
    config.moe.num_shared_experts = 1
    config.moe.shared_gate = True
    # Published as 0.001, on a loss that is K = 10 when even (`transformers`); this one is 1.
    config.moe.router.balance_loss = 0.001 * 10

    config.data.sequence_length = 4096
    config.train.batch_sequences = 1024
    config.train.micro_batches = 2
    config.train.num_steps = 100_000
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 2000
    config.checkpoint.save_every = 1000
    return config
