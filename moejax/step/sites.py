"""The state of a run with an outer loop: its shapes and shardings, and how sites begin.

What a site trains gets the sites as its first dimension, sharded over them, because sites differ.
The outer weights and their momentum are the same at all sites, so every site has a copy: it needs
them to know what it moved, and another site may be gone.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.layout.layout import Axes
from moejax.step.model import ModelDef
from moejax.step.outer import build_outer
from moejax.step.state import Sites, TrainState, Tree


def with_sites(
    site: ModelDef, shapes: TrainState, specs: TrainState
) -> tuple[TrainState, TrainState]:
    """Returns shapes and shardings of a run's state, made of those of a site's own state.

    Args:
      site: the model as a site sees it.
    """
    layout, error = site.layout, build_outer(site.cfg, site).no_error

    def stacked(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((layout.size(layout.sites), *x.shape), x.dtype)

    def each(spec: P) -> P:
        return P(layout.sites, *spec)

    errors = jax.eval_shape(error, shapes.params)
    error_specs = jax.tree.map(
        lambda x, spec: None if x is None else spec,
        errors,
        specs.params,
        is_leaf=lambda x: x is None,
    )
    gone = {"optimizer": (), "load_LE": None}
    return shapes._replace(
        sites=jax.tree.map(stacked, _own(shapes, errors)), momentum=shapes.params, **gone
    ), specs._replace(
        sites=jax.tree.map(each, _own(specs, error_specs)), momentum=specs.params, **gone
    )


def _own(state: TrainState, error: Tree) -> Sites:
    return Sites(state.params, state.router_bias, state.optimizer, state.load_LE, error)


def first_sites(like: Sites, params: Tree, router_bias: Tree, moments: Any) -> Sites:
    """Returns the first state of all sites, each with these weights and moments.

    Args:
      like: its shapes.
    """
    return _begin(like, (params, router_bias, moments))


def sites_to_read(like: Sites, count: int, over: Axes) -> Sites:
    """Returns what a run reads of a checkpoint of another number of sites: moments alone.

    Args:
      like: the run's own, with shardings.
      count: sites of the checkpoint.
      over: mesh axes along which the run's sites lie.
    """
    sites = jax.tree.leaves(like.params)[0].shape[0]
    shared = over if count % sites == 0 else None

    def moment(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(x.sharding.mesh, P(shared, *x.sharding.spec[1:]))
        return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=sharding)

    return Sites(None, None, jax.tree.map(moment, like.optimizer), None, None)


def sites_at(like: Sites, params: Tree, router_bias: Tree, moments: Any) -> Sites:
    """Returns the state of sites that go on from outer weights, each with the mean of moments.

    Args:
      like: its shapes.
      moments: of any number of sites, along the first dimension.
    """

    def mean(x: jax.Array) -> jax.Array:
        return jnp.max(x, 0) if jnp.issubdtype(x.dtype, jnp.integer) else jnp.mean(x, 0)

    return _begin(like, (params, router_bias, jax.tree.map(mean, moments)))


def _begin(like: Sites, own: tuple[Tree, Tree, Any]) -> Sites:
    params, router_bias, moments = jax.tree.map(
        lambda like, x: jnp.broadcast_to(x, like.shape),
        (like.params, like.router_bias, like.optimizer),
        own,
    )
    load_LE, error = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (like.load_LE, like.error))
    return Sites(params, router_bias, moments, load_LE, error)
