"""A model whose last layer groups are spread over pipeline stages, as one stage sees it.

Per device, inside the shard_map of the training mesh. A micro-batch passes through three pieces
of the model; `step.pipeline.ticks` says when:

- The leading layers: the embedding, and the layers before the stages. The data of M / P
  micro-batches lies on each stage, its local micro-batches, and it runs the leading layers on
  these: `run_leading`. Where the embedding alone leads, the first stage looks up its rows at each
  tick: `embed`.
- The stages' layers: `run_layer`, for each layer of a virtual stage.
- The output head with the loss: `step.pipeline.loss`. All stages compute it, each for a share of
  the positions.

So no work is done on more than one stage.

Letters: those of `layout.layout`; P stages, M micro-batches, k a micro-batch in the order in which
stages run them, j a local micro-batch.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm import context, links, wire
from moejax.layout.layout import Layout
from moejax.model.block import Slice
from moejax.model.remat import remat_policy
from moejax.model.transformer import Transformer
from moejax.moe.layer import MoEStats
from moejax.moe.router import Noise
from moejax.step.forward import split_micro_batches
from moejax.step.full_batch import noise_key
from moejax.step.loss import router_losses
from moejax.step.model import ModelDef
from moejax.step.pipeline.schedule import build_schedule
from moejax.step.pipeline.weights import StagedWeights, entry
from moejax.step.state import Batch, TrainState, Tree

Past = list[jax.Array]  # keys and values of earlier slices: `Slice.past`


class StageTask(NamedTuple):
    """One micro-batch, or one slice of it, in one virtual stage; scalars.

    Attributes:
      micro_batch: its number k.
      virtual_stage: number of the virtual stage on this stage.
      slice_index: number of the slice.
      first_layer: index of the virtual stage's first layer in `StagedWeights.layers`.
      slot: index of its saved activations.
      past_slot: index of its micro-batch's keys and values.
      valid: False in the bubble, where the task is another one and its results are discarded.
    """

    micro_batch: jax.Array
    virtual_stage: jax.Array
    slice_index: jax.Array
    first_layer: jax.Array
    slot: jax.Array
    past_slot: jax.Array
    valid: jax.Array


class RouterParts(NamedTuple):
    """Contributions of expert layers to `LossParts`; shares of this device, as there."""

    balance: jax.Array
    entropy: jax.Array
    load_LE: jax.Array
    uneven_L3: jax.Array
    needed_LEQ: jax.Array | None = None
    replayed_L2: jax.Array | None = None


class StagedModel:
    """A model's weights and rows on this device.

    Attributes:
      training: False in evaluation and sampling, which have no noise.
      stage_index: this device's stage.
      local_micro_batches: J = M / P, whose data lies on this stage.
      local_batch: rows of the local micro-batches, arrays [J, B, T].
      only_embedding: whether no layer is before the stages.
      segment_MBT, target_MBT, token_MBT: rows of all micro-batches, stage by stage; the last is
        None where no stage looks up tokens of another's.
      expert_MBTLK: recorded experts in this stage's layers, of all micro-batches, stage by stage;
        None where tokens choose.
      biases: selection biases of this stage's layers [L, E]; empty without experts.
      expert_layers: number of expert layers in the model.
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
        training: bool,
    ):
        """Gathers the weights and the rows of all stages.

        Args:
          params: trained parameters, as `StagedWeights` takes them.
        """
        self.model, self.state, self.layout = model, state, model.layout
        self.training = training
        self.weights = StagedWeights(model, state, params)
        self.stages = self.layout.size(self.layout.stage)
        self.stage_index = wire.index(self.layout.stage)
        self.micro_batches, self.local_micro_batches = micro_batches, micro_batches // self.stages
        self.virtual_stages, self.repeats = self.weights.virtual_stages, self.weights.repeats
        self.local_batch = split_micro_batches(batch, self.local_micro_batches)
        # J B T -> M B T
        gather = partial(wire.all_gather, axes=self.layout.stage, dim=0, tag=None)
        self.slices = slices
        self.schedule = build_schedule(
            model.cfg.mesh.schedule, self.stages, micro_batches, self.virtual_stages, slices
        )
        self.only_embedding = not self.weights.outer["groups"]
        looked_up = self.only_embedding or (training and model.cfg.model.predict_ahead)
        self.token_MBT = gather(self.local_batch.token_BT) if looked_up else None
        self.segment_MBT = gather(self.local_batch.segment_BT)
        self.target_MBT = gather(self.local_batch.target_BT)
        biases = state.router_bias.get("groups", {})
        has_experts = self.weights.groups[-1] in biases
        self.biases = self.weights.stacked(biases) if has_experts else {}
        here = sum(map(len, jax.tree.leaves(self.biases)))
        every = sum(map(len, jax.tree.leaves(state.router_bias)))
        self.expert_layers = every + here * (self.stages - 1)
        self.expert_MBTLK = self._recorded_here(here)

    def _recorded_here(self, layers: int) -> jax.Array | None:
        """Returns `expert_MBTLK`. Wire: (P - 1) / P of the local experts, over the stages.

        Args:
          layers: number of this stage's layers with experts.
        """
        expert_JBTLK, P = self.local_batch.expert_BTLK, self.stages
        if expert_JBTLK is None:
            return None
        J, B, T, L, K = expert_JBTLK.shape
        # Virtual stage 0 of all stages comes first: V P L.
        staged = expert_JBTLK[:, :, :, L - layers * P :]
        by_stage = staged.reshape(J, B, T, self.virtual_stages, P, -1, K)
        own = wire.all_to_all(jnp.moveaxis(by_stage, 4, 0), self.layout.stage, tag=None)
        return own.reshape(P * J, B, T, layers, K)

    def _recorded_of(self, task: StageTask, index: jax.Array) -> list[jax.Array]:
        """Returns the recorded experts [B, T, K] of a task, for each expert block of a layer."""
        assert self.expert_MBTLK is not None
        expert_BTLK = context.own(self.rows_of(self.expert_MBTLK, task.micro_batch), self.layout)
        expert_BTLK = self.slice_of(expert_BTLK, task.slice_index)
        count = expert_BTLK.shape[2] // (self.virtual_stages * self.repeats)
        own = lax.dynamic_slice_in_dim(expert_BTLK, index * count, count, axis=2)
        return [own[:, :, block] for block in range(count)]

    def _load_of(self, load_LE: jax.Array, index: jax.Array) -> jax.Array:
        """Returns the load of each expert block [n, E] of a layer, of that of all layers."""
        layers = self.virtual_stages * self.stages * self.repeats
        count = sum(map(len, jax.tree.leaves(self.biases))) // (self.virtual_stages * self.repeats)
        staged_LnE = load_LE[len(load_LE) - layers * count :].reshape(layers, count, -1)
        stage = index // self.repeats * self.stages + self.stage_index
        return staged_LnE[stage * self.repeats + index % self.repeats]

    def link(
        self, traffic: Literal["stage", "stage_gradient"], x_BtD: jax.Array
    ) -> links.StageLink:
        """Returns the link between stages for arrays like x [B, t, D]."""
        return links.build_link(traffic, self.layout, self.model.spec.codecs, x_BtD)

    def transformer(self, outer: Tree, *further: jax.Array | None) -> Transformer:
        """Returns the model with these weights outside of the stages' layers.

        Args:
          further: recorded experts, and a load, as of `ModelDef.merge`.
        """
        params = self.weights.join(outer, self.weights.layers)
        return self.model.merge(params, self.state.router_bias, None, *further)

    def task(self, n: jax.Array, section: jax.Array) -> StageTask:
        """Returns task n of this stage; in the bubble the nearest micro-batch's, not valid.

        Args:
          section: `PipelineSchedule.section` of the task.
        """
        schedule, zero = self.schedule, jnp.int32(0)
        k, valid = self.nearest(schedule.micro_batch(n))
        first_group, groups = (
            jnp.asarray(x)[section] for x in (schedule.first_groups, schedule.saved_groups)
        )
        virtual_stage, slice_index = (zero, section) if schedule.slices > 1 else (section, zero)
        return StageTask(
            micro_batch=k,
            virtual_stage=virtual_stage,
            slice_index=slice_index,
            first_layer=virtual_stage * self.repeats,
            slot=schedule.slot(k, first_group, groups),
            past_slot=k % schedule.saved_groups[0],
            valid=valid,
        )

    def forward_task(self, t: jax.Array) -> StageTask:
        """Returns the task that this stage runs forward at tick t."""
        n = t - self.stage_index
        return self.task(n, self.schedule.section(n))

    def nearest(self, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the nearest micro-batch to the k-th, and whether it is the k-th."""
        nearest = jnp.clip(k, 0, self.micro_batches - 1)
        return nearest, nearest == k

    def owner(self, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the stage that has the data of micro-batch k, and its local number there.

        Consecutive micro-batches are of consecutive stages.
        """
        return k % self.stages, k // self.stages

    def rows_of(self, array_MBT: jax.Array, k: jax.Array) -> jax.Array:
        """Returns the rows [B, T] of micro-batch k in an array of all micro-batches."""
        stage, j = self.owner(k)
        return entry(array_MBT, stage * self.local_micro_batches + j)

    def noise(self, stage: jax.Array, j: jax.Array) -> Noise | None:
        """Returns the router's noise for a stage's j-th micro-batch: the same on every mesh."""
        if not self.training or not self.model.cfg.moe.router.jitter:
            return None
        inside = self.layout.inside.row_axes
        ranks = self.layout.size(inside)
        rank = stage * ranks + (wire.index(inside) if ranks > 1 else 0)
        rows = self.local_batch.token_BT.shape[1]
        key = noise_key(self.model, self.state)
        position_T = context.positions(self.segment_MBT.shape[2], self.layout)
        return Noise(key, (rank * self.local_micro_batches + j) * rows, position_T)

    def slice_of(self, array_BT: jax.Array, slice_index: jax.Array) -> jax.Array:
        """Returns the positions of a slice, [B, T / N, ...] of [B, T, ...]."""
        if self.slices == 1:
            return array_BT
        length = array_BT.shape[1] // self.slices
        return lax.dynamic_slice_in_dim(array_BT, slice_index * length, length, axis=1)

    def embed(self, table: Tree, k: jax.Array, slice_index: jax.Array) -> jax.Array:
        """Returns the embedding of a slice of micro-batch k, [B, t, D], where it leads alone.

        Args:
          table: trained part of the table.
        """
        assert self.token_MBT is not None
        outer = self.weights.outer_with({"embedding": {"table": table}})
        token_BT, segment_BT = (
            self.slice_of(self.rows_of(x, k), slice_index)
            for x in (self.token_MBT, self.segment_MBT)
        )
        with jax.named_scope("embed"):
            return self.transformer(outer).before_stages(token_BT, segment_BT, None)[0]

    def leading_weights(self, outer: Tree) -> Tree:
        """Returns the weights of the leading layers, of a tree like `StagedWeights.outer`."""
        return {"groups": outer["groups"], "embedding": {"table": outer["embedding"]["table"]}}

    def run_leading(self, outer: Tree, j: jax.Array) -> tuple[jax.Array, MoEStats | None]:
        """Runs the leading layers on local micro-batch j.

        Returns:
          Hidden states [B, t, D], positions ordered by slices, and the experts' statistics.
        """
        rows = entry(self.local_batch, j)
        load_LE = self.state.load_LE if self.training else None
        model = self.transformer(outer, rows.expert_BTLK, load_LE)
        noise = self.noise(self.stage_index, j)
        with jax.named_scope("embed"):
            x_BtD, stats = model.before_stages(rows.token_BT, rows.segment_BT, noise)
        return links.order_by_slices(x_BtD, self.slices, self.layout), stats

    def leading_with_loss(
        self, trained: Tree, j: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], RouterParts]:
        """Returns ((hidden states, routers' share of the loss), parts) of `run_leading`.

        Args:
          trained: trained part of `leading_weights`.
        """
        x_BtD, stats = self.run_leading(self.weights.outer_with(trained), j)
        loss, parts = self.router_parts(stats)
        return (x_BtD, loss), parts

    def run_layer(
        self, weights: Tree, past: Past, x_BtD: jax.Array, task: StageTask, index: jax.Array
    ) -> tuple[jax.Array, MoEStats | None, Past]:
        """Runs one of this stage's layers on a task. Its backward saves what `model.remat` says.

        Args:
          weights: of the layer.
          past: keys and values of earlier slices [B, T, ...]; empty where x has full sequences.
          index: of the layer in `StagedWeights.layers`.
        Returns:
          Hidden states [B, t, D], the experts' statistics, and the slice's own keys and values.
        """
        k = task.micro_batch
        segment_BT, noise = self.rows_of(self.segment_MBT, k), self.noise(*self.owner(k))
        if noise is not None:
            virtual_stage = index // self.repeats
            repeat = self.stage_index * self.repeats + index % self.repeats
            noise = noise.of(self.weights.groups[0] + virtual_stage).of(repeat)
        biases, length = self._biases(index), segment_BT.shape[1] // self.slices

        def run(weights: Tree, past: Past, x_BtD: jax.Array) -> Any:
            model = self.model.merge(self._with_layer(self.weights.outer, weights), biases)
            if self.expert_MBTLK is not None:
                model.groups[-1].use_recorded(self._recorded_of(task, index))
            if self.training and self.state.load_LE is not None:
                model.groups[-1].use_load(self._load_of(self.state.load_LE, index))
            of_slice = Slice(task.slice_index, length, past) if past else None
            return model.in_layer(x_BtD, segment_BT, noise, of_slice)

        remat = self.model.cfg.model.remat
        if remat != "none":
            run = jax.checkpoint(run, policy=remat_policy(remat, self.model.spec))
        return run(weights, past, x_BtD)

    def past_shapes(self, x_BtD: jax.Array) -> list[jax.ShapeDtypeStruct]:
        """Returns shapes of a layer's keys and values of full sequences, [B, T, ...].

        Empty without slices.

        Args:
          x_BtD: hidden states of a slice; only shape and dtype count.
        """
        if self.slices == 1:
            return []
        T, zero = self.segment_MBT.shape[2], jnp.int32(0)

        def keys_values(x_BtD: jax.Array) -> Past:
            merged = self._with_layer(self.weights.outer, self.weights.layer(zero))
            model = self.model.merge(merged, self._biases(zero))
            return model.keys(x_BtD, Slice(zero, T // self.slices, []))

        of_slice = jax.eval_shape(keys_values, x_BtD)
        return [jax.ShapeDtypeStruct((x.shape[0], T, *x.shape[2:]), x.dtype) for x in of_slice]

    def _biases(self, index: jax.Array) -> Tree:
        """Returns the selection biases, with those of one layer for the stages' groups."""
        if not self.biases:
            return self.state.router_bias
        return self._with_layer(self.state.router_bias, entry(self.biases, index))

    def _with_layer(self, tree: Tree, layer: Tree) -> Tree:
        """Returns a tree like the model's, with one layer's arrays for each of the stages' groups.

        Virtual stages have layers of one kind, so the model runs any of them as its last group.
        """
        return {**tree, "groups": {**tree["groups"], **dict.fromkeys(self.weights.groups, layer)}}

    def router_parts(
        self, stats: MoEStats | None, slices: int = 1, layout: Layout | None = None
    ) -> tuple[jax.Array, RouterParts]:
        """Returns the share of the routers' losses in a micro-batch's loss, and its parts.

        Args:
          slices: slices in a micro-batch; `stats` covers one of them.
          layout: of the tokens that the experts saw; None: that inside a stage.
        """
        zero = jnp.zeros(())
        if stats is None:
            return zero, no_parts()
        loss, balance, load_LE, uneven_L3, replayed_L2 = router_losses(
            stats, self.model.cfg.moe, layout or self.layout.inside
        )
        share = len(load_LE) / self.expert_layers / self.micro_batches / slices
        entropy = jnp.mean(stats.entropy)
        parts = balance * share, entropy * share, load_LE, uneven_L3, stats.needed_EQ, replayed_L2
        return loss * share, RouterParts(*parts)


def no_parts() -> RouterParts:
    """Returns the parts of no expert layers."""
    zero = jnp.zeros(())
    return RouterParts(zero, zero, jnp.zeros((0, 1), jnp.int32), jnp.zeros((0, 3), jnp.int32))
