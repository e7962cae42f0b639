"""Refuses impossible model sizes, from the settings alone."""

from collections.abc import Callable

from moejax.config.checks.text import require
from moejax.config.mixers import MIXERS, Matrix
from moejax.config.pattern import block_kinds
from moejax.config.schema import Config, ModelConfig

# A hundred times the largest models that are published; the weights alone are 400 TB.
MAX_PARAMETERS = 10**14
# Bytes of a float32 master, two moments of AdamW, and a gradient.
BYTES_PER_PARAMETER = 16
FROZEN_BYTES = {"float32": 4, "bfloat16": 2}  # of a parameter that is not trained


def parameters_of(cfg: Config) -> int:
    """Returns a model's number of parameters without norms and biases."""
    model, moe, D = cfg.model, cfg.moe, cfg.model.width
    mixers = [MIXERS[kind.mixer].matrices(model) for kind in block_kinds(model)]
    dense = 3 * D * model.mlp_hidden
    hidden = moe.num_experts * moe.expert_hidden + moe.shared_width
    sparse = D * moe.num_experts + 3 * D * hidden
    layers = model.expert_layers
    embedding = model.vocab_size * D * (1 if model.tie_embeddings else 2)
    ahead = 2 * D * D + _products(mixers[-1]) + (sparse if model.ends_in_experts else dense)
    return (
        embedding
        + sum(map(_products, mixers))
        + (model.num_layers - layers) * dense
        + layers * sparse
        + model.predict_ahead * ahead
    )


def state_bytes(cfg: Config) -> int:
    """Returns the bytes of a run's weights, moments and gradients; adapters are not counted."""
    frozen = cfg.lora.rank is not None
    each = FROZEN_BYTES[cfg.lora.base_dtype] if frozen else BYTES_PER_PARAMETER
    return each * parameters_of(cfg)


def attention_parameters(model: ModelConfig) -> float:
    """Returns the parameters of the matrices of a block's mixer, a mean over the blocks."""
    return mean_of_mixers(model, _products)


def mean_of_mixers(model: ModelConfig, of: Callable[[list[Matrix]], int]) -> float:
    """Returns the mean over the blocks of a number that the matrices of a mixer have."""
    kinds = block_kinds(model)
    numbers = {kind.mixer: of(MIXERS[kind.mixer].matrices(model)) for kind in set(kinds)}
    return sum(numbers[kind.mixer] for kind in kinds) / len(kinds)


def _products(matrices: list[Matrix]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices)


def check_size(cfg: Config) -> None:
    """Refuses a model that is too large to train anywhere, before it is traced."""
    parameters = parameters_of(cfg)
    require(
        parameters <= MAX_PARAMETERS,
        f"the model has {parameters:.1e} parameters. It may have {MAX_PARAMETERS:.0e}. Lower "
        "model.width, model.num_layers, model.vocab_size or the experts' sizes.",
    )
