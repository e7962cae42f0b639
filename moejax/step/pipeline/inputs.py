"""The first stage's inputs, and the gradients that return to the weights before the stages.

Per device, inside the shard_map of the training mesh. One of two:

- `EmbeddingInputs`, where the embedding alone leads. Tokens are a thousandth of hidden states, so
  every stage has those of all micro-batches, and the first stage looks up its input at each tick.
  All stages do so, because they run one program: a read of as many bytes as a slot has.
- `LeadingInputs`, where layers lead too. Each stage runs them on its local micro-batches before the
  first tick. Their results move toward the first stage, one stage a tick, and gradients return.

Letters: those of `layout.layout`; P stages, M micro-batches, J = M / P local ones; k a micro-batch
in the order in which stages run them, j a local one, t a tick.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.step.pipeline.model import RouterParts, StagedModel, no_parts
from moejax.step.pipeline.weights import entry, replace_part
from moejax.step.state import Tree


class EmbeddingInputs:
    """The embedding, looked up at the first stage.

    Its state of gradients is the float32 sum of the table's; None if it is not trained.
    """

    def __init__(self, staged: StagedModel):
        self.staged = staged
        self.table = staged.weights.trained_of(staged.weights.outer)["embedding"]["table"]
        self.trained = staged.weights.trains("embedding", "table")

    def initial(self) -> tuple[jax.Array, None]:
        """Returns hidden states [B, t, D] of real tokens. Nothing moves toward the first stage."""
        return self.staged.embed(self.table, jnp.int32(0), jnp.int32(0)), None

    def input_at(self, inbound: None, t: jax.Array) -> tuple[jax.Array, None]:
        """Returns the first stage's input [B, t, D] at a boundary tick."""
        schedule = self.staged.schedule
        k, _ = self.staged.nearest(schedule.micro_batch(t))
        return self.staged.embed(self.table, k, schedule.section(t)), None

    def initial_gradients(self) -> Tree | None:
        """Returns the state of gradients before the first tick."""
        return sums_like(self.table) if self.trained else None

    def backward_at(
        self, gradients: Tree | None, dx_BtD: jax.Array, t: jax.Array, *, boundary: bool
    ) -> Tree | None:
        """Adds the table's gradient from the first stage's last backward task.

        Args:
          gradients: the state of gradients.
          dx_BtD: input gradient of the backward task at the tick before t.
          boundary: whether tick t is a boundary tick, so that the first stage's dx is that of its
            first virtual stage.
        Returns:
          The new state of gradients.
        """
        if not boundary or not self.trained:
            return gradients
        staged, schedule = self.staged, self.staged.schedule
        n = t - schedule.first_backward - schedule.virtual_stages * staged.stages
        k, valid = staged.nearest(schedule.micro_batch(n))
        slice_index = schedule.section(n, backward=True)
        _, pullback = jax.vjp(partial(staged.embed, k=k, slice_index=slice_index), self.table)
        (table,) = pullback(jnp.where((staged.stage_index == 0) & valid, dx_BtD, 0))
        return add(gradients, table)

    def finish(self, gradients: Tree, dx_BtD: jax.Array) -> tuple[Tree, RouterParts]:
        """Returns the gradients of the weights before the stages, and their routers' parts.

        Args:
          gradients: the state of gradients at the last tick.
          dx_BtD: input gradient of that tick's backward task.
        Returns:
          Float32 sums like the trained part of `StagedWeights.outer`, zero for the output head;
          and the sums of the parts over local micro-batches.
        """
        zeros = sums_like(self.staged.weights.trained_of(self.staged.weights.outer))
        if not self.trained:
            return zeros, no_parts()
        end = jnp.int32(self.staged.schedule.end)
        table = self.backward_at(gradients, dx_BtD, end, boundary=True)
        return replace_part(zeros, {"embedding": {"table": table}}), no_parts()


class ReturningGradients(NamedTuple):
    """Gradients on the way from the first stage to the stages whose micro-batches they are of.

    Attributes:
      in_transit_BtD: the one that passes this stage.
      arrived_JBtD: those that arrived, of this stage's local micro-batches.
    """

    in_transit_BtD: jax.Array
    arrived_JBtD: jax.Array


