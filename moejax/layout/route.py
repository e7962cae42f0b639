"""A route: the hops of a token to its experts. Results take the same hops back.

    all_to_all  each bucket of rows goes to the peer that owns its experts, along these axes. With
                `merge` a token bound for several experts behind one peer crosses once, and its
                weighted results are summed before they cross back.
    gather      every device along these axes needs all rows, because the experts' hidden width is
                sharded over them. On the way back partial results are reduce-scattered.
    sum         every device along these axes has the rows already. On the way back partial results
                are all-reduced.

All-to-all hops come first: a hop's index is then also the index of its slots in the dispatch plan.

Rows are cut in chunks that follow each other through all hops, so that the exchange of one chunk
runs beside the experts of another. Forward and backward have their own numbers of chunks.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from moejax.config.compression import NO_CODECS, Codecs
from moejax.layout.layout import Axes, Layout

# Every route, with its description in the table that a run prints at its start.
ROUTES = {
    "duplicate": "every tensor rank sends every token (the baseline of benchmarks)",
    "split": "each tensor rank sends its own tokens; experts' tensor ranks gather what arrives",
    "merge": "split, de-duplicated: a token crosses once to each device that has its experts",
    "two_level": "hierarchical all-to-all: between nodes first, then inside the node",
    "two_level_merge": "two_level, de-duplicated: a token crosses once to each node that needs it",
}


@dataclass(frozen=True)
class Hop:
    """One stage of dispatch, and of combine, along some mesh axes."""

    kind: Literal["all_to_all", "gather", "sum"]
    axes: Axes
    merge: bool = False
    # Codecs of rows and results, and of their gradients. Only the first hop may have them, because
    # `comm.tokens.hops` encodes at the source alone; a hop inside a node has none.
    codecs: Codecs = NO_CODECS

    def peers(self, layout: Layout) -> int:
        """P, the number of buckets of an all-to-all."""
        return layout.size(self.axes)


@dataclass(frozen=True)
class Route:
    """The hops, and the numbers of chunks."""

    name: str
    hops: tuple[Hop, ...]
    replicated: bool = False  # each tensor rank starts from the tokens of all tensor ranks
    chunks: int = 1
    chunks_backward: int = 1
    trim: bool = False  # only the filled rows of buckets travel

    @property
    def parts(self) -> int:
        """I, the parts of a bucket: a chunk of forward or backward is a whole number of parts."""
        return math.lcm(self.chunks, self.chunks_backward)

    @property
    def merges(self) -> bool:
        """True if rows merge: weights then travel along, and results are summed on the way back."""
        return any(hop.merge for hop in self.hops)

    @property
    def parts_by_expert(self) -> bool:
        """True if the parts of a bucket are runs of rows sorted by expert: each meets few experts.

        A second exchange, or rows that merge, would find uneven loads in such parts.
        """
        return self.parts > 1 and len(self.exchanges) == 1 and not self.merges

    @property
    def exchanges(self) -> tuple[Hop, ...]:
        """The all-to-all hops."""
        return tuple(hop for hop in self.hops if hop.kind == "all_to_all")


def build_route(
    name: str,
    layout: Layout,
    *,
    chunks: int = 1,
    chunks_backward: int = 1,
    trim: bool = False,
    codecs: Codecs = NO_CODECS,
) -> Route:
    """Returns a route of `ROUTES` on a mesh; hops of one device are left out.

    Args:
      codecs: for the exchange that crosses nodes.
    Raises:
      ValueError: if a hop behind the first one would have codecs: it would not encode.
    """
    owner, tensor = layout.expert_owner_axes, layout.tensor
    merge = name in ("merge", "two_level_merge")
    if name == "duplicate":
        hops = [Hop("all_to_all", owner), Hop("sum", tensor)]
    else:
        levels = (owner,)
        if name.startswith("two_level"):
            levels = (layout.between_nodes(owner), layout.inside_node(owner))
        hops = [Hop("all_to_all", axes, merge=merge) for axes in levels]
        if layout.hidden_over_tensor:
            hops.append(Hop("gather", tensor))
    hops = tuple(
        replace(hop, codecs=codecs)
        if hop.kind == "all_to_all" and layout.between_nodes(hop.axes)
        else hop
        for hop in hops
        if layout.size(hop.axes) > 1
    )
    if any(hop.codecs != NO_CODECS for hop in hops[1:]):
        raise ValueError(
            f"route {name}: a hop behind the first would have codecs, but only the source encodes"
        )
    if not any(hop.kind == "all_to_all" for hop in hops):
        chunks, chunks_backward, trim = 1, 1, False  # there are no buckets
    return Route(name, hops, name == "duplicate", chunks, chunks_backward, trim)


def explain(route: Route) -> str:
    """Describes a route in one line: hops of dispatch, what the route does, and chunks."""
    if not route.hops:
        return "none: every device has all experts"
    names = [hop.kind.replace("_", "-") + " " + ", ".join(hop.axes) for hop in route.hops]
    clauses = [f"{route.name} ({' > '.join(names)}): {ROUTES[route.name]}"]
    if route.parts > 1:
        clauses.append(f"{route.chunks} chunks forward, {route.chunks_backward} backward")
    if route.trim:
        clauses.append("only filled rows travel")
    return "; ".join(clauses)


def plain_route(route: Route, layout: Layout) -> Route:
    """Returns the route of overflow rounds: one exchange, no merging, no chunks.

    It starts from the same tokens as `route`.
    """
    single = len(route.exchanges) == 1 and not route.merges
    codecs = next((hop.codecs for hop in route.hops if hop.codecs != NO_CODECS), NO_CODECS)
    return build_route(route.name if single else "split", layout, codecs=codecs)
