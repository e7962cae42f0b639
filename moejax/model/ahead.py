"""Multi-token prediction: a module that predicts the token after the next one, in training alone.

Per device. At position t it joins the model's hidden state with the embedding of token t + 1, takes
both through a block of its own, and predicts token t + 2 by the model's embedding and head. Nothing
crosses the end of a document. Source: DeepSeek-V3 (2024), section 2.2.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.annotations import Array, Float, Int
from moejax.comm.activations import join_positions, split_positions
from moejax.comm.weights.adapters import product
from moejax.comm.weights.gather import gather_weight
from moejax.config.schema import ModelConfig
from moejax.layout.spec import StepSpec
from moejax.model.layers import model_norm


class PredictAhead(nnx.Module):
    """The module's own parameters: a projection with its norms, a block, a final norm."""

    def __init__(self, cfg: ModelConfig, spec: StepSpec, rngs: nnx.Rngs, group: Any):
        """Takes the block as a layer group of one, which the model runs as its own."""
        D = cfg.width
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        self.spec, self.group = spec, group
        self.embedding_norm = model_norm(cfg)
        self.hidden_norm = model_norm(cfg)
        # U counts what is joined: the embedding, then the hidden state.
        self.w_join = nnx.Param(normal(rngs.params(), (2, D, D), jnp.float32), dims="UDO")
        self.norm = model_norm(cfg, divisor=cfg.logit_divisor)

    def join(
        self, embedding_BtD: Float[Array, "B t D"], h_BtD: Float[Array, "B t D"]
    ) -> Float[Array, "B t D"]:
        """Projects the next token's embedding and the hidden state to the input of the block.

        Takes and returns activations in the layout between blocks. Each tensor rank projects its
        own positions with the unsharded matrix.

        Args:
          h_BtD: the model's hidden states after its final norm, as vLLM hands them to DeepSeek-V3's
            published module.
        """
        layout = self.spec.layout
        embedding_BtD, h_BtD = (split_positions(x, layout) for x in (embedding_BtD, h_BtD))
        both = (self.embedding_norm(embedding_BtD), self.hidden_norm(h_BtD))
        w_UDO = gather_weight(self.w_join, self.spec)
        joined_BtD = product(jnp.concatenate(both, axis=-1), w_UDO)
        return join_positions(joined_BtD, layout)


def next_tokens(token_BT: Int[Array, "B T"], segment_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the token after each position; at the end of a document its own.

    There is no target there, and no later position of the document sees it.
    """
    return jnp.where(_goes_on(segment_BT), _shifted(token_BT, 0), token_BT)


def targets_ahead(target_BT: Int[Array, "B T"], segment_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the target after each position's own, of the same document; -1 for none.

    A document's last position may have a target, the token that ends it, but none after that.
    """
    return jnp.where(_goes_on(segment_BT), _shifted(target_BT, -1), -1)


def _goes_on(segment_BT: jax.Array) -> jax.Array:
    """Returns whether the next position is of the same document; false for the last."""
    return _shifted(segment_BT, -1) == segment_BT


def _shifted(x_BT: jax.Array, last: int) -> jax.Array:
    """Returns the next position's value of each position."""
    return jnp.pad(x_BT[:, 1:], ((0, 0), (0, 1)), constant_values=last)
