"""A few million parameters on the text of Python's own library: the first run of anyone.

Hardware: any machine; 8 simulated CPU devices, an expert axis of 4 and a tensor axis of 2.
Command:  moejax train --config configs/tiny.py
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    config = default_config()
    config.run_dir = "runs/tiny"
    config.mesh.simulated_devices = 8
    config.mesh.expert = 4
    config.mesh.tensor = 2
    config.mesh.activations = "sequence"

    config.model.vocab_size = 264
    config.model.width = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_width = 32
    config.moe.num_experts = 16
    config.moe.experts_per_token = 2
    config.moe.expert_hidden = 128

    config.data.sequence_length = 128
    config.train.batch_sequences = 16
    config.train.num_steps = 500
    config.train.log_every = 10
    config.train.eval_every = 100
    config.train.eval_batches = 16
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 0.1  # of the run
    config.checkpoint.save_every = 250
    return config
