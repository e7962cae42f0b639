"""The gradients of a step whose layers are spread over pipeline stages.

Per device, inside the shard_map of the training mesh. Every device runs one program. At each tick a
stage runs its layers forward on one micro-batch, backward on another, or both, and passes on what
it has. Stage s works on micro-batch k forward at tick s + k; the last stage's hidden states are
answered one tick later by the loss, of which each stage computes a share of the positions; and
backward runs the same way back (`schedule_of`). Ticks outside of 0 <= k < M are the bubble: there a
stage computes with real tokens, and what comes of it counts nothing.

Weights enter once and gradients leave once a step (`comm.weights.enter`). Of a micro-batch only the
input of each stage is kept: backward runs the stage's layers again.

Embedding and the layers before the stages' run before the first tick (`step.staged_model`); what
they return moves down to the first stage, one stage a tick.

Letters: those of `layout.layout`; P stages, M micro-batches, k a micro-batch in the order in which
stages work on them, j one of a stage's own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm import stages, wire
from moejax.comm.weights.enter import enter_weights, leave_gradients
from moejax.comm.weights.residuals import detach_residuals
from moejax.step.loss import LossParts
from moejax.step.model import ModelDef
from moejax.step.schedule import Phase, schedule_of
from moejax.step.staged_model import RouterParts, StagedModel, put_head
from moejax.step.state import Batch, Reduction, TrainState, Tree
from moejax.step.whole_batch import (
    choose_levels,
    count_targets,
    reduce_whole_gradients,
    with_residuals,
)


class Carried(NamedTuple):
    """What a stage holds between ticks.

    Attributes:
      moving: hidden states on their way forward.
      kept: inputs of the stage that backward still needs, a slot each.
      answers: gradients of the last stage's hidden states, a slot each; zeros elsewhere.
      gradient: of the hidden states that this stage returned, from the stage after.
      returned: gradients of what the layers before the stages returned, on their way back.
      own_gradients: what came back, for each of this stage's own micro-batches.
      layers, head: sums of the weights' gradients, float32.
      nll: share of the loss.
      parts: sums over micro-batches.
    """

    moving: "Moving"
    kept: jax.Array
    answers: jax.Array
    gradient: jax.Array
    returned: jax.Array
    own_gradients: jax.Array
    layers: Tree
    head: Tree
    nll: jax.Array
    parts: RouterParts


def loss_gradients(
    model: ModelDef, state: TrainState, batch: Batch
) -> tuple[Tree, LossParts, Reduction]:
    """Returns gradients of the whole batch, the loss's parts, and the new codec state.

    `nll`, `balance` and `entropy` are this device's shares. The caller sums them over devices.
    """
    params = with_residuals(model, state)
    entered = enter_weights(params, model.dims, model.layouts, model.spec)
    staged = StagedModel(model, state, batch, entered, model.cfg.train.micro_batches)
    end = Ticks(staged, count_targets(model, batch).next).run()
    outer, before = backward_before(staged, end.own_gradients)
    outer = put_head(outer, jax.tree.map(jnp.add, staged.head_of(outer), end.head))
    summed = staged.join(outer, end.layers)
    gradients = leave_gradients(summed, params, model.dims, model.layouts, model.spec)
    gradients, residuals = detach_residuals(gradients, model.dims)
    gradients = reduce_whole_gradients(model, gradients)
    return (
        gradients,
        loss_parts(staged, before, end),
        choose_levels(model, state.reduction, residuals),
    )


class Ticks:
    """The ticks of a step."""

    def __init__(self, staged: StagedModel, num_targets: jax.Array):
        self.staged, self.num_targets = staged, num_targets
        name = staged.model.cfg.mesh.schedule
        self.schedule = schedule_of(name, staged.stages, staged.micro_batches)

    def run(self) -> Carried:
        """Runs all ticks. Returns what the last one left."""
        feed = Feed(self.staged)
        carried = self.first(feed)
        for phase in self.schedule.phases:

            def tick(carried: Carried, t: jax.Array, phase: Phase = phase) -> tuple[Carried, None]:
                if phase.answer:
                    carried = self.answer_tick(carried, t)
                if phase.forward:
                    carried = self.forward_tick(carried, t, feed)
                if phase.backward:
                    carried = self.backward_tick(carried, t)
                return carried, None

            carried, _ = lax.scan(tick, carried, jnp.arange(phase.start, phase.stop))

        def bring_back(carried: Carried, t: jax.Array) -> tuple[Carried, None]:
            return self.return_gradients(carried, t), None

        end = self.schedule.phases[-1].stop
        return lax.scan(bring_back, carried, jnp.arange(end, end + self.staged.stages - 1))[0]

    def first(self, feed: "Feed") -> Carried:
        """Returns what a stage holds before the first tick."""
        staged, x_BtD = self.staged, feed.x_JBtD[0]
        parts = jax.eval_shape(staged.in_stage, staged.layers, x_BtD, jnp.int32(0))[1]

        def slots(count: int) -> jax.Array:
            return jnp.zeros((count, *x_BtD.shape), x_BtD.dtype)

        return Carried(
            moving=feed.first(),
            kept=slots(self.schedule.kept),
            answers=slots(self.schedule.answers),
            gradient=jnp.zeros_like(x_BtD),
            returned=jnp.zeros_like(x_BtD),
            own_gradients=jnp.zeros_like(feed.x_JBtD),
            layers=_sums(staged.layers),
            head=_sums(staged.head_of(staged.outer)),
            nll=jnp.zeros(()),
            parts=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parts),
        )

    def forward_tick(self, carried: Carried, t: jax.Array, feed: "Feed") -> Carried:
        """Runs this stage's layers on a micro-batch, and keeps its input."""
        x_BtD, k, valid = feed.input(carried.moving, t)
        slot = (self.staged.stage + k) % self.schedule.kept
        return carried._replace(
            kept=_put(carried.kept, x_BtD, slot, valid), moving=feed.forward(carried.moving, t)
        )

    def answer_tick(self, carried: Carried, t: jax.Array) -> Carried:
        """Computes the loss of what the last stage left, each stage that of some positions."""
        staged, k = self.staged, t - self.staged.stages
        y_BtD = stages.spread_positions(carried.moving.left, staged.layout)
        answer = jax.value_and_grad(staged.answer, argnums=(0, 1))
        head = staged.head_of(staged.outer)
        nll, (head, dy_BtD) = answer(head, y_BtD, k, self.num_targets)
        dy_BtD = stages.collect_positions(dy_BtD, staged.layout)
        slot = k % self.schedule.answers
        return carried._replace(
            answers=lax.dynamic_update_index_in_dim(carried.answers, dy_BtD, slot, 0),
            head=_add(carried.head, head),
            nll=carried.nll + nll,
        )

    def backward_tick(self, carried: Carried, t: jax.Array) -> Carried:
        """Runs a micro-batch through this stage's layers again, and its gradient back."""
        staged, schedule = self.staged, self.schedule
        behind = staged.stages - 1 - staged.stage
        k, valid = staged.numbered(t - schedule.begins - behind)
        x_BtD = _get(carried.kept, (staged.stage + k) % schedule.kept)
        answer = _get(carried.answers, k % schedule.answers)
        dy_BtD = jnp.where(behind == 0, answer, carried.gradient)
        dy_BtD = jnp.where(valid, dy_BtD, 0)
        run = partial(staged.in_stage, k=k)
        _, pull, parts = jax.vjp(run, staged.layers, x_BtD, has_aux=True)
        layers, dx_BtD = pull((dy_BtD, valid.astype(jnp.float32)))
        carried = carried._replace(
            gradient=stages.to_previous(dx_BtD, staged.layout),
            returned=jnp.where(staged.stage == 0, dx_BtD, carried.returned),
            layers=_add(carried.layers, layers),
            parts=jax.tree.map(lambda x, y: x + jnp.where(valid, y, 0), carried.parts, parts),
        )
        return self.return_gradients(carried, t)

    def return_gradients(self, carried: Carried, t: jax.Array) -> Carried:
        """Keeps the gradient that has come back to where its micro-batch is from, and moves on.

        What the first stage returns at tick u reaches stage s at tick u + s.
        """
        staged = self.staged
        u = t - self.schedule.begins - (staged.stages - 1) - 2 * staged.stage
        j, here = u // staged.stages, u % staged.stages == 0
        here &= (j >= 0) & (j < staged.each)
        slot = jnp.clip(j, 0, staged.each - 1)
        return carried._replace(
            own_gradients=_put(carried.own_gradients, carried.returned, slot, here),
            returned=stages.to_next(carried.returned, staged.layout),
        )


