"""What recorded choices say: loads, hot experts, paths, and placements by formula.

Letters: B rows of text, T bytes of a row, N tokens, L layers, E experts, K experts of a token,
M micro-batches, P devices.
"""

import itertools
from typing import Any

import numpy as np

from benchmarks.skew.copies import busiest, placed
from benchmarks.skew.loads import (
    busiest_device,
    busiest_expert,
    kept,
    kept_apart,
    loads_of,
    summary,
)
from benchmarks.skew.paths import predicted, predicted_by_id
from benchmarks.skew.record import Recorded, Setup
from benchmarks.skew.texts import OWN

SIZES = {"1k": 1024, "4k": 4096, "16k": 16384}  # tokens of a micro-batch
DEVICES = (4, 8, 16)
APART = (1, 4, 16)
LENGTHS = (1, 3, 6)
LEAST = (1, 8)
WINDOW = 4  # micro-batches whose loads make the table of those behind them
PLACED = 8  # micro-batches that are placed
NAMES = ("in order", "rearranged", "1", "2", "3")  # numbers: slots a device
TABLES = ("same", "before", "older", "before, split now", "older, split now")


def drawn(choice_BTLK: np.ndarray) -> np.ndarray:
    """Returns the choices of tokens, [N, L, K], with rows in the order that training draws."""
    order_B = np.random.default_rng(0).permutation(len(choice_BTLK))
    return in_order(choice_BTLK[order_B])


def in_order(choice_BTLK: np.ndarray) -> np.ndarray:
    """Returns the choices of tokens, [N, L, K], as the text stands."""
    return choice_BTLK.reshape(-1, *choice_BTLK.shape[2:])


def uneven(choice_NLK: np.ndarray, experts: int) -> dict[str, Any]:
    """Returns busiest over mean, of experts and devices, by the size of a micro-batch."""
    found = {}
    for name, tokens in SIZES.items():
        if len(choice_NLK) < tokens:
            continue
        load_MLE = loads_of(choice_NLK, experts=experts, tokens=tokens)
        of_devices = {str(p): summary(busiest_device(load_MLE, p)) for p in DEVICES}
        found[name] = {"expert": summary(busiest_expert(load_MLE)), **of_devices}
    return found


def even_choices(setup: Setup) -> np.ndarray:
    """Returns choices [N, L, K] of a router that draws experts, all alike likely."""
    tokens = setup.rows * setup.length
    score_NLE = np.random.default_rng(0).random((tokens, setup.layers, setup.experts), np.float32)
    return np.argpartition(score_NLE, setup.choices, axis=2)[:, :, : setup.choices]


def lasting(choice_NLK: np.ndarray, experts: int) -> dict[str, Any]:
    """Returns how many of the hottest experts are hot some micro-batches of 4k later."""
    load_MLE = loads_of(choice_NLK, experts=experts, tokens=SIZES["4k"])
    return {str(n): _means(kept_apart(load_MLE, n)) for n in APART if n < len(load_MLE)}


def lasting_over_steps(recorded: Recorded, rows: int, experts: int) -> dict[str, Any]:
    """Returns how many of the hottest experts are hot at the next recorded step, on equal text."""
    loads = {
        step: loads_of(in_order(c[:rows]), experts=experts, tokens=rows * c.shape[1])[0]
        for step, c in recorded.choices.items()
    }
    return {
        f"{a} to {b}": _means(kept(loads[a], loads[b])[None]) for a, b in itertools.pairwise(loads)
    }


def _means(found_ML: np.ndarray) -> dict[str, Any]:
    layer_L = found_ML.mean(axis=0)
    return {"median": float(np.median(layer_L)), "worst": float(layer_L.min())}


