"""Kimi-K2: 1.03 T parameters, 33 B active, 384 experts, top 8, sigmoid, latent attention.

Hardware: 512 H100s of 80 GB, 64 nodes of 8.
Mesh:     as the planner chose it for dgx_h100:64. To look again: moejax plan --topology dgx_h100:64
          --config this file.
Memory:   65 GiB a device, as --dry_run says with mesh.platform=gpu.
Command:  moejax train --config configs/kimi_k2.py --dry_run
Begins from released weights with --config.checkpoint.init_from=FOLDER, a folder as it was
downloaded or one that `moejax hf import` wrote; the numbers of steps and the rates are a choice for
that. The data is Python's own library until data.source, train_files and eval_files name token
files that `moejax prepare` made with the model's tokenizer.json.
Shapes: the published configuration (Moonshot AI 2025).
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/kimi_k2"
    config.mesh.nodes = 64
    config.mesh.fsdp = 4
    config.mesh.expert = 32
    config.mesh.tensor = 4
    config.mesh.expert_weights = "folded"
    config.route_chunks = 2

    config.model.vocab_size = 163840
    config.model.width = 7168
    config.model.num_layers = 61
    config.model.first_dense_layers = 1
    config.model.mlp_hidden = 18432
    config.model.attention = "latent"
    config.model.num_heads = 64
    config.model.head_width = 128 + 64  # those that do not rotate, and those that do
    config.model.rope_width = 64
    config.model.value_width = 128
    config.model.q_latent = 1536
    config.model.kv_latent = 512
    config.model.tie_embeddings = False
    config.model.remat = "full"
    config.model.dtype = "bfloat16"
    config.model.rope.theta = 50_000.0
    config.model.rope.scaling = "yarn"
    config.model.rope.factor = 32.0
    config.model.rope.trained_length = 4096
    config.model.rope.beta_fast = 1.0
    config.model.rope.mscale = 1.0
    config.model.rope.mscale_all_dim = 1.0
    config.moe.num_experts = 384
    config.moe.experts_per_token = 8
    config.moe.expert_hidden = 2048
    config.moe.num_shared_experts = 1
    config.moe.router.score = "sigmoid"
    config.moe.router.weight_scale = 2.827
    # Published for each layer; this loss is a mean over the layers with experts.
    config.moe.router.balance_loss = 0.001 * 60
    config.moe.router.balance_over = "sequence"

    config.data.sequence_length = 4096
    config.train.batch_sequences = 2048
    config.train.num_steps = 1000
    config.optimizer.learning_rate = 1e-5
    config.optimizer.warmup_steps = 50
    config.checkpoint.save_every = 200
    return config
