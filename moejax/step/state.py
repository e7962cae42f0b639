"""The inputs and outputs of a step: state, batch, metrics."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.layout.layout import Axes

Tree = Any  # a pure dict of arrays
Leaf = Any  # an array, or its shape or sharding


def flat(tree: Tree) -> dict[str, Leaf]:
    """Returns the leaves of a tree by path, as manifests and files of weights name them."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


class Sites(NamedTuple):
    """What each site of an outer loop trains. Leaves: [sites, ...], a site's own along the first.

    They differ, so they are sharded over the sites.
    """

    params: Tree
    router_bias: Tree
    optimizer: Any
    load_LE: Leaf  # as in `TrainState`
    # Of `params`, what the codec of the outer loop left out so far, float32; None without feedback
    # and for parameters that are not encoded.
    error: Tree


class TrainState(NamedTuple):
    """The state of a run.

    With an outer loop `params` and `router_bias` are the outer weights, of which every site has a
    copy; `optimizer` is empty and `load_LE` None, because `sites` has them.
    """

    step: Leaf  # optimizer steps done, which is also the position in the data
    skipped: Leaf  # updates not applied because loss or gradient was not finite
    params: Tree  # trained parameters: all weights, or adapters
    router_bias: Tree  # selection biases of loss-free balancing
    optimizer: Any
    # State of the codecs of gradients: a tree like params, None for a parameter without codec.
    # Leaves: [layers, devices, ...].
    reduction: Tree
    # All weights where adapters are trained, else None. No checkpoint of the run holds them.
    frozen: Tree = None
    # Assignments to each expert in the last step [L, E], where experts get copies by them
    # (`moe.slots_from`); else None.
    load_LE: Leaf = None
    sites: Sites | None = None  # None without an outer loop
    momentum: Tree = None  # of the outer loop, like `params`


class Batch(NamedTuple):
    """One step's sequences; global arrays outside the step, this device's rows inside."""

    token_BT: Leaf
    target_BT: Leaf  # -1: no target
    segment_BT: Leaf
    # Recorded experts of each token in each layer with experts, by `moe.router.route`; -1 for all K
    # of a token: it chooses. None: all choose.
    expert_BTLK: Leaf = None


class Metrics(NamedTuple):
    """Metrics of one step, over all devices."""

    loss: jax.Array  # nats per target; 0 without targets
    balance: jax.Array  # load-balance loss, 1 when even
    router_entropy: jax.Array  # of a token's scores, over its largest; mean over tokens and layers
    load_LE: jax.Array  # assignments to each expert of each expert layer
    uneven_L3: jax.Array  # assignments dropped, those in overflow rounds, rounds; by expert layer
    gradient_norm: jax.Array  # before clipping
    skipped: Leaf  # updates skipped so far
    ahead: Leaf = None  # nats per target of `model.predict_ahead`; None without
    # bool [1] or [2]: whether there were targets of `loss`, and of `ahead`; None: there were.
    has_targets: Leaf = None
    # By expert layer, of the recorded choices those that the router makes too, and all; None
    # without recorded experts.
    replayed_L2: Leaf = None


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
        sharding = NamedSharding(x.sharding.mesh, P(shared or None, *x.sharding.spec[1:]))
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
