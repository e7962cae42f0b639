"""A model whose last layer groups are spread over pipeline stages, as one stage sees it.

Per device, inside the shard_map of the training mesh. Three functions take a micro-batch from
tokens to its loss: `before`, `in_layer` for each layer of a stage, and `step.pipeline.loss`.
`step.pipeline.ticks` says at which tick each is called.

Layers before the stages' run on each stage's own micro-batches, M / P of them. The loss of a
micro-batch is computed by all stages, each for a share of the positions. So none of the two is
computed more than once. Where the embedding alone is before the stages, its rows are looked up at
the stage: `step.pipeline.inputs`.

Letters: those of `layout.layout`; P stages, M micro-batches, k a micro-batch in the order in which
stages work on them, j one of a stage's own.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm import links, wire
from moejax.layout.layout import Layout
from moejax.model.block import Slice
from moejax.model.remat import remat_policy
from moejax.model.transformer import Transformer
from moejax.moe.layer import MoEStats
from moejax.moe.router import Noise
from moejax.step.forward import split_micro_batches
from moejax.step.full_batch import keys_of
from moejax.step.loss import router_losses
from moejax.step.model import ModelDef
from moejax.step.pipeline.schedule import schedule_of
from moejax.step.pipeline.weights import StagedWeights, at
from moejax.step.state import Batch, TrainState, Tree

Past = list[jax.Array]  # keys and values: `Slice.past`


class Visit(NamedTuple):
    """A micro-batch in one of this stage's chunks, or one of its slices.

    Attributes:
      chunk: its number.
      piece: the slice's number.
      first: number of the chunk's first layer among those of all chunks here.
      slot: index of its saved activations.
      past_slot: where keys and values of its slices are.
      valid: whether it counts; in a bubble it does not.
    """

    k: jax.Array
    chunk: jax.Array
    piece: jax.Array
    first: jax.Array
    slot: jax.Array
    past_slot: jax.Array
    valid: jax.Array


class RouterParts(NamedTuple):
    """What some expert layers add to the loss's parts; shares, as in `LossParts`."""

    balance: jax.Array
    entropy: jax.Array
    load_LE: jax.Array
    uneven_L3: jax.Array


