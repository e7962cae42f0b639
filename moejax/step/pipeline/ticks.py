"""The gradients of a step whose layers are spread over pipeline stages.

Per device, inside the shard_map of the training mesh. Every device runs one program. At each tick
(`step.pipeline.schedule`) a stage runs a task forward, a task backward, or both:

1. Gradients return: the gradient of the previous tick is sent to the previous stage, and that of
   the first stage toward the leading layers (`step.pipeline.inputs`).
2. Loss step: each stage computes the loss of the last stage's output of the previous tick, for its
   share of the positions (`step.pipeline.loss`). The last stage gets the output gradients.
3. Forward: the stage runs its layers on its input, saves residuals in a slot
   (`step.pipeline.stage`), and sends its output to the next stage (`step.pipeline.transfers`).
4. Backward: the stage runs the output gradient that arrived in 1, or on the last stage that of a
   loss step, back through its layers, with the residuals of the task's slot.

So a gradient travels while the next tick computes forward, and activations travel while backward
is computed. In a combined schedule 3 and 4 come first, layer by layer in alternation; then all is
sent, and travels during the loss step.

Letters: those of `layout.layout`; P stages, M micro-batches, k a micro-batch in the order in which
stages run them, t a tick, L this stage's layers, of all its virtual stages, S slots.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm import wire
from moejax.comm.weights.residuals import attach_residuals, detach_residuals
from moejax.comm.weights.stage_weights import reduce_stage_gradients
from moejax.step.full_batch import NumTargets, count_targets, reduce_replicated_gradients
from moejax.step.loss import LossParts
from moejax.step.model import ModelDef
from moejax.step.pipeline.inputs import add, sums_like, zeros_of
from moejax.step.pipeline.loss import HeadParts, OutputHead
from moejax.step.pipeline.model import RouterParts, StagedModel, StageTask
from moejax.step.pipeline.schedule import Cycle, Phase
from moejax.step.pipeline.stage import Gradients, SavingStage, Slots, any_task, build_stage
from moejax.step.pipeline.transfers import Activations, ActivationTransfers
from moejax.step.pipeline.weights import entry, replace_part
from moejax.step.state import Batch, TrainState, Tree


class TickState(NamedTuple):
    """A stage's arrays between two ticks.

    Attributes:
      activations: hidden states on the way forward.
      slots: saved activations of tasks that wait for backward.
      loss_gradients: output gradients of the last stage from loss steps [S, B, t, D]; undefined on
        other stages.
      input_gradient: of the last backward task [B, t, D].
      gradient_in_transit: the same, encoded, which is sent at the next tick. In a combined schedule
        the gradient that arrived from the next stage, decoded.
      codec_errors: with feedback the errors of earlier encodings: by backward [virtual stages, B,
        t, D], and by loss steps [B, t / P, D]; None without.
      leading: gradients of the weights before the stages: the state of `inputs.backward_at`.
      layers: float32 sums of the gradients of this stage's layers, [L, ...].
      past: gradients of keys and values, from later slices: `Gradients.past`.
      head: float32 sums of the output head's gradients.
      head_parts: sums of the parts of loss steps.
      router_parts: sums of the parts of this stage's layers, counts [L, ...].
    """

    activations: Activations
    slots: Slots
    loss_gradients: jax.Array
    input_gradient: jax.Array
    gradient_in_transit: jax.Array
    codec_errors: tuple[jax.Array | None, jax.Array | None]
    leading: Any
    layers: Tree
    past: list[jax.Array]
    head: Tree
    head_parts: HeadParts
    router_parts: RouterParts


def loss_gradients(
    model: ModelDef, state: TrainState, batch: Batch
) -> tuple[Tree, LossParts, Tree]:
    """Returns gradients of the full batch, the loss's parts, and the new codec state.

    `nll`, `balance` and `entropy` are this device's shares. The caller sums them over devices.
    """
    params = attach_residuals(state.params, state.reduction, model.dims, state.step)
    micro_batches, slices = model.cfg.train.micro_batches, model.cfg.mesh.stage_slices
    staged = StagedModel(model, state, batch, params, micro_batches, slices, training=True)
    ticks = Ticks(staged, count_targets(model, batch))
    end = ticks.run()
    outer, leading_parts = ticks.inputs.finish(end.leading, end.input_gradient)
    head = jax.tree.map(jnp.add, ticks.head.part_of(outer), end.head)
    summed = staged.weights.join(replace_part(outer, head), end.layers)
    gradients = reduce_stage_gradients(summed, params, model.dims, model.layouts, model.spec)
    gradients, residuals = detach_residuals(gradients, model.dims)
    gradients = reduce_replicated_gradients(model, gradients)
    return gradients, join_loss_parts(staged, leading_parts, end), residuals


class Ticks:
    """The ticks of a step: methods return the state after a cycle, a tick, or a part of one."""

    def __init__(self, staged: StagedModel, num_targets: NumTargets):
        self.staged, self.schedule = staged, staged.schedule
        self.head, self.transfers = OutputHead(staged, num_targets), ActivationTransfers(staged)
        self.inputs, self.stage = self.transfers.inputs, build_stage(staged)
        self.gradient_link = staged.link("stage_gradient", self.transfers.initial.input_BtD)

    def run(self) -> TickState:
        """Runs all ticks. Returns the state after the last one."""
        state, first = self.initial_state(), 0
        for cycle in self.schedule.cycles:
            starts = first + cycle.length * jnp.arange(cycle.times)
            if cycle.times == 1:
                state = self.cycle(state, starts[0], cycle.phases)
            else:

                def repeat(state: TickState, start: jax.Array, cycle: Cycle = cycle) -> Any:
                    return self.cycle(state, start, cycle.phases), None

                state, _ = lax.scan(repeat, state, starts)
            first += cycle.length * cycle.times
        return state

    def cycle(self, state: TickState, start: jax.Array, phases: tuple[Phase, ...]) -> TickState:
        """Runs phases one after the other, their ticks counted from `start`."""
        for phase in phases:

            def tick(state: TickState, t: jax.Array, phase: Phase = phase) -> Any:
                return self.tick(state, t, phase), None

            state, _ = lax.scan(tick, state, start + jnp.arange(phase.start, phase.stop))
        return state

    def tick(self, state: TickState, t: jax.Array, phase: Phase) -> TickState:
        """Runs tick t of a phase, while saved activations travel."""
        following = self.backward_at(t + 1)
        state = state._replace(slots=self.stage.begin_tick(state.slots, phase, following))
        state = self.compute(state, t, phase)
        return state._replace(slots=self.stage.end_tick(state.slots, phase, following))

    def compute(self, state: TickState, t: jax.Array, phase: Phase) -> TickState:
        """Computes what tick t of a phase has."""
        if phase.backward:
            leading = self.inputs.backward_at(
                state.leading, state.input_gradient, t, boundary=phase.boundary
            )
            state = state._replace(leading=leading)
        if self.schedule.combined:
            return self.combined_tick(state, t, phase)
        dy_BtD = self.to_previous(state.gradient_in_transit) if phase.backward else None
        if phase.loss:
            state = self.loss_step(state, t)
        if phase.forward:
            state = self.forward_step(state, t, phase)
        if dy_BtD is not None:
            state = self.backward_step(state, dy_BtD, t, phase)
        return state

    def combined_tick(self, state: TickState, t: jax.Array, phase: Phase) -> TickState:
        """Runs tick t of a combined schedule: the passes in alternation, then the loss step."""
        if phase.forward and phase.backward:
            state = self.combined_step(state, t, phase)
        elif phase.forward:
            state = self.forward_step(state, t, phase)
        elif phase.backward:
            state = self.backward_step(state, state.gradient_in_transit, t, phase)
        if phase.backward:
            state = state._replace(gradient_in_transit=self.to_previous(state.gradient_in_transit))
        return self.loss_step(state, t) if phase.loss else state

    def initial_state(self) -> TickState:
        """Returns the state before the first tick."""
        staged, activations = self.staged, self.transfers.initial
        x_BtD, count = activations.input_BtD, staged.virtual_stages
        parts = jax.eval_shape(lambda x: self.stage.layers.run_saving(x, any_task())[2], x_BtD)

        def every(counts: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            """[L, ...] of the layers of all virtual stages."""
            shape = (count * counts.shape[0], *counts.shape[1:])
            return jax.ShapeDtypeStruct(shape, counts.dtype)

        names = ("load_LE", "uneven_L3", "needed_LEQ", "replayed_L2")
        counts = {name: getattr(parts, name) for name in names}
        parts = parts._replace(**jax.tree.map(every, counts))
        share_BtD, zero_BtD = x_BtD[:, : x_BtD.shape[1] // staged.stages], jnp.zeros_like(x_BtD)
        combined, link = self.schedule.combined, self.gradient_link
        stacked_VBtD = jnp.broadcast_to(x_BtD, (count, *x_BtD.shape))
        past = [(staged.repeats, *x.shape) for x in staged.past_shapes(x_BtD)]
        loss = partial(self.head.loss, k=jnp.int32(0), slice_index=jnp.int32(0))
        head_parts = jax.eval_shape(loss, self.head.trained, share_BtD)[1]
        return TickState(
            activations=activations,
            slots=self.stage.empty_slots(self.schedule, x_BtD),
            loss_gradients=jnp.zeros((self.schedule.loss_slots, *x_BtD.shape), x_BtD.dtype),
            input_gradient=zero_BtD,
            gradient_in_transit=zero_BtD if combined else link.encode_once(zero_BtD),
            codec_errors=(link.first_error(stacked_VBtD), link.first_error(share_BtD)),
            leading=self.inputs.initial_gradients(),
            layers=sums_like(staged.weights.trained_layers),
            past=[jnp.zeros(shape, jnp.float32) for shape in past],
            head=sums_like(self.head.trained),
            head_parts=zeros_of(head_parts),
            router_parts=zeros_of(parts),
        )

    def forward_step(self, state: TickState, t: jax.Array, phase: Phase) -> TickState:
        """Runs a task forward. Returns the state with its residuals, and its output sent."""
        x_BtD, inbound = self.transfers.receive(state.activations, t, boundary=phase.boundary)
        task = self.staged.forward_task(t)
        slots, y_BtD, parts = self.stage.forward(state.slots, x_BtD, task)
        activations = self.transfers.send(y_BtD, inbound)
        return _add_parts(state._replace(slots=slots, activations=activations), parts, task)

    def backward_step(
        self, state: TickState, dy_BtD: jax.Array, t: jax.Array, phase: Phase
    ) -> TickState:
        """Runs a task backward. Returns the state with its gradients.

        Args:
          dy_BtD: output gradient from the next stage.
        """
        task, gradients = self.backward_task(state, dy_BtD, t, phase)
        gradients, parts = self.stage.backward(state.slots, task, gradients)
        return _add_parts(self.with_gradients(state, gradients, task), parts, task)

    def combined_step(self, state: TickState, t: jax.Array, phase: Phase) -> TickState:
        """Runs a task forward and another backward, their layers in alternation."""
        assert isinstance(self.stage, SavingStage)  # see `config.checks`
        x_BtD, inbound = self.transfers.receive(state.activations, t, boundary=phase.boundary)
        forward = self.staged.forward_task(t)
        backward, gradients = self.backward_task(state, state.gradient_in_transit, t, phase)
        slots, y_BtD, parts, gradients = self.stage.forward_and_backward(
            state.slots, x_BtD, forward, backward, gradients
        )
        activations = self.transfers.send(y_BtD, inbound)
        state = state._replace(slots=slots, activations=activations)
        return _add_parts(self.with_gradients(state, gradients, backward), parts, forward)

    def loss_step(self, state: TickState, t: jax.Array) -> TickState:
        """Computes the loss of the last stage's output, each stage for its share of positions.

        Returns the state with the head's gradients and, on the last stage, the output gradient.
        Wire: a share of the encoded output gradient from each stage, to the last.
        """
        schedule, n = self.schedule, t - self.schedule.first_loss
        k, slice_index = schedule.micro_batch(n), n % schedule.slices
        y_BtD = self.transfers.last_output(state.activations)
        loss = jax.value_and_grad(self.head.loss, argnums=(0, 1), has_aux=True)
        (_, parts), (head, dy_BtD) = loss(self.head.trained, y_BtD, k, slice_index)
        of_backward, error = state.codec_errors
        encoded, error = self.gradient_link.encode(dy_BtD, error, jnp.bool_(True))
        dy_BtD = self.gradient_link.gather_to_last(encoded)  # B t/P D -> B t D
        slot = schedule.loss_slot(k, slice_index)
        return state._replace(
            loss_gradients=lax.dynamic_update_index_in_dim(state.loss_gradients, dy_BtD, slot, 0),
            codec_errors=(of_backward, error),
            head=add(state.head, head),
            head_parts=jax.tree.map(jnp.add, state.head_parts, parts),
        )

    def to_previous(self, encoded: jax.Array) -> jax.Array:
        """Sends a gradient to the previous stage. Wire: all of the encoded array."""
        return self.gradient_link.to_previous(encoded, around=self.transfers.interleaved)

    def backward_at(self, t: jax.Array) -> StageTask:
        """Returns the task that runs backward at tick t."""
        stages_after = self.staged.stages - 1 - self.staged.stage_index
        n = t - self.schedule.first_backward - stages_after
        return self.staged.task(n, self.schedule.section(n, backward=True))

    def backward_task(
        self, state: TickState, dy_BtD: jax.Array, t: jax.Array, phase: Phase
    ) -> tuple[StageTask, Gradients]:
        """Returns the task that runs backward at tick t, and the gradients that it starts from.

        Args:
          dy_BtD: output gradient from the next stage; the last stage has that of a loss step.
        """
        task, schedule = self.backward_at(t), self.schedule
        if phase.boundary:
            slot = schedule.loss_slot(task.micro_batch, task.slice_index)
            loss_BtD = entry(state.loss_gradients, slot)
            is_last = self.staged.stage_index == self.staged.stages - 1
            dy_BtD = jnp.where(is_last, loss_BtD, dy_BtD)
        # Backward begins with the last slice, whose keys no later slice has attended to.
        is_last = task.slice_index == schedule.slices - 1
        past = [jnp.where(is_last, 0, x) for x in state.past]
        return task, Gradients(jnp.where(task.valid, dy_BtD, 0), state.layers, past)

    def with_gradients(self, state: TickState, gradients: Gradients, task: StageTask) -> TickState:
        """Returns the state with the gradients of a task that has run backward."""
        errors, of_loss = state.codec_errors
        error = None if errors is None else entry(errors, task.virtual_stage)
        encoded, error = self.gradient_link.encode(gradients.dy_BtD, error, task.valid)
        if errors is not None:
            errors = lax.dynamic_update_index_in_dim(errors, error, task.virtual_stage, 0)
        return state._replace(
            input_gradient=gradients.dy_BtD,
            gradient_in_transit=encoded,
            codec_errors=(errors, of_loss),
            layers=gradients.weights,
            past=gradients.past,
        )


def _add_parts(state: TickState, parts: RouterParts | None, task: StageTask) -> TickState:
    """Returns the state with a task's parts added, if there are any and the task is valid."""
    if parts is None:
        return state
    sums = state.router_parts

    def add_counts(sums: jax.Array, counts: jax.Array) -> jax.Array:
        first = task.virtual_stage * len(counts)
        old = lax.dynamic_slice_in_dim(sums, first, len(counts))
        return lax.dynamic_update_slice_in_dim(
            sums, old + jnp.where(task.valid, counts, 0), first, 0
        )

    sums = RouterParts(
        sums.balance + jnp.where(task.valid, parts.balance, 0),
        sums.entropy + jnp.where(task.valid, parts.entropy, 0),
        add_counts(sums.load_LE, parts.load_LE),
        add_counts(sums.uneven_L3, parts.uneven_L3),
        *jax.tree.map(add_counts, sums[4:], parts[4:]),
    )
    return state._replace(router_parts=sums)


