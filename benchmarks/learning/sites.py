"""What does an outer loop across sites do to the loss, and do experts of sites drift apart?

A small model of 16 experts on the source of Python's library, three seeds, equal tokens: data
parallel, and sites that average weights over a period, some ways. At four steps of the first seed
each site's own weights read the same held-out text: how evenly its tokens use the experts, how far
apart the sites' routers are, and how many choices two sites share. A run that is finished is not
repeated. Where sites.json is beside, losses at equal seconds follow from its speeds. Writes
sites_loss.json and sites_loss.md.

Four sites in a ring that gossip with low rank (`benchmarks.learning.gossip`) are a control.

    python -m benchmarks.learning.sites --out benchmarks/results
"""

import argparse
import dataclasses
import json
import math
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import numpy as np

from benchmarks.learning.gossip import trained as gossip
from benchmarks.machine import RESULTS, stamp
from benchmarks.skew.record import choices_of, read
from benchmarks.skew.texts import OWN, files_of, rows_of
from moejax.api import LiveRun, run_training
from moejax.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    OuterConfig,
    TrainConfig,
)
from moejax.step.state import TrainState

SEEDS, ROWS, NATS = 3, 32, 0.02
ALONE, LAYERS = "data parallel", "by layers, H = 16"
GOSSIP = "gossip of rank 1 in each step, ring of 4 sites"
CONFIG = Config(
    model=ModelConfig(
        vocab_size=264, width=128, num_layers=4, num_heads=4, num_kv_heads=2, head_width=32
    ),
    moe=MoEConfig(num_experts=16, experts_per_token=2, expert_hidden=128),
    mesh=MeshConfig(simulated_devices=2, replica=2),
    data=DataConfig(sequence_length=64),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50),
    train=TrainConfig(
        num_steps=600,
        batch_sequences=16,
        log_every=100,
        eval_every=100,
        eval_batches=32,
        sample_tokens=0,
    ),
    checkpoint=CheckpointConfig(save_every=None),
)


def outer(replica: int = 2, every: int = 16, **others: Any) -> Config:
    """Returns the config with sites."""
    mesh = MeshConfig(simulated_devices=replica, replica=replica)
    return dataclasses.replace(CONFIG, mesh=mesh, outer=OuterConfig(every, **others))


WAYS = {
    ALONE: CONFIG,
    LAYERS: outer(momentum=0.5),
    "by layers, H = 16, momentum 0.9": outer(momentum=0.9),
    # Without momentum and at rate 1 two sites gossip: each takes the mean of both.
    "plain mean, H = 16": outer(rate=1.0, momentum=0.0),
    "at once, H = 16": outer(momentum=0.5, order="all"),
    "by layers, H = 16, 4 sites": outer(replica=4, momentum=0.5),
    "by layers, H = 4": outer(every=4, momentum=0.5),
    "by layers, H = 64": outer(every=64, momentum=0.5),
    "by layers, H = 16, float32": outer(momentum=0.5, codec="none"),
    GOSSIP: dataclasses.replace(CONFIG, mesh=MeshConfig(simulated_devices=1, replica=4)),
}


