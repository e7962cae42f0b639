"""The gradients of a step whose layers are spread over pipeline stages.

Per device, inside the shard_map of the training mesh. Every device runs one program. At each tick a
stage runs its layers forward on one micro-batch, backward on another, or both, and passes on what
it has. Stage s works on micro-batch k forward at tick s + k; the last stage's hidden states are
answered one tick later by the loss, of which each stage computes a share of the positions; and
backward runs the same way back (`schedule_of`). Ticks outside of 0 <= k < M are the bubble: there a
stage computes with real tokens, and what comes of it counts nothing.

Weights enter once and gradients leave once a step (`comm.weights.enter`). What is kept of a
micro-batch between its two passes: `step.kept`.

What the first stage starts from, and where its gradients go: `step.feed`. A gradient is sent at the
start of the tick after the one that made it, so that it travels while that tick computes forward;
in a combined schedule all is sent at the end of a tick, and travels while the loss is computed.

Letters: those of `layout.layout`; P stages, M micro-batches, k a micro-batch in the order in which
stages work on them, j one of a stage's own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm import wire
from moejax.comm.weights.enter import enter_weights, leave_gradients
from moejax.comm.weights.residuals import detach_residuals
from moejax.step.feed import add, build_feed, get, sums_like
from moejax.step.kept import Back, Layers, Residuals, Visit, build_keeper
from moejax.step.loss import LossParts
from moejax.step.model import ModelDef
from moejax.step.schedule import Phase
from moejax.step.staged_model import RouterParts, StagedModel, put_head
from moejax.step.state import Batch, Reduction, TrainState, Tree
from moejax.step.whole_batch import (
    choose_levels,
    count_targets,
    reduce_whole_gradients,
    with_residuals,
)


class Moving(NamedTuple):
    """Hidden states on their way forward.

    Attributes:
      arrived: from the stage before, for the next forward.
      fed: what else moves towards the first stage.
      left: what the last forward returned.
    """

    arrived: jax.Array
    fed: Any
    left: jax.Array


class Carried(NamedTuple):
    """What a stage holds between ticks.

    Attributes:
      moving: hidden states on their way forward.
      kept: what backward still needs of micro-batches, a slot each.
      answers: gradients of the last stage's hidden states, a slot each; zeros elsewhere.
      gradient: of the stage's last input, encoded: it is sent at the next tick. In a combined
        schedule the one that arrived from the stage after.
      errors: of what was encoded before, by backward and by answers; None without feedback.
      back: gradients on their way back to what is before the stages.
      layers, head: sums of the weights' gradients, float32.
      nll: share of the loss.
      parts: sums over micro-batches.
    """

    moving: Moving
    kept: list[jax.Array]
    answers: jax.Array
    gradient: jax.Array
    errors: tuple[jax.Array | None, jax.Array | None]
    back: Any
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
    ticks = Ticks(staged, count_targets(model, batch).next)
    end = ticks.run()
    outer, before = ticks.feed.finish(end.back)
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
        self.schedule, self.feed = staged.schedule, build_feed(staged)
        self.keeper = build_keeper(staged)
        x_BtD, fed = self.feed.first()
        self.start = Moving(x_BtD, fed, x_BtD)
        self.ahead = staged.link("stage", x_BtD)
        self.behind = staged.link("stage_gradient", x_BtD)

    def run(self) -> Carried:
        """Runs all ticks. Returns what the last one left."""
        carried = self.first()
        for phase in self.schedule.phases:

            def tick(carried: Carried, t: jax.Array, phase: Phase = phase) -> tuple[Carried, None]:
                return self.tick(carried, t, phase), None

            carried, _ = lax.scan(tick, carried, jnp.arange(phase.start, phase.stop))
        return carried

    def tick(self, carried: Carried, t: jax.Array, phase: Phase) -> Carried:
        """Does what a phase does at tick t."""
        if phase.backward:
            carried = carried._replace(back=self.feed.pass_on(carried.back))
        if self.schedule.combined:
            return self.combined_tick(carried, t, phase)
        arrived = self.behind.to_previous(carried.gradient) if phase.backward else None
        if phase.answer:
            carried = self.answer_tick(carried, t)
        if phase.forward:
            carried = self.forward_tick(carried, t)
        if arrived is not None:
            carried = self.backward_tick(carried, arrived, t)
        return carried

    def combined_tick(self, carried: Carried, t: jax.Array, phase: Phase) -> Carried:
        """Does forward and backward, a layer of each in turn, and then the answer."""
        if phase.forward and phase.backward:
            carried = self.both_tick(carried, t)
        elif phase.forward:
            carried = self.forward_tick(carried, t)
        elif phase.backward:
            carried = self.backward_tick(carried, carried.gradient, t)
        if phase.backward:
            carried = carried._replace(gradient=self.behind.to_previous(carried.gradient))
        return self.answer_tick(carried, t) if phase.answer else carried

    def first(self) -> Carried:
        """Returns what a stage holds before the first tick."""
        staged, x_BtD = self.staged, self.start.arrived
        parts = jax.eval_shape(self.keeper.layers.keep_all, x_BtD, jnp.int32(0))[2]
        share_BtD, none_BtD = x_BtD[:, : x_BtD.shape[1] // staged.stages], jnp.zeros_like(x_BtD)
        combined = self.schedule.combined
        return Carried(
            moving=self.start,
            kept=self.keeper.empty(self.schedule.kept, x_BtD),
            answers=jnp.zeros((self.schedule.answers, *x_BtD.shape), x_BtD.dtype),
            gradient=none_BtD if combined else self.behind.encode_once(none_BtD),
            errors=(self.behind.first_error(x_BtD), self.behind.first_error(share_BtD)),
            back=self.feed.first_back(),
            layers=sums_like(staged.layers),
            head=sums_like(staged.head_of(staged.outer)),
            nll=jnp.zeros(()),
            parts=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parts),
        )

    def forward_tick(self, carried: Carried, t: jax.Array) -> Carried:
        """Runs this stage's layers on a micro-batch."""
        x_BtD, fed = stage_input(self.staged, self.feed, carried.moving, t)
        visit = self.visit(t - self.staged.stage)
        kept, y_BtD, parts = self.keeper.forward(carried.kept, x_BtD, visit)
        carried = carried._replace(kept=kept, moving=self.sent(y_BtD, fed))
        return _counted(carried, parts, visit.valid)

    def backward_tick(self, carried: Carried, arrived: jax.Array, t: jax.Array) -> Carried:
        """Runs a micro-batch's gradients back through this stage's layers.

        Args:
          arrived: gradient from the stage after.
        """
        visit, back = self.way_back(carried, arrived, t)
        back, parts = self.keeper.backward(carried.kept, visit, back)
        return _counted(self.backed(carried, back, visit, t), parts, visit.valid)

    def both_tick(self, carried: Carried, t: jax.Array) -> Carried:
        """Runs layers forward on one micro-batch and backward on another, in turns."""
        assert isinstance(self.keeper, Residuals)  # see `config.checks`
        x_BtD, fed = stage_input(self.staged, self.feed, carried.moving, t)
        ahead = self.visit(t - self.staged.stage)
        behind, back = self.way_back(carried, carried.gradient, t)
        kept, y_BtD, parts, back = self.keeper.both(carried.kept, x_BtD, ahead, behind, back)
        carried = carried._replace(kept=kept, moving=self.sent(y_BtD, fed))
        return _counted(self.backed(carried, back, behind, t), parts, ahead.valid)

    def visit(self, k: jax.Array) -> Visit:
        """Returns the visit of micro-batch k, or in a bubble of another that does not count."""
        k, valid = self.staged.numbered(k)
        return Visit(k, (self.staged.stage + k) % self.schedule.kept, valid)

    def sent(self, y_BtD: jax.Array, fed: Any) -> Moving:
        """Sends what forward returned to the next stage."""
        return Moving(self.ahead.to_next(self.ahead.encode_once(y_BtD)), fed, y_BtD)

    def way_back(self, carried: Carried, arrived: jax.Array, t: jax.Array) -> tuple[Visit, Back]:
        """Returns which micro-batch goes back at tick t, and what its way back starts from."""
        behind = self.staged.stages - 1 - self.staged.stage
        visit = self.visit(t - self.schedule.begins - behind)
        answer = get(carried.answers, visit.k % self.schedule.answers)
        dy_BtD = jnp.where(behind == 0, answer, arrived)
        return visit, Back(jnp.where(visit.valid, dy_BtD, 0), carried.layers)

    def backed(self, carried: Carried, back: Back, visit: Visit, t: jax.Array) -> Carried:
        """Returns what is held when a micro-batch has gone back."""
        gradient, error = self.behind.encode(back.dy_BtD, carried.errors[0], visit.valid)
        return carried._replace(
            gradient=gradient,
            errors=(error, carried.errors[1]),
            back=self.feed.take(carried.back, back.dy_BtD, t),
            layers=back.sums,
        )

    def answer_tick(self, carried: Carried, t: jax.Array) -> Carried:
        """Computes the loss of what the last stage left, each stage that of some positions."""
        staged, k = self.staged, t - self.schedule.answered
        y_BtD = self.ahead.spread_positions(carried.moving.left)
        answer = jax.value_and_grad(staged.answer, argnums=(0, 1))
        head = staged.head_of(staged.outer)
        nll, (head, dy_BtD) = answer(head, y_BtD, k, self.num_targets)
        encoded, error = self.behind.encode(dy_BtD, carried.errors[1], jnp.bool_(True))
        dy_BtD = self.behind.collect_positions(encoded)
        slot = k % self.schedule.answers
        return carried._replace(
            answers=lax.dynamic_update_index_in_dim(carried.answers, dy_BtD, slot, 0),
            errors=(carried.errors[0], error),
            head=add(carried.head, head),
            nll=carried.nll + nll,
        )


