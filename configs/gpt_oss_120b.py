"""gpt-oss-120b: 117 B parameters, 5.7 B active, 128 experts, top 4, attention sinks, windows.

Hardware: 64 H100s of 80 GB, 8 nodes of 8.
Mesh:     as the planner chose it for dgx_h100:8. To look again: moejax plan --topology dgx_h100:8
          --traces 46 --config this file.
Memory:   54 GiB a device, as --dry_run says with mesh.platform=gpu.
Command:  moejax train --config configs/gpt_oss_120b.py --dry_run
Begins from released weights with --config.checkpoint.init_from=FOLDER, a folder as it was
downloaded or one that `moejax hf import` wrote; the numbers of steps and the rates are a choice for
that. The data is Python's own library until data.source, train_files and eval_files name token
files that `moejax prepare` made with the model's tokenizer.json.
Shapes: the published configuration (OpenAI 2025).
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/gpt_oss_120b"
    config.mesh.nodes = 8
    config.mesh.fsdp = 2
    config.mesh.expert = 32
    config.mesh.gather_dense = "step"
    config.route_chunks = 4

    config.model.vocab_size = 201088
    config.model.width = 2880
    config.model.num_layers = 36
    config.model.num_heads = 64
    config.model.num_kv_heads = 8
    config.model.head_width = 64
    config.model.norm_epsilon = 1e-5
    config.model.activation = "clamped_swiglu"
    config.model.attention_bias = True
    config.model.attention_output_bias = True
    config.model.attention_sinks = True
    config.model.sliding_window = 128
    config.model.full_attention_every = 2
    config.model.tie_embeddings = False
    config.model.remat = "full"
    config.model.dtype = "bfloat16"
    config.model.rope.theta = 150_000.0
    config.model.rope.scaling = "yarn"
    config.model.rope.factor = 32.0
    config.model.rope.trained_length = 4096
    config.model.rope.truncate = False
    config.moe.num_experts = 128
    config.moe.experts_per_token = 4
    config.moe.expert_hidden = 2880
    config.moe.router_bias = True
    config.moe.expert_bias = True

    config.data.sequence_length = 4096
    config.train.batch_sequences = 256
    config.train.num_steps = 1000
    config.optimizer.learning_rate = 1e-5
    config.optimizer.warmup_steps = 50
    config.checkpoint.save_every = 200
    return config
