"""Nemotron-3-Nano-30B-A3B: 31.6 B parameters, 3.6 B active, Mamba-2, 128 experts, top 6.

Of 52 layers 23 are Mamba-2, 23 experts with a shared one, and 6 attention without positions.
Hardware: 64 GPUs of 80 GB or more (8 nodes of 8: fsdp across nodes, experts inside a node).
Command:  moejax train --config configs/nemotron_3_nano_30b_a3b.py --dry_run
The data is Python's own library until data.source, train_files and eval_files name token files
that `moejax prepare` made with the model's tokenizer.json.
Shapes: NVIDIA 2025 (Nemotron 3), and the published configuration.
"""

from ml_collections import ConfigDict

from moejax.settings import default_config

# M: Mamba-2, E: experts, *: attention.
LAYERS = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/nemotron_3_nano_30b_a3b"
    config.mesh.fsdp = 8
    config.mesh.expert = 8

    config.model.vocab_size = 131072
    config.model.width = 2688
    config.model.num_layers = 52
    config.model.num_heads = 32
    config.model.num_kv_heads = 2
    config.model.head_width = 128
    config.model.positions = "none"
    config.model.activation = "relu2"
    config.model.norm_epsilon = 1e-05
    mixers = {"M": "linear", "E": "none", "*": "full"}
    config.model.layer_attention = tuple(mixers[layer] for layer in LAYERS)
    config.model.layer_mlps = tuple("experts" if layer == "E" else "none" for layer in LAYERS)
    config.model.tie_embeddings = False
    config.model.linear.form = "mamba2"
    config.model.linear.key_heads = 8
    config.model.linear.value_heads = 64
    config.model.linear.key_width = 128
    config.model.linear.value_width = 64
    config.model.linear.convolution_bias = True
    config.model.linear.least_step = 0.001
    config.model.dtype = "bfloat16"
    config.model.remat = "token_collectives"
    config.moe.num_experts = 128
    config.moe.experts_per_token = 6
    config.moe.expert_hidden = 1856
    config.moe.num_shared_experts = 2
    config.moe.router.score = "sigmoid"
    config.moe.router.weight_scale = 2.5
    # 0.0001 a layer, as NVIDIA's scripts for Megatron-LM have it, over 23 layers with experts.
    config.moe.router.balance_loss = 1e-4 * 23
    config.moe.router.balance_over = "sequence"
    config.moe.router.bias_update_rate = 0.001  # DeepSeek-V3's

    config.data.sequence_length = 4096
    config.train.batch_sequences = 256
    config.train.micro_batches = 2
    config.train.num_steps = 100_000
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 2000
    config.checkpoint.save_every = 1000
    return config
