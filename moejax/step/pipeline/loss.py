"""Loss of the last stage's hidden states: each stage computes it for its share of the positions.

Per device, inside the shard_map of the training mesh. The block of `model.predict_ahead` follows
the last stage's layers, so it runs here too, on the same share of the positions: `model.share`.

Letters: those of `layout.layout`; k a micro-batch in the order in which stages work on them.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.comm import links
from moejax.comm.weights.adapters import Weight
from moejax.model.ahead import next_tokens, targets_ahead
from moejax.model.share import Share
from moejax.model.transformer import Transformer
from moejax.moe.layer import MoEStats
from moejax.step.full_batch import NumTargets
from moejax.step.loss import AheadTargets, next_token_loss
from moejax.step.pipeline.model import RouterParts, StagedModel, no_parts
from moejax.step.state import Tree


class AnswerParts(NamedTuple):
    """What a micro-batch adds to the loss's parts, as in `LossParts`.

    Attributes:
      router: of the experts of `model.predict_ahead`.
    """

    nll: jax.Array
    ahead: jax.Array | None
    router: RouterParts


class Answers:
    """Losses of micro-batches that have left the last stage.

    Attributes:
      num_targets: of the full batch; None where no loss is wanted.
    """

    def __init__(self, staged: StagedModel, num_targets: NumTargets | None = None):
        self.staged, self.num_targets = staged, num_targets

    @property
    def head(self) -> Tree:
        """Returns the trainable weights of the output head."""
        weights = self.staged.weights
        return self.head_of(weights.trained_of(weights.outer))

    def head_of(self, outer: Tree) -> Tree:
        """Returns their part of a tree like what is trained of `StagedWeights.outer`."""
        tables = {"table" if self.staged.model.cfg.model.tie_embeddings else "project"}
        others = {"norm"}
        if self.num_targets is not None and self.num_targets.ahead is not None:
            tables.add("table")
            others.add("predict_ahead")
        trains, own = self.staged.weights.trains, outer["embedding"]
        embedding = {name: own[name] for name in sorted(tables) if trains("embedding", name)}
        return {n: outer[n] for n in sorted(others) if trains(n)} | {"embedding": embedding}

    def end(self, y_BtD: jax.Array) -> tuple[jax.Array, Weight]:
        """Returns final hidden states x_BTD of this stage's positions, and the projection w_Dv."""
        return self.staged.transformer(self.staged.weights.outer).after_stages(y_BtD)

    def targets(self, k: jax.Array, piece: jax.Array) -> jax.Array:
        """Returns the targets of this stage's share of a slice's positions."""
        staged = self.staged
        target_BT = staged.piece_of(staged.row_of(staged.target_MBT, k), piece)
        return links.own_positions(target_BT, staged.layout)

    def loss(
        self, head: Tree, y_BtD: jax.Array, k: jax.Array, piece: jax.Array
    ) -> tuple[jax.Array, AnswerParts]:
        """Returns this device's share of the loss of what the last stage left, and its parts.

        Args:
          head: the weights of `head`.
          y_BtD: this stage's share of the positions.
        """
        staged, targets = self.staged, self.num_targets
        assert targets is not None
        model = staged.transformer(staged.weights.outer_with(head))
        x_BTD, w_Dv = model.after_stages(y_BtD)
        ahead, router_loss, router = None, jnp.zeros(()), no_parts()
        if targets.ahead is not None:
            ahead, stats = self._look_ahead(model, y_BtD, k, targets.ahead)
            router_loss, router = self._router_parts(stats)
        with jax.named_scope("loss"):
            loss, parts = next_token_loss(
                x_BTD,
                w_Dv,
                self.targets(k, piece),
                None,
                moe=staged.model.cfg.moe,
                num_targets=targets.next,
                micro_batches=staged.micro_batches,
                layout=staged.layout,
                chunk_tokens=staged.model.chunk_tokens,
                ahead=ahead,
            )
        return loss + router_loss, AnswerParts(parts.nll, parts.ahead, router)

    def _look_ahead(
        self, model: Transformer, y_BtD: jax.Array, k: jax.Array, num_targets: jax.Array
    ) -> tuple[AheadTargets, MoEStats | None]:
        """Runs the block of `model.predict_ahead`; arguments as of `loss`."""
        staged = self.staged
        assert staged.token_MBT is not None
        rows = (staged.token_MBT, staged.segment_MBT, staged.target_MBT)
        token_BS, segment_BS, target_BS = (staged.row_of(x, k) for x in rows)
        next_BS, ahead_BS = next_tokens(token_BS, segment_BS), targets_ahead(target_BS, segment_BS)
        next_BT, ahead_BT = (links.own_positions(x, staged.layout) for x in (next_BS, ahead_BS))
        share, noise = Share(staged.layout, segment_BS), staged.noise(*staged.rank(k))
        x_BTD, stats = model.look_ahead_in_share(y_BtD, next_BT, share, noise)
        coefficient = staged.model.cfg.train.predict_ahead_loss
        return AheadTargets(x_BTD, ahead_BT, num_targets, coefficient), stats

    def _router_parts(self, stats: MoEStats | None) -> tuple[jax.Array, RouterParts]:
        """As `StagedModel.router_parts`, of experts that see a share of each sequence."""
        staged = self.staged
        if stats is None:
            return staged.router_parts(None)
        # Stages hold shares of the same sequences, as tensor ranks do.
        inside = staged.layout.inside
        layout = replace(inside, tensor=staged.layout.stage + inside.tensor)
        mean = stats._replace(z=stats.z / staged.stages, entropy=stats.entropy / staged.stages)
        return staged.router_parts(mean, layout=layout)
