"""A stage's layers, run one after the other, and what is kept of a micro-batch until its backward.

Per device, inside the shard_map of the training mesh. Backward is written out: forward calls
`jax.vjp` on a layer, and the arrays of the function that it returns are kept. Those that are the
layer's weights are left out: JAX hands on the very arrays, which are recognised. Gradients of
weights are added to their sums layer by layer, so those of a whole stage never exist beside them.

`mesh.stage_keeps` chooses what is kept:

- `residuals`: what `model.remat` keeps of each layer. Backward recomputes what it says.
- `input`: the stage's input alone. Backward runs the stage forward again, a third more products,
  and then holds one micro-batch's residuals.

A layer here is one repeat of a layer group. Letters: those of `layout.layout`; L the layers of one
chunk on this stage, S slots; k a micro-batch in the order in which stages work on them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.step.pipeline.inputs import get
from moejax.step.pipeline.model import Past, RouterParts, StagedModel, Visit
from moejax.step.pipeline.schedule import Schedule
from moejax.step.state import Tree

Arrays = list[jax.Array]


class Slots(NamedTuple):
    """What a stage keeps of micro-batches.

    Attributes:
      arrays: what backward needs of visits.
      past: of micro-batches whose slices are under way, keys and values [S, L, B, T, ...].
    """

    arrays: Arrays
    past: Arrays


class Back(NamedTuple):
    """Backward through some layers.

    Attributes:
      dy_BtD: gradients of what the layer before this one, on the way back, took in.
      sums: of the weights' gradients, float32, over micro-batches.
      past: gradients of keys and values by later slices, float32 [L, B, T, ...].
    """

    dy_BtD: jax.Array
    sums: Tree
    past: Arrays


class Layers:
    """Single layers of the stage, forward and backward."""

    def __init__(self, staged: StagedModel):
        self.staged, self.count = staged, staged.repeats
        self.tree: Any = None  # of the function that runs back, and of its arrays:
        self.places: list[int | None] = []  # which weight each is; None: one that is kept

    def scan(self, body: Callable, carry: Any) -> Any:
        """Scans over the numbers of a chunk's layers, as `model.scan_layers` says."""
        unroll = 1 if self.staged.model.cfg.model.scan_layers else self.count
        return lax.scan(body, carry, jnp.arange(self.count), unroll=unroll)

    def forward(
        self, x_BtD: jax.Array, visit: Visit, local: jax.Array, past: Past
    ) -> tuple[jax.Array, Past, Arrays, RouterParts]:
        """Runs a layer.

        Args:
          local: the layer's number in its chunk.
          past: of the layer; as of `StagedModel.run_layer`.
        Returns:
          Its result, a slice's own keys and values, what backward needs, and parts of the loss.
        """
        index = visit.first + local
        staged = self.staged
        weights = staged.weights.layer(index)
        trained = staged.weights.trained_of(weights)

        def run(trained: Tree, past: Past, x_BtD: jax.Array) -> Any:
            whole = staged.weights.put_trained(weights, trained)
            return staged.in_layer(whole, past, x_BtD, visit, index)

        (y_BtD, _, new), pull, parts = jax.vjp(run, trained, past, x_BtD, has_aux=True)
        arrays, self.tree = jax.tree.flatten(pull)
        number = {id(array): n for n, array in enumerate(jax.tree.leaves((weights, past)))}
        self.places = [number.get(id(array)) for array in arrays]
        kept = [a for a, place in zip(arrays, self.places, strict=True) if place is None]
        return y_BtD, new, kept, parts

    def backward(
        self, kept: Arrays, visit: Visit, local: jax.Array, past: Past, back: Back
    ) -> Back:
        """Runs gradients back through a layer, after a `forward` that kept as many arrays."""
        index = visit.first + local
        own, inputs = iter(kept), jax.tree.leaves((self.staged.weights.layer(index), past))
        arrays = [next(own) if place is None else inputs[place] for place in self.places]
        share = visit.valid.astype(jnp.float32)  # the gradient of the routers' losses
        of_keys = [get(x, local) for x in back.past]
        new = [self.staged.piece_of(x, visit.piece) for x in of_keys]
        new = [x.astype(like.dtype) for x, like in zip(new, past, strict=True)]
        pull = jax.tree.unflatten(self.tree, arrays)
        gradients, earlier, dx_BtD = pull((back.dy_BtD, share, new))
        sums = jax.tree.map(lambda s, g: _add_at(s, g, index), back.sums, gradients)
        more = zip(back.past, earlier, strict=True)
        return Back(dx_BtD, sums, [_add_at(x, g, local) for x, g in more])

    def keep_nothing(self, x_BtD: jax.Array, visit: Visit) -> jax.Array:
        """Runs a chunk's layers."""

        def layer(x_BtD: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            index = visit.first + index
            weights = self.staged.weights.layer(index)
            return self.staged.run_layer(weights, [], x_BtD, visit, index)[0], None

        return self.scan(layer, x_BtD)[0]

    def keep_all(self, x_BtD: jax.Array, visit: Visit) -> tuple[jax.Array, Arrays, RouterParts]:
        """Runs a chunk's layers. Returns the result, the kept [L, ...], and parts of the loss."""
        past = [jnp.zeros(x.shape, x.dtype) for x in self.staged.past_of(x_BtD)]

        def layer(x_BtD: jax.Array, index: jax.Array) -> tuple[jax.Array, Any]:
            y_BtD, _, kept, parts = self.forward(x_BtD, visit, index, past)
            return y_BtD, (kept, parts)

        y_BtD, (kept, parts) = self.scan(layer, x_BtD)
        return y_BtD, kept, _together(parts)


class Residuals:
    """Keeps what `model.remat` keeps: slots [S, L, ...]."""

    def __init__(self, staged: StagedModel):
        self.layers = Layers(staged)

    def empty(self, schedule: Schedule, x_BtD: jax.Array) -> Slots:
        """Returns slots for the micro-batches that a schedule keeps.

        Args:
          x_BtD: an input of the stage; only its shape and dtype count.
        """
        shapes = jax.eval_shape(lambda x: self.layers.keep_all(x, any_visit())[1], x_BtD)
        arrays = [jnp.zeros((schedule.kept, *array.shape), array.dtype) for array in shapes]
        each = schedule.groups[0], self.layers.count
        past = self.layers.staged.past_of(x_BtD)
        return Slots(arrays, [jnp.zeros((*each, *x.shape), x.dtype) for x in past])

    def forward(
        self, slots: Slots, x_BtD: jax.Array, visit: Visit
    ) -> tuple[Slots, jax.Array, RouterParts]:
        """Runs a micro-batch through a chunk. Returns the slots, its result, and its parts."""

        def layer(carry: Any, index: jax.Array) -> Any:
            slots, y_BtD = carry
            slots, y_BtD, parts = self._forward(slots, y_BtD, visit, index)
            return (slots, y_BtD), parts

        (slots, y_BtD), parts = self.layers.scan(layer, (slots, x_BtD))
        return slots, y_BtD, _together(parts)

    def backward(self, slots: Slots, visit: Visit, back: Back) -> tuple[Back, None]:
        """Runs a micro-batch's gradients back through a chunk. Returns them, and no parts."""

        def layer(back: Back, index: jax.Array) -> tuple[Back, None]:
            return self._backward(slots, visit, back, index), None

        return self.layers.scan(layer, back)[0], None

    def both(
        self, slots: Slots, x_BtD: jax.Array, ahead: Visit, behind: Visit, back: Back
    ) -> tuple[Slots, jax.Array, RouterParts, Back]:
        """Runs one micro-batch forward and another back, in each turn a layer of each.

        Neither needs the other, so exchanges of one hide behind products of the other.
        """

        def layer(carry: Any, index: jax.Array) -> Any:
            slots, y_BtD, back = carry
            slots, y_BtD, parts = self._forward(slots, y_BtD, ahead, index)
            return (slots, y_BtD, self._backward(slots, behind, back, index)), parts

        (slots, y_BtD, back), parts = self.layers.scan(layer, (slots, x_BtD, back))
        return slots, y_BtD, _together(parts), back

    def _forward(self, slots: Slots, x_BtD: jax.Array, visit: Visit, index: jax.Array) -> Any:
        past = [_get(array, visit.past_slot, index) for array in slots.past]
        y_BtD, new, kept, parts = self.layers.forward(x_BtD, visit, index, past)
        arrays = [
            _put(old, x, visit.valid, (visit.slot, index))
            for old, x in zip(slots.arrays, kept, strict=True)
        ]
        past = [
            _put(old, x, visit.valid, (visit.past_slot, index, 0, visit.piece * x.shape[1]))
            for old, x in zip(slots.past, new, strict=True)
        ]
        return Slots(arrays, past), y_BtD, parts

    def _backward(self, slots: Slots, visit: Visit, back: Back, index: jax.Array) -> Back:
        """Runs gradients back through the layer that is `index` before the last."""
        index = self.layers.count - 1 - index
        kept = [_get(array, visit.slot, index) for array in slots.arrays]
        past = [_get(array, visit.past_slot, index) for array in slots.past]
        return self.layers.backward(kept, visit, index, past, back)


class Input:
    """Keeps the stage's input: one slot array [S, B, t, D]."""

    def __init__(self, staged: StagedModel):
        self.layers = Layers(staged)

    def empty(self, schedule: Schedule, x_BtD: jax.Array) -> Slots:
        """As `Residuals.empty`."""
        return Slots([jnp.zeros((schedule.kept, *x_BtD.shape), x_BtD.dtype)], [])

    def forward(
        self, slots: Slots, x_BtD: jax.Array, visit: Visit
    ) -> tuple[Slots, jax.Array, None]:
        """As `Residuals.forward`, without parts."""
        (kept,) = slots.arrays
        x = jnp.where(visit.valid, x_BtD, get(kept, visit.slot))
        kept = lax.dynamic_update_index_in_dim(kept, x, visit.slot, 0)
        return Slots([kept], []), self.layers.keep_nothing(x_BtD, visit), None

    def backward(self, slots: Slots, visit: Visit, back: Back) -> tuple[Back, RouterParts]:
        """As `Residuals.backward`, with the parts."""
        _, kept, parts = self.layers.keep_all(get(slots.arrays[0], visit.slot), visit)

        def layer(back: Back, index: jax.Array) -> tuple[Back, None]:
            index = self.layers.count - 1 - index
            arrays = [get(array, index) for array in kept]
            return self.layers.backward(arrays, visit, index, [], back), None

        return self.layers.scan(layer, back)[0], parts


def any_visit() -> Visit:
    """Returns a visit of which only shapes count."""
    zero = jnp.int32(0)
    return Visit(zero, zero, zero, zero, zero, zero, jnp.bool_(True))


def build_keeper(staged: StagedModel) -> Input | Residuals:
    """Returns what `mesh.stage_keeps` asks for."""
    return {"input": Input, "residuals": Residuals}[staged.model.cfg.mesh.stage_keeps](staged)


def _together(parts: RouterParts) -> RouterParts:
    """Adds up what layers add to the loss's parts; counts stay apart, in layer order."""
    return RouterParts(
        jnp.sum(parts.balance),
        jnp.sum(parts.entropy),
        parts.load_LE.reshape(-1, parts.load_LE.shape[-1]),
        parts.uneven_L3.reshape(-1, 3),
    )


@jax.named_scope("stage_slots")
def _get(slots: jax.Array, slot: jax.Array, index: jax.Array) -> jax.Array:
    """Reads what a slot has of a layer."""
    start = (slot, index, *(0 for _ in slots.shape[2:]))
    return lax.dynamic_slice(slots, start, (1, 1, *slots.shape[2:])).reshape(slots.shape[2:])


@jax.named_scope("stage_slots")
def _put(slots: jax.Array, x: jax.Array, valid: jax.Array, start: tuple[Any, ...]) -> jax.Array:
    """Writes a layer's array, or a part of it, to a slot, if it counts.

    Args:
      start: slot, layer, and the first indices of a part.
    """
    x, start = x[None, None], (*start, *(0 for _ in slots.shape[len(start) :]))
    x = jnp.where(valid, x, lax.dynamic_slice(slots, start, x.shape))
    return lax.dynamic_update_slice(slots, x, start)


@jax.named_scope("stage_sums")
def _add_at(sums: jax.Array, gradient: jax.Array, index: jax.Array) -> jax.Array:
    """Adds a layer's gradient to the sum that is stacked with those of the others."""
    more = get(sums, index) + gradient.astype(jnp.float32)
    return lax.dynamic_update_index_in_dim(sums, more, index, 0)
