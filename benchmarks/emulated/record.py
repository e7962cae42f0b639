"""Runs the cases of a question on emulated clusters, and keeps what they found."""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.emulated.exchange import Case, place, run
from benchmarks.machine import RESULTS, Clock, stamp


def record_cases(
    name: str,
    cases: Iterable[Case],
    page: Callable[[dict[str, Any]], str],
    about: str,
    worker: str = "exchange",
    more: dict[str, Any] | None = None,
    prepare: Callable[[Case, Path], tuple[Case, dict[str, Any]]] | None = None,
) -> None:
    """Runs the cases; writes NAME.json and NAME.md after each, so that a stopped run keeps some.

    The folder is the command line's `--out`.

    Args:
      page: the record, as in NAME.json -> Markdown.
      about: the question, for `--help`.
      worker: the script of workers/ that runs on each host.
      more: further entries of the record.
      prepare: returns a case as it is to run, and further entries of its result.
    """
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--add", action="store_true", help="keep the cases that --out holds, and run the others"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cases = list(cases)
    order = [place(asdict(case)) for case in cases]
    results: list[dict[str, Any]] = []
    if args.add:
        results = json.loads((args.out / f"{name}.json").read_text())["results"]
        held = {place(result["case"]) for result in results}
        cases = [case for case in cases if place(asdict(case)) not in held]
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            rate = f"{case.rate} Mbit/s" if case.rate else "not shaped"
            print(f"== {case.name}, {case.hosts} x {case.devices}, {rate}", flush=True)
            case, known = (case, {}) if prepare is None else prepare(case, Path(folder))
            clock, before = Clock(sorted(os.sched_getaffinity(0))), _seconds_of_children()
            found = run(case, Path(folder), worker)
            others = clock.others_share(_seconds_of_children() - before)
            results.append({"case": asdict(case), "found": found, "others": others, **known})
            results.sort(key=lambda result: order.index(place(result["case"])))
            record = {"results": results, **(more or {})} | stamp()
            (args.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
            (args.out / f"{name}.md").write_text(page(record))
    print((args.out / f"{name}.md").read_text())


def _seconds_of_children() -> float:
    """CPU seconds of the processes that were started here and have ended."""
    times = os.times()
    return times.children_user + times.children_system