class LeadingInputs:
    """The leading layers, run on each stage's local micro-batches.

    Micro-batch k comes from stage k % P. Stage s starts to send it, or its
    slices, s ticks before the first stage takes it.

    Attributes:
      x_JBtD: results of the leading layers, positions ordered by slices.
    """

    def __init__(self, staged: StagedModel):
        self.staged = staged
        local = jnp.arange(staged.local_micro_batches)
        self.x_JBtD = lax.map(lambda j: staged.run_leading(staged.weights.outer, j)[0], local)
        like_BtD = self.initial()[0]
        self.link = staged.link("stage", like_BtD)
        self.gradient_link = staged.link("stage_gradient", like_BtD)

    def initial(self) -> tuple[jax.Array, jax.Array]:
        """Returns hidden states [B, t, D] of real tokens, twice: as input, and as inbound."""
        x_BtD = self.staged.slice_of(self.x_JBtD[0], jnp.int32(0))
        return x_BtD, x_BtD

    def input_at(self, inbound: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the first stage's input at a boundary tick, and sends the inbound ones on.

        Wire: hidden states of one task, to the previous stage.

        Args:
          inbound: hidden states [B, t, D] that arrived at this stage, on the way to the first.
        Returns:
          The input, of use on the first stage alone, and the next inbound.
        """
        staged, n = self.staged, t + self.staged.stage_index
        k, _ = staged.nearest(staged.schedule.micro_batch(n))
        owner, j = staged.owner(k)
        local_BtD = staged.slice_of(entry(self.x_JBtD, j), staged.schedule.section(n))
        x_BtD = jnp.where(owner == staged.stage_index, local_BtD, inbound)
        return x_BtD, self.link.to_previous(self.link.encode_once(x_BtD))

    def initial_gradients(self) -> ReturningGradients:
        """Returns the state of gradients before the first tick."""
        return ReturningGradients(jnp.zeros_like(self.initial()[0]), jnp.zeros_like(self.x_JBtD))

    def backward_at(
        self, gradients: ReturningGradients, dx_BtD: jax.Array, t: jax.Array, *, boundary: bool
    ) -> ReturningGradients:
        """Sends gradients one stage toward their owner; stores those that arrived.

        The input gradient that the first stage sends at a tick reaches stage s s ticks later.
        Wire: hidden states of one task, to the next stage. Arguments and result as of
        `EmbeddingInputs.backward_at`.
        """
        link = self.gradient_link
        passing_BtD = link.to_next(link.encode_once(gradients.in_transit_BtD))
        if boundary:
            passing_BtD = jnp.where(self.staged.stage_index == 0, dx_BtD, passing_BtD)
        staged, schedule = self.staged, self.staged.schedule
        delay = schedule.virtual_stages * staged.stages
        n = t - staged.stage_index - schedule.first_backward - delay
        k, here = staged.nearest(schedule.micro_batch(n))
        owner, j = staged.owner(k)
        section = schedule.section(n, backward=True)
        first_virtual_stage = n // staged.stages % schedule.virtual_stages == 0
        here &= (owner == staged.stage_index) & first_virtual_stage
        slice_index = section if schedule.slices > 1 else 0
        start = (j, 0, slice_index * passing_BtD.shape[1], 0)
        old = lax.dynamic_slice(gradients.arrived_JBtD, start, (1, *passing_BtD.shape))
        arrived_JBtD = lax.dynamic_update_slice(
            gradients.arrived_JBtD, jnp.where(here, passing_BtD[None], old), start
        )
        return ReturningGradients(passing_BtD, arrived_JBtD)

    def finish(self, gradients: ReturningGradients, dx_BtD: jax.Array) -> tuple[Tree, RouterParts]:
        """Delivers the last gradients, and runs backward through the leading layers.

        Arguments and results as of `EmbeddingInputs.finish`.
        """
        staged, end = self.staged, self.staged.schedule.end
        gradients = self.backward_at(gradients, dx_BtD, jnp.int32(end), boundary=True)

        def deliver(gradients: ReturningGradients, t: jax.Array) -> tuple[ReturningGradients, None]:
            return self.backward_at(gradients, dx_BtD, t, boundary=False), None

        gradients, _ = lax.scan(deliver, gradients, jnp.arange(end + 1, end + staged.stages))

        trained = staged.weights.trained_of(staged.weights.outer)
        weights = staged.leading_weights(trained)

        def add_one(sums: Any, scanned: Any) -> tuple[Any, None]:
            j, dx_BtD = scanned
            run = partial(staged.leading_with_loss, j=j)
            _, pullback, parts = jax.vjp(run, weights, has_aux=True)
            (gradient,) = pullback((dx_BtD, jnp.ones(())))
            return (add(sums[0], gradient), jax.tree.map(jnp.add, sums[1], parts)), None

        parts = zeros_of(jax.eval_shape(staged.leading_with_loss, weights, jnp.int32(0))[1])
        local = jnp.arange(staged.local_micro_batches), gradients.arrived_JBtD
        (sums, parts), _ = lax.scan(add_one, (sums_like(weights), parts), local)
        return replace_part(sums_like(trained), sums), parts


def build_inputs(staged: StagedModel) -> EmbeddingInputs | LeadingInputs:
    """Returns the source of the first stage's inputs."""
    return EmbeddingInputs(staged) if staged.only_embedding else LeadingInputs(staged)


def sums_like(tree: Tree) -> Tree:
    """Returns float32 zeros, to which gradients of weights are added."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), tree)


def zeros_of(shapes: Any) -> Any:
    """Returns zeros of these shapes and dtypes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


@jax.named_scope("stage_sums")
def add(sums: Tree, gradients: Tree) -> Tree:
    """Returns float32 sums with gradients added to them."""
    return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), sums, gradients)
