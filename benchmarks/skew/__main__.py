"""How unevenly do tokens fall on experts, and would copies of hot experts pay in training?

Small models are trained on the source of Python's library, as bytes, on one CPU device: with a
balance loss, with a selection bias, with a bias and a loss of each sequence, and with none.
At some steps the experts of every token of held-out text are recorded; at the last step by the
model as exported and imported again, and also those of other texts: a model that reads what it was
not trained on. All else is counted from these choices. No load is invented. Times play no part.
Writes skew.json and skew.md, and to benchmarks/recorded the loads and some choices.

    python -m benchmarks.skew --out benchmarks/results
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from benchmarks.machine import RESULTS, ROOT, stamp
from benchmarks.skew.loads import loads_of
from benchmarks.skew.measure import even_choices, in_order, measure, uneven
from benchmarks.skew.page import page
from benchmarks.skew.record import (
    BIAS_RATE,
    SEQUENCE_LOSS,
    Recorded,
    Setup,
    all_texts,
    train,
    ways,
)
from benchmarks.skew.texts import OTHER, OWN
from moejax.config.schema import RouterConfig
from moejax.serve.samples import write_routing
from moejax.train.planning import save_expert_load

RECORDED = ROOT / "benchmarks" / "recorded"
KEPT_ROWS = 16  # rows of each text whose choices are written
SMALL = Setup(steps=20, recorded=(10, 20), rows=192, rows_before=64, rows_other=96)


def write_loads(folder: Path, name: str, choice_BTLK: np.ndarray, experts: int) -> None:
    """Writes the load of all tokens, as a run does."""
    tokens = choice_BTLK[:, :, 0, 0].size
    load_LE = loads_of(in_order(choice_BTLK), experts=experts, tokens=tokens)[0]
    save_expert_load(load_LE, folder / f"{name}.json")


def write_recorded(folder: Path, found: dict[str, Recorded], setup: Setup) -> None:
    """Writes loads with a balance loss and without, and choices of the model without."""
    folder.mkdir(parents=True, exist_ok=True)
    balanced, free = found["balance loss"], found["none"]
    write_loads(folder, "balance_loss", balanced.choices[setup.steps], setup.experts)
    write_loads(folder, "unbalanced", free.choices[setup.steps], setup.experts)
    write_loads(folder, "unbalanced_c_headers", free.other[OTHER[1]], setup.experts)
    samples = [one for kind in (OWN, OTHER[1]) for one in free.samples[kind][:KEPT_ROWS]]
    place = str(folder / "unbalanced.npz")
    write_routing(place, samples, layers=range(setup.layers), num_experts=setup.experts)


def run(setup: Setup, chosen: list[str], recorded: Path) -> dict[str, Any]:
    """Trains and measures every way, and returns the result."""
    texts, found = all_texts(setup), {}
    result: dict[str, Any] = {"setup": dataclasses.asdict(setup), "ways": {}}
    result["coefficients"] = {
        "balance loss": RouterConfig().balance_loss,
        "bias": BIAS_RATE,
        "sequence loss": SEQUENCE_LOSS,
    }
    result["even"] = uneven(even_choices(setup), setup.experts)
    routers = ways(setup.layers)
    for way in chosen:
        began = time.perf_counter()
        found[way] = train(setup, routers[way], texts)
        between = time.perf_counter()
        result["ways"][way] = measure(found[way], texts, setup)
        spent = f"{between - began:.0f} s and {time.perf_counter() - between:.0f} s"
        print(f"{way}: recorded and measured in {spent}", file=sys.stderr, flush=True)
    if {"balance loss", "none"} <= found.keys():
        write_recorded(recorded, found, setup)
    return result | stamp()


def main() -> None:
    """Runs all and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--small", action="store_true", help="a few steps, to try it out")
    parser.add_argument("--steps", type=int, help="a multiple of 6, for longer runs")
    all_ways = list(ways(1))
    parser.add_argument("--ways", nargs="+", choices=all_ways, default=all_ways)
    args = parser.parse_args()
    setup = SMALL if args.small else Setup()
    if args.steps is not None:
        at = tuple(args.steps * sixths // 6 for sixths in (1, 2, 4, 6))
        setup = dataclasses.replace(setup, steps=args.steps, recorded=at)
    recorded = args.out / "recorded" if args.small else RECORDED
    result = run(setup, args.ways, recorded)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "skew.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "skew.md").write_text(page(result, __doc__ or ""))


if __name__ == "__main__":
    main()
