"""A route: the hops a token takes to its expert. The way home is its mirror.

Two kinds of hop. `all_to_all`: along these axes each bucket of rows goes to the peer that owns its
experts. `gather`: along these axes every device needs all rows, because the experts' hidden width
is sharded there (MoNTA: send 1/T of the tokens from each tensor rank, gather inside the node,
scatter-sum on the way home).
"""

from dataclasses import dataclass
from typing import Literal

from moejax.dims import Axes, Layout


@dataclass(frozen=True)
class Hop:
    """One stage of the journey, along some mesh axes."""

    kind: Literal["all_to_all", "gather"]
    axes: Axes


Route = tuple[Hop, ...]


def flat_route(layout: Layout) -> Route:
    """One all-to-all over the devices that own experts, then the tensor ranks share the rows."""
    hops = (Hop("all_to_all", layout.expert_owner_axes),)
    if not layout.folded:
        hops += (Hop("gather", layout.tensor),)
    return tuple(hop for hop in hops if layout.size(hop.axes) > 1)