def foretold(choice_BTLK: np.ndarray, id_BT: np.ndarray, experts: int) -> dict[str, Any]:
    """Returns how well the next layer's experts are told: learned on one half, tested on another.

    Layers are those with the longest path before them; values are means over them.
    """
    half = len(choice_BTLK) // 2
    learn, test = in_order(choice_BTLK[:half]), in_order(choice_BTLK[half : 2 * half])
    ids = id_BT[:half].ravel(), id_BT[half : 2 * half].ravel()
    layers = range(max(LENGTHS), choice_BTLK.shape[2])
    given = {"experts": experts}
    found: dict[str, Any] = {}
    for length, least in [(0, 1), *((n, few) for few in LEAST for n in LENGTHS)]:
        rows = [
            predicted(learn, test, layer=layer, length=length, least=least, **given)
            for layer in layers
        ]
        found[f"{length}, {least}"] = _mean(rows)
    pairs = (ids[0], learn), (ids[1], test)
    found["id"] = _mean([predicted_by_id(*pairs, layer=layer, **given) for layer in layers])
    return found


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def placements(choice_NLK: np.ndarray, older_LE: np.ndarray, devices: int) -> dict[str, Any]:
    """Returns the busiest device over the mean as experts are placed, by table.

    A table says where experts lie, and how a copied expert's rows are split: made from the loads of
    the micro-batch itself, of those before it, or of a training step long before. "Split now":
    copies are those of an old table, and rows are split by what the micro-batch has.

    Args:
      older_LE: the loads of that step.
    """
    load_MLE = loads_of(choice_NLK, experts=older_LE.shape[1], tokens=SIZES["4k"])
    turns = range(WINDOW, min(len(load_MLE), WINDOW + PLACED))
    found: dict[str, Any] = {}
    for name in NAMES:
        by_table: dict[str, list[list[float]]] = {table: [] for table in TABLES}
        for m in turns:
            now_LE, before_LE = load_MLE[m], load_MLE[m - WINDOW : m].sum(axis=0)
            for table, table_LE in zip(TABLES[:3], (now_LE, before_LE, older_LE), strict=True):
                by_table[table].append(_each(now_LE, table_LE, name, devices))
            for table, table_LE in zip(TABLES[3:], (before_LE, older_LE), strict=True):
                by_table[table].append(_each(now_LE, table_LE, name, devices, split_now=True))
        found[name] = {table: _layers(np.array(rows)) for table, rows in by_table.items()}
    return found


def _layers(found_ML: np.ndarray) -> dict[str, float]:
    found = summary(found_ML)
    return {"median": found["median"], "worst": found["worst"]}


def _each(
    now_LE: np.ndarray, table_LE: np.ndarray, name: str, devices: int, *, split_now: bool = False
) -> list[float]:
    """Returns the busiest device over the mean of each layer."""
    return [
        busiest(now_E, placed(table_E, name, devices, now_E if split_now else None))
        for now_E, table_E in zip(now_LE, table_LE, strict=True)
    ]


def measure(recorded: Recorded, texts: dict[str, np.ndarray], setup: Setup) -> dict[str, Any]:
    """Returns all that a run's choices say."""
    E = setup.experts
    last, choices = setup.steps, recorded.choices
    own = choices[last]
    before = choices[setup.recorded[-2]]
    older_LE = loads_of(in_order(before), experts=E, tokens=before[:, :, 0, 0].size)[0]
    cases = {OWN: drawn(own), "as it stands": in_order(own)}
    cases |= {kind: drawn(choice) for kind, choice in recorded.other.items()}
    return {
        "bits": recorded.bits,
        "steps": {str(step): uneven(drawn(choice), E) for step, choice in choices.items()},
        "texts": {kind: uneven(choice, E) for kind, choice in cases.items()},
        "lasting": {
            "drawn": lasting(drawn(own), E),
            "as it stands": lasting(in_order(own), E),
            "steps": lasting_over_steps(recorded, setup.rows_before, E),
        },
        "foretold": foretold(own, texts[OWN], E),
        "placed": {
            kind: {str(p): placements(choice, older_LE, p) for p in DEVICES}
            for kind, choice in cases.items()
        },
    }
