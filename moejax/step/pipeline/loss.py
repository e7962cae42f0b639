"""Loss of the last stage's hidden states: each stage computes it for its share of the positions.

Per device, inside the shard_map of the training mesh. The block of `model.predict_ahead` follows
the last stage's layers, so it runs here too, on the same positions (`block.PositionShare`).

Letters: those of `layout.layout`, with T the positions of this stage's share; S all positions;
M micro-batches, k a micro-batch in the order in which stages run them.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.comm import context, links
from moejax.comm.weights.adapters import Weight
from moejax.model.ahead import next_tokens, targets_ahead
from moejax.model.block import PositionShare
from moejax.model.transformer import Transformer
from moejax.moe.layer import MoEStats
from moejax.step.full_batch import NumTargets
from moejax.step.loss import AheadTargets, next_token_loss
from moejax.step.pipeline.model import RouterParts, StagedModel, no_parts
from moejax.step.state import Tree


class HeadParts(NamedTuple):
    """Contributions of a loss step to `LossParts`; shares of this device, as there.

    Attributes:
      ahead: None without `model.predict_ahead`.
      router: of the experts in the block of `model.predict_ahead`.
    """

    nll: jax.Array
    ahead: jax.Array | None
    router: RouterParts


class OutputHead:
    """The model after the last stage: final norm, output projection, and the loss.

    Attributes:
      num_targets: of the full batch; None where no loss is wanted.
    """

    def __init__(self, staged: StagedModel, num_targets: NumTargets | None = None):
        self.staged, self.num_targets = staged, num_targets

    @property
    def trained(self) -> Tree:
        """Trainable weights of the output head."""
        weights = self.staged.weights
        return self.part_of(weights.trained_of(weights.outer))

    def part_of(self, outer: Tree) -> Tree:
        """Returns the entries of `trained` in a tree like the trained part of the outer weights."""
        tables = {"table" if self.staged.model.cfg.model.tie_embeddings else "project"}
        others = {"norm"}
        if self.num_targets is not None and self.num_targets.ahead is not None:
            tables.add("table")
            others.add("predict_ahead")
        trains, weights = self.staged.weights.trains, outer["embedding"]
        embedding = {name: weights[name] for name in sorted(tables) if trains("embedding", name)}
        return {n: outer[n] for n in sorted(others) if trains(n)} | {"embedding": embedding}

    def final(self, y_BtD: jax.Array) -> tuple[jax.Array, Weight]:
        """Returns final hidden states x_BTD of this stage's share, and the projection w_Dv.

        Args:
          y_BtD: this stage's share of the last stage's output.
        """
        return self.staged.transformer(self.staged.weights.outer).after_stages(y_BtD)

    def targets(self, k: jax.Array, slice_index: jax.Array) -> jax.Array:
        """Returns the targets [B, T] of this stage's share of a slice of micro-batch k."""
        staged = self.staged
        target_BS = context.own(staged.rows_of(staged.target_MBT, k), staged.layout)
        target_BT = staged.slice_of(target_BS, slice_index)
        return links.share_of_positions(target_BT, staged.layout)

    def loss(
        self, trained: Tree, y_BtD: jax.Array, k: jax.Array, slice_index: jax.Array
    ) -> tuple[jax.Array, HeadParts]:
        """Returns this device's share of the loss of a slice of micro-batch k, and its parts.

        Args:
          trained: values of `trained`.
          y_BtD: this stage's share of the last stage's output.
        """
        staged, num_targets = self.staged, self.num_targets
        assert num_targets is not None
        model = staged.transformer(staged.weights.outer_with(trained))
        x_BTD, w_Dv = model.after_stages(y_BtD)
        ahead, router_loss, router = None, jnp.zeros(()), no_parts()
        if num_targets.ahead is not None:
            ahead, stats = self._predict_ahead(model, y_BtD, k, num_targets.ahead)
            router_loss, router = self._router_parts(stats)
        with jax.named_scope("loss"):
            loss, parts = next_token_loss(
                x_BTD,
                w_Dv,
                self.targets(k, slice_index),
                None,
                moe=staged.model.cfg.moe,
                num_targets=num_targets.next,
                micro_batches=staged.micro_batches,
                layout=staged.layout,
                chunk_tokens=staged.model.chunk_tokens,
                cap=staged.model.cfg.model.logit_cap,
                ahead=ahead,
            )
        return loss + router_loss, HeadParts(parts.nll, parts.ahead, router)

    def _predict_ahead(
        self, model: Transformer, y_BtD: jax.Array, k: jax.Array, num_targets: jax.Array
    ) -> tuple[AheadTargets, MoEStats | None]:
        """Runs the block of `model.predict_ahead` on this stage's share of micro-batch k."""
        staged = self.staged
        assert staged.token_MBT is not None
        rows = (staged.token_MBT, staged.segment_MBT, staged.target_MBT)
        token_BS, segment_BS, target_BS = (staged.rows_of(x, k) for x in rows)
        next_BS, ahead_BS = next_tokens(token_BS, segment_BS), targets_ahead(target_BS, segment_BS)
        next_BT, ahead_BT = (
            links.share_of_positions(x, staged.layout) for x in (next_BS, ahead_BS)
        )
        share, noise = PositionShare(staged.layout, segment_BS), staged.noise(*staged.owner(k))
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
