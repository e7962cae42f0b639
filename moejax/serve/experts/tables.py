"""Tables of experts by place, planned from the experts' load.

A device has places for its own e experts and r further ones. A table names the expert of each
place, and the share of the expert's choices that goes there. The plans differ in what they move:

- `by_node`: as `greedy`, but first between devices of a node, then with the slots that are left.
- `greedy`: own experts stay. The hottest part of the busiest device goes to the least busy one.
- `first_fit`: Lina's packing. An expert gets devices by its popularity; what is less than a device
  goes to the first that has room.
- `eplb`: DeepSeek's. Copies go to the expert with most load a copy; then the hottest copies go to
  the least busy device with a free place, nodes before devices.

None makes the busiest device busier than without copies: then the table is that of homes. `best` is
the first of them, in this order, that comes within 5 % of the least busy: later ones move more.

Letters: E experts, P devices that own experts in mesh order, e experts of each, r slots of each,
M places of all devices, C places of an expert.

Sources: Lina (Li et al., ATC 2023, section 5); github.com/deepseek-ai/EPLB (2025), its README.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

SHARES = 256  # as `moe.copies.SHARES`
WORTH = 1.05  # how much more the busiest device must have to do for a table that moves more


@dataclass(frozen=True)
class Cluster:
    """The devices that own experts, and their slots."""

    nodes: int
    devices: int  # of each node
    slots: int  # of each device

    @property
    def P(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices

    def node_of(self, device: int) -> int:
        """Returns the node of a device."""
        return device // self.devices


class Table(NamedTuple):
    """The expert of each place, and its share of the expert's choices.

    An expert of -1 means any: the place gets no choice. Other experts have at least one place, and
    their shares sum to one.
    """

    expert_M: np.ndarray
    share_M: np.ndarray


Plan = Callable[[np.ndarray, Cluster], Table]


def homes(num_experts: int, cluster: Cluster) -> Table:
    """Returns the table of experts at home, where nothing goes to slots."""
    expert_PM = np.full((cluster.P, num_experts // cluster.P + cluster.slots), -1)
    expert_PM[:, : num_experts // cluster.P] = np.arange(num_experts).reshape(cluster.P, -1)
    return Table(expert_PM.reshape(-1), (expert_PM >= 0).astype(float).reshape(-1))


def device_loads(table: Table, load_E: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Returns the choices of each device, [P]."""
    return (load_E[table.expert_M] * table.share_M).reshape(cluster.P, -1).sum(1)


def plan_table(name: str, load_E: ArrayLike, cluster: Cluster) -> Table:
    """Returns a table for a load, by the plan of a name in PLANS, or by "best" of them.

    Raises:
      ValueError: if the devices cannot share the experts evenly.
    """
    load_E = np.asarray(load_E, float)
    if len(load_E) % cluster.P:
        raise ValueError(f"{len(load_E)} experts on {cluster.P} devices. Each owns as many.")
    home = homes(len(load_E), cluster)
    if not cluster.slots or load_E.sum() <= 0:
        return home
    names = list(PLANS) if name == "best" else [name]
    planned = [PLANS[one](load_E, cluster) for one in names]
    busiest = [device_loads(one, load_E, cluster).max() for one in planned]
    first = next(i for i, load in enumerate(busiest) if load <= WORTH * min(busiest))
    return planned[first] if busiest[first] < device_loads(home, load_E, cluster).max() else home


def _greedy(load_E: np.ndarray, cluster: Cluster) -> Table:
    return _split_hot(homes(len(load_E), cluster), load_E, cluster, inside=False)


def _by_node(load_E: np.ndarray, cluster: Cluster) -> Table:
    table = _split_hot(homes(len(load_E), cluster), load_E, cluster, inside=True)
    return _split_hot(table, load_E, cluster, inside=False)


def _split_hot(table: Table, load_E: np.ndarray, cluster: Cluster, *, inside: bool) -> Table:
    """Fills slots with copies as long as one evens two devices.

    Args:
      inside: whether copies stay in their node. Then each node's busiest device is a source.
    """
    expert_PM, share_PM = (x.reshape(cluster.P, -1).copy() for x in table)
    node_P = np.arange(cluster.P) // (cluster.devices if inside else cluster.P)
    open_P = np.ones(cluster.P, bool)  # devices that may have something to give
    while open_P.any():
        load_PM = load_E[expert_PM] * share_PM
        total_P = load_PM.sum(1)
        source = int(np.argmax(np.where(open_P, total_P, -1)))
        may_P = (node_P == node_P[source]) & (expert_PM < 0).any(1)
        move = _best_move(source, may_P, load_PM, expert_PM)
        if move is None:
            open_P[source] = False
            continue
        place, target, load = move
        expert, slot = expert_PM[source, place], int(np.argmax(expert_PM[target] < 0))
        expert_PM[target, slot], share_PM[target, slot] = expert, load / load_E[expert]
        share_PM[source, place] -= load / load_E[expert]
    return Table(expert_PM.reshape(-1), share_PM.reshape(-1))


