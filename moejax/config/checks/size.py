"""Sizes of a model, from the settings alone: of mixers of tokens, and of all; none too large."""

from collections.abc import Callable
from typing import NamedTuple

from moejax.config.checks.text import require
from moejax.config.pattern import BlockKind, ahead_kind, block_kinds, settings_of
from moejax.config.schema import Config, ModelConfig

# A hundred times the largest models that are published; the weights alone are 400 TB.
MAX_PARAMETERS = 10**14
# Bytes of a float32 master, two moments of AdamW, and a gradient.
BYTES_PER_PARAMETER = 16
FROZEN_BYTES = {"float32": 4, "bfloat16": 2}  # of a parameter that is not trained


Matrix = tuple[int, int]  # inputs and outputs


class MixerSizes(NamedTuple):
    """The sizes of a mixer of tokens by the settings of a model.

    Attributes:
      matrices: sides of the matrices of a block, by its own settings (`pattern.settings_of`);
        norms, biases, sinks and convolutions are left out.
      heads: the settings that `mesh.tensor` divides, by name.
    """

    matrices: Callable[[ModelConfig], list[Matrix]]
    heads: Callable[[ModelConfig], dict[str, int]]


def _grouped_matrices(model: ModelConfig) -> list[Matrix]:
    D, H, G = model.width, model.num_heads, model.num_kv_heads
    C, V = model.head_width, model.value_channels
    queries = [(D, H * C), *([(D, H * V)] if model.attention_gate else [])]
    values = [] if model.full_attention.keys_are_values else [(D, G * V)]
    return [*queries, (D, G * C), *values, (H * V, D)]


def _latent_matrices(model: ModelConfig) -> list[Matrix]:
    D, H, C = model.width, model.num_heads, model.head_width
    latent, rotated = model.kv_latent or 0, model.rotated_channels
    q_latent = model.q_latent
    return [
        *([(D, H * C)] if q_latent is None else [(D, q_latent), (q_latent, H * C)]),
        (D, latent + rotated),
        (latent, H * (C - rotated + model.value_channels)),
        (H * model.value_channels, D),
    ]


def _sparse_matrices(model: ModelConfig) -> list[Matrix]:
    D, own, q_latent = model.width, model.indexer, model.q_latent or 0
    indexer = [(q_latent, own.heads * own.width), (D, own.width), (D, own.heads)]
    return _latent_matrices(model) + indexer


def _delta_matrices(model: ModelConfig) -> list[Matrix]:
    D, linear = model.width, model.linear
    keys, values = linear.key_heads * linear.key_width, linear.value_heads * linear.value_width
    of_head = (D, linear.value_heads)
    return [(D, keys), (D, keys), (D, values), (D, values), of_head, of_head, (values, D)]


def _kimi_matrices(model: ModelConfig) -> list[Matrix]:
    D, linear = model.width, model.linear
    keys, values = linear.key_heads * linear.key_width, linear.value_heads * linear.value_width
    narrow = linear.value_width
    gates = [(D, linear.value_heads), (D, narrow), (narrow, keys), (D, narrow), (narrow, values)]
    return [(D, keys), (D, keys), (D, values), *gates, (values, D)]


def _mamba_matrices(model: ModelConfig) -> list[Matrix]:
    D, linear = model.width, model.linear
    keys, values = linear.key_heads * linear.key_width, linear.value_heads * linear.value_width
    return [(D, keys), (D, keys), (D, values), (D, values), (D, linear.value_heads), (values, D)]


def _delta_heads(model: ModelConfig) -> dict[str, int]:
    return {
        "linear.key_heads": model.linear.key_heads,
        "linear.value_heads": model.linear.value_heads,
    }


def _of_full(heads: int | None) -> dict[str, int]:
    return {} if heads is None else {"full_attention.num_kv_heads": heads}


MIXERS: dict[str, MixerSizes] = {
    "grouped": MixerSizes(
        _grouped_matrices,
        lambda model: {
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            **_of_full(model.full_attention.num_kv_heads),
        },
    ),
    "latent": MixerSizes(_latent_matrices, lambda model: {"num_heads": model.num_heads}),
    "sparse": MixerSizes(_sparse_matrices, lambda model: {"num_heads": model.num_heads}),
    "gated_delta": MixerSizes(_delta_matrices, _delta_heads),
    "kimi_delta": MixerSizes(_kimi_matrices, _delta_heads),
    "mamba2": MixerSizes(_mamba_matrices, _delta_heads),
    "none": MixerSizes(lambda model: [], lambda model: {}),
}


def mlp_parameters(cfg: Config) -> tuple[int, int, int]:
    """Returns the parameters of matrices of a dense MLP, of a block's experts, and beside these.

    Beside them are shared experts and projections to the experts' width; the router is left out.
    """
    model, moe, D = cfg.model, cfg.moe, cfg.model.width
    each, width = model.hidden_inputs + 1, moe.latent or D
    beside = D * (each * moe.shared_width + 2 * (moe.latent or 0))
    experts = each * width * moe.num_experts * moe.expert_hidden
    return each * D * model.mlp_hidden, experts, beside


def parameters_of(cfg: Config) -> int:
    """Returns a model's number of parameters without norms and biases."""
    model, D = cfg.model, cfg.model.width
    mixers = [_matrices(model, kind) for kind in block_kinds(model)]
    dense, experts, beside = mlp_parameters(cfg)
    sparse, mlps = D * cfg.moe.num_experts + experts + beside, model.mlps
    embedding = model.vocab_size * D * (1 if model.tie_embeddings else 2)
    ahead, own = 0, ahead_kind(model)
    if model.predict_ahead:
        ahead = (
            2 * D * D + _products(_matrices(model, own)) + (sparse if own.mlp == "moe" else dense)
        )
    return (
        embedding
        + sum(map(_products, mixers))
        + mlps.count("dense") * dense
        + mlps.count("experts") * sparse
        + ahead
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
    numbers = {kind: of(_matrices(model, kind)) for kind in set(kinds)}
    return sum(numbers[kind] for kind in kinds) / len(kinds)


def _matrices(model: ModelConfig, kind: BlockKind) -> list[Matrix]:
    return MIXERS[kind.mixer].matrices(settings_of(model, kind.window))


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
