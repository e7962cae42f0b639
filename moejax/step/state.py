"""The inputs and outputs of a step: state, batch, metrics."""

from typing import Any, NamedTuple

import jax

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
