"""The page of measured plans, and how they are judged."""

import math
from itertools import combinations
from statistics import mean, median
from typing import Any

from benchmarks.emulated.setups import (
    GROUPS,
    Setup,
    config_of_row,
    ratios_of,
    real_ratios,
)
from moejax.plan.cluster.file import from_json
from moejax.plan.report.tables import plan_text

OFTEN = 0.1  # of the rounds: less is chance
OFF = 0.1  # of a measured time: a price that is further off needs a cause
ROUNDS = "overflow [rounds](routing.md), in part"


def judge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Regret, rank correlation, errors; the best rule of thumb over the chosen and the plain plan.

    None stands for a ratio to a rule where none was measured.
    """
    measured = [median(row["seconds"]) for row in rows]
    predicted = [row["predicted"] for row in rows]
    ratios = [m / p for m, p in zip(measured, predicted, strict=True)]
    left_out = [
        abs(predicted[i] * median(ratios[:i] + ratios[i + 1 :]) / measured[i] - 1)
        for i in range(len(rows))
    ]
    pairs = list(combinations(range(len(rows)), 2))
    apart = [(a, b) for a, b in pairs if _apart(rows[a]["seconds"], rows[b]["seconds"])]

    def agreement(pairs: list[tuple[int, int]]) -> float:
        return mean(
            math.copysign(1, (measured[a] - measured[b]) * (predicted[a] - predicted[b]))
            for a, b in pairs
        )

    rules = {row["rule"]: took for row, took in zip(rows, measured, strict=True) if row["rule"]}
    rule = min(rules, key=lambda name: rules[name], default=None)
    plain = next((t for row, t in zip(rows, measured, strict=True) if row["plain"]), None)
    return {
        "plans": len(rows),
        "regret": measured[0] / min(measured) - 1,
        "kendall": agreement(pairs),
        "kendall_apart": agreement(apart),
        "apart": len(apart) / len(pairs),
        "left_out": median(left_out),
        "raw": median(abs(1 / ratio - 1) for ratio in ratios),
        "rule": rule,
        "rule_over_chosen": rules[rule] / measured[0] if rule else None,
        "rule_over_plain": rules[rule] / plain if rule and plain else None,
        "best": min(range(len(rows)), key=measured.__getitem__),
    }


def _apart(one: list[float], other: list[float]) -> bool:
    """Whether one plan was faster than another in more than nine of ten rounds."""
    if len(one) != len(other):
        return max(one) < min(other) or max(other) < min(one)
    faster = mean(a < b for a, b in zip(one, other, strict=True))
    return not OFTEN < faster < 1 - OFTEN


def page(record: dict[str, Any], intro: str) -> str:
    """The results as Markdown, below an introduction."""
    results = {
        name: one | {"judged": judge(one["rows"])} for name, one in record["results"].items()
    }
    lines = [
        "# Plans, predicted and measured",
        "",
        *intro.strip().splitlines(),
        "",
        f"{'; '.join(sorted({where(one) for one in results.values()}))}.",
        "",
        "Regret: the chosen plan's time over the best measured. Left out: the error of a "
        "prediction scaled by what the other plans of the set-up took over theirs; raw: not "
        "scaled. Times are medians over rounds in turns. Kendall: of all pairs of plans, and of "
        "those of which one was faster in more than nine of ten rounds (their share).",
        "",
    ]
    for name in GROUPS:
        lines += group(name, {k: v for k, v in results.items() if _setup(v).group == name})
    lines += [*probes(record["clusters"]), "", *misses(results)]
    for name, one in results.items():
        lines += setup_section(name, one)
    return "\n".join(lines)


def group(name: str, results: dict[str, Any]) -> list[str]:
    """How the plans of one group of set-ups are judged; nothing, if none was measured."""
    if not results:
        return []
    title = {
        "odd": "Odd shapes: models and devices that no price knew",
        "like": "Shapes with the ratios of large models on large clusters",
    }
    lines = [
        f"{title[name]}:",
        "",
        "| set-up | plans | regret | Kendall | of pairs apart | left out | raw | "
        "best rule of thumb | rule / chosen | rule / best without codecs | search (s) |",
        "|---|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for setup, one in results.items():
        j = one["judged"]
        lines.append(
            f"| {setup} | {j['plans']} | {j['regret']:.1%} | {j['kendall']:.2f} | "
            f"{j['kendall_apart']:.2f} ({j['apart']:.0%}) | "
            f"{j['left_out']:.0%} | {j['raw']:.0%} | {j['rule'] or 'none runs'} | "
            f"{ratio(j['rule_over_chosen'])} | {ratio(j['rule_over_plain'])} | "
            f"{one['search_seconds']:.0f} |"
        )
    return [*lines, "", *summary(results), "", *(by_ratio(results) if name == "like" else [])]


def by_ratio(results: dict[str, Any]) -> list[str]:
    """The ratios of each set-up beside those of the model and cluster that it is like."""
    lines = [
        "Exchanged: the bytes that an exchange sends over those of gathering a layer's weights.",
        "Computing: its seconds over those of gathering. Of a layer and a micro-batch, by what was",
        "probed, and by an H100's fastest product and 8 x 400 Gbit/s a node (slow cloud: 100).",
        "",
        "| set-up | exchanged | of the real one | computing | of the real one | rule / chosen |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, one in results.items():
        ours, real = ratios_of(_setup(one), one["flops"]), real_ratios(_setup(one).model)
        cells = " | ".join(f"{a:.2f} | {b:.2f}" for a, b in zip(ours, real, strict=True))
        lines.append(f"| {name} | {cells} | {ratio(one['judged']['rule_over_chosen'])} |")
    return [*lines, ""]


def ratio(value: float | None) -> str:
    """A ratio to a rule of thumb."""
    return "-" if value is None else f"{value:.2f}"


def setup_section(name: str, one: dict[str, Any]) -> list[str]:
    """The plans of one set-up, predicted and measured."""
    rows = one["rows"]
    best = rows[one["judged"]["best"]]
    lines = [
        f"## {name}",
        "",
        f"Chosen: {words(one, rows[0])}. Best measured: {words(one, best)}.",
        "",
        "| plan | predicted (s) | measured (s) | range |",
        "|---|---:|---:|---|",
    ]
    for row in rows:
        took = row["seconds"]
        note = f" ({row['rule']})" if row["rule"] else ""
        lines.append(
            f"| {words(one, row)}{note} | {row['predicted']:.3f} | {median(took):.3f} | "
            f"{min(took):.3f} to {max(took):.3f} |"
        )
    lines.append("")
    return lines


def misses(results: dict[str, Any]) -> list[str]:
    """Plans whose price is further off than `OFF`, each with its cause as far as it is known."""
    rows = [
        (name, one, row, row["predicted"] / median(row["seconds"]))
        for name, one in results.items()
        for row in one["rows"]
    ]
    off = [entry for entry in rows if abs(entry[-1] - 1) > OFF]
    coded = [_has_codecs(row) for _, _, row, _ in rows]
    coded_off = sum(_has_codecs(row) for _, _, row, _ in off)
    lines = [
        f"Of {len(rows)} prices {len(off)} are off by more than {OFF:.0%}, "
        f"{sum(entry[-1] < 1 for entry in off)} of them too low: {coded_off} of {sum(coded)} with "
        f"codecs, {len(off) - coded_off} of {len(rows) - sum(coded)} without.",
        "",
        "| set-up | plan | predicted / measured | cause |",
        "|---|---|---:|---|",
    ]
    for name, one, row, share in off:
        lines.append(f"| {name} | {words(one, row)} | {share:.2f} | {_cause(one, row)} |")
    return [*lines, ""]


def _has_codecs(row: dict[str, Any]) -> bool:
    return any(name.startswith("compression.") for name in row["settings"])


def _cause(one: dict[str, Any], row: dict[str, Any]) -> str:
    setup = _setup(one)
    cfg = config_of_row(setup, row)
    over_all = cfg.mesh.expert == setup.hosts * setup.devices
    return ROUNDS if over_all and cfg.moe.capacity_factor is None else "not known"


def _setup(one: dict[str, Any]) -> Setup:
    return Setup(**one["setup"])


def words(one: dict[str, Any], row: dict[str, Any]) -> str:
    """A plan of a set-up."""
    return plan_text(config_of_row(_setup(one), row))


def where(one: dict[str, Any]) -> str:
    """On what a set-up was measured, and when."""
    machine = one["machine"]
    return f"{machine['cpu']}, {machine['cpus_used']} cores, JAX {one['jax']}, {one['date']}"


def summary(results: dict[str, Any]) -> list[str]:
    """What the set-ups say together."""
    judged = [one["judged"] for one in results.values()]
    over = [j["rule_over_chosen"] for j in judged if j["rule"]]
    return [
        f"Over {len(judged)} set-ups: regret {median(j['regret'] for j in judged):.1%} median, "
        f"{max(j['regret'] for j in judged):.1%} worst; Kendall "
        f"{median(j['kendall'] for j in judged):.2f} median, "
        f"{min(j['kendall'] for j in judged):.2f} worst; left out "
        f"{median(j['left_out'] for j in judged):.0%} median, "
        f"{max(j['left_out'] for j in judged):.0%} worst. The chosen plan is at least 1.3 times as "
        f"fast as the best rule of thumb in {sum(x >= 1.3 for x in over)} of {len(over)}, least "
        f"{ratio(min(over, default=None))} times."
    ]


def probes(clusters: dict[str, Any]) -> list[str]:
    """How long each cluster took to probe, and what was found."""
    lines = ["| cluster | probed in (s) | Mbit/s a host, all-to-all | float32 GFLOP/s a device |"]
    lines.append("|---|---:|---:|---:|")
    for name, one in clusters.items():
        topology = from_json(one["topology"], name)
        rate = 8e-6 * topology.tiers[-1].links["all_to_all"].bytes_per_s * topology.tiers[0].size
        largest = topology.device.products["float32"][-1][1] / 1e9
        lines.append(f"| {name} | {one['seconds']:.0f} | {rate:.0f} | {largest:.1f} |")
    return lines
