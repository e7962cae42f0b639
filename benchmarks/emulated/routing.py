"""Why do experts over all devices take longer than their price?

A price counts a router that loads all experts alike, or a recorded load. Here the set-ups with the
ratios of large models (`setups.LIKE`) train some steps on eight simulated devices, with experts
over all of them and the tokens of the planner's page, and each step's load and overflow rounds are
recorded. Beside them: rounds as they are priced for an even load, for the mean of the recorded
loads, and for each step's own; and prices over the seconds that planner.json has. Then rounds where
every token has another id, and where also none attends to another, so that no two choose alike for
what they are or for their sequence. Times play no part. Writes routing.json and routing.md.

    python -m benchmarks.emulated.routing --out benchmarks/results
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np

from benchmarks.emulated.planner import refitted
from benchmarks.emulated.setups import LIKE, SETUPS, Setup, config_of, config_of_row
from benchmarks.machine import RESULTS, stamp
from moejax.config.checks import resolve_mesh
from moejax.config.fields import change
from moejax.config.schema import Config
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.layout.route import build_route
from moejax.plan.cluster.file import from_json
from moejax.plan.price.candidate import price, trace_config
from moejax.plan.price.routing import ExpertLoad, bucket_fills, read_expert_load
from moejax.step.state import Batch
from moejax.step.train_step import build_step

STEPS, DEVICES = 6, 8
FEW = 64  # sequences; ids of as many tokens make a model that takes minutes
TITLES = (
    "Tokens of the planner's page",
    "Every token another id",
    "Every token another id, and none sees another",
)
OVER_ALL = {"mesh.expert": DEVICES}


def run(cfg: Config, token_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns loads [steps, L, E] and overflow rounds [steps, L] of a step that is repeated."""
    cfg = resolve_mesh(change(cfg, {"mesh.nodes": 1}), DEVICES, "cpu", processes=1)
    step = build_step(cfg, build_mesh(build_layout(cfg.mesh), jax.devices()), "cpu")
    arrays = token_BT, np.roll(token_BT, -1, axis=1), np.zeros_like(token_BT)
    batch = Batch(*(jax.device_put(x, step.batch_sharding) for x in arrays))
    state, loads, rounds = step.init(), [], []
    for _ in range(STEPS):
        state, metrics = step.step(state, batch)
        loads.append(np.asarray(metrics.load_LE))
        rounds.append(np.asarray(metrics.uneven_L3)[:, 2])
    return np.array(loads), np.array(rounds)


def load_of(counts_LE: np.ndarray) -> ExpertLoad:
    """The load of some counts."""
    share_LE = counts_LE / counts_LE.sum(axis=1, keepdims=True)
    return ExpertLoad("recorded", tuple(map(tuple, share_LE.tolist())))


def priced_rounds(cfg: Config, load: ExpertLoad) -> float:
    """Rounds of a layer, as a price expects them."""
    layout = build_layout(cfg.mesh)
    fills = bucket_fills(load, cfg, layout, build_route(cfg.route, layout))
    return sum(share * fill.rounds for share, fill in fills)


def rounds_of(cfg: Config, token_BT: np.ndarray) -> tuple[dict[str, float], ExpertLoad]:
    """Returns rounds of a layer and step, priced and counted, and the mean load."""
    loads, rounds = run(cfg, token_BT.astype(np.int32))
    mean = load_of(loads.sum(axis=0))
    found = {
        "even": priced_rounds(cfg, read_expert_load("balanced", cfg.moe.num_experts)),
        "mean": priced_rounds(cfg, mean),
        "each": float(np.mean([priced_rounds(cfg, load_of(one)) for one in loads])),
        "counted": float(rounds.mean()),
    }
    return found, mean


def measure(setup: Setup, record: dict[str, Any]) -> dict[str, float]:
    """Rounds with the tokens of the planner's page, and prices over its seconds."""
    cfg = change(config_of(setup), OVER_ALL)
    shape = cfg.train.batch_sequences, cfg.data.sequence_length
    token_BT = np.random.default_rng(0).integers(0, cfg.model.vocab_size, shape)
    found, mean = rounds_of(cfg, token_BT)
    one = record["results"][str(setup)]
    row = next(row for row in one["rows"] if row.get("rule") == "EP")
    facts = record["clusters"][setup.cluster]["topology"]
    topology = refitted(from_json(facts, setup.cluster))
    traced = trace_config(config_of_row(setup, row), "cpu")
    even = read_expert_load("balanced", cfg.moe.num_experts)
    for name, load in (("even", even), ("mean", mean)):
        predicted = price(traced, topology, load).seconds
        found[f"price, {name}"] = predicted / float(np.median(row["seconds"]))
    return found


def without_likeness(setup: Setup, window: int | None) -> dict[str, float]:
    """Rounds with another id for every token; a window of 1: no token sees another."""
    cfg = change(config_of(setup), OVER_ALL | {"model.sliding_window": window})
    shape = cfg.train.batch_sequences, cfg.data.sequence_length
    tokens = shape[0] * shape[1]
    token_BT = np.random.default_rng(0).permutation(tokens).reshape(shape)
    return rounds_of(change(cfg, {"model.vocab_size": tokens}), token_BT)[0]


def page(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Rounds and prices of experts over all", "", *(__doc__ or "").strip().splitlines()]
    heads = ["set-up", "even load", "mean load", "each step's", "counted"]
    prices = ["price over measured, even", "mean load"]
    for title, rows in result["rounds"].items():
        names = heads + (prices if title == TITLES[0] else [])
        lines += ["", f"{title}: rounds of a layer and step.", "", f"| {' | '.join(names)} |"]
        lines += ["|---|" + "---:|" * (len(names) - 1)]
        for name, found in rows.items():
            lines.append(f"| {name} | " + " | ".join(f"{x:.2f}" for x in found.values()) + " |")
    return "\n".join([*lines, "", f"JAX {result['jax']}, {result['date']}.", ""])


def main() -> None:
    """Runs all set-ups and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    record = json.loads((RESULTS / "planner.json").read_text())
    rounds: dict[str, dict[str, Any]] = {title: {} for title in TITLES}
    for setup in (one for one in SETUPS if one.model in LIKE):
        found = [measure(setup, record)]
        if config_of(setup).train.batch_sequences <= FEW:
            found += [without_likeness(setup, window) for window in (None, 1)]
        for title, one in zip(TITLES, found, strict=False):
            rounds[title][str(setup)] = one
            print(title, setup, one, flush=True)
    result = {"rounds": rounds, **stamp()}
    (args.out / "routing.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "routing.md").write_text(page(result))


if __name__ == "__main__":
    main()
