"""The mixers by their names in a config; their sizes by settings stand in `config.mixers`."""

from typing import Any

from moejax.model.mixers.attention import Attention
from moejax.model.mixers.delta import GatedDeltaNet
from moejax.model.mixers.latent import LatentAttention

# Classes of `mixers.interface.Mixer`.
MIXERS: dict[str, Any] = {
    "grouped": Attention,
    "latent": LatentAttention,
    "gated_delta": GatedDeltaNet,
}
