"""Which codecs leave the held-out loss where it was?

Trains the same model on the built-in text under each policy, several seeds, equal tokens. Every
device is a node of its own, so that every class of traffic meets its codec: the harshest case.
A run that is finished is not repeated; results so far stand in convergence.json, page and picture
beside it. Needs matplotlib (`pip install '.[plots]'`).

    python -m benchmarks.learning.convergence --out benchmarks/results
"""

import argparse
import dataclasses
import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl

from benchmarks.learning.training import held_out
from benchmarks.machine import stamp
from moejax.config.compression import PRESETS, STAGES
from moejax.config.schema import (
    CheckpointConfig,
    CompressionConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    TrainConfig,
)

mpl.use("svg")
import matplotlib.pyplot as plt

SEEDS = 3
# Where it breaks: beyond every preset.
HARSH = {
    "gradients int4, no feedback": {"dense_gradient": "int4", "expert_gradient": "int4"},
    "gradients loco": {"dense_gradient": "loco", "expert_gradient": "loco"},
    "tokens int4, all four": dict.fromkeys(
        ("dispatch", "combine", "dispatch_backward", "combine_backward"), "int4"
    ),
}
# Codecs that were measured here once, and left (docs/decisions/0009).
LEFT = (
    "gradients topk 1 %",
    "gradients topk:0.05+feedback",
    "gradients powersgd:4",
    "gradients int4+stochastic",
    "gradients adaptive:0.9:int8|int4",
)
# What both presets had between stages until 2026-11-28.
FORMER = "stages, int8 with feedback"
# With two pipeline stages, whose micro-batches make them another run without codecs too.
STAGED = {
    "stages": {},
    "stages, codecs of strong": {kind: PRESETS["strong"][kind] for kind in STAGES},
    FORMER: {"stage": "int8", "stage_gradient": "int8+feedback"},
    "stages, int4 without feedback": dict.fromkeys(STAGES, "int4"),
}
POLICIES: dict[str, dict[str, str]] = {
    "none": {},
    "hybrid": {"preset": "hybrid"},
    "strong": {"preset": "strong"},
    **{
        f"{kind} {codec} alone": {kind: codec}
        for kind, codec in PRESETS["strong"].items()
        if kind not in STAGES
    },
    **HARSH,
    **STAGED,
}
CONFIG = Config(
    model=ModelConfig(width=128, num_layers=4, num_heads=4, num_kv_heads=2, head_width=32),
    moe=MoEConfig(num_experts=16, experts_per_token=2, expert_hidden=128),
    mesh=MeshConfig(simulated_devices=4, replica=2, expert=2, nodes=4),
    data=DataConfig(sequence_length=64),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50),
    train=TrainConfig(
        num_steps=1500,
        batch_sequences=8,
        log_every=100,
        eval_every=250,
        eval_batches=64,
        sample_tokens=0,
    ),
    checkpoint=CheckpointConfig(save_every=None, keep=2),
)


def main() -> None:
    """Runs every seed of every policy, in turns, and writes the results after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=CONFIG.train.num_steps)
    parser.add_argument("--only", choices=list(POLICIES), nargs="+", default=list(POLICIES))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "convergence.json"
    record = json.loads(path.read_text()) if path.exists() else {"steps": args.steps, "runs": {}}
    if record["steps"] != args.steps:
        parser.error(f"{path} holds runs of {record['steps']} steps. Name another --out.")
    for seed in range(args.seeds):
        for name in args.only:
            policy, runs = POLICIES[name], record["runs"].setdefault(name, {})
            if str(seed) in runs:
                continue
            settings = dataclasses.replace(CONFIG.train, num_steps=args.steps)
            compression = CompressionConfig(**policy)
            mesh = CONFIG.mesh
            if name in STAGED:
                mesh = dataclasses.replace(mesh, stage=2, replica=1)
                settings = dataclasses.replace(settings, micro_batches=4)
            cfg = dataclasses.replace(CONFIG, train=settings, compression=compression, mesh=mesh)
            runs[str(seed)] = held_out(cfg, seed)
            print(f"seed {seed}  {name}  {runs[str(seed)]['final']:.4f} bits per byte", flush=True)
            record |= stamp()
            path.write_text(json.dumps(record, indent=1) + "\n")
            (args.out / "convergence.md").write_text(page(record))
            draw(record, args.out / "convergence.svg")


def finals(record: dict[str, Any], name: str) -> list[float]:
    """Held-out bits per byte at the end, by seed."""
    return [run["final"] for run in record["runs"].get(name, {}).values()]


def page(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    base = finals(record, "none")
    low, high = min(base), max(base)
    rows = []
    for name in (*POLICIES, *LEFT):
        found = finals(record, name)
        if not found:
            continue
        inside = sum(value <= high for value in found)
        # Seeds are drawn alike in all policies: pairs differ by the policy alone.
        same = record["runs"]["stages" if name in STAGED else "none"]
        pairs = [
            run["final"] - same[seed]["final"]
            for seed, run in record["runs"][name].items()
            if seed in same
        ]
        each = ", ".join(f"{value:.3f}" for value in found)
        rows.append(
            f"| {name.replace('|', '&#124;')} | {mean(found):.4f} | {each} | {mean(pairs):+.4f} | "
            f"{inside} of {len(found)} |"
        )
    means = {name: mean(found) for name in (*POLICIES, *LEFT) if (found := finals(record, name))}
    above = [name for name, value in means.items() if value > high]
    tokens = record["steps"] * CONFIG.train.batch_sequences * CONFIG.data.sequence_length
    done = sum(len(runs) for runs in record["runs"].values())
    return "\n".join(
        [
            "# Held-out loss under compression",
            "",
            *(__doc__ or "").strip().splitlines(),
            "",
            f"{record['steps']:,} steps, {tokens:,} tokens; JAX {record['jax']}, Python "
            f"{record['python']}, CPU. Uncompressed seeds end between {low:.4f} and {high:.4f} "
            "bits per byte: the seed band. Held-out text is evaluated without codecs. "
            f"Codecs that left stand in the last rows. {done} runs are done.",
            "",
            "| policy | bits per byte, mean | by seed | over the same seed without codecs | "
            "not above the band |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"`{FORMER}` was measured with the codecs that `hybrid` and `strong` had between "
            "stages until 2026-11-28. They have int8 without feedback there now (decision 0027), "
            "measured only where a row `stages, codecs of strong` stands. The rows of `hybrid` and "
            "`strong` have no stages: they were measured before, and hold.",
            "",
            f"By their means, {len(means) - len(above)} of {len(means)} policies end no higher "
            f"than the band; above it: {', '.join(above) or 'none'}.",
            "",
            "![Held-out bits per byte along training](convergence.svg)",
            "",
        ]
    )


def draw(record: dict[str, Any], path: Path) -> None:
    """Mean curves of the presets and of what is harsher, with the band of uncompressed seeds."""
    figure, axes = plt.subplots(figsize=(7, 4))
    shown = ["none", "hybrid", "strong", *HARSH]
    for name in (name for name in shown if record["runs"].get(name)):
        curves = [run["curve"] for run in record["runs"][name].values()]
        steps = sorted(map(int, curves[0]))
        by_step = [[curve[str(step)] for curve in curves] for step in steps]
        (line,) = axes.plot(steps, [mean(values) for values in by_step], label=name)
        if name == "none":
            bounds = [min(v) for v in by_step], [max(v) for v in by_step]
            axes.fill_between(steps, *bounds, alpha=0.2, color=line.get_color())
    axes.set_xlabel("step")
    axes.set_ylabel("held-out bits per byte")
    axes.set_yscale("log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
