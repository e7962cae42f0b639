"""Gemma 4 26B-A4B: 25.2 B parameters, 3.8 B active, an MLP beside 128 experts, top 8.

A window in five of six blocks.
Hardware: 64 GPUs of 80 GB or more (8 nodes of 8: fsdp across nodes, experts inside a node).
Command:  moejax train --config configs/gemma_4_26b_a4b.py --dry_run
The data is Python's own library until data.source, train_files and eval_files name token files
that `moejax prepare` made with the model's tokenizer.json.
Shapes: the published configuration of the text model (Google 2026).
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/gemma_4_26b_a4b"
    config.mesh.fsdp = 8
    config.mesh.expert = 8

    config.model.vocab_size = 262144
    config.model.width = 2816
    config.model.num_layers = 30
    config.model.num_heads = 16
    config.model.num_kv_heads = 8
    config.model.head_width = 256
    config.model.activation = "geglu"
    config.model.block_norm = "both"
    config.model.layer_scale = True
    config.model.qk_norm = "head"
    config.model.value_norm = True
    config.model.embedding_scale = 2816**0.5
    config.model.score_scale = 1.0
    config.model.logit_cap = 30.0
    config.model.sliding_window = 1024
    config.model.full_attention_every = 6
    config.model.full_attention.head_width = 512
    config.model.full_attention.num_kv_heads = 2
    config.model.full_attention.keys_are_values = True
    config.model.full_attention.theta = 1e6
    config.model.full_attention.turned_channels = 128
    config.model.dtype = "bfloat16"
    config.model.remat = "token_collectives"
    config.moe.num_experts = 128
    config.moe.experts_per_token = 8
    config.moe.expert_hidden = 704
    config.moe.num_shared_experts = 3
    config.moe.own_norms = True
    config.moe.expert_scale = True

    config.data.sequence_length = 4096
    config.train.batch_sequences = 256
    config.train.micro_batches = 2
    config.train.num_steps = 100_000
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 2000
    config.checkpoint.save_every = 1000
    return config
