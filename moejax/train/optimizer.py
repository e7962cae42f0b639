"""The optimizer: optax transformations that work on this device's shards.

Per device, inside shard_map. AdamW is elementwise, so shards need nothing from each other; the two
things that look at whole arrays, clipping by global norm and Muon, say what they communicate.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from moejax.comm import wire
from moejax.config import OptimizerConfig
from moejax.dims import Layout

Tree = dict  # a pure dict of arrays, or of the letters of their dimensions


def learning_rate(cfg: OptimizerConfig, num_steps: int, peak: float) -> optax.Schedule:
    """Linear warm-up from zero to `peak`, then the schedule down to its final fraction."""
    rest = max(num_steps - cfg.warmup_steps, 1)
    end = peak * cfg.final_fraction
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=cfg.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, end, rest),
        "constant": lambda: optax.constant_schedule(peak),
    }[cfg.schedule]()
    if not cfg.warmup_steps:
        return after
    warmup = optax.linear_schedule(0.0, peak, cfg.warmup_steps)
    return optax.join_schedules([warmup, after], [cfg.warmup_steps])


def build_optimizer(
    cfg: OptimizerConfig, dims: Tree, layout: Layout, num_steps: int
) -> optax.GradientTransformation:
    """Returns the whole update: clip, AdamW or Muon, weight decay, schedule.

    Args:
      dims: the letters of each parameter's dimensions, in the parameters' tree.
    """
    clip = []
    if cfg.clip_norm is not None:
        clip = [clip_by_global_norm(cfg.clip_norm, dims, layout)]
    decay = jax.tree.map(_decays, dims)
    adamw = optax.adamw(
        learning_rate(cfg, num_steps, cfg.learning_rate),
        b1=cfg.beta1,
        b2=cfg.beta2,
        eps=cfg.epsilon,
        weight_decay=cfg.weight_decay,
        mask=decay,
    )
    if cfg.name == "adamw":
        return optax.chain(*clip, adamw)
    muon = optax.chain(
        optax.trace(cfg.muon_momentum, nesterov=True),
        orthogonalize(dims, layout),
        optax.add_decayed_weights(cfg.weight_decay),
        optax.scale_by_learning_rate(learning_rate(cfg, num_steps, cfg.muon_learning_rate)),
    )
    labels = jax.tree.map(lambda d: "muon" if is_matrix(d) else "adamw", dims)
    masked = adamw_without_mask(cfg, num_steps)
    return optax.chain(*clip, optax.partition({"muon": muon, "adamw": masked}, labels))


def adamw_without_mask(cfg: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """AdamW for what Muon leaves (embeddings, norms, biases, router); nothing decays."""
    rate = learning_rate(cfg, num_steps, cfg.learning_rate)
    return optax.adamw(rate, b1=cfg.beta1, b2=cfg.beta2, eps=cfg.epsilon, weight_decay=0.0)


def _decays(dims: str) -> bool:
    """Matrices that touch the residual stream decay; norm scales and biases do not."""
    return "D" in dims and len(dims) > 1


def is_matrix(dims: str) -> bool:
    """Whether Muon takes the parameter: hidden matrices, not embeddings, norms or the router."""
    return _decays(dims) and "V" not in dims and dims != "DE"


def global_norm(tree: Tree, dims: Tree, layout: Layout) -> jax.Array:
    """The norm of a sharded tree. Wire: one float32, summed over all devices."""
    devices = layout.size(layout.mesh_axes)

    def share(x: jax.Array, d: str) -> jax.Array:
        shards = layout.size(tuple(axis for axes in layout.param_axes(d) for axis in axes))
        # Copies of a shard would count several times; device counts divide exactly in float32.
        return jnp.sum(jnp.square(x.astype(jnp.float32))) * (shards / devices)

    shares = jnp.stack(jax.tree.leaves(jax.tree.map(share, tree, dims)))
    return jnp.sqrt(wire.all_reduce(jnp.sum(shares), layout.mesh_axes))


def clip_by_global_norm(limit: float, dims: Tree, layout: Layout) -> optax.GradientTransformation:
    """Scales gradients so that their norm over all devices is at most `limit`."""

    def update(updates, state, params=None):
        norm = global_norm(updates, dims, layout)
        scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
        return jax.tree.map(lambda g: g * scale, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def orthogonalize(dims: Tree, layout: Layout) -> optax.GradientTransformation:
    """Replaces each matrix by the nearest orthogonal one, layer by layer (Muon).

    Needs whole matrices: gathers one layer's update at a time and keeps this device's shard of the
    result. Momentum stays sharded. Wire: every matrix once per step, in float32.

    Source: Jordan et al. 2024, through optax.contrib.
    """

    def update(updates, state, params=None):
        def one(x: Any, d: str) -> Any:
            return x if is_masked(x) else _orthogonal_shard(x, d, layout)

        return jax.tree.map(one, updates, dims, is_leaf=is_masked), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def is_masked(x: Any) -> bool:
    """Whether a leaf belongs to the other optimizer."""
    return isinstance(x, optax.MaskedNode)


def _orthogonal_shard(x: Any, dims: str, layout: Layout) -> jax.Array:
    """One parameter, possibly with stacked layers in front."""
    if x.ndim > len(dims):
        return jax.lax.map(lambda layer: _orthogonal_shard(layer, dims, layout), x)
    axes_by_dim = list(enumerate(layout.param_axes(dims)))
    if dims[0] == "E":
        axes_by_dim = axes_by_dim[1:]  # experts are separate matrices: no need to meet
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
    """Which dimensions are the matrix's inputs and its outputs; the model's width is one of them.

    Gate and up (U) and experts (E) are separate matrices.
    """
    inner = tuple(i for i, letter in enumerate(dims) if letter not in "EU")
    width = dims.index("D")
    others = tuple(i for i in inner if i != width)
    return ((width,), others) if inner[0] == width else (others, (width,))
