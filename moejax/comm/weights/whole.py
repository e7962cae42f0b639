"""Weights that are gathered once a step and kept, and travel beside their shards.

Per device, inside shard_map. Where `mesh.gather_dense` is "step", dense matrices are gathered
before the first micro-batch, all layers of a stack at once. `gather_weight` then takes what is
there and sends nothing. The copy is the same for all micro-batches, so nothing is differentiated
with respect to it. The gradients of these matrices are added up whole over micro-batches, and the
last one reduces the sums (`GatherSpec.whole_total`).

Where `mesh.gather_across` is "step", all other matrices whose shards lie across nodes are gathered
across nodes then, and `gather_weight` gathers the rest inside the node. Micro-batches add up
gradients that are summed inside the node, and the last one sends the sums to other nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from moejax.comm.weights.path import class_of, compressible, path_of
from moejax.comm.weights.residuals import has_residual
from moejax.comm.weights.totals import WithTotal
from moejax.layout.spec import StepSpec


@jax.tree_util.register_dataclass
@dataclass
class WithWhole:
    """A parameter's shard with the gathered weight.

    Attributes:
      weight: an array, a `WithResidual` or a `WithTotal`; Any because JAX builds trees of other
        leaves too.
      whole: in the dtype of compute; or what was gathered of it across nodes, [S, ...].
    """

    weight: Any
    whole: Any


def is_kept_whole(dims: str, spec: StepSpec) -> bool:
    """Whether a parameter with these dimension letters is gathered once a step.

    The router's matrix and biases are not: they are small, and are gathered in float32.
    """
    dense = class_of(dims) == "dense_gradient" and compressible(dims)
    return spec.gather_dense == "step" and dense and path_of(dims, spec.layout).dim is not None


def is_kept_in_node(dims: str, spec: StepSpec) -> bool:
    """Whether a parameter with these dimension letters is gathered across nodes once a step.

    Those in float32 are not, as above.
    """
    kept = spec.gather_across == "step" and compressible(dims) and not is_kept_whole(dims, spec)
    return kept and path_of(dims, spec.layout).gathers_across


def gather_whole(
    params: Any, dims: Any, spec: StepSpec, gather: Callable[[jax.Array, str], jax.Array]
) -> Any:
    """Returns for each parameter what is gathered of it for the step, or None.

    Args:
      params: this device's shards; layers may be stacked.
      dims: the dimension letters of each parameter.
      gather: gathers the shard of one layer, whose letters it is given.
    """

    def whole(param: jax.Array, letters: str) -> jax.Array | None:
        if not (is_kept_whole(letters, spec) or is_kept_in_node(letters, spec)):
            return None

        def one(shard: jax.Array) -> jax.Array:
            return gather(shard, letters)

        for _ in range(param.ndim - len(letters)):
            one = jax.vmap(one)
        return one(param)

    with jax.named_scope("weights"):
        return jax.tree.map(whole, params, dims)


def has_whole(x: Any) -> bool:
    """Whether a node of a tree is a `WithWhole`."""
    return isinstance(x, WithWhole)


def attach_whole(params: Any, whole: Any) -> Any:
    """Puts gathered weights beside parameters, which may have states and sums beside them.

    Args:
      whole: an array or None for each parameter.
    """
    return jax.tree.map(
        lambda weight, whole: weight if whole is None else WithWhole(weight, whole),
        params,
        whole,
        is_leaf=lambda x: has_residual(x) or isinstance(x, WithTotal),
    )


def detach_whole(params: Any) -> tuple[Any, Any]:
    """The inverse of `attach_whole`."""

    def is_entry(x: Any) -> bool:
        return has_whole(x) or has_residual(x) or isinstance(x, WithTotal)

    return (
        jax.tree.map(lambda x: x.weight if has_whole(x) else x, params, is_leaf=has_whole),
        jax.tree.map(lambda x: x.whole if has_whole(x) else None, params, is_leaf=is_entry),
    )
