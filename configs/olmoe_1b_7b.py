"""OLMoE-1B-7B: 6.9 B parameters, 1.3 B active, 64 experts, top 8, QK-norm over all heads.

Hardware: 8 GPUs of 80 GB (one node).
Command:  moejax train --config configs/olmoe_1b_7b.py --dry_run
The data is Python's own library until data.source, train_files and eval_files name token files
that `moejax prepare` made with the model's tokenizer.json.
Shapes and router losses: the published configuration (Muennighoff et al. 2024).
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/olmoe_1b_7b"
    config.mesh.expert = 8

    config.model.vocab_size = 50304
    config.model.width = 2048
    config.model.num_layers = 16
    config.model.num_heads = 16
    config.model.num_kv_heads = 16
    config.model.head_width = 128
    config.model.norm_epsilon = 1e-5
    config.model.qk_norm = "full"
    config.model.tie_embeddings = False
    config.model.dtype = "bfloat16"
    config.model.remat = "token_collectives"
    config.moe.num_experts = 64
    config.moe.experts_per_token = 8
    config.moe.expert_hidden = 1024
    config.moe.router.renormalize = False
    # As published: megablocks' losses are means over layers, 1 when even, as these are.
    config.moe.router.balance_loss = 0.01
    config.moe.router.z_loss = 0.001

    config.data.sequence_length = 4096
    config.train.batch_sequences = 1024
    config.train.micro_batches = 32
    config.train.num_steps = 100_000
    config.optimizer.learning_rate = 4e-4
    config.optimizer.warmup_steps = 2500
    config.checkpoint.save_every = 1000
    return config
