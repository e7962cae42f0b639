"""GLM-4.5-Air: 107 B parameters, 13 B active, 128 experts, top 8, one shared, sigmoid.

Hardware: 64 H100s of 80 GB, 8 nodes of 8.
Mesh:     as the planner chose it for dgx_h100:8. To look again: moejax plan --topology dgx_h100:8
          --traces 46 --config this file.
Memory:   54 GiB a device, as --dry_run says with mesh.platform=gpu.
Command:  moejax train --config configs/glm_45_air.py --dry_run
Begins from released weights with --config.checkpoint.init_from=FOLDER, a folder as it was
downloaded or one that `moejax hf import` wrote; the numbers of steps and the rates are a choice for
that. The data is Python's own library until data.source, train_files and eval_files name token
files that `moejax prepare` made with the model's tokenizer.json.
Shapes: the published configuration (Zhipu AI 2025).
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/glm_45_air"
    config.mesh.nodes = 8
    config.mesh.fsdp = 4
    config.mesh.expert = 4
    config.mesh.tensor = 4
    config.mesh.expert_weights = "folded"
    config.mesh.gather_dense = "step"
    config.route = "two_level_merge"

    config.model.vocab_size = 151552
    config.model.width = 4096
    config.model.num_layers = 46
    config.model.first_dense_layers = 1
    config.model.mlp_hidden = 10944
    config.model.num_heads = 96
    config.model.num_kv_heads = 8
    config.model.head_width = 128
    config.model.rope_width = 64  # half of a head rotates
    config.model.norm_epsilon = 1e-5
    config.model.attention_bias = True
    config.model.tie_embeddings = False
    config.model.remat = "full"
    config.model.dtype = "bfloat16"
    config.model.rope.theta = 1e6
    config.moe.num_experts = 128
    config.moe.experts_per_token = 8
    config.moe.expert_hidden = 1408
    config.moe.num_shared_experts = 1
    config.moe.router.score = "sigmoid"
    # DeepSeek-V3's for each layer; this loss is a mean over the 45 layers with experts.
    config.moe.router.balance_loss = 0.0001 * 45
    config.moe.router.balance_over = "sequence"

    config.data.sequence_length = 4096
    config.train.batch_sequences = 256
    config.train.num_steps = 1000
    config.optimizer.learning_rate = 1e-5
    config.optimizer.warmup_steps = 50
    config.checkpoint.save_every = 200
    return config
