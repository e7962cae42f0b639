"""The small Mixtral that `step.py` times: 8 experts of which a token visits 2, 18 million weights.

What has no counterpart here (rotary base, epsilon, decay of the moments, ...) is set to what
transformers' MixtralConfig and the optimizer on the PyTorch side are given, so that both sides
compute the same thing.

Hardware: one CPU, 2 threads.
Command:  python -m benchmarks.cpu.step --torch-python .venv-torch/bin/python
"""

from ml_collections import ConfigDict

from moejax.settings import default_config


def get_config() -> ConfigDict:
    """Returns the settings of the timed step."""
    config = default_config()
    config.mesh.platform = "cpu"

    config.model.vocab_size = 8192
    config.model.width = 256
    config.model.num_layers = 4
    config.model.scan_layers = False  # PyTorch's are not scanned either
    config.model.num_heads = 8
    config.model.num_kv_heads = 8
    config.model.head_width = 32
    config.model.norm_epsilon = 1e-5
    config.model.rope.theta = 1e6
    config.model.tie_embeddings = False
    config.moe.num_experts = 8
    config.moe.experts_per_token = 2
    config.moe.expert_hidden = 512
    # Mixtral's coefficient of 0.001 is on a loss that is 2 when even (K); here it is 1.
    config.moe.router.balance_loss = 0.001 * 2

    config.data.sequence_length = 256
    config.train.batch_sequences = 8
    # Low, because the tokens are noise: the router stays near even, as in a healthy run.
    config.optimizer.learning_rate = 1e-4
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 0
    return config
