"""What a pipeline stage keeps of a micro-batch from its forward pass until its backward pass.

Per device, inside the shard_map of the training mesh. `mesh.stage_keeps` chooses:

- `residuals`: what `model.remat` keeps of the stage's layers. Backward recomputes what it says.
- `input`: the stage's input alone. Backward runs the stage forward again, a third more products,
  and then holds one micro-batch's residuals.

Letters: those of `layout.layout`; k a micro-batch in the order in which stages work on them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from moejax.step.staged_model import RouterParts, StagedModel
from moejax.step.state import Tree

Arrays = list[jax.Array]


class Input:
    """Keeps the stage's input."""

    def __init__(self, staged: StagedModel):
        self.staged = staged

    def forward(self, x_BtD: jax.Array, k: jax.Array) -> tuple[jax.Array, Arrays, None]:
        """Runs a micro-batch through the stage. Returns the result, and what is kept of it."""
        return self.staged.run_stage(self.staged.layers, x_BtD, k)[0], [x_BtD], None

    def backward(
        self, kept: Arrays, k: jax.Array, dy_BtD: jax.Array, share: jax.Array
    ) -> tuple[Tree, jax.Array, RouterParts]:
        """Runs a micro-batch's gradients back.

        Args:
          dy_BtD: gradients of the stage's result.
          share: gradient of the routers' losses: 1, or 0 in a bubble.
        Returns:
          Gradients of the weights, gradients of the input, and parts of the loss.
        """
        run = partial(self.staged.in_stage, k=k)
        _, pull, parts = jax.vjp(run, self.staged.layers, *kept, has_aux=True)
        return *pull((dy_BtD, share)), parts


class Residuals:
    """Keeps what `model.remat` keeps, but for the weights, which are the same for all."""

    def __init__(self, staged: StagedModel):
        self.staged = staged
        self.weights = jax.tree.leaves(staged.layers)
        self.tree: Any = None  # of the function that runs back, and of its arrays:
        self.places: list[int | None] = []  # which weight each is; None: one that is kept

    def forward(self, x_BtD: jax.Array, k: jax.Array) -> tuple[jax.Array, Arrays, RouterParts]:
        """As `Input.forward`, and the parts of the loss."""
        run = partial(self.staged.in_stage, k=k)
        (y_BtD, _), pull, parts = jax.vjp(run, self.staged.layers, x_BtD, has_aux=True)
        arrays, self.tree = jax.tree.flatten(pull)
        number = {id(weight): n for n, weight in enumerate(self.weights)}
        self.places = [number.get(id(array)) for array in arrays]
        kept = [a for a, place in zip(arrays, self.places, strict=True) if place is None]
        return y_BtD, kept, parts

    def backward(
        self, kept: Arrays, k: jax.Array, dy_BtD: jax.Array, share: jax.Array
    ) -> tuple[Tree, jax.Array, None]:
        """As `Input.backward`, without parts."""
        own = iter(kept)
        arrays = [next(own) if place is None else self.weights[place] for place in self.places]
        pull = jax.tree.unflatten(self.tree, arrays)
        return *pull((dy_BtD, share)), None


def build_keeper(staged: StagedModel) -> Input | Residuals:
    """Returns what `mesh.stage_keeps` asks for."""
    return {"input": Input, "residuals": Residuals}[staged.model.cfg.mesh.stage_keeps](staged)


def empty_slots(keeper: Input | Residuals, count: int, x_BtD: jax.Array) -> Arrays:
    """Returns slots for what is kept of `count` micro-batches.

    Args:
      x_BtD: an input of the stage; only its shape and dtype count.
    """
    shapes = jax.eval_shape(lambda x, k: keeper.forward(x, k)[1], x_BtD, jnp.int32(0))
    return [jnp.zeros((count, *array.shape), array.dtype) for array in shapes]