def _best_move(
    source: int, may_P: np.ndarray, load_PM: np.ndarray, expert_PM: np.ndarray
) -> tuple[int, int, float] | None:
    """Returns the place whose expert is copied, the device that takes it, and how much moves."""
    total_P = load_PM.sum(1)
    for place in np.argsort(-load_PM[source], kind="stable").tolist():
        takes_P = may_P & ~(expert_PM == expert_PM[source, place]).any(1)
        target = int(np.argmin(np.where(takes_P, total_P, np.inf)))
        load = float(min(load_PM[source, place], (total_P[source] - total_P[target]) / 2))
        if takes_P[target] and load * SHARES >= total_P[source] > 0:
            return place, target, load
    return None


def _first_fit(load_E: np.ndarray, cluster: Cluster) -> Table:
    """Experts by popularity; each takes whole devices, then the first with room for its rest."""
    packed, wanted_E = _Packed(len(load_E), cluster), cluster.P * load_E / load_E.sum()
    for expert in np.argsort(-wanted_E, kind="stable").tolist():
        left = float(wanted_E[expert])
        while left >= 1 and (packed.load_P == 0).any():
            device = int(np.argmin(packed.load_P))
            packed.put(expert, device, 1.0)
            left -= 1
        fits_P = packed.free_P & (packed.load_P + left <= 1 + 1e-9)
        emptiest = np.argmin(np.where(packed.free_P, packed.load_P, np.inf))
        device = int(np.argmax(fits_P) if fits_P.any() else emptiest)
        if left > 1e-9 or wanted_E[expert] == 0:
            packed.put(expert, device, left)
    return packed.table()


