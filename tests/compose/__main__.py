"""Trains random combinations of features beside the oracle, and writes what came of them.

    make compose                       until every pair of features was in one: hours on two cores
    make compose ARGS="--number 5"     five more

Results are kept in a JSON file; a run goes on where the file ends, with the seed that it has, and
leaves out what has a feature that is gone.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
from concurrent import futures
from pathlib import Path

DEVICES = 32
FLAGS = (
    f"--xla_force_host_platform_device_count={DEVICES}",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def main() -> int:
    """Runs the combinations that are asked for; 1 if one came out wrong."""
    parser = argparse.ArgumentParser(prog="make compose", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the combinations; default 0")
    parser.add_argument(
        "--number", type=int, help="combinations to run now; default: all that miss"
    )
    out = Path("benchmarks/results/compose.json")
    workers = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=workers, help="processes; default: cores")
    parser.add_argument("--out", type=Path, default=out, help=f"results; default {out}")
    args = parser.parse_args()
    # JAX reads both when it is imported.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)).strip()
    return compose(args.seed, args.number, args.out, args.workers)


def compose(seed: int, number: int | None, out: Path, workers: int) -> int:
    """Goes on with the results in `out`, writes them, and the page beside them."""
    from tests.compose import page
    from tests.compose.cover import plan
    from tests.compose.features import FEATURES, name
    from tests.compose.run import run

    known = json.loads(out.read_text()) if out.exists() else {"seed": seed, "results": []}
    if known["seed"] != seed:
        print(f"{out} has seed {known['seed']}: name it, or another --out", file=sys.stderr)
        return 2
    done = {tuple(map(tuple, one["combination"])): one for one in known["results"]}
    done = {combination: one for combination, one in done.items() if set(combination) <= FEATURES}
    asked = {frozenset(map(tuple, pair)): message for *pair, message in known.get("refused", [])}
    asked = {pair: message for pair, message in asked.items() if pair <= FEATURES}
    left, refused = plan(seed, done, asked)
    known["refused"] = [[*sorted(pair), message] for pair, message in refused.items()]
    # A process for each combination: programs of an earlier one would fill its memory.
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        running = {pool.submit(run, one): one for one in left[:number]}
        for future in futures.as_completed(running):
            combination, outcome = running[future], dataclasses.asdict(future.result())
            done[combination] = {"combination": combination, "outcome": outcome}
            said = page.verdict(combination, outcome)
            print(f"{said} in {outcome['seconds']:.0f} s: {name(combination)}", flush=True)
            known["results"] = list(done.values())
            out.write_text(json.dumps(known, indent=1) + "\n")
    results = known["results"]
    out.write_text(json.dumps(known, indent=1) + "\n")
    out.with_suffix(".md").write_text(page.build(results, refused, seed))
    verdicts = [page.verdict(tuple(map(tuple, r["combination"])), r["outcome"]) for r in results]
    return int(any(verdict not in ("right", "refused") for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
