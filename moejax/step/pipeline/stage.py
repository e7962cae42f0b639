"""A stage's layers, forward and backward, and the activations that it saves between the two.

Per device, inside the shard_map of the training mesh. Backward is written out: forward calls
`jax.vjp` on each layer, and the residuals of its pullback are saved in a slot until the task's
backward. Weights are not saved: `vjp` returns the same array objects, matched by `id`. Gradients of
weights are added to their sums layer by layer, so those of all layers never exist beside the sums.

`mesh.stage_keeps` chooses the saved activations:

- `residuals`: `SavingStage` saves the residuals that `model.remat` keeps of each layer.
- `input`: `RecomputingStage` saves its input alone. Backward runs forward again, a third more
  products, and holds the residuals of one task then.

With `memory.residuals=host` a `DistantStage` has the slots in the host's memory. On the device are
two: of the task that ran forward, and of the one that runs backward. Copies have a whole tick:

    tick t - 1   a task runs forward, into slot AHEAD
    tick t       its residuals leave for the host, and those of the task that runs backward at
                 tick t + 1 come, while both passes of tick t compute

The last stage runs a task backward one tick after it ran forward. Its residuals cannot be back by
then; they go from one slot on the device to the other.

A layer here is one repeat of a layer group. Letters: those of `layout.layout`; L this stage's
layers, R = L / V those of one of its V virtual stages (`repeats`), S slots.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm import host
from moejax.comm.host import to_device, to_memory_of
from moejax.step.pipeline.model import Past, RouterParts, StagedModel, StageTask
from moejax.step.pipeline.schedule import Phase, PipelineSchedule
from moejax.step.pipeline.weights import entry
from moejax.step.state import Tree

Arrays = list[jax.Array]


class Slots(NamedTuple):
    """Activations that a stage saves between forward and backward.

    Attributes:
      saved: residuals of tasks, arrays [S, R, ...]; or their inputs [S, B, t, D].
      past: keys and values of micro-batches whose slices have begun, arrays [S, R, B, T, ...].
      distant: of a `DistantStage` all slots, on the host, and one more for tasks in the bubble:
        [S + 1, R, ...]. `saved` are then the two on the device.
      coming, leaving: during a tick the residuals that arrive for the next one, and those of the
        last one that have yet to leave, [R, ...].
      slot: of the last task that ran forward; its place among `distant`.
    """

    saved: Arrays
    past: Arrays
    distant: Sequence[jax.Array] = ()
    coming: Sequence[jax.Array] = ()
    leaving: Sequence[jax.Array] = ()
    slot: jax.Array | None = None


class Gradients(NamedTuple):
    """Gradients that backward passes from layer to layer.

    Attributes:
      dy_BtD: output gradient of the layer that is next.
      weights: float32 sums of the gradients of weights over tasks, [L, ...].
      past: gradients of keys and values, from later slices, float32 [R, B, T, ...].
    """

    dy_BtD: jax.Array
    weights: Tree
    past: Arrays


class Layers:
    """Single layers of the stage, forward and backward.

    `forward` must have been traced before `backward`, which reads the last two attributes. They are
    set first by `Ticks.initial_state`, through `run_saving`, and by each later trace again.

    Attributes:
      count: R.
      pullback_tree: structure of the last layer's pullback, whose leaves are its residuals.
      weight_index: for each of these residuals the index of the weight, or of the keys and values,
        that it is; None if it is saved.
    """

    def __init__(self, staged: StagedModel):
        self.staged, self.count = staged, staged.repeats
        self.pullback_tree: Any = None
        self.weight_index: list[int | None] = []

    def scan(self, body: Callable, carry: Any) -> Any:
        """Scans over the indices of R layers, unrolled as `model.scan_layers` says."""
        unroll = 1 if self.staged.model.cfg.model.scan_layers else self.count
        return lax.scan(body, carry, jnp.arange(self.count), unroll=unroll)

    def forward(
        self, x_BtD: jax.Array, task: StageTask, layer: jax.Array, past: Past
    ) -> tuple[jax.Array, Past, Arrays, RouterParts]:
        """Runs a layer.

        Args:
          layer: index in the virtual stage.
          past: the layer's keys and values of earlier slices, as of `StagedModel.run_layer`.
        Returns:
          Its output [B, t, D], a slice's own keys and values, the residuals to save, and its parts
          of the loss.
        """
        index = task.first_layer + layer
        staged = self.staged
        weights = staged.weights.layer(index)
        trained = staged.weights.trained_of(weights)

        def run(trained: Tree, past: Past, x_BtD: jax.Array) -> Any:
            merged = staged.weights.replace_trained(weights, trained)
            y_BtD, stats, keys_values = staged.run_layer(merged, past, x_BtD, task, index)
            loss, parts = staged.router_parts(stats, staged.slices)
            return (y_BtD, loss, keys_values), parts

        (y_BtD, _, keys_values), pullback, parts = jax.vjp(run, trained, past, x_BtD, has_aux=True)
        residuals, self.pullback_tree = jax.tree.flatten(pullback)
        index_of = {id(array): n for n, array in enumerate(jax.tree.leaves((weights, past)))}
        self.weight_index = [index_of.get(id(array)) for array in residuals]
        pairs = zip(residuals, self.weight_index, strict=True)
        return y_BtD, keys_values, [x for x, weight in pairs if weight is None], parts

    def backward(
        self, saved: Arrays, task: StageTask, layer: jax.Array, past: Past, gradients: Gradients
    ) -> Gradients:
        """Runs gradients backward through a layer.

        Args:
          saved: residuals that `forward` returned.
          layer, past: as given to `forward`.
          gradients: from the layer after.
        """
        index = task.first_layer + layer
        unused, inputs = iter(saved), jax.tree.leaves((self.staged.weights.layer(index), past))
        residuals = [next(unused) if n is None else inputs[n] for n in self.weight_index]
        share = task.valid.astype(jnp.float32)  # the gradient of the routers' losses
        of_layer = [entry(x, layer) for x in gradients.past]
        of_slice = [self.staged.slice_of(x, task.slice_index) for x in of_layer]
        of_slice = [x.astype(like.dtype) for x, like in zip(of_slice, past, strict=True)]
        pullback = jax.tree.unflatten(self.pullback_tree, residuals)
        weights, earlier, dx_BtD = pullback((gradients.dy_BtD, share, of_slice))
        sums = jax.tree.map(lambda s, g: _add_at(s, g, index), gradients.weights, weights)
        pairs = zip(gradients.past, earlier, strict=True)
        return Gradients(dx_BtD, sums, [_add_at(x, g, layer) for x, g in pairs])

    def run(self, x_BtD: jax.Array, task: StageTask) -> jax.Array:
        """Returns the output [B, t, D] of a virtual stage, and saves nothing."""

        def run_one(x_BtD: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            index = task.first_layer + index
            weights = self.staged.weights.layer(index)
            return self.staged.run_layer(weights, [], x_BtD, task, index)[0], None

        return self.scan(run_one, x_BtD)[0]

    def run_saving(
        self, x_BtD: jax.Array, task: StageTask
    ) -> tuple[jax.Array, Arrays, RouterParts]:
        """Returns the output of a virtual stage, its residuals [R, ...], and its parts."""
        past = [jnp.zeros(x.shape, x.dtype) for x in self.staged.past_shapes(x_BtD)]

        def run_one(x_BtD: jax.Array, layer: jax.Array) -> tuple[jax.Array, Any]:
            y_BtD, _, saved, parts = self.forward(x_BtD, task, layer, past)
            return y_BtD, (saved, parts)

        y_BtD, (saved, parts) = self.scan(run_one, x_BtD)
        return y_BtD, saved, _joined(parts)


class SavingStage:
    """A stage that saves residuals of each layer, as `model.remat` says: slots [S, R, ...]."""

    def __init__(self, staged: StagedModel):
        self.layers = Layers(staged)

    def begin_tick(self, slots: Slots, phase: Phase, following: StageTask) -> Slots:
        """Starts copies of saved activations that a tick hides. Here all stay where they are.

        Args:
          following: the task that runs backward at the next tick.
        """
        return slots

    def end_tick(self, slots: Slots, phase: Phase, following: StageTask) -> Slots:
        """Ends what `begin_tick` started."""
        return slots

    def empty_slots(self, schedule: PipelineSchedule, x_BtD: jax.Array) -> Slots:
        """Returns zeros in the slots of a schedule.

        Args:
          x_BtD: an input of the stage; only its shape and dtype count.
        """
        shapes = jax.eval_shape(lambda x: self.layers.run_saving(x, any_task())[1], x_BtD)
        saved = [jnp.zeros((schedule.slots, *array.shape), array.dtype) for array in shapes]
        stacked = schedule.saved_groups[0], self.layers.count
        past = self.layers.staged.past_shapes(x_BtD)
        return Slots(saved, [jnp.zeros((*stacked, *x.shape), x.dtype) for x in past])

    def forward(
        self, slots: Slots, x_BtD: jax.Array, task: StageTask
    ) -> tuple[Slots, jax.Array, RouterParts]:
        """Runs a task forward. Returns the slots, its output [B, t, D], and its parts."""

        def run_one(carry: Any, index: jax.Array) -> Any:
            slots, y_BtD = carry
            slots, y_BtD, parts = self._forward(slots, y_BtD, task, index)
            return (slots, y_BtD), parts

        (slots, y_BtD), parts = self.layers.scan(run_one, (slots, x_BtD))
        return slots, y_BtD, _joined(parts)

    def backward(
        self, slots: Slots, task: StageTask, gradients: Gradients
    ) -> tuple[Gradients, None]:
        """Runs a task backward. Returns the gradients, and no parts: forward returned them."""

        def run_one(gradients: Gradients, index: jax.Array) -> tuple[Gradients, None]:
            return self._backward(slots, task, gradients, index), None

        return self.layers.scan(run_one, gradients)[0], None

    def forward_and_backward(
        self,
        slots: Slots,
        x_BtD: jax.Array,
        forward: StageTask,
        backward: StageTask,
        gradients: Gradients,
    ) -> tuple[Slots, jax.Array, RouterParts, Gradients]:
        """Alternates a layer of one task forward and a layer of another backward.

        Returns:
          The slots, output and parts of the forward task, and gradients of the backward task.
        """

        def run_one(carry: Any, index: jax.Array) -> Any:
            slots, y_BtD, gradients = carry
            slots, y_BtD, parts = self._forward(slots, y_BtD, forward, index)
            return (slots, y_BtD, self._backward(slots, backward, gradients, index)), parts

        carry = slots, x_BtD, gradients
        (slots, y_BtD, gradients), parts = self.layers.scan(run_one, carry)
        return slots, y_BtD, _joined(parts), gradients

    def _forward(self, slots: Slots, x_BtD: jax.Array, task: StageTask, layer: jax.Array) -> Any:
        """Runs one layer forward. Returns the slots, its output, and its parts."""
        past = [_get(array, task.past_slot, layer) for array in slots.past]
        y_BtD, keys_values, residuals, parts = self.layers.forward(x_BtD, task, layer, past)
        saved = [
            _put(old, x, task.valid, (task.slot, layer))
            for old, x in zip(slots.saved, residuals, strict=True)
        ]
        past = [
            _put(old, x, task.valid, (task.past_slot, layer, 0, task.slice_index * x.shape[1]))
            for old, x in zip(slots.past, keys_values, strict=True)
        ]
        return Slots(saved, past), y_BtD, parts

    def _backward(
        self, slots: Slots, task: StageTask, gradients: Gradients, index: jax.Array
    ) -> Gradients:
        """Runs gradients backward through the layer that is `index` before the last."""
        layer = self.layers.count - 1 - index
        saved = [_get(array, task.slot, layer) for array in slots.saved]
        past = [_get(array, task.past_slot, layer) for array in slots.past]
        return self.layers.backward(saved, task, layer, past, gradients)


SMALL = 64  # residuals of less than this part of a slot stay on the device
AHEAD, BEHIND = 0, 1  # slots on the device: of the task that ran forward, of the one that runs back


class DistantStage(SavingStage):
    """A `SavingStage` whose slots are in the host's memory, two apart."""

    def empty_slots(self, schedule: PipelineSchedule, x_BtD: jax.Array) -> Slots:
        """As `SavingStage.empty_slots`."""
        near = super().empty_slots(schedule._replace(saved_groups=(2,), stages=1), x_BtD)
        own = super().empty_slots(schedule, x_BtD)
        least = sum(x.nbytes for x in near.saved) / SMALL

        def all_slots(x: jax.Array) -> jax.Array:
            make = host.empty if x.nbytes > least else jnp.zeros
            return make((schedule.slots + 1, *x.shape[1:]), x.dtype)

        distant = list(map(all_slots, near.saved))
        return Slots(near.saved, own.past, distant, slot=jnp.int32(schedule.slots))

    def begin_tick(self, slots: Slots, phase: Phase, following: StageTask) -> Slots:
        """Has the residuals of the next tick come, and sends those of the last to the host.

        What comes is read before anything is written in place: what the last stage needs of the
        last tick is on the device (`end_tick`). If both passes run, what leaves waits (`_sent`).
        """
        if phase.backward:
            get = partial(lax.dynamic_index_in_dim, index=following.slot, axis=0, keepdims=False)
            slots = slots._replace(coming=[to_device(get(x)) for x in slots.distant])
        if phase.forward:
            slots = slots._replace(leaving=[near[AHEAD] for near in slots.saved])
        return slots if phase.backward else self._sent(slots, ())

    def end_tick(self, slots: Slots, phase: Phase, following: StageTask) -> Slots:
        """Has what arrived ready for backward; what just ran forward was never sent.

        In the bubble what arrives may never have been written, so it is not read.
        """
        if not phase.backward:  # then only the last stage runs backward at the next tick
            coming = [near[AHEAD] for near in slots.saved]
        else:
            here = (following.slot == slots.slot) | ~following.valid
            pairs = zip(slots.saved, slots.coming, strict=True)
            coming = [jnp.where(here, near[AHEAD], x) for near, x in pairs]
        saved = [x.at[BEHIND].set(y) for x, y in zip(slots.saved, coming, strict=True)]
        return slots._replace(saved=saved, coming=())

    def forward(self, slots: Slots, x_BtD: jax.Array, task: StageTask) -> Any:
        """As `SavingStage.forward`."""
        near, task_ahead = _near(slots), task._replace(slot=jnp.int32(AHEAD))
        new, y_BtD, parts = super().forward(near, x_BtD, task_ahead)
        return self._taken(self._sent(slots, y_BtD), new, task), y_BtD, parts

    def backward(self, slots: Slots, task: StageTask, gradients: Gradients) -> Any:
        """As `SavingStage.backward`."""
        return super().backward(_near(slots), task._replace(slot=jnp.int32(BEHIND)), gradients)

    def forward_and_backward(
        self,
        slots: Slots,
        x_BtD: jax.Array,
        forward: StageTask,
        backward: StageTask,
        gradients: Gradients,
    ) -> Any:
        """As `SavingStage.forward_and_backward`."""
        ahead, behind = (
            task._replace(slot=jnp.int32(slot))
            for task, slot in ((forward, AHEAD), (backward, BEHIND))
        )
        near, slots = _near(slots), self._sent(slots, ())
        new, *results = super().forward_and_backward(near, x_BtD, ahead, behind, gradients)
        return self._taken(slots, new, forward), *results

    def _sent(self, slots: Slots, behind: Any) -> Slots:
        """Sends what leaves to the host, when what comes is here and `behind` is computed."""
        if not slots.leaving:
            return slots
        *_, coming, leaving = lax.optimization_barrier((behind, slots.coming, slots.leaving))
        put = partial(lax.dynamic_update_index_in_dim, index=slots.slot, axis=0)
        pairs = zip(slots.distant, leaving, strict=True)
        distant = [put(x, to_memory_of(x, near)) for x, near in pairs]
        return slots._replace(distant=distant, coming=coming, leaving=())

    def _taken(self, slots: Slots, new: Slots, task: StageTask) -> Slots:
        """Returns the slots after a task ran forward; in the bubble its place is the last."""
        bubble = len(slots.distant[0]) - 1
        slot = jnp.where(task.valid, task.slot, bubble)
        return slots._replace(saved=new.saved, past=new.past, slot=slot)


