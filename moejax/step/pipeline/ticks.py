"""The gradients of a step whose layers are spread over pipeline stages.

Per device, inside the shard_map of the training mesh. Every device runs one program. At each tick a
stage runs a chunk of its layers forward on one micro-batch, backward on another, or both, and
passes on what it has. The last stage's hidden states are answered one tick later by the loss, of
which each stage computes a share of the positions; and backward runs the same way back
(`step.pipeline.schedule`). Ticks at which a stage has no micro-batch are the bubble: there it
computes with real tokens, and what comes of it counts nothing.

Weights enter once and gradients leave once a step (`comm.weights.enter`). What is kept of a
micro-batch between its two passes: `step.pipeline.residuals`.

What the first stage starts from, and where its gradients go: `step.pipeline.inputs`. A gradient is
sent at the start of the tick after the one that made it, so that it travels while that tick
computes forward; hidden states are sent when they are made, and travel while backward is computed;
in a combined schedule all is sent at the end of a tick, and travels while the loss is computed.

Letters: those of `layout.layout`; P stages, M micro-batches, k a micro-batch in the order in which
stages work on them, j one of a stage's own.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm import wire
from moejax.comm.weights.enter import leave_gradients
from moejax.comm.weights.residuals import detach_residuals
from moejax.step.full_batch import (
    NumTargets,
    choose_levels,
    count_targets,
    reduce_replicated_gradients,
    with_residuals,
)
from moejax.step.loss import LossParts
from moejax.step.model import ModelDef
from moejax.step.pipeline.inputs import add, build_feed, get, sums_like
from moejax.step.pipeline.loss import AnswerParts, Answers
from moejax.step.pipeline.model import RouterParts, StagedModel, Visit
from moejax.step.pipeline.residuals import Back, Residuals, Slots, any_visit, build_keeper
from moejax.step.pipeline.schedule import Phase, Turn
from moejax.step.pipeline.visits import (
    Moving,
    build_visit,
    first_moving,
    sent,
    stage_input,
    to_answer,
    visit_forward,
)
from moejax.step.pipeline.weights import put_part
from moejax.step.state import Batch, Reduction, TrainState, Tree


class Carried(NamedTuple):
    """What a stage holds between ticks.

    Attributes:
      moving: hidden states on their way forward.
      kept: what backward still needs of micro-batches, a slot each.
      answers: gradients of the last stage's hidden states, a slot each; of no use elsewhere.
      input_gradient: of the stage's last input.
      gradient: the same, encoded: it is sent at the next tick. In a combined schedule the one that
        arrived from the stage after.
      errors: of what was encoded before, by backward, of each chunk, and by answers; None without
        feedback.
      back: gradients on their way back to what is before the stages.
      layers, head: sums of the weights' gradients, float32.
      past: gradients of keys and values by later slices: `Back.past`.
      answered: sums of what answers add to the loss's parts.
      parts: sums of what the stage's layers add.
    """

    moving: Moving
    kept: Slots
    answers: jax.Array
    input_gradient: jax.Array
    gradient: jax.Array
    errors: tuple[jax.Array | None, jax.Array | None]
    back: Any
    layers: Tree
    past: list[jax.Array]
    head: Tree
    answered: AnswerParts
    parts: RouterParts


def loss_gradients(
    model: ModelDef, state: TrainState, batch: Batch
) -> tuple[Tree, LossParts, Reduction]:
    """Returns gradients of the full batch, the loss's parts, and the new codec state.

    `nll`, `balance` and `entropy` are this device's shares. The caller sums them over devices.
    """
    params = with_residuals(model, state)
    micro_batches, slices = model.cfg.train.micro_batches, model.cfg.mesh.stage_slices
    staged = StagedModel(model, state, batch, params, micro_batches, slices, trains=True)
    ticks = Ticks(staged, count_targets(model, batch))
    end = ticks.run()
    outer, before = ticks.feed.finish(end.back, end.input_gradient)
    outer = put_part(outer, jax.tree.map(jnp.add, ticks.answers.head_of(outer), end.head))
    summed = staged.weights.join(outer, end.layers)
    gradients = leave_gradients(summed, params, model.dims, model.layouts, model.spec)
    gradients, residuals = detach_residuals(gradients, model.dims)
    gradients = reduce_replicated_gradients(model, gradients)
    return (
        gradients,
        loss_parts(staged, before, end),
        choose_levels(model, state.reduction, residuals),
    )


class Ticks:
    """The ticks of a step."""

    def __init__(self, staged: StagedModel, num_targets: NumTargets):
        self.staged, self.answers = staged, Answers(staged, num_targets)
        self.schedule, self.feed = staged.schedule, build_feed(staged)
        self.keeper, self.interleaved = build_keeper(staged), staged.chunks > 1
        x_BtD, fed = self.feed.first()
        self.start = first_moving(x_BtD, fed, staged.stages, interleaved=self.interleaved)
        self.ahead = staged.link("stage", x_BtD)
        self.behind = staged.link("stage_gradient", x_BtD)

    def run(self) -> Carried:
        """Runs all ticks. Returns what the last one left."""
        carried, first = self.first(), 0
        for turn in self.schedule.turns:
            starts = first + turn.length * jnp.arange(turn.times)
            if turn.times == 1:
                carried = self.turn(carried, starts[0], turn.phases)
            else:

                def again(carried: Carried, start: jax.Array, turn: Turn = turn) -> Any:
                    return self.turn(carried, start, turn.phases), None

                carried, _ = lax.scan(again, carried, starts)
            first += turn.length * turn.times
        return carried

    def turn(self, carried: Carried, start: jax.Array, phases: tuple[Phase, ...]) -> Carried:
        """Does phases one after the other, their ticks counted from `start`."""
        for phase in phases:

            def tick(carried: Carried, t: jax.Array, phase: Phase = phase) -> tuple[Carried, None]:
                return self.tick(carried, t, phase), None

            carried, _ = lax.scan(tick, carried, start + jnp.arange(phase.start, phase.stop))
        return carried

    def tick(self, carried: Carried, t: jax.Array, phase: Phase) -> Carried:
        """Does what a phase does at tick t."""
        if phase.backward:
            left = carried.input_gradient
            back = self.feed.move(carried.back, left, t, leave=phase.ends)
            carried = carried._replace(back=back)
        if self.schedule.combined:
            return self.combined_tick(carried, t, phase)
        arrived = self.to_previous(carried.gradient) if phase.backward else None
        if phase.answer:
            carried = self.answer_tick(carried, t)
        if phase.forward:
            carried = self.forward_tick(carried, t, phase)
        if arrived is not None:
            carried = self.backward_tick(carried, arrived, t, phase)
        return carried

    def combined_tick(self, carried: Carried, t: jax.Array, phase: Phase) -> Carried:
        """Does forward and backward, a layer of each in turn, and then the answer."""
        if phase.forward and phase.backward:
            carried = self.both_tick(carried, t, phase)
        elif phase.forward:
            carried = self.forward_tick(carried, t, phase)
        elif phase.backward:
            carried = self.backward_tick(carried, carried.gradient, t, phase)
        if phase.backward:
            carried = carried._replace(gradient=self.to_previous(carried.gradient))
        return self.answer_tick(carried, t) if phase.answer else carried

    def first(self) -> Carried:
        """Returns what a stage holds before the first tick."""
        staged, x_BtD = self.staged, self.start.arrived
        parts = jax.eval_shape(lambda x: self.keeper.layers.keep_all(x, any_visit())[2], x_BtD)
        every = parts._replace(
            load_LE=_of_chunks(parts.load_LE, staged.chunks),
            uneven_L3=_of_chunks(parts.uneven_L3, staged.chunks),
        )
        share_BtD, none_BtD = x_BtD[:, : x_BtD.shape[1] // staged.stages], jnp.zeros_like(x_BtD)
        combined = self.schedule.combined
        each_BtD = jnp.broadcast_to(x_BtD, (staged.chunks, *x_BtD.shape))
        past = [(staged.repeats, *x.shape) for x in staged.past_of(x_BtD)]
        return Carried(
            moving=self.start,
            kept=self.keeper.empty(self.schedule, x_BtD),
            answers=jnp.zeros((self.schedule.answers, *x_BtD.shape), x_BtD.dtype),
            input_gradient=none_BtD,
            gradient=none_BtD if combined else self.behind.encode_once(none_BtD),
            errors=(self.behind.first_error(each_BtD), self.behind.first_error(share_BtD)),
            back=self.feed.first_back(),
            layers=sums_like(staged.weights.trained_layers),
            past=[jnp.zeros(shape, jnp.float32) for shape in past],
            head=sums_like(self.answers.head),
            answered=_zeros_of(self._shapes_of_answer(share_BtD)),
            parts=_zeros_of(every),
        )

    def _shapes_of_answer(self, share_BtD: jax.Array) -> AnswerParts:
        k = jnp.int32(0)
        answer = partial(self.answers.loss, k=k, piece=k)
        return jax.eval_shape(answer, self.answers.head, share_BtD)[1]

    def forward_tick(self, carried: Carried, t: jax.Array, phase: Phase) -> Carried:
        """Runs a chunk of this stage's layers on a micro-batch."""
        x_BtD, fed = stage_input(self.staged, self.feed, carried.moving, t, enter=phase.ends)
        visit = visit_forward(self.staged, t)
        kept, y_BtD, parts = self.keeper.forward(carried.kept, x_BtD, visit)
        moving = sent(self.ahead, y_BtD, fed, interleaved=self.interleaved)
        return self.counted(carried._replace(kept=kept, moving=moving), parts, visit)

    def backward_tick(
        self, carried: Carried, arrived: jax.Array, t: jax.Array, phase: Phase
    ) -> Carried:
        """Runs a micro-batch's gradients back through a chunk of this stage's layers.

        Args:
          arrived: gradient from the stage after.
        """
        visit, back = self.way_back(carried, arrived, t, phase)
        back, parts = self.keeper.backward(carried.kept, visit, back)
        return self.counted(self.backed(carried, back, visit), parts, visit)

    def both_tick(self, carried: Carried, t: jax.Array, phase: Phase) -> Carried:
        """Runs layers forward on one micro-batch and backward on another, in turns."""
        assert isinstance(self.keeper, Residuals)  # see `config.checks`
        x_BtD, fed = stage_input(self.staged, self.feed, carried.moving, t, enter=phase.ends)
        ahead = visit_forward(self.staged, t)
        behind, back = self.way_back(carried, carried.gradient, t, phase)
        kept, y_BtD, parts, back = self.keeper.both(carried.kept, x_BtD, ahead, behind, back)
        moving = sent(self.ahead, y_BtD, fed, interleaved=self.interleaved)
        carried = self.backed(carried._replace(kept=kept, moving=moving), back, behind)
        return self.counted(carried, parts, ahead)

    def to_previous(self, encoded: jax.Array) -> jax.Array:
        """Sends a gradient to where its chunk's input is from."""
        return self.behind.to_previous(encoded, around=self.interleaved)

    def way_back(
        self, carried: Carried, arrived: jax.Array, t: jax.Array, phase: Phase
    ) -> tuple[Visit, Back]:
        """Returns which micro-batch goes back at tick t, and what its way back starts from."""
        behind, schedule = self.staged.stages - 1 - self.staged.stage, self.schedule
        n = t - schedule.begins - behind
        visit = build_visit(self.staged, n, schedule.kind(n, backward=True))
        dy_BtD = arrived
        if phase.ends:
            answer = get(carried.answers, schedule.answer_slot(visit.k, visit.piece))
            dy_BtD = jnp.where(behind == 0, answer, arrived)
        # The last slice comes first, and no later one has told of its keys.
        first = visit.piece == schedule.slices - 1
        past = [jnp.where(first, 0, x) for x in carried.past]
        return visit, Back(jnp.where(visit.valid, dy_BtD, 0), carried.layers, past)

    def backed(self, carried: Carried, back: Back, visit: Visit) -> Carried:
        """Returns what is held when a micro-batch has gone back."""
        errors, answers = carried.errors
        error = None if errors is None else get(errors, visit.chunk)
        gradient, error = self.behind.encode(back.dy_BtD, error, visit.valid)
        if errors is not None:
            errors = lax.dynamic_update_index_in_dim(errors, error, visit.chunk, 0)
        return carried._replace(
            input_gradient=back.dy_BtD,
            gradient=gradient,
            errors=(errors, answers),
            layers=back.sums,
            past=back.past,
        )

    def counted(self, carried: Carried, parts: RouterParts | None, visit: Visit) -> Carried:
        """Adds the parts of a micro-batch's loss, where there are any and they count."""
        if parts is None:
            return carried
        old = carried.parts

        def of_chunk(sums: jax.Array, own: jax.Array) -> jax.Array:
            first = visit.chunk * len(own)
            more = lax.dynamic_slice_in_dim(sums, first, len(own)) + jnp.where(visit.valid, own, 0)
            return lax.dynamic_update_slice_in_dim(sums, more, first, 0)

        sums = RouterParts(
            old.balance + jnp.where(visit.valid, parts.balance, 0),
            old.entropy + jnp.where(visit.valid, parts.entropy, 0),
            of_chunk(old.load_LE, parts.load_LE),
            of_chunk(old.uneven_L3, parts.uneven_L3),
        )
        return carried._replace(parts=sums)

    def answer_tick(self, carried: Carried, t: jax.Array) -> Carried:
        """Computes the loss of what the last stage left, each stage that of some positions."""
        schedule, n = self.schedule, t - self.schedule.answered
        k, piece = schedule.micro_batch(n), n % schedule.slices
        y_BtD = to_answer(self.ahead, carried.moving, interleaved=self.interleaved)
        answer = jax.value_and_grad(self.answers.loss, argnums=(0, 1), has_aux=True)
        (_, parts), (head, dy_BtD) = answer(self.answers.head, y_BtD, k, piece)
        encoded, error = self.behind.encode(dy_BtD, carried.errors[1], jnp.bool_(True))
        dy_BtD = self.behind.collect_positions(encoded)
        slot = schedule.answer_slot(k, piece)
        return carried._replace(
            answers=lax.dynamic_update_index_in_dim(carried.answers, dy_BtD, slot, 0),
            errors=(carried.errors[0], error),
            head=add(carried.head, head),
            answered=jax.tree.map(jnp.add, carried.answered, parts),
        )


