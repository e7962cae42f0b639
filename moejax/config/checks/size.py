"""Refuses impossible model sizes, from the settings alone."""

from moejax.config.checks.text import require
from moejax.config.schema import Config, ModelConfig

# A hundred times the largest models that are published; the weights alone are 400 TB.
MAX_PARAMETERS = 10**14
# Bytes of a float32 master, two moments of AdamW, and a gradient.
BYTES_PER_PARAMETER = 16
FROZEN_BYTES = {"float32": 4, "bfloat16": 2}  # of a parameter that is not trained


def parameters_of(cfg: Config) -> int:
    """Returns a model's number of parameters without norms and biases."""
    model, moe, D = cfg.model, cfg.moe, cfg.model.width
    attention = attention_parameters(model)
    dense = 3 * D * model.mlp_hidden
    hidden = moe.num_experts * moe.expert_hidden + moe.shared_width
    sparse = D * moe.num_experts + 3 * D * hidden
    layers = model.expert_layers
    embedding = model.vocab_size * D * (1 if model.tie_embeddings else 2)
    ahead = 2 * D * D + attention + (sparse if model.ends_in_experts else dense)
    return (
        embedding
        + model.num_layers * attention
        + (model.num_layers - layers) * dense
        + layers * sparse
        + model.predict_ahead * ahead
    )


def state_bytes(cfg: Config) -> int:
    """Returns the bytes of a run's weights, moments and gradients; adapters are not counted."""
    frozen = cfg.lora.rank is not None
    each = FROZEN_BYTES[cfg.lora.base_dtype] if frozen else BYTES_PER_PARAMETER
    return each * parameters_of(cfg)


def attention_parameters(model: ModelConfig) -> int:
    """Returns the number of parameters of a block's attention, without norms, biases and sinks."""
    return sum(inputs * outputs for inputs, outputs in attention_matrices(model))


def attention_matrices(model: ModelConfig) -> list[tuple[int, int]]:
    """Returns the sides of each matrix of a block's attention: inputs and outputs."""
    D, H, C = model.width, model.num_heads, model.head_width
    if not model.is_latent:
        keys = (D, model.num_kv_heads * C)
        return [(D, H * C), keys, keys, (H * C, D)]
    latent, rotated = model.kv_latent or 0, model.rotated_channels
    q_latent = model.q_latent
    return [
        *([(D, H * C)] if q_latent is None else [(D, q_latent), (q_latent, H * C)]),
        (D, latent + rotated),
        (latent, H * (C - rotated + model.value_channels)),
        (H * model.value_channels, D),
    ]


def check_size(cfg: Config) -> None:
    """Refuses a model that is too large to train anywhere, before it is traced."""
    parameters = parameters_of(cfg)
    require(
        parameters <= MAX_PARAMETERS,
        f"the model has {parameters:.1e} parameters. It may have {MAX_PARAMETERS:.0e}. Lower "
        "model.width, model.num_layers, model.vocab_size or the experts' sizes.",
    )
