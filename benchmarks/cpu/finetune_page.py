"""The page of `benchmarks/cpu/finetune.py`, and the bars that were set before its first run."""

import json
from statistics import mean
from typing import Any

# The bars, for the mean over seeds.
LOSS_BAR = 0.5  # bits of an answer token after full fine-tuning, over those before: at most
MATCH_BAR = 0.5  # share of exact answers after full fine-tuning, above that before: at least
GAP_BAR = 0.1  # of full fine-tuning's gain in bits, which adapters miss: at most, at every rank
MEMORY_BAR = 0.4  # bytes of training state with adapters, over those of full: at most


def summary(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns means over seeds by kind of fine-tuning, and what the bars are about."""
    means, before = {}, result["before"]
    for name, runs in result["runs"].items():
        found = runs.values()
        means[name] = {key: mean(r[key] for r in found) for key in ("bits_per_token", "exact")}
        means[name]["bytes"] = mean(sum(r["state"].values()) for r in found)
    full = means["full"]
    for row in means.values():
        gain = before["bits_per_token"] - row["bits_per_token"]
        full_gain = before["bits_per_token"] - full["bits_per_token"]
        row |= {"gap": 1 - gain / full_gain, "share": row["bytes"] / full["bytes"]}
    return means


def verdicts(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """Returns what was expected, and whether it is so."""
    means, before = summary(result), result["before"]
    full = means["full"]
    ratio = full["bits_per_token"] / before["bits_per_token"]
    more = full["exact"] - before["exact"]
    told = [
        (f"full: bits at most {LOSS_BAR:g} of before ({ratio:.3f})", ratio <= LOSS_BAR),
        (f"full: {100 * MATCH_BAR:g} points more exact ({100 * more:.1f})", more >= MATCH_BAR),
        (
            "full: fewer bits than the form alone",
            full["bits_per_token"] < result["form_alone"],
        ),
    ]
    for name in (name for name in means if name != "full"):
        gap, share = means[name]["gap"], means[name]["share"]
        told += [
            (f"{name}: misses at most {GAP_BAR:g} of full's gain ({gap:.3f})", gap <= GAP_BAR),
            (
                f"{name}: at most {MEMORY_BAR:g} of full's bytes ({share:.2f})",
                share <= MEMORY_BAR,
            ),
        ]
    return told


def row_of(name: str, runs: dict[str, Any], means: dict[str, float]) -> str:
    """Returns a line of the table."""
    bits = ", ".join(f"{run['bits_per_token']:.3f}" for run in runs.values())
    exact = ", ".join(f"{100 * run['exact']:.1f}" for run in runs.values())
    return (
        f"| {name} | {means['bits_per_token']:.3f} ({bits}) | {100 * means['exact']:.1f} % "
        f"({exact}) | {means['gap']:.3f} | {means['bytes'] / 2**20:.1f} MiB | "
        f"{means['share']:.2f} |"
    )


def page(result: dict[str, Any], introduction: str) -> str:
    """Returns the page.

    Args:
      introduction: what is measured, and by which command.
    """
    before, means = result["before"], summary(result)
    rows = [
        f"| before | {before['bits_per_token']:.3f} | {100 * before['exact']:.1f} % | 1 | | |",
        f"| the form alone | {result['form_alone']:.3f} | | | | |",
        *(row_of(name, result["runs"][name], means[name]) for name in means),
    ]
    bars = [f"- {'met' if met else '**missed**'}: {text}" for text, met in verdicts(result)]
    text = result["text_bits_per_byte"]
    return "\n".join(
        [
            "# Fine-tuning on a kind of task that was never read",
            "",
            *introduction.strip().splitlines(),
            "",
            "Bits of an answer token (the token that ends the answer is one) and exact answers of "
            f"{result['held_out']} held-out questions, greedy; means, and each seed of "
            "fine-tuning. The gap is the share of full fine-tuning's gain in bits that is missed. "
            "Training state: weights, gradients and moments on one device, as `--dry_run` tells.",
            "",
            "| fine-tuning | bits of an answer token | exact answers | gap | training state | "
            "of full |",
            "|---|---|---|---:|---:|---:|",
            *rows,
            "",
            "The form alone: what it costs to know the template, the number of letters and which, "
            "and to guess their order.",
            "",
            "Expectations, written before the first run:",
            "",
            *bars,
            "",
            f"The first model has {text['runs/base']:.4f} bits per byte on held-out source, "
            f"exported and imported {text['imported']:.4f}.",
            "",
            f"Settings: `{result['setup']}`.",
            "",
            f"JAX {result['jax']}, Python {result['python']}, {result['date']}. Machine: "
            f"{json.dumps(result['machine'])}",
            "",
        ]
    )