class Moving(NamedTuple):
    """Hidden states on their way forward.

    Attributes:
      arrived: from the stage before, for the next forward.
      fed: what the layers before the stages returned, on its way to the first stage.
      left: what the last forward returned.
    """

    arrived: jax.Array
    fed: jax.Array
    left: jax.Array


class Feed:
    """Inputs of the stages: what the layers before them returned, and what stages pass on.

    Each stage in turn has the next micro-batch. At every P-th tick all put their next one on a
    chain that ends at the first stage.

    Attributes:
      x_JBtD: hidden states of this stage's own micro-batches.
    """

    def __init__(self, staged: StagedModel):
        self.staged = staged
        each = jnp.arange(staged.each)
        self.x_JBtD = lax.map(lambda j: staged.run_before(staged.outer, j)[0], each)

    def first(self) -> Moving:
        """Returns what a stage holds before the first tick: real tokens, so that none is idle."""
        return Moving(self.x_JBtD[0], self.x_JBtD[0], self.x_JBtD[0])

    def _fed(self, moving: Moving, t: jax.Array) -> jax.Array:
        staged = self.staged
        new = _get(self.x_JBtD, jnp.minimum(t // staged.stages, staged.each - 1))
        return jnp.where(t % staged.stages == 0, new, moving.fed)

    def input(self, moving: Moving, t: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns this stage's input at a tick, its micro-batch, and whether there is one."""
        k, valid = self.staged.numbered(t - self.staged.stage)
        return jnp.where(self.staged.stage == 0, self._fed(moving, t), moving.arrived), k, valid

    def forward(self, moving: Moving, t: jax.Array) -> Moving:
        """Runs this stage's layers on its input, and sends the result on."""
        staged = self.staged
        x_BtD, k, _ = self.input(moving, t)
        y_BtD, _ = staged.run_stage(staged.layers, x_BtD, k)
        fed = stages.to_previous(self._fed(moving, t), staged.layout)
        return Moving(stages.to_next(y_BtD, staged.layout), fed, y_BtD)


def forward_through_stages(
    staged: StagedModel, answer: Callable[[jax.Array, jax.Array], Any]
) -> Any:
    """Runs all micro-batches forward alone. Returns their answers, stacked in the order of k.

    Args:
      answer: of (this stage's share of the positions of what the last stage left, k).
    """
    feed, P = Feed(staged), staged.stages

    def forward(moving: Moving, t: jax.Array) -> tuple[Moving, None]:
        return feed.forward(moving, t), None

    def both(moving: Moving, t: jax.Array) -> tuple[Moving, Any]:
        y_BtD = stages.spread_positions(moving.left, staged.layout)
        return feed.forward(moving, t), answer(y_BtD, t - P)

    moving, _ = lax.scan(forward, feed.first(), jnp.arange(P))
    return lax.scan(both, moving, jnp.arange(P, P + staged.micro_batches))[1]


def backward_before(staged: StagedModel, own_gradients: jax.Array) -> tuple[Tree, RouterParts]:
    """Returns the gradients of `outer`, without those of the loss, and the parts' sums."""

    def add(sums: Any, scanned: Any) -> tuple[Any, None]:
        j, dx_BtD = scanned
        _, pull, parts = jax.vjp(partial(staged.before, j=j), staged.outer, has_aux=True)
        (outer,) = pull((dx_BtD, jnp.ones(())))
        return (_add(sums[0], outer), jax.tree.map(jnp.add, sums[1], parts)), None

    zeros = _sums(staged.outer)
    parts = jax.eval_shape(staged.before, staged.outer, jnp.int32(0))[1]
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parts)
    return lax.scan(add, (zeros, none), (jnp.arange(staged.each), own_gradients))[0]


def loss_parts(staged: StagedModel, before: RouterParts, end: Carried) -> LossParts:
    """Returns the parts of the loss, those of expert layers in layer order."""
    stage = staged.layout.stage

    def joined(own: jax.Array, staged: jax.Array) -> jax.Array:
        both = [wire.all_reduce(own, stage, tag=None)] if len(own) else []
        both += [wire.all_gather(staged, stage, dim=0, tag=None)] if len(staged) else []
        return jnp.concatenate(both) if both else own

    return LossParts(
        end.nll,
        before.balance + end.parts.balance,
        before.entropy + end.parts.entropy,
        joined(before.load_LE, end.parts.load_LE),
        joined(before.dropped_L, end.parts.dropped_L),
    )


def _get(slots: jax.Array, slot: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(slots, slot, keepdims=False)


def _sums(tree: Tree) -> Tree:
    """Returns zeros to which gradients of weights are added."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), tree)


def _put(slots: jax.Array, x: jax.Array, slot: jax.Array, valid: jax.Array) -> jax.Array:
    """Writes to a slot, if valid."""
    x = jnp.where(valid, x, _get(slots, slot))
    return lax.dynamic_update_index_in_dim(slots, x, slot, 0)


def _add(sums: Tree, more: Tree) -> Tree:
    """Adds to float32 sums."""
    return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), sums, more)
