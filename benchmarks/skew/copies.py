"""What placing experts otherwise, or copying hot ones, makes of the busiest device: by formula.

Devices lie on a ring. Slot j of device p holds a copy of an expert of device p + j + 1. A copied
expert's rows are split between its home and its copies so that the busiest device has fewest.

Letters: E experts, P devices.
"""

import numpy as np
from scipy.optimize import linprog

Holders = list[list[int]]  # the devices of each expert, its home first


def homes_in_order(experts: int, devices: int) -> np.ndarray:
    """Returns the device of each expert, [E], placed in order."""
    return np.arange(experts) * devices // experts


def homes_rearranged(load_E: np.ndarray, devices: int) -> np.ndarray:
    """Returns devices of experts, [E]: the hottest first, to the least busy with room."""
    room = np.full(devices, len(load_E) // devices)
    busy, home_E = np.zeros(devices), np.zeros(len(load_E), int)
    for expert in np.argsort(-load_E, kind="stable"):
        device = int(np.argmin(np.where(room > 0, busy, np.inf)))
        home_E[expert] = device
        busy[device] += load_E[expert]
        room[device] -= 1
    return home_E


def ring(load_E: np.ndarray, devices: int, slots: int) -> Holders:
    """Returns the holders of experts in order, with copies: of the hottest by load over holders."""
    home_E = homes_in_order(len(load_E), devices)
    holders: Holders = [[int(home)] for home in home_E]
    for owner in range(devices):
        own = np.flatnonzero(home_E == owner)
        for slot in range(slots):
            hottest = max(own, key=lambda e: load_E[e] / len(holders[e]))
            holders[hottest].append((owner - slot - 1) % devices)
    return holders


def split(load_E: np.ndarray, holders: Holders, devices: int) -> np.ndarray:
    """Returns the share of each expert's rows on each device, [E, P], by a linear program."""
    share_EP = np.zeros((len(load_E), devices))
    for expert, own in enumerate(holders):
        share_EP[expert, own[0]] = 1.0
    copied = [e for e, own in enumerate(holders) if len(own) > 1 and load_E[e] > 0]
    if not copied:
        return share_EP
    share_EP[copied] = 0
    fixed_P = load_E @ share_EP
    places = [(row, e, p) for row, e in enumerate(copied) for p in holders[e]]
    # Variables: rows of each place, then those of the busiest device, which is least.
    rows_on = np.zeros((devices, len(places) + 1))
    rows_of = np.zeros((len(copied), len(places) + 1))
    rows_on[:, -1] = -1
    for column, (row, _, device) in enumerate(places):
        rows_on[device, column] = 1
        rows_of[row, column] = 1
    cost = np.zeros(len(places) + 1)
    cost[-1] = 1
    found = linprog(cost, rows_on, -fixed_P, rows_of, load_E[copied], method="highs")
    if found.x is None:
        raise RuntimeError(f"the linear program has no solution: {found.message}")
    for value, (_, expert, device) in zip(found.x, places, strict=False):
        share_EP[expert, device] = value / load_E[expert]
    return share_EP


def busiest(load_E: np.ndarray, share_EP: np.ndarray) -> float:
    """Returns the busiest device's rows over the mean."""
    rows_P = load_E @ share_EP
    return float(rows_P.max() / rows_P.mean())


def placed(
    load_E: np.ndarray, name: str, devices: int, now_E: np.ndarray | None = None
) -> np.ndarray:
    """Returns the shares [E, P] that a load calls for.

    Args:
      name: `in order`, `rearranged`, or a number of slots a device.
      now_E: the load by which rows are split over copies; None: that by which they were chosen.
    """
    if name == "in order":
        return np.eye(devices)[homes_in_order(len(load_E), devices)]
    if name == "rearranged":
        return np.eye(devices)[homes_rearranged(load_E, devices)]
    holders = ring(load_E, devices, int(name))
    return split(load_E if now_E is None else now_E, holders, devices)
