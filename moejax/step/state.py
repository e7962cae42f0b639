"""What a step takes and gives: the state of a run, a batch, and what is measured of it."""

from typing import Any, NamedTuple

import jax

Tree = Any  # a pure dict of arrays
Leaf = Any  # an array; in a description of one, its shape or sharding


class TrainState(NamedTuple):
    """All that a checkpoint holds."""

    step: Leaf  # optimizer steps done, which is also the position in the data
    skipped: Leaf  # updates not applied because loss or gradient was not finite
    params: Tree
    router_bias: Tree  # selection biases of loss-free balancing
    optimizer: Any
    reduction: "Reduction"


class Reduction(NamedTuple):
    """What the compressed reductions of gradients remember; empty without codecs."""

    # Shaped like params; None where no codec serves. Of each device apart: [layers, devices, ...].
    codecs: Tree
    levels: Leaf | None  # int32 [2], of adaptive codecs: dense, experts


class Batch(NamedTuple):
    """One step's sequences; global arrays outside the step, this device's rows inside."""

    token_BT: Leaf
    target_BT: Leaf  # -1 where there is nothing to predict
    segment_BT: Leaf


class Metrics(NamedTuple):
    """Of one step, over all devices."""

    loss: jax.Array  # nats per target
    balance: jax.Array  # load-balance loss, 1 when even
    load_LE: jax.Array  # assignments to each expert of each expert layer
    dropped_L: jax.Array
    gradient_norm: jax.Array  # before clipping
    skipped: Leaf  # updates skipped so far
