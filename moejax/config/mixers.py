"""The mixers of tokens by name, as far as settings say: their matrices, and what tensor divides.

A mixer takes information from earlier positions to later ones, in one block. Its computation is a
class of the same name in `model.mixers.table`.
"""

from collections.abc import Callable
from typing import NamedTuple

from moejax.config.schema import ModelConfig

Matrix = tuple[int, int]  # inputs and outputs


class MixerSizes(NamedTuple):
    """The sizes of a mixer by the settings of a model.

    Attributes:
      matrices: sides of the matrices of a block; norms, biases, sinks and convolutions are left
        out.
      heads: the settings that `mesh.tensor` divides, by name.
    """

    matrices: Callable[[ModelConfig], list[Matrix]]
    heads: Callable[[ModelConfig], dict[str, int]]


def _grouped_matrices(model: ModelConfig) -> list[Matrix]:
    D, H, C = model.width, model.num_heads, model.head_width
    keys = (D, model.num_kv_heads * C)
    return [(D, H * C)] * (2 if model.attention_gate else 1) + [keys, keys, (H * C, D)]


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


def _delta_matrices(model: ModelConfig) -> list[Matrix]:
    D, linear = model.width, model.linear
    keys, values = linear.key_heads * linear.key_width, linear.value_heads * linear.value_width
    of_head = (D, linear.value_heads)
    return [(D, keys), (D, keys), (D, values), (D, values), of_head, of_head, (values, D)]


MIXERS: dict[str, MixerSizes] = {
    "grouped": MixerSizes(
        _grouped_matrices,
        lambda model: {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads},
    ),
    "latent": MixerSizes(_latent_matrices, lambda model: {"num_heads": model.num_heads}),
    "gated_delta": MixerSizes(
        _delta_matrices,
        lambda model: {
            "linear.key_heads": model.linear.key_heads,
            "linear.value_heads": model.linear.value_heads,
        },
    ),
}