class RecomputingStage:
    """A stage that saves its input alone: slots [S, B, t, D]."""

    def __init__(self, staged: StagedModel):
        self.layers = Layers(staged)

    def begin_tick(self, slots: Slots, phase: Phase, following: StageTask) -> Slots:
        """As `SavingStage.begin_tick`: does nothing."""
        return slots

    end_tick = begin_tick

    def empty_slots(self, schedule: PipelineSchedule, x_BtD: jax.Array) -> Slots:
        """As `SavingStage.empty_slots`."""
        return Slots([jnp.zeros((schedule.slots, *x_BtD.shape), x_BtD.dtype)], [])

    def forward(
        self, slots: Slots, x_BtD: jax.Array, task: StageTask
    ) -> tuple[Slots, jax.Array, None]:
        """As `SavingStage.forward`, but returns no parts: backward does."""
        (saved,) = slots.saved
        x = jnp.where(task.valid, x_BtD, entry(saved, task.slot))
        saved = lax.dynamic_update_index_in_dim(saved, x, task.slot, 0)
        return Slots([saved], []), self.layers.run(x_BtD, task), None

    def backward(
        self, slots: Slots, task: StageTask, gradients: Gradients
    ) -> tuple[Gradients, RouterParts]:
        """Runs a task forward again, and backward. Returns the gradients and the task's parts."""
        _, residuals, parts = self.layers.run_saving(entry(slots.saved[0], task.slot), task)

        def run_one(gradients: Gradients, index: jax.Array) -> tuple[Gradients, None]:
            layer = self.layers.count - 1 - index
            saved = [entry(array, layer) for array in residuals]
            return self.layers.backward(saved, task, layer, [], gradients), None

        return self.layers.scan(run_one, gradients)[0], parts