def _zeros_of(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _of_chunks(own: Any, chunks: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array that has the layers of all chunks."""
    return jax.ShapeDtypeStruct((chunks * own.shape[0], *own.shape[1:]), own.dtype)


def loss_parts(staged: StagedModel, before: RouterParts, end: Carried) -> LossParts:
    """Returns the parts of the loss, those of expert layers in layer order."""
    stage, stages, chunks = staged.layout.stage, staged.stages, staged.chunks

    def joined(own: jax.Array, staged: jax.Array, ahead: jax.Array) -> jax.Array:
        parts = [wire.all_reduce(own, stage, tag=None)] if len(own) else []
        if len(staged):
            every = wire.all_gather(staged, stage, dim=0, tag=None)
            # A chunk's layers are those of all stages.
            by_chunk = every.reshape(stages, chunks, -1, *every.shape[1:]).swapaxes(0, 1)
            parts.append(by_chunk.reshape(every.shape))
        parts += [ahead] if len(ahead) else []
        return jnp.concatenate(parts) if parts else own

    ahead = end.answered.router
    return LossParts(
        end.answered.nll,
        before.balance + end.parts.balance + ahead.balance,
        before.entropy + end.parts.entropy + ahead.entropy,
        joined(before.load_LE, end.parts.load_LE, ahead.load_LE),
        joined(before.uneven_L3, end.parts.uneven_L3, ahead.uneven_L3),
        end.answered.ahead,
    )
