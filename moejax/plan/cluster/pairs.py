"""Links between pairs of nodes: which of them a collective uses, and which nodes belong together.

A matrix has a row for the sending node and a column for the receiving one. A ring passes each
message to the next node of its group, the last to the first; an all-to-all uses all pairs; pipeline
stages are a chain. Nodes are numbered as in the topology; a group's order is that of its ring.
"""

import itertools
from collections.abc import Iterable, Sequence

Matrix = tuple[tuple[float, ...], ...]
Groups = tuple[tuple[int, ...], ...]  # disjoint groups of nodes

ALIKE = 1.25  # times: rates that differ by less are equal, as their measurements differ so
MANY = 7  # nodes of a chain that is found by trying all orders


def links_of(kind: str, group: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the (sender, receiver) pairs that a collective uses in a group of nodes.

    Args:
      kind: all_to_all, ppermute, or a kind that goes along a ring.
    """
    if kind == "all_to_all":
        return list(itertools.permutations(group, 2))
    chain = list(itertools.pairwise(group))
    if kind == "ppermute" or len(group) < 2:
        return chain
    return [*chain, (group[-1], group[0])]


def groupings(pairs: Matrix) -> list[Groups]:
    """Returns the ways to join nodes by fast links: all apart first, then fewer and larger groups.

    Single linkage: at each level two nodes belong together if a path of links at least as fast as
    the level's joins them. A level ends where the next slower rate is `ALIKE` times slower or more.
    A link counts as its slower direction. Of all ways to make as many groups, the fastest link
    between two of a level's groups is the slowest.
    """
    nodes = range(len(pairs))
    links = sorted(
        ((min(pairs[a][b], pairs[b][a]), a, b) for a, b in itertools.combinations(nodes, 2)),
        reverse=True,
    )
    group_of = list(nodes)
    found, last = [_groups(group_of)], None
    for rate, a, b in links:
        if last is not None and last >= ALIKE * rate:
            found.append(_groups(group_of))
        joined, gone = sorted((group_of[a], group_of[b]))
        group_of = [joined if group == gone else group for group in group_of]
        last = rate
    return list(dict.fromkeys([*found, _groups(group_of)]))


def _groups(group_of: Sequence[int]) -> Groups:
    """Returns the nodes of each group, in the order of the groups' first nodes."""
    members: dict[int, list[int]] = {}
    for node, group in enumerate(group_of):
        members.setdefault(group, []).append(node)
    return tuple(map(tuple, members.values()))


def chain(nodes: Sequence[int], pairs: Matrix) -> tuple[int, ...]:
    """Returns nodes in an order whose slowest link to the next one is as fast as can be.

    Of equally good orders the first in the order of `nodes`. Of more than `MANY` nodes each is
    followed by the one that is nearest to it, from the best of all beginnings.
    """
    if not pairs or len(nodes) < 3:
        return tuple(nodes)

    def slowest(order: Sequence[int]) -> float:
        return min(pairs[a][b] for a, b in itertools.pairwise(order))

    orders: Iterable[tuple[int, ...]] = itertools.permutations(nodes)
    if len(nodes) > MANY:
        orders = [tuple(nodes), *(_nearest_first(first, nodes, pairs) for first in nodes)]
    return max(orders, key=slowest)


def _nearest_first(first: int, nodes: Sequence[int], pairs: Matrix) -> tuple[int, ...]:
    order, left = [first], [node for node in nodes if node != first]
    while left:
        order.append(max(left, key=lambda node: pairs[order[-1]][node]))
        left.remove(order[-1])
    return tuple(order)