def trained(cfg: Config, seed: int, row_BT: np.ndarray | None) -> dict[str, Any]:
    """Trains once; returns held-out nats a byte along the run, and what was seen of the experts."""
    steps, seen = cfg.train.num_steps, {}

    def look(run: LiveRun) -> None:
        if row_BT is not None:
            seen[str(run.step)] = experts_of(run, row_BT, cfg.moe.num_experts)

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, seed=seed))
        run_training(cfg, [f"run_dir={folder}"], quiet=True, on_step=look, every=steps // 4)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    curve = {e["step"]: e["bits_per_byte"] * math.log(2) for e in events if e["event"] == "eval"}
    final = next(e["bits_per_byte"] for e in events if e["event"] == "final_eval") * math.log(2)
    return {
        "final": final,
        "curve": curve,
        "experts": seen,
        "seconds": time.perf_counter() - began,
    }


def of_sites(state: TrainState) -> list[TrainState]:
    """Returns states whose weights are each site's own; of a run without sites the state itself."""
    if state.sites is None:
        return [state]
    own = state.sites.params, state.sites.router_bias
    shared = state.params, state.router_bias

    def pick(site: int) -> TrainState:
        params, bias = jax.tree.map(
            lambda x, like: jax.device_put(x[site], like.sharding), own, shared
        )
        return state._replace(params=params, router_bias=bias)

    return [pick(site) for site in range(jax.tree.leaves(own)[0].shape[0])]


def experts_of(run: LiveRun, row_BT: np.ndarray, experts: int) -> dict[str, Any]:
    """Returns what each site's weights choose for the same text, compared."""
    engine, choices, routers = run.engine(), [], []
    for state in of_sites(run.state):
        engine.update(state)
        choices.append(choices_of(read(engine, row_BT)))
        routers.append(
            [
                np.asarray(leaf, np.float64)
                for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
                if "router" in jax.tree_util.keystr(path)
            ]
        )
    pairs = list(combinations(range(len(choices)), 2))
    return {
        "entropy": [fmean(entropies(one, experts)) for one in choices],
        "overlap": [overlap(choices[a], choices[b]) for a, b in pairs],
        "distance": [distance(routers[a], routers[b]) for a, b in pairs],
    }


def entropies(choice_BTLK: np.ndarray, experts: int) -> list[float]:
    """Returns by layer the entropy of the experts' shares, over that of equal shares."""
    found = []
    for layer in np.moveaxis(choice_BTLK, 2, 0):
        share = np.bincount(layer.ravel(), minlength=experts) / layer.size
        share = share[share > 0]
        found.append(float(-(share * np.log(share)).sum() / math.log(experts)))
    return found


def overlap(one_BTLK: np.ndarray, other_BTLK: np.ndarray) -> float:
    """Returns the part of a token's experts that it also chose at the other site, on average."""
    return float((one_BTLK[..., :, None] == other_BTLK[..., None, :]).any(-1).mean())


def distance(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Returns the norm of the difference of all routers over the mean of their norms."""

    def norm(parts: list[np.ndarray]) -> float:
        return math.sqrt(sum(float((x * x).sum()) for x in parts))

    apart = norm([a - b for a, b in zip(one, other, strict=True)])
    return 2 * apart / (norm(one) + norm(other))


def page(record: dict[str, Any], speeds: dict[str, Any] | None) -> str:
    """The results as Markdown."""
    runs, train = record["runs"], CONFIG.train
    tokens = train.batch_sequences * CONFIG.data.sequence_length
    lines = ["# Loss of sites", "", *(__doc__ or "").strip().splitlines(), ""]
    lines += [
        f"{record['steps']} steps of {tokens:,} bytes of all sites together, each a simulated "
        f"device; JAX {record['jax']}, {record['date']}. Losses are nats a byte of held-out text, "
        "read by the outer weights. Codec int4 with feedback, rate 0.7, momentum 0.5 where nothing "
        "else is said.",
        "",
        f"| way | loss, mean | by seed | over data parallel, same seed | by at most {NATS} |",
        "|---|---:|---|---|---|",
    ]
    for name, found in runs.items():
        finals = {seed: one["final"] for seed, one in found.items()}
        more = [value - runs[ALONE][seed]["final"] for seed, value in finals.items()]
        lines.append(
            f"| {name} | {fmean(finals.values()):.4f} | "
            f"{', '.join(f'{value:.4f}' for value in finals.values())} | "
            f"{', '.join(f'{value:+.4f}' for value in more)}; mean {fmean(more):+.4f} | "
            f"{'yes' if fmean(more) <= NATS else 'no'} |"
        )
    lines += ["", "## Along the run", "", *_curves(runs)]
    lines += ["", "## Experts of the sites", "", *_experts(runs)]
    if speeds is not None:
        lines += ["", "## At equal seconds", "", *_at_seconds(runs, speeds)]
    return "\n".join(lines) + "\n"


def _curves(runs: dict[str, Any]) -> list[str]:
    """Mean losses by step."""
    steps = list(next(iter(runs[ALONE].values()))["curve"])
    lines = [f"| way | {' | '.join(f'step {step}' for step in steps)} |"]
    lines.append("|---" * (len(steps) + 1) + "|")
    for name, found in runs.items():
        means = [fmean(one["curve"][step] for one in found.values()) for step in steps]
        lines.append(f"| {name} | {' | '.join(f'{value:.3f}' for value in means)} |")
    return lines


def _experts(runs: dict[str, Any]) -> list[str]:
    """What the sites' own weights chose, at four steps of the first seed."""
    lines = [
        "Entropy: of the shares of experts, over that of equal shares, a mean over layers and "
        "sites. Distance: of the routers of two sites, over their norm. Shared: the part of a "
        "token's experts that it chose at both sites. The last two are means over pairs of sites.",
        "",
        "| way | step | entropy | distance | shared |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, found in runs.items():
        for step, seen in found["0"]["experts"].items():
            two = [f"{fmean(seen[kind]):.3f}" if seen[kind] else "" for kind in _OF_PAIRS]
            lines.append(f"| {name} | {step} | {fmean(seen['entropy']):.3f} | {' | '.join(two)} |")
    return lines


_OF_PAIRS = ("distance", "overlap")


def _at_seconds(runs: dict[str, Any], speeds: dict[str, Any]) -> list[str]:
    """Losses when data parallel has done 200 steps, by the speeds of another page."""
    ways = {ALONE: "data parallel", LAYERS: "outer by layers", "at once, H = 16": "outer at once"}
    lines = [
        "Steps that each way has done when data parallel has done 200, by the speeds of two sites "
        "in [sites.md](sites.md), and the mean loss there. Its model is another, so this is a "
        "picture, not a measurement.",
        "",
        "| Mbit/s | way | steps | loss |",
        "|---:|---|---:|---:|",
    ]
    for result in speeds["results"]:
        if result["case"]["hosts"] != 2 or result["case"]["delay"] is not None:
            continue
        found = result["found"]
        rate = {
            name: fmean(one["tokens"] / s for s in one["seconds"]) for name, one in found.items()
        }
        for way, there in ways.items():
            if way not in runs or there not in rate or not runs[way]["0"]["curve"]:
                continue
            steps = 200 * rate[there] / rate["data parallel"]
            curves = [{int(s): v for s, v in one["curve"].items()} for one in runs[way].values()]
            at = sorted(curves[0])
            loss = fmean(float(np.interp(steps, at, [c[s] for s in at])) for c in curves)
            more = " (beyond its last evaluation)" if steps > at[-1] else ""
            lines.append(f"| {result['case']['rate']} | {way} | {steps:,.0f}{more} | {loss:.3f} |")
    return lines


def main() -> None:
    """Runs every seed of every way, and writes the results after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=CONFIG.train.num_steps)
    parser.add_argument("--only", choices=list(WAYS), nargs="+", default=list(WAYS))
    args = parser.parse_args()
    path, beside = args.out / "sites_loss.json", RESULTS / "sites.json"
    record = json.loads(path.read_text()) if path.exists() else {"steps": args.steps, "runs": {}}
    if record["steps"] != args.steps:
        parser.error(f"{path} holds runs of {record['steps']} steps. Name another --out.")
    row_BT = rows_of(files_of(OWN), ROWS, CONFIG.data.sequence_length)
    for seed in range(args.seeds):
        for name in args.only:
            runs = record["runs"].setdefault(name, {})
            if str(seed) in runs:
                continue
            train = dataclasses.replace(WAYS[name].train, num_steps=args.steps)
            cfg = dataclasses.replace(WAYS[name], train=train)
            # A process for each run: they have different numbers of devices.
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                seen = row_BT if seed == 0 else None
                if name == GOSSIP:
                    running = pool.submit(gossip, cfg, seed)
                else:
                    running = pool.submit(trained, cfg, seed, seen)
                runs[str(seed)] = running.result()
            print(f"seed {seed}  {name}  {runs[str(seed)]['final']:.4f} nats a byte", flush=True)
            record |= stamp()
            path.write_text(json.dumps(record, indent=1) + "\n")
            record = json.loads(path.read_text())  # steps as they are read
            speeds = json.loads(beside.read_text()) if beside.exists() else None
            (args.out / "sites_loss.md").write_text(page(record, speeds))


if __name__ == "__main__":
    main()
