"""Does the Mixture-of-Experts model learn more from the same tokens and FLOPs than a dense one?

Trains both on the built-in text, several seeds, and compares held-out bits per byte after equal
tokens. Active FLOPs are equal: K experts of hidden width F against one MLP of width K * F; the
router's share is stated. Writes moe_vs_dense.json and .md.

    python -m benchmarks.learning.moe_vs_dense --out benchmarks/results
"""

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

from benchmarks.learning.training import held_out
from benchmarks.machine import stamp
from moejax.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RouterConfig,
    TrainConfig,
)


def configs(num_steps: int) -> dict[str, Config]:
    """The two models, alike but for their feed-forward blocks."""
    model = ModelConfig(width=128, num_layers=2, num_heads=2, num_kv_heads=2, head_width=64)
    run = Config(
        model=model,
        moe=MoEConfig(
            num_experts=8,
            experts_per_token=2,
            expert_hidden=192,
            router=RouterConfig(balance_loss=0.02),
        ),
        data=DataConfig(sequence_length=128),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=100),
        train=TrainConfig(
            num_steps=num_steps,
            batch_sequences=8,
            log_every=100,
            eval_every=250,
            eval_batches=64,
            sample_tokens=0,
        ),
        checkpoint=CheckpointConfig(save_every=None, keep=2),
    )
    hidden = run.moe.experts_per_token * run.moe.expert_hidden
    dense = dataclasses.replace(model, moe_every=None, mlp_hidden=hidden)
    return {"moe": run, "dense": dataclasses.replace(run, model=dense, moe=MoEConfig())}


def main() -> None:
    """Runs every seed of both models, alternating, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    runs: dict[str, list[dict]] = {"moe": [], "dense": []}
    for seed in range(args.seeds):
        for name, cfg in configs(args.steps).items():
            runs[name].append(held_out(cfg, seed))
            print(f"seed {seed}  {name}  {runs[name][-1]['final']:.4f} bits per byte", flush=True)
    cfg = configs(args.steps)["moe"]
    tokens = args.steps * cfg.train.batch_sequences * cfg.data.sequence_length
    result = {"tokens": tokens, "runs": runs} | stamp()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "moe_vs_dense.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "moe_vs_dense.md").write_text(page(result))


def page(result: dict) -> str:
    """The results as Markdown."""
    rows = []
    for name, runs in result["runs"].items():
        finals = [run["final"] for run in runs]
        each = ", ".join(f"{bits:.3f}" for bits in finals)
        rows.append(f"| {name} | {statistics.mean(finals):.3f} | {each} |")
    pairs = zip(result["runs"]["moe"], result["runs"]["dense"], strict=True)
    gains = [dense["final"] - moe["final"] for moe, dense in pairs]
    wins = sum(gain > 0 for gain in gains)
    return (
        "# MoE against dense at equal active FLOPs and tokens\n\n"
        "`python -m benchmarks.learning.moe_vs_dense`: 2 layers of width 128; 8 experts, top 2, "
        "hidden 192, against one MLP of hidden 384. The router adds 1,024 of about 213,000 "
        f"multiply-adds a token and layer. {result['tokens']:,} tokens of the built-in text; JAX "
        f"{result['jax']}, Python {result['python']}, CPU.\n\n"
        "| model | held-out bits per byte, mean | by seed |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\nThe MoE model needs {statistics.mean(gains):.3f} bits per byte less on average "
        f"and wins {wins} of {len(gains)} seeds.\n"
    )


if __name__ == "__main__":
    main()