def _eplb(load_E: np.ndarray, cluster: Cluster) -> Table:
    """Experts to nodes, copies inside each node, then copies to its devices."""
    E, nodes = len(load_E), cluster.nodes
    packed = _Packed(E, cluster)
    for node, experts in enumerate(_balanced(load_E, nodes, E // nodes)):
        copies = list(experts)
        count_E = np.bincount(copies, minlength=E)
        for _ in range(cluster.devices * cluster.slots):
            hottest = max(experts, key=lambda x: load_E[x] / count_E[x])
            copies.append(hottest)
            count_E[hottest] += 1
        each = np.array([load_E[x] / count_E[x] for x in copies])
        per_device = len(copies) // cluster.devices
        for device, own in enumerate(_balanced(each, cluster.devices, per_device)):
            for i in own:
                packed.put(copies[i], node * cluster.devices + device, float(each[i]))
    return packed.table()


def _balanced(weight_N: np.ndarray, packs: int, size: int) -> list[list[int]]:
    """Returns packs of equal size: the heaviest item first, to the lightest pack with room."""
    found: list[list[int]] = [[] for _ in range(packs)]
    total = np.zeros(packs)
    for item in np.argsort(-weight_N, kind="stable"):
        room = np.array([len(own) < size for own in found])
        pack = int(np.argmin(np.where(room, total, np.inf)))
        found[pack].append(int(item))
        total[pack] += weight_N[item]
    return found


class _Packed:
    """Devices that are filled place by place, with parts of experts by load."""

    def __init__(self, num_experts: int, cluster: Cluster):
        places = num_experts // cluster.P + cluster.slots
        self.load_P = np.zeros(cluster.P)
        self._expert_PM = np.full((cluster.P, places), -1)
        self._load_PM = np.zeros((cluster.P, places))
        self._experts = num_experts

    @property
    def free_P(self) -> np.ndarray:
        """Whether a device has a free place."""
        return (self._expert_PM < 0).any(1)

    def put(self, expert: int, device: int, load: float) -> None:
        """Puts a part of an expert into the first free place of a device, which has one."""
        place = int(np.argmax(self._expert_PM[device] < 0))
        self._expert_PM[device, place], self._load_PM[device, place] = expert, load
        self.load_P[device] += load

    def table(self) -> Table:
        """Returns the table; an expert without load goes to its places in equal shares."""
        expert_M, load_M = self._expert_PM.reshape(-1), self._load_PM.reshape(-1)
        used_M = expert_M >= 0
        total_E = np.bincount(expert_M[used_M], load_M[used_M], self._experts)
        count_E = np.bincount(expert_M[used_M], minlength=self._experts)
        cold_M = total_E[expert_M] <= 0
        share_M = np.where(
            cold_M, 1 / count_E[expert_M], load_M / np.maximum(total_E, 1e-300)[expert_M]
        )
        return Table(expert_M, np.where(used_M, share_M, 0.0))


PLANS: dict[str, Plan] = {
    "by_node": _by_node,
    "greedy": _greedy,
    "first_fit": _first_fit,
    "eplb": _eplb,
}


def aligned(new: Table, old_M: np.ndarray, cluster: Cluster) -> Table:
    """Returns a table that does the same with more experts where they are.

    Devices take the row of the table that shares most experts with what they hold, the best match
    first, and order its places. Places of -1 keep the experts that they hold.

    Args:
      old_M: the expert that each place holds.
    """
    row_P = _matched(new.expert_M.reshape(cluster.P, -1), old_M.reshape(cluster.P, -1))
    expert_PM, share_PM = (x.reshape(cluster.P, -1)[row_P] for x in new)
    rows = zip(expert_PM, share_PM, old_M.reshape(cluster.P, -1), strict=True)
    expert_PM, share_PM = [], []
    for expert_M, share_M, held_M in rows:
        parts = [(int(x), float(s)) for x, s in zip(expert_M, share_M, strict=True) if x >= 0]
        place_of: dict[int, tuple[int, float]] = {}
        for place, held in enumerate(held_M.tolist()):
            match = next((one for one in parts if one[0] == held), None)
            if match is not None:
                parts.remove(match)
                place_of[place] = match
        free = iter([place for place in range(len(held_M)) if place not in place_of])
        place_of |= {next(free): part for part in parts}
        usual = [(int(held), 0.0) for held in held_M]
        own = [place_of.get(place, usual[place]) for place in range(len(held_M))]
        expert_PM.append([one[0] for one in own])
        share_PM.append([one[1] for one in own])
    return Table(np.array(expert_PM).reshape(-1), np.array(share_PM).reshape(-1))


def _matched(new_PM: np.ndarray, old_PM: np.ndarray) -> np.ndarray:
    """Returns the row of a table that each device takes, [P]; its own of equally good ones."""
    P = len(new_PM)
    shared_PP = np.array([[len(set(new) & set(old)) for new in new_PM] for old in old_PM], float)
    shared_PP += 0.5 * np.eye(P)
    row_P = np.zeros(P, int)
    for _ in range(P):
        device, row = np.unravel_index(np.argmax(shared_PP), shared_PP.shape)
        row_P[device] = row
        shared_PP[device], shared_PP[:, row] = -1, -1
    return row_P


def sources(new_M: np.ndarray, old_M: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Returns the place from which each place gets its expert: itself, or the nearest holder."""
    per_device = len(old_M) // cluster.P
    found_M = np.arange(len(old_M))
    for place in np.flatnonzero(new_M != old_M).tolist():
        device = place // per_device
        holders = np.flatnonzero(old_M == new_M[place])
        device_C = holders // per_device
        far_C = 2 * (device_C // cluster.devices != cluster.node_of(device)) + (device_C != device)
        found_M[place] = holders[np.argmin(far_C)]
    return found_M


def placement(table: Table, num_experts: int, cluster: Cluster) -> np.ndarray:
    """Returns a `moe.copies.Placement` [2, E, P], int32: places of each expert in mesh order.

    Places of an expert on one device count as the first of them.
    """
    per_device = len(table.expert_M) // cluster.P
    found = np.zeros((2, num_experts, cluster.P), np.int32)
    for expert in range(num_experts):
        places = np.flatnonzero(table.expert_M == expert)
        devices, first_D, row_C = np.unique(
            places // per_device, return_index=True, return_inverse=True
        )
        share_D = np.bincount(row_C, table.share_M[places], len(devices))
        upto_D = np.round(np.cumsum(share_D) * SHARES)
        upto_D[-1] = SHARES
        rest = cluster.P - len(devices)
        found[0, expert] = np.concatenate([places[first_D], np.repeat(places[first_D[-1]], rest)])
        found[1, expert] = np.concatenate([upto_D, np.full(rest, SHARES)])
    return found
