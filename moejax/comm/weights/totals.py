"""Sums of gradients over micro-batches, which travel through the backward pass beside the weights.

Per device, inside shard_map. A gradient crosses what holds copies of its shard once a step, in the
last micro-batch. Those before it give parts that this device adds up: the sum enters forward beside
the weight, and a micro-batch's own parts leave backward as its "gradient".
"""

from dataclasses import dataclass, field
from typing import Any

import jax

from moejax.comm.weights.residuals import has_residual


@jax.tree_util.register_dataclass
@dataclass
class WithTotal:
    """A parameter's shard with the sum of its gradients over the micro-batches so far.

    Attributes:
      weight: an array or a `WithResidual`; Any because JAX builds trees of other leaves too.
      total: float32 arrays, what `reduce.sum_shards` returns; of a weight that is gathered once a
        step one, in the shape of the gathered weight.
      last: whether this is the last micro-batch. If so the gradient of `weight` is that of the
        whole batch, reduced over all devices; if not, that of `total` has this micro-batch's parts,
        whatever `total` is.
    """

    weight: Any
    total: Any
    last: bool = field(metadata={"static": True})


def attach_totals(params: Any, totals: Any, *, last: bool) -> Any:
    """Puts sums beside parameters, which may have codec states beside them already.

    Args:
      totals: a tuple of arrays for each parameter.
    """
    return jax.tree.map(
        lambda weight, total: WithTotal(weight, total, last),
        params,
        totals,
        is_leaf=has_residual,
    )