def _near(slots: Slots) -> Slots:
    """Returns what of a `DistantStage`'s slots is on the device."""
    return Slots(slots.saved, slots.past)


def any_task() -> StageTask:
    """Returns a task for traces of which only shapes count."""
    zero = jnp.int32(0)
    return StageTask(zero, zero, zero, zero, zero, zero, jnp.bool_(True))


def build_stage(staged: StagedModel) -> RecomputingStage | SavingStage:
    """Returns this device's stage, of the kind that `mesh.stage_keeps` names."""
    cfg = staged.model.cfg
    if cfg.memory.residuals == "host":
        return DistantStage(staged)
    stages = {"input": RecomputingStage, "residuals": SavingStage}
    return stages[cfg.mesh.stage_keeps](staged)


def _joined(parts: RouterParts) -> RouterParts:
    """Returns the parts of several layers: sums of losses, and counts in layer order.

    Args:
      parts: stacked over the R layers; counts are [R, expert layers of one, ...].
    """
    return RouterParts(
        jnp.sum(parts.balance),
        jnp.sum(parts.entropy),
        parts.load_LE.reshape(-1, parts.load_LE.shape[-1]),
        parts.uneven_L3.reshape(-1, 3),
        *jax.tree.map(lambda n: n.reshape(-1, *n.shape[2:]), parts[4:]),
    )


