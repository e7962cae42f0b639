"""MiniMax-M2: 229 B parameters, 11 B active, 256 experts, top 8, sigmoid, QK-norm over all heads.

Hardware: 128 H100s of 80 GB, 16 nodes of 8.
Mesh:     as the planner chose it for dgx_h100:16. To look again: moejax plan --topology dgx_h100:16
          --config this file.
Memory:   49 GiB a device, as --dry_run says with mesh.platform=gpu.
Command:  moejax train --config configs/minimax_m2.py --dry_run
Begins from released weights with --config.checkpoint.init_from=FOLDER, a folder as it was
downloaded or one that `moejax hf import` wrote; the numbers of steps and the rates are a choice for
that. The data is Python's own library until data.source, train_files and eval_files name token
files that `moejax prepare` made with the model's tokenizer.json.
Shapes: the published configuration (MiniMax 2025).
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/minimax_m2"
    config.mesh.nodes = 16
    config.mesh.fsdp = 2
    config.mesh.expert = 32
    config.mesh.tensor = 2
    config.mesh.expert_weights = "folded"
    config.mesh.gather_dense = "step"
    config.route_chunks = 2

    config.model.vocab_size = 200064
    config.model.width = 3072
    config.model.num_layers = 62
    config.model.num_heads = 48
    config.model.num_kv_heads = 8
    config.model.head_width = 128
    config.model.rope_width = 64  # half of a head rotates
    config.model.qk_norm = "full"
    config.model.tie_embeddings = False
    config.model.remat = "full"
    config.model.dtype = "bfloat16"
    config.model.rope.theta = 5e6
    config.moe.num_experts = 256
    config.moe.experts_per_token = 8
    config.moe.expert_hidden = 1536
    config.moe.router.score = "sigmoid"
    config.moe.router.balance_loss = 0.001 * 8  # where the file says none, transformers takes 0.001

    config.data.sequence_length = 4096
    config.train.batch_sequences = 512
    config.train.num_steps = 1000
    config.optimizer.learning_rate = 1e-5
    config.optimizer.warmup_steps = 50
    config.checkpoint.save_every = 200
    return config
