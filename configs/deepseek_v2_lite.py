"""DeepSeek-V2-Lite: 15.7 B parameters, 2.7 B active, 64 experts, top 6, latent attention.

Hardware: 8 GPUs of 80 GB (one node).
Memory:   52 GiB a device, as --dry_run says.
Command:  moejax train --config configs/deepseek_v2_lite.py --dry_run
Begins from released weights with --config.checkpoint.init_from=FOLDER, a folder as it was
downloaded or one that `moejax hf import` wrote; the numbers of steps and the rates are a choice for
that. The data is Python's own library until data.source, train_files and eval_files name token
files that `moejax prepare` made with the model's tokenizer.json.
Shapes: the published configuration (DeepSeek-AI 2024).
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/deepseek_v2_lite"
    config.mesh.expert = 8

    config.model.vocab_size = 102400
    config.model.width = 2048
    config.model.num_layers = 27
    config.model.first_dense_layers = 1
    config.model.mlp_hidden = 10944
    config.model.attention = "latent"
    config.model.num_heads = 16
    config.model.head_width = 128 + 64  # those that do not rotate, and those that do
    config.model.rope_width = 64
    config.model.value_width = 128
    config.model.kv_latent = 512
    config.model.tie_embeddings = False
    config.model.dtype = "bfloat16"
    config.model.remat = "token_collectives"
    config.model.rope.scaling = "yarn"
    config.model.rope.factor = 40.0
    config.model.rope.trained_length = 4096
    config.model.rope.mscale = 0.707
    config.model.rope.mscale_all_dim = 0.707
    config.moe.num_experts = 64
    config.moe.experts_per_token = 6
    config.moe.expert_hidden = 1408
    config.moe.num_shared_experts = 2
    config.moe.router.renormalize = False
    # Published for each layer; this loss is a mean over the layers with experts.
    config.moe.router.balance_loss = 0.001 * 26
    config.moe.router.balance_over = "sequence"

    config.data.sequence_length = 4096
    config.train.batch_sequences = 64
    config.train.micro_batches = 8
    config.train.num_steps = 1000
    config.optimizer.learning_rate = 1e-5
    config.optimizer.warmup_steps = 50
    config.checkpoint.save_every = 200
    return config