@jax.named_scope("stage_slots")
def _get(slots: jax.Array, slot: jax.Array, layer: jax.Array) -> jax.Array:
    """Returns one layer's array in a slot: [...] of [S, R, ...]."""
    start = (slot, layer, *(0 for _ in slots.shape[2:]))
    return lax.dynamic_slice(slots, start, (1, 1, *slots.shape[2:])).reshape(slots.shape[2:])


@jax.named_scope("stage_slots")
def _put(slots: jax.Array, x: jax.Array, valid: jax.Array, start: tuple[Any, ...]) -> jax.Array:
    """Returns slots [S, R, ...] with a layer's array, or a part of it, written if it is valid.

    Args:
      start: slot, layer, and the first indices of a part.
    """
    x, start = x[None, None], (*start, *(0 for _ in slots.shape[len(start) :]))
    x = jnp.where(valid, x, lax.dynamic_slice(slots, start, x.shape))
    return lax.dynamic_update_slice(slots, x, start)


@jax.named_scope("stage_sums")
def _add_at(sums: jax.Array, gradient: jax.Array, index: jax.Array) -> jax.Array:
    """Returns stacked float32 sums with a gradient [...] added to entry `index`."""
    summed = entry(sums, index) + gradient.astype(jnp.float32)
    return lax.dynamic_update_index_in_dim(sums, summed, index, 0)