class StagedModel:
    """A model's weights and rows on this device.

    Attributes:
      weights: that this device computes with.
      trains: whether this is a training step: evaluation and sampling have no noise.
      own: this device's rows, by its own micro-batches.
      segment_MBT, target_MBT, token_MBT: of all stages' micro-batches, in the order of ranks; the
        last is None where no stage looks a micro-batch of another up.
    """

    def __init__(
        self,
        model: ModelDef,
        state: TrainState,
        batch: Batch,
        params: Tree,
        micro_batches: int,
        slices: int = 1,
        *,
        trains: bool,
    ):
        """Takes what is trained as `params`; see `StagedWeights`."""
        self.model, self.state, self.layout = model, state, model.layout
        self.trains = trains
        self.weights = StagedWeights(model, state, params)
        self.stages = self.layout.size(self.layout.stage)
        self.stage = wire.index(self.layout.stage)
        self.micro_batches = micro_batches
        self.each = micro_batches // self.stages
        self.chunks, self.repeats = self.weights.chunks, self.weights.repeats
        self.own = split_micro_batches(batch, self.each)
        gather = partial(wire.all_gather, axes=self.layout.stage, dim=0, tag=None)
        name = model.cfg.mesh.schedule
        self.slices = slices
        self.schedule = schedule_of(name, self.stages, micro_batches, self.chunks, slices)
        # Whether nothing but the embedding is before the stages.
        self.embeds_alone = not self.weights.outer["groups"]
        looked_up = self.embeds_alone or (trains and model.cfg.model.predict_ahead)
        self.token_MBT = gather(self.own.token_BT) if looked_up else None
        self.segment_MBT = gather(self.own.segment_BT)
        self.target_MBT = gather(self.own.target_BT)
        biases = state.router_bias.get("groups", {})
        has_experts = self.weights.groups[-1] in biases
        self.biases = self.weights.stacked(biases) if has_experts else {}
        here = sum(map(len, jax.tree.leaves(self.biases)))
        every = sum(map(len, jax.tree.leaves(state.router_bias)))
        self.expert_layers = every + here * (self.stages - 1)

    def link(self, traffic: Literal["stage", "stage_gradient"], x_BtD: jax.Array) -> links.Link:
        """Returns the links to other stages for arrays like x."""
        return links.build_link(traffic, self.layout, self.model.spec.codecs, x_BtD)

    def transformer(self, outer: Tree) -> Transformer:
        """Returns the model with these weights outside of the stages."""
        params = self.weights.join(outer, self.weights.layers)
        return self.model.merge(params, self.state.router_bias)

    def rank(self, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns whose the k-th micro-batch is, and which of its own: each stage's in turn."""
        return k % self.stages, k // self.stages

    def row_of(self, array_MBT: jax.Array, k: jax.Array) -> jax.Array:
        """Returns a micro-batch's part of `segment_MBT`, `target_MBT` or `token_MBT`."""
        owner, j = self.rank(k)
        return lax.dynamic_index_in_dim(array_MBT, owner * self.each + j, keepdims=False)

    def noise(self, owner: jax.Array, j: jax.Array) -> Noise | None:
        """Returns the router's noise for a micro-batch: the same on every mesh."""
        if not self.trains or not self.model.cfg.moe.router.jitter:
            return None
        inside = self.layout.inside.token_axes
        ranks = self.layout.size(inside)
        rank = owner * ranks + (wire.index(inside) if ranks > 1 else 0)
        rows = self.own.token_BT.shape[1]
        return Noise(keys_of(self.model, self.state)[0], (rank * self.each + j) * rows)

    def numbered(self, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the nearest micro-batch to the k-th, and whether it is the k-th."""
        nearest = jnp.clip(k, 0, self.micro_batches - 1)
        return nearest, nearest == k

    def run_before(self, outer: Tree, j: jax.Array) -> tuple[jax.Array, MoEStats | None]:
        """Takes an own micro-batch through what comes before the stages."""
        rows = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, j, keepdims=False), self.own)
        model, noise = self.transformer(outer), self.noise(self.stage, j)
        with jax.named_scope("embed"):
            x_BtD, stats = model.before_stages(rows.token_BT, rows.segment_BT, noise)
        return links.in_slices(x_BtD, self.slices, self.layout), stats

    def piece_of(self, array_BT: jax.Array, piece: jax.Array) -> jax.Array:
        """Returns the positions of a slice."""
        if self.slices == 1:
            return array_BT
        length = array_BT.shape[1] // self.slices
        return lax.dynamic_slice_in_dim(array_BT, piece * length, length, axis=1)

    def embed(self, table: Tree, k: jax.Array, piece: jax.Array) -> jax.Array:
        """Looks up a slice's hidden states, where nothing else is before the stages.

        Args:
          table: what is trained of it.
        """
        assert self.token_MBT is not None
        outer = self.weights.outer_with({"embedding": {"table": table}})
        rows = [self.piece_of(self.row_of(x, k), piece) for x in (self.token_MBT, self.segment_MBT)]
        with jax.named_scope("embed"):
            return self.transformer(outer).before_stages(rows[0], rows[1], None)[0]

    def before_of(self, outer: Tree) -> Tree:
        """Returns the part of `outer` that is before the stages."""
        table = outer["embedding"]["table"]
        return {"groups": outer["groups"], "embedding": {"table": table}}

    def before(self, part: Tree, j: jax.Array) -> tuple[tuple[jax.Array, jax.Array], RouterParts]:
        """Returns ((hidden states, share of the routers' losses), parts) of `run_before`.

        Args:
          part: what is trained of the weights of `before_of`.
        """
        x_BtD, stats = self.run_before(self.weights.outer_with(part), j)
        loss, parts = self.router_parts(stats)
        return (x_BtD, loss), parts

    def in_layer(
        self, weights: Tree, past: Past, x_BtD: jax.Array, visit: Visit, index: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, Past], RouterParts]:
        """Returns ((hidden states, routers' share of the loss, keys and values), parts).

        Arguments and the first and last of three as of `run_layer`.
        """
        y_BtD, stats, own = self.run_layer(weights, past, x_BtD, visit, index)
        loss, parts = self.router_parts(stats, self.slices)
        return (y_BtD, loss, own), parts

    def past_of(self, x_BtD: jax.Array) -> list[jax.ShapeDtypeStruct]:
        """Returns shapes of a layer's keys and values of whole sequences; nothing without slices.

        Args:
          x_BtD: a slice's hidden states; only shape and dtype count.
        """
        if self.slices == 1:
            return []
        length, zero = self.segment_MBT.shape[2] // self.slices, jnp.int32(0)

        def keys(x_BtD: jax.Array) -> Past:
            merged = self._in_every_chunk(self.weights.outer, self.weights.layer(zero))
            model = self.model.merge(merged, self._biases(zero))
            return model.keys(x_BtD, Slice(zero, length, []))

        own = jax.eval_shape(keys, x_BtD)
        whole = self.segment_MBT.shape[2]
        return [jax.ShapeDtypeStruct((x.shape[0], whole, *x.shape[2:]), x.dtype) for x in own]

    def run_layer(
        self, weights: Tree, past: Past, x_BtD: jax.Array, visit: Visit, index: jax.Array
    ) -> tuple[jax.Array, MoEStats | None, Past]:
        """Takes a micro-batch, or a slice, through one of this stage's repeats.

        A function that runs it back keeps what `model.remat` says.

        Args:
          past: keys and values of earlier slices: `Slice.past`. Empty: x is of whole sequences.
        Returns:
          Hidden states, statistics of the experts, and the slice's own keys and values.
        """
        k = visit.k
        segment_BT, noise = self.row_of(self.segment_MBT, k), self.noise(*self.rank(k))
        if noise is not None:
            chunk, number = index // self.repeats, self.stage * self.repeats + index % self.repeats
            noise = noise.of(self.weights.groups[0] + chunk).of(number)
        biases, length = self._biases(index), segment_BT.shape[1] // self.slices

        def run(weights: Tree, past: Past, x_BtD: jax.Array) -> Any:
            merged = self._in_every_chunk(self.weights.outer, weights)
            model = self.model.merge(merged, biases)
            part = Slice(visit.piece, length, past) if past else None
            return model.in_layer(x_BtD, segment_BT, noise, part)

        remat = self.model.cfg.model.remat
        if remat != "none":
            run = jax.checkpoint(run, policy=remat_policy(remat, self.model.spec))
        return run(weights, past, x_BtD)

    def _biases(self, index: jax.Array) -> Tree:
        """Returns the selection biases, of the stages' groups those of one repeat."""
        if not self.biases:
            return self.state.router_bias
        own = at(self.biases, index)
        return self._in_every_chunk(self.state.router_bias, own)

    def _in_every_chunk(self, tree: Tree, own: Tree) -> Tree:
        """Returns a tree like the model's, with one repeat's arrays for each of the stages' groups.

        Chunks are alike, so whichever runs has them.
        """
        return {**tree, "groups": {**tree["groups"], **dict.fromkeys(self.weights.groups, own)}}

    def router_parts(
        self, stats: MoEStats | None, slices: int = 1, layout: Layout | None = None
    ) -> tuple[jax.Array, RouterParts]:
        """Returns a micro-batch's share of the routers' losses, and what it adds to the parts.

        Args:
          slices: number of slices in a micro-batch; `stats` covers one of them.
          layout: of the tokens that the experts saw; None: that inside a stage.
        """
        zero = jnp.zeros(())
        if stats is None:
            return zero, no_parts()
        loss, balance, load_LE, uneven_L3 = router_losses(
            stats, self.model.cfg.moe, layout or self.layout.inside
        )
        share = len(load_LE) / self.expert_layers / self.micro_batches / slices
        entropy = jnp.mean(stats.entropy)
        return loss * share, RouterParts(balance * share, entropy * share, load_LE, uneven_L3)


def no_parts() -> RouterParts:
    """Returns the parts of no expert layers."""
    zero = jnp.zeros(())
    return RouterParts(zero, zero, jnp.zeros((0, 1), jnp.int32), jnp.zeros((0, 3), jnp.int32))
