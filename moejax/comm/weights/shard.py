"""A parameter's shard, with all that enters a layer beside it.

Per device, inside shard_map. `gather_weight` takes a `Shard` and returns the weight. Backward
returns a `Shard` of gradients. State passes through backward without side effects: it enters
forward as a field of the shard, and its next value leaves backward as that field's "gradient".
`attach` puts fields beside weights, and `detach` takes them apart again.

Letters: a weight [M, N] is sharded along M, a shard is [m, N]; S nodes.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax

# Fields are Any because JAX builds trees of other leaves too: shapes, shardings, None.


@jax.tree_util.register_dataclass
@dataclass
class Shard:
    """A parameter's shard with everything that enters beside it.

    A field that is None has no leaf. Shapes are of one layer; stacked layers lead in all fields.

    Attributes:
      weight: the shard, [m, N], in the parameter's dtype. Its gradient has the same shape and
        dtype. It is that of the full batch, reduced over all devices (of a replicated weight this
        device's share: see `reduce.reduce_replicated`); zeros if not `last`. None in a pipeline
        stage, where `gathered` has the gradient.
      residual: a `residuals.Residual`, the state of the gradient's codec. `attach_residuals` sets
        it where a gradient crosses nodes through a codec. Its "gradient" is the next state.
      total: float32 arrays. On the way in the sum of the gradients of earlier micro-batches; on the
        way out, as its "gradient", what this micro-batch adds to the sum; if `last`, zeros, because
        the weight's gradient contains the total. The shapes are those that `reduce.sum_shards`
        returns; for a weight that is gathered once a step, or replicated, there is one array,
        [M, N]. The step sets it if it has several micro-batches, because only the last one reduces
        gradients over the devices with copies of the shard.
      gathered: the weight [M, N] in the dtype of compute, gathered before the first micro-batch; or
        gathered across nodes alone, [S, m, N]. `gather.gather_once` makes it. It is the same for
        all micro-batches and has no gradient. With pipeline stages `gather_stage_weights` makes it:
        there its gradient is that of the gathered weight on this device, not reduced.
      adapter: an `Adapter` of arrays or `Shard`s, for a frozen weight. `ModelDef.merge` sets it.
        Its gradients are those of the two factors; the weight then has none.
      last: whether this is the step's last micro-batch; static. `attach` sets it.
    """

    weight: Any
    residual: Any = None
    total: Any = None
    gathered: Any = None
    adapter: Any = None
    last: bool = field(default=True, metadata={"static": True})


def is_shard(x: Any) -> bool:
    """Whether a node of a tree is a `Shard`."""
    return isinstance(x, Shard)


def as_shard(x: Any) -> Shard:
    """Returns a `Shard` as it is, and an array as one with nothing beside it."""
    return x if isinstance(x, Shard) else Shard(x)


def attach(
    weights: Any,
    *,
    residuals: Any = None,
    totals: Any = None,
    gathered: Any = None,
    adapters: Any = None,
    last: bool = True,
) -> Any:
    """Builds a `Shard` of each weight, or sets fields of a `Shard` that is there.

    An array with nothing beside it stays an array.

    Args:
      weights: a tree of arrays or `Shard`s.
      residuals, totals, gathered, adapters: like `weights`, with that field of each `Shard`. A tree
        that is None leaves the field as it is.
      last: False for a micro-batch before the last.
    """
    trees = {"residual": residuals, "total": totals, "gathered": gathered, "adapter": adapters}
    given = {name: tree for name, tree in trees.items() if tree is not None}

    def one(weight: Any, *values: Any) -> Any:
        if not is_shard(weight) and all(value is None for value in values):
            return weight
        shard = as_shard(weight)
        own = dict(zip(given, values, strict=True))
        return replace(shard, **own, last=shard.last and last)

    return jax.tree.map(one, weights, *given.values(), is_leaf=is_shard)


def detach(shards: Any) -> Shard:
    """The inverse of `attach`: a `Shard` of trees, of a tree of `Shard`s or of their gradients."""

    def one(name: str) -> Any:
        return jax.tree.map(lambda x: getattr(as_shard(x), name), shards, is_leaf=is_shard)

    return Shard(*map(one, ("weight", "residual", "total", "gathered", "adapter")))


def without(shards: Any, name: str) -> Any:
    """Returns a tree of `Shard`s and other leaves, with this field of each `Shard` None."""
    return jax.tree.map(
        lambda x: replace(x, **{name: None}) if is_shard(x) else x, shards, is_leaf=is_shard
    )
