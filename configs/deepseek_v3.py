"""DeepSeek-V3: 256 experts, top 8 in 4 of 8 groups, one shared, sigmoid, loss-free balance.

Hardware: 256 H200s of 141 GB, 32 nodes of 8.
Mesh:     as the planner chose it for h200:32, with the rest as it is here. To look again:
          moejax plan --topology h200:32 --config this file
          --config.plan.keep=route,route_chunks,route_chunks_backward,model.remat,train.micro_batches
          Without plan.keep its best has no stages: 4 % faster by price, with 23 GiB more.
Memory:   97 GiB a device, as --dry_run says with mesh.platform=gpu.
Command:  moejax train --config configs/deepseek_v3.py --dry_run
All blocks have the published shapes (DeepSeek-AI 2024), latent attention included: 671,026,404,352
parameters, and 14,848 selection biases. Multi-token prediction is left out;
--config.model.predict_ahead=1 trains it too.
The data is Python's own library until data.source, train_files and eval_files name token files
that `moejax prepare` made with the model's tokenizer.json.
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/deepseek_v3"
    config.mesh.nodes = 32
    config.mesh.stage = 8
    config.mesh.stage_keeps = "input"
    config.mesh.fsdp = 2
    config.mesh.expert = 8
    config.mesh.tensor = 2
    config.mesh.expert_weights = "folded"
    config.route = "two_level_merge"
    config.route_chunks = 4
    config.route_chunks_backward = 1

    config.model.vocab_size = 129280
    config.model.width = 7168
    config.model.num_layers = 61
    config.model.first_dense_layers = 3
    config.model.layers_before_stages = 2  # so that 8 stages share 56
    config.model.mlp_hidden = 18432
    config.model.attention = "latent"
    config.model.num_heads = 128
    config.model.head_width = 128 + 64  # those that do not rotate, and those that do
    config.model.rope_width = 64
    config.model.value_width = 128
    config.model.q_latent = 1536
    config.model.kv_latent = 512
    config.model.tie_embeddings = False
    config.model.remat = "experts"
    config.model.dtype = "bfloat16"
    config.model.rope.scaling = "yarn"
    config.model.rope.factor = 40.0
    config.model.rope.trained_length = 4096
    config.model.rope.mscale = 1.0
    config.model.rope.mscale_all_dim = 1.0
    config.moe.num_experts = 256
    config.moe.experts_per_token = 8
    config.moe.expert_hidden = 2048
    config.moe.num_shared_experts = 1
    config.moe.router.score = "sigmoid"
    config.moe.router.weight_scale = 2.5
    config.moe.router.num_groups = 8
    config.moe.router.groups_per_token = 4
    # Published as 0.0001 for each layer; this loss is a mean over the 61 - 3 layers with experts.
    config.moe.router.balance_loss = 0.0001 * 58
    config.moe.router.balance_over = "sequence"
    config.moe.router.bias_update_rate = 0.001

    config.data.sequence_length = 4096
    config.train.batch_sequences = 2048
    config.train.micro_batches = 64
    config.train.num_steps = 100_000
    config.optimizer.learning_rate = 2.2e-4
    config.optimizer.warmup_steps = 2000
    config.checkpoint.save_every = 1000
    return config