def join_loss_parts(staged: StagedModel, leading: RouterParts, end: TickState) -> LossParts:
    """Returns the parts of the loss, with counts of all expert layers in layer order.

    Wire: counts of the leading layers, summed over stages; counts of the stages' layers, gathered.

    Args:
      leading: parts of the leading layers, of this stage's local micro-batches.
      end: the state after the last tick.
    """
    axis, stages, head = staged.layout.stage, staged.stages, end.head_parts.router

    def join(leading: jax.Array, layers: jax.Array, head: jax.Array) -> jax.Array:
        parts = [wire.all_reduce(leading, axis, tag=None)] if len(leading) else []
        if len(layers):
            every = wire.all_gather(layers, axis, dim=0, tag=None)  # V L ... -> P V L ...
            apart = every.reshape(stages, staged.virtual_stages, -1, *every.shape[1:])
            # Virtual stage 0 of all stages comes first: P V L ... -> V P L ...
            parts.append(apart.swapaxes(0, 1).reshape(every.shape))
        parts += [head] if len(head) else []
        return jnp.concatenate(parts) if parts else leading

    def replayed(parts: RouterParts) -> jax.Array:
        if parts.replayed_L2 is not None:
            return parts.replayed_L2
        return jnp.zeros((len(parts.load_LE), 2), jnp.int32)

    layers, is_replayed = end.router_parts, staged.local_batch.expert_BTLK is not None
    needed = [n for n in (leading.needed_LEQ, layers.needed_LEQ, head.needed_LEQ) if n is not None]
    return LossParts(
        end.head_parts.nll,
        leading.balance + layers.balance + head.balance,
        leading.entropy + layers.entropy + head.entropy,
        join(leading.load_LE, layers.load_LE, head.load_LE),
        join(leading.uneven_L3, layers.uneven_L3, head.uneven_L3),
        end.head_parts.ahead,
        jnp.concatenate(needed) if needed else None,
        join(*map(replayed, (leading, layers, head))) if is_replayed else None,
    )
