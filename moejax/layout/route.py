"""A route: the hops a token takes to its experts. The way home is its mirror.

    all_to_all  each bucket of rows goes to the peer that owns its experts, along these axes;
                with `merge` a token bound for several experts behind one peer crosses once, and its
                weighted results are summed before they cross back
    gather      every device along these axes needs all rows, because the experts' hidden width is
                sharded there; home: partial results are reduce-scattered
    sum         the rows are on every device along these axes already; home: partial results are
                all-reduced

A route is cut in chunks that follow each other through all hops, so that one chunk's exchange runs
beside another's experts; forward and backward have their own number of them.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from moejax.config.compression import NO_CODECS, Codecs
from moejax.layout.layout import Axes, Layout

# Every route, and what the start table says of it.
ROUTES = {
    "duplicate": "every tensor rank sends every token (the baseline of benchmarks)",
    "split": "each tensor rank sends its own tokens; experts' tensor ranks gather what arrives",
    "spread": "one all-to-all takes a token to every tensor rank of its expert",
    "gather_home": "tensor ranks each send a share of the same buckets; results gathered at home",
    "merge": "as split, and a token crosses once to each device that owns some of its experts",
    "two_level": "between nodes first, then inside the node",
    "two_level_merge": "as two_level, and a token crosses once to each node that needs it",
}


@dataclass(frozen=True)
class Hop:
    """One stage of dispatch, and of combine, along some mesh axes."""

    kind: Literal["all_to_all", "gather", "sum"]
    axes: Axes
    merge: bool = False
    # Of an all-to-all. Axes whose devices hold the same buckets: each sends its share, and on the
    # way home the shares are gathered.
    split: Axes = ()
    # Of an all-to-all. The last of `axes`: every device along them gets a copy of the bucket, and
    # on the way home the copies' results are summed.
    copies: Axes = ()
    # How rows and results, and their gradients, travel; a hop inside a node has none.
    codecs: Codecs = NO_CODECS

    def peers(self, layout: Layout) -> int:
        """P: buckets of an all-to-all."""
        return layout.size(self.axes) // layout.size(self.copies)


@dataclass(frozen=True)
class Route:
    """The hops, and into how many chunks the tokens are cut."""

    name: str
    hops: tuple[Hop, ...]
    replicated: bool = False  # whether it starts from the tokens of all tensor ranks
    chunks: int = 1
    chunks_backward: int = 1
    trim: bool = False  # whether only the filled rows of buckets travel, not whole buckets

    @property
    def parts(self) -> int:
        """I: the finest pieces of a bucket; chunks of both directions are whole numbers of them."""
        return math.lcm(self.chunks, self.chunks_backward)

    @property
    def merges(self) -> bool:
        """Whether weights travel with the rows, so that results are summed on the way home."""
        return any(hop.merge for hop in self.hops)

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
      codecs: of the exchanges that cross nodes.
    """
    owner, tensor = layout.expert_owner_axes, layout.tensor
    merge = name in ("merge", "two_level_merge")
    if name == "duplicate":
        hops = [Hop("all_to_all", owner), Hop("sum", tensor)]
    elif name == "spread":
        hops = [Hop("all_to_all", owner + tensor, copies=tensor)]
    elif name == "gather_home":
        hops = [Hop("all_to_all", owner, split=tensor), Hop("gather", tensor)]
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
        if layout.size(hop.axes + hop.split) > 1
    )
    if not any(hop.kind == "all_to_all" for hop in hops):
        chunks, chunks_backward, trim = 1, 1, False  # there are no buckets
    return Route(name, hops, name in ("duplicate", "gather_home"), chunks, chunks_backward, trim)


def explain(route: Route) -> str:
    """One line: the hops out, the chunks, and what the route does."""
    if not route.hops:
        return "none: every device has all experts"
    names = [hop.kind.replace("_", "-") + " " + ", ".join(hop.axes) for hop in route.hops]
    said = [f"{route.name} ({' > '.join(names)}): {ROUTES[route.name]}"]
    if route.parts > 1:
        said.append(f"{route.chunks} chunks forward, {route.chunks_backward} backward")
    if route.trim:
        said.append("only filled rows travel")
    return "; ".join(said)


def plain_route(route: Route, layout: Layout) -> Route:
    """The route's form with one exchange, no merging and no chunks: any routing fits it in rounds.

    It starts from the same tokens as `route`.
    """
    single = len(route.exchanges) == 1 and not route.merges
    codecs = next((hop.codecs for hop in route.hops if hop.codecs != NO_CODECS), NO_CODECS)
    return build_route(route.name if single else "split", layout, codecs=codecs)
