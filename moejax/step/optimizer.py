"""The optimizer: optax transformations that work on this device's shards.

Per device, inside shard_map. AdamW is elementwise, so shards are independent; clipping by global
norm and Muon need unsharded arrays, and their docstrings say what they communicate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax import contrib

from moejax.comm import wire
from moejax.comm.host import is_on_host, pieces, sum_of_squares, to_device, to_host
from moejax.config.schema import OptimizerConfig
from moejax.layout.layout import Layout, is_index, is_product

Tree = dict  # a pure dict of arrays, or of the letters of their dimensions


def learning_rate(cfg: OptimizerConfig, num_steps: int, peak: float) -> optax.Schedule:
    """Returns the schedule: linear warm-up to `peak`, then decay to its final fraction."""
    warmup_steps = cfg.warmup(num_steps)
    rest = max(num_steps - warmup_steps, 1)
    end = peak * cfg.final_fraction
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=cfg.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, end, rest),
        "constant": lambda: optax.constant_schedule(peak),
    }[cfg.schedule]()
    if not warmup_steps:
        return after
    warmup = optax.linear_schedule(0.0, peak, warmup_steps)
    return optax.join_schedules([warmup, after], [warmup_steps])


@dataclass(frozen=True)
class Optimizer:
    """The update: clip, AdamW or Muon, weight decay, schedule.

    Each parameter is updated on its own and in place. Muon needs unsharded matrices, so it updates
    stacked layers one after the other: its temporaries have the size of a layer, not of the model
    (as TED's tiled optimizer does).

    Attributes:
      dims: letters of each parameter's dimensions, as a tree like the parameters.
      layouts: the layout of each parameter.
      num_steps: steps of the run, for the schedule.
      host: whether moments of matrices lie in the host's memory.
    """

    cfg: OptimizerConfig
    dims: Tree
    layouts: Tree
    num_steps: int
    host: bool = False

    def init(self, params: Tree) -> Tree:
        """Returns the first state: an optax state for each parameter."""
        return jax.tree.map(
            lambda p, d, layout: self.transform(d, layout).init(p), params, self.dims, self.layouts
        )

    def specs(self, params: Tree, state: Tree, param_specs: Tree) -> Tree:
        """Returns the state's sharding: moments like their parameters, counts replicated."""

        def spec_of(param: Any, spec: PartitionSpec, state: Any) -> Any:
            return jax.tree.map(
                lambda x: spec if x.shape == param.shape else PartitionSpec(), state
            )

        return jax.tree.map(spec_of, params, param_specs, state)

    def on_host(self, params: Tree, state: Tree) -> Tree:
        """Returns of each array of the state whether it lies in the host's memory.

        Those are moments of matrices, where the config says so. The rest is small.
        """

        def one(param: Any, dims: str, state: Any) -> Any:
            matrix = self.host and is_product(dims)
            return jax.tree.map(lambda x: matrix and x.shape == param.shape, state)

        return jax.tree.map(one, params, self.dims, state)

    def update(
        self, gradients: Tree, state: Tree, params: Tree, norm: jax.Array, finite: jax.Array
    ) -> tuple[Tree, Tree]:
        """Returns the next parameters and state, or the old ones if the step is not finite.

        Args:
          norm: global norm of the gradients.
          finite: whether to apply the update.
        """
        limit = self.cfg.clip_norm
        scale = 1.0 if limit is None else jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))

        def update_one(
            gradient: jax.Array, dims: str, layout: Layout, param: jax.Array, state: Any
        ) -> tuple[Any, Any]:
            transform = self.transform(dims, layout)

            def apply(gradient: jax.Array, old: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
                param, state = old
                updates, state = transform.update(gradient * scale, state, param)
                updated = (optax.apply_updates(param, updates), state)
                return jax.tree.map(partial(jnp.where, finite), updated, old)

            old, muon = (param, state), self.cfg.name == "muon" and is_matrix(dims)
            if muon and param.ndim > len(dims):
                return _layer_by_layer(apply, gradient, old)
            if any(map(is_on_host, jax.tree.leaves((gradient, old)))):
                return _piece_by_piece(apply, gradient, old, whole=muon)
            return apply(gradient, old)

        updated = jax.tree.map(update_one, gradients, self.dims, self.layouts, params, state)
        tree = jax.tree.structure(gradients)
        new_params, new_state = zip(*tree.flatten_up_to(updated), strict=True)
        return jax.tree.unflatten(tree, new_params), jax.tree.unflatten(tree, new_state)

    def transform(self, dims: str, layout: Layout) -> optax.GradientTransformation:
        """Returns the optax transformation of one parameter, which follows clipping."""
        cfg = self.cfg
        if cfg.name == "muon" and is_matrix(dims):
            rate = learning_rate(cfg, self.num_steps, cfg.muon_learning_rate)
            return optax.chain(
                optax.trace(cfg.muon_momentum, nesterov=True),
                optax.stateless(lambda updates, _: _orthogonal_shard(updates, dims, layout)),
                optax.add_decayed_weights(cfg.weight_decay),
                optax.scale_by_learning_rate(rate),
            )
        # Matrices and adapters decay, not scales and biases. Matrices that Muon leaves to AdamW
        # (embeddings, router) do not, nor those of an indexer: without a gradient it must not move.
        decays = cfg.name == "adamw" and is_product(dims) and not is_index(dims)
        return optax.adamw(
            learning_rate(cfg, self.num_steps, cfg.learning_rate),
            b1=cfg.beta1,
            b2=cfg.beta2,
            eps=cfg.epsilon,
            weight_decay=cfg.weight_decay if decays else 0.0,
        )


def _layer_by_layer(apply: Callable, gradient: jax.Array, state: Any) -> Any:
    """Applies `apply` to each layer of stacked arrays, in place; counts are not stacked.

    Layers that lie in the host's memory are on the device while it computes with them. One layer
    goes before the next comes: a loop that fetches ahead holds the arrays twice on the host.

    The loop carries flat layers: otherwise XLA gives the full stack the layout that suits the
    products inside, and copies it before and after.
    """
    index, put = jax.lax.dynamic_index_in_dim, jax.lax.dynamic_update_index_in_dim

    def body(layer: jax.Array, now: Any) -> Any:
        def own(flat: jax.Array, array: jax.Array) -> jax.Array:
            if not array.ndim:
                return array
            return to_device(index(flat, layer, keepdims=False)).reshape(array.shape[1:])

        def replaced(flat: jax.Array, new: jax.Array) -> jax.Array:
            if not flat.ndim:
                return new
            new = to_host(new.reshape(-1)) if is_on_host(flat) else new.reshape(-1)
            return put(flat, new, layer, 0)

        new = apply(own(gradient, gradient), jax.tree.map(own, now, state))
        return jax.tree.map(replaced, now, new)

    flat = jax.tree.map(lambda x: x.reshape(len(x), -1) if x.ndim else x, state)
    updated = jax.lax.fori_loop(0, len(gradient), body, flat)
    return jax.tree.map(lambda x, y: x.reshape(y.shape), updated, state)


def _piece_by_piece(apply: Callable, gradient: jax.Array, state: Any, *, whole: bool) -> Any:
    """Applies `apply` to pieces of arrays as `_layer_by_layer` does to layers.

    Args:
      whole: whether `apply` needs the array as it is; else it treats each number by itself.
    """
    count = 1 if whole else pieces(gradient.size, gradient.size)

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(count, *(x.shape if whole else (-1,))) if x.ndim else x

    updated = _layer_by_layer(apply, *jax.tree.map(cut, (gradient, state)))
    return jax.tree.map(lambda x, y: x.reshape(y.shape), updated, state)


def is_matrix(dims: str) -> bool:
    """Returns whether Muon updates a parameter: a hidden matrix, no embedding, norm, router.

    Nor does it update an indexer, which AdamW leaves alone where there is no gradient.
    """
    return is_product(dims) and "V" not in dims and dims != "DE" and not is_index(dims)


def square_share(tree: Tree, dims: Tree, layouts: Tree) -> jax.Array:
    """Returns this device's share of a sharded tree's squared norm; shares sum to it."""

    def share(x: jax.Array, d: str, layout: Layout) -> jax.Array:
        devices = layout.size(layout.mesh_axes)
        shards = layout.size(tuple(axis for axes in layout.param_axes(d) for axis in axes))
        # Replicas of a shard share its norm; powers of two divide exactly in float32.
        return sum_of_squares(x) * (shards / devices)

    return jnp.sum(jnp.stack(jax.tree.leaves(jax.tree.map(share, tree, dims, layouts))))


def _orthogonal_shard(x: Any, dims: str, layout: Layout) -> jax.Array:
    """Returns this device's shard of the orthogonal matrix nearest to an update (Muon).

    Needs the unsharded matrix: gathers it and keeps this device's shard of the result. Wire: the
    matrix, in float32. Source: Jordan et al. 2024, through optax.contrib.
    """
    axes_by_dim = list(enumerate(layout.param_axes(dims)))
    if dims[0] == "E":
        axes_by_dim = axes_by_dim[1:]  # experts are separate matrices, not gathered
    shard_shape = x.shape
    for dim, axes in axes_by_dim:
        x = wire.all_gather(x, axes, dim=dim) if axes else x
    rows, columns = _matrix_dims(dims)
    numbers = contrib.MuonDimensionNumbers(reduction_axis=rows, output_axis=columns)
    muon = contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=numbers)
    x = muon.update(x, muon.init(x))[0]
    fan_in, fan_out = (math.prod(x.shape[i] for i in part) for part in (rows, columns))
    x = x * max(1.0, fan_out / fan_in) ** 0.5
    for dim, axes in axes_by_dim:
        if axes and layout.size(axes) > 1:
            start = wire.index(axes) * shard_shape[dim]
            x = jax.lax.dynamic_slice_in_dim(x, start, shard_shape[dim], axis=dim)
    return x


def _matrix_dims(dims: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the matrix's input and output dimensions; one is the model's width or a latent.

    Gate and up (U) and experts (E) are separate matrices.
    """
    inner = tuple(i for i, letter in enumerate(dims) if letter not in "EU")
    width = dims.index("D" if "D" in dims else "Z")
    others = tuple(i for i in inner if i != width)
    return ((width,), others) if inner[0] == width else (others, (width,))
