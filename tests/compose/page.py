"""The page of what combinations came to."""

import platform
from collections import Counter
from itertools import combinations
from typing import Any

import jax

from tests.compose.cover import Pair, all_pairs, pairs_of
from tests.compose.features import FACTORS, Combination, is_rounded, name

# Bounds. Exact: sums of 512 tokens in float32 differ by their order. Rounded: a codec or bfloat16
# moves some tokens, near the border between two experts, to the other one.
# A selection bias moves by 0.01 a step, or to a quantile, which the next bin puts off by 0.002.
EXACT = {"loss": 2e-6, "gradient": 5e-5, "second": 1e-4, "bias": 5e-3}
ROUNDED = {"loss": 0.02, "gradient": 0.5, "second": 0.05}


def verdict(combination: Combination, outcome: dict[str, Any]) -> str:
    """Returns "right", "refused", or what is wrong."""
    if outcome["refused"]:
        return "refused"
    if outcome["error"]:
        return outcome["error"]
    bounds = ROUNDED if is_rounded(combination) else EXACT
    found = {"bias": 0.0} | outcome  # earlier outcomes have none
    wrong = [f"{what} {found[what]:.1e}" for what in bounds if not found[what] <= bounds[what]]
    wrong += [f"for a {one}: {said}" for one, said in outcome["traced"].items() if said != "traced"]
    return ", ".join(wrong) or "right"


def build(results: list[dict[str, Any]], refused: dict[Pair, str], seed: int) -> str:
    """Returns the page.

    Args:
      results: of each run combination, its features and its outcome.
      refused: pairs that are refused, with the message.
    """
    runs = [(tuple(map(tuple, one["combination"])), one["outcome"]) for one in results]
    verdicts = [verdict(*one) for one in runs]
    right = [one for one, said in zip(runs, verdicts, strict=True) if said == "right"]
    covered = set().union(*(pairs_of(combination) for combination, _ in right))
    every, no = all_pairs(), set(refused)
    counted = Counter(said if said in ("right", "refused") else "wrong" for said in verdicts)
    lines = [
        "# Combinations of features",
        "",
        "Each combination takes one feature of every factor. A small model with it trains two",
        "steps on its mesh of simulated devices; loss, gradients and the loss after the update are",
        "compared with an oracle in plain `jax.numpy` on one device. Then the step is traced for a",
        "GPU and a TPU, in sizes that their kernels take. A pair of features is covered by a",
        "combination that came out right; if neither rounds, only by one in which nothing rounds.",
        "",
        f"Made by `make compose` (seed {seed}), JAX {jax.__version__}, {platform.machine()}.",
        "",
        "| | |",
        "|---|---:|",
        f"| combinations run | {len(runs)} |",
        f"| right | {counted['right']} |",
        f"| wrong | {counted['wrong']} |",
        f"| refused when built | {counted['refused']} |",
        f"| pairs of features | {len(every)} |",
        f"| covered | {len(every & covered)} |",
        f"| refused by name | {len(no)} |",
        f"| neither | {len(every - covered - no)} |",
    ]
    for title, rounded in (("nothing rounded", False), ("with codecs or bfloat16", True)):
        own = [outcome for combination, outcome in right if is_rounded(combination) == rounded]
        for what, label in (("loss", "loss"), ("gradient", "gradients"), ("second", "next loss")):
            worst = max((outcome[what] for outcome in own), default=0.0)
            lines.append(f"| worst difference, {title}: {label} | {worst:.1e} |")
    moved = sum(outcome.get("moved", False) for _, outcome in right)
    lines.append(f"| right beside a kink, where the last bit of a weight counts | {moved} |")
    for platform_name in ("gpu", "tpu"):
        traced = sum(outcome["traced"].get(platform_name) == "traced" for _, outcome in right)
        lines.append(f"| traced for a {platform_name.upper()} | {traced} of {len(right)} |")
    lines += _wrong(runs, verdicts) + _matrix(covered, no) + _refusals(refused)
    return "\n".join(lines) + "\n"


def _wrong(runs: list, verdicts: list[str]) -> list[str]:
    lines = ["", "## Not right", ""]
    for (combination, outcome), said in zip(runs, verdicts, strict=True):
        line = outcome["refused"] if said == "refused" else said
        if said != "right":
            lines.append(f"- {name(combination)}: {line}")
    return lines if len(lines) > 3 else ["", "Nothing came out wrong."]


def _matrix(covered: set, refused: set) -> list[str]:
    """A table of factors: how many of their pairs are covered, and how many are refused."""
    lines = ["", "## Pairs by factor: covered + refused, of all", ""]
    factors = list(FACTORS)
    lines += ["| | " + " | ".join(factors[:-1]) + " |", "|---" * len(factors) + "|"]
    numbers = {both: [0, 0, 0] for both in combinations(factors, 2)}
    for pair in all_pairs():
        (first, _), (second, _) = sorted(pair, key=lambda one: factors.index(one[0]))
        numbers[first, second][0] += pair in covered
        numbers[first, second][1] += pair in refused and pair not in covered
        numbers[first, second][2] += 1
    for row in factors[1:]:
        cells = []
        for column in factors[:-1]:
            done, no, whole = numbers.get((column, row), (0, 0, 0))
            cells.append(f"{done}{f' + {no}' if no else ''} of {whole}" if whole else "")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return lines


def _refusals(refused: dict[Pair, str]) -> list[str]:
    lines = ["", "## Refused pairs", "", "| pair | message |", "|---|---|"]
    for pair, message in sorted(refused.items(), key=lambda one: sorted(one[0])):
        both = " with ".join(f"{factor} *{feature}*" for factor, feature in sorted(pair))
        lines.append(f"| {both} | {message.replace('|', '&#124;')} |")
    return lines