def _counted(carried: Carried, parts: RouterParts | None, valid: jax.Array) -> Carried:
    """Adds the parts of a micro-batch's loss, where there are any and they count."""
    if parts is None:
        return carried
    sums = jax.tree.map(lambda x, y: x + jnp.where(valid, y, 0), carried.parts, parts)
    return carried._replace(parts=sums)


def stage_input(
    staged: StagedModel, feed: Any, moving: Moving, t: jax.Array
) -> tuple[jax.Array, Any]:
    """Returns this stage's input at a tick, and what moves on towards the first stage."""
    first, fed = feed.input(moving.fed, t)
    return jnp.where(staged.stage == 0, first, moving.arrived), fed


def forward_through_stages(
    staged: StagedModel, answer: Callable[[jax.Array, jax.Array], Any]
) -> Any:
    """Runs all micro-batches forward alone. Returns their answers, stacked in the order of k.

    Args:
      answer: of (this stage's share of the positions of what the last stage left, k).
    """
    feed, layers, P = build_feed(staged), Layers(staged), staged.stages
    x_BtD, fed = feed.first()
    ahead = staged.link("stage", x_BtD)

    def forward(moving: Moving, t: jax.Array) -> tuple[Moving, None]:
        x_BtD, fed = stage_input(staged, feed, moving, t)
        y_BtD = layers.keep_nothing(x_BtD, staged.numbered(t - staged.stage)[0])
        return Moving(ahead.to_next(ahead.encode_once(y_BtD)), fed, y_BtD), None

    def both(moving: Moving, t: jax.Array) -> tuple[Moving, Any]:
        y_BtD = ahead.spread_positions(moving.left)
        return forward(moving, t)[0], answer(y_BtD, t - P)

    moving, _ = lax.scan(forward, Moving(x_BtD, fed, x_BtD), jnp.arange(P))
    return lax.scan(both, moving, jnp.arange(P, P + staged.micro_batches))[1]


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
