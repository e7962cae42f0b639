"""DeepSeek-V3.2: DeepSeek-V3 with an indexer in every block, which chooses 2,048 keys of a query.

Hardware: 256 H200s of 141 GB, 32 nodes of 8.
Mesh:     that of configs/deepseek_v3.py; the planner's own, without stages, is in
          benchmarks/results/plan_deepseek_v3_2.json.
Memory:   --dry_run says it with mesh.platform=gpu; nobody has looked yet.
Command:  moejax train --config configs/deepseek_v3_2.py --dry_run
Begins from released weights with --config.checkpoint.init_from=FOLDER, a folder as it was
downloaded or one that `moejax hf import` wrote; the numbers of steps and the rates are a choice for
that. The indexers stay as they are, as in transformers; --config.train.indexer_loss=1 trains them
too, without stages. The data is Python's own library until data.source, train_files and eval_files
name token files that `moejax prepare` made with the model's tokenizer.json.
Shapes: DeepSeek-AI 2025; those of the indexer are 64 heads of 128 channels.
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/deepseek_v3_2"
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
    config.model.attention = "sparse"
    config.model.num_heads = 128
    config.model.head_width = 128 + 64  # those that do not rotate, and those that do
    config.model.rope_width = 64
    config.model.value_width = 128
    config.model.q_latent = 1536
    config.model.kv_latent = 512
    config.model.indexer.heads = 64
    config.model.indexer.width = 128
    config.model.indexer.keys = 2048
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

    config.data.sequence_length = 16384
    config.train.batch_sequences = 512
    config.train.micro_batches = 32
    config.train.num_steps = 1000
    config.optimizer.learning_rate = 7.3e-6
    config.optimizer.warmup_steps = 50
    config.checkpoint.save_every = 200
    return config
