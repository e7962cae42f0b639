"""The page of `gpu.py`: targets, limits, and a table a subject."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.gpu.targets import Rates, judge, over_device, over_one_chunk

Rows = list[dict[str, Any]]
NOT_A_GPU = "Nothing here was measured on a GPU: sizes are tiny, and no target is judged."


def to_markdown(result: dict[str, Any]) -> str:
    """The whole page."""
    rates = Rates(result["rows"])
    parts = [_head(result)]
    if result["small"]:
        parts.append([NOT_A_GPU, ""])
    else:
        parts.append(_targets(rates))
    parts += [_limits(rates), _checks(result["rows"]), _products(rates), _moved(rates)]
    parts += [_attention(rates), _layers(rates), _chunks(rates), _host(rates, result["rows"])]
    parts += [_errors(result), _foot(result)]
    return "\n".join(line for part in parts for line in part) + "\n"


def table(names: list[str], rows: Iterable[list[str]], *, left: int = 1) -> list[str]:
    """A table; the first `left` columns are text."""
    rule = "|".join(["---"] * left + ["---:"] * (len(names) - left))
    lines = [f"| {' | '.join(names)} |", f"|{rule}|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _head(result: dict[str, Any]) -> list[str]:
    versions = result["versions"]
    device = versions.get("device", "an unknown device")
    return [
        f"# Kernels, layers and a step on {device}",
        "",
        f"`python -m benchmarks.gpu`, {result['date']}. Times are medians of rounds in which all "
        "forms of a row took turns; quartiles in brackets.",
        "",
        *(line for note in result.get("notes", []) for line in (note, "")),
    ]


def _targets(rates: Rates) -> list[str]:
    rows = []
    for one in judge(rates):
        verdict = {True: "met", False: "**missed**", None: "not measured"}[one.met]
        rows.append([one.what, one.bar, one.found, verdict])
    return ["## Targets", "", *table(["what", "target", "measured", ""], rows, left=4)]


def _limits(rates: Rates) -> list[str]:
    rows = []
    for row in rates.timed(section=None, operations=rates.LIMITS):
        name = f"{row['operation']}, {row['implementation']}"
        rows.append([name, rates.shown(row), _time(row)])
    return ["## Limits of the device", "", *table(["", "rate", "time"], rows)]


def _checks(rows: Rows) -> list[str]:
    """Each kernel: how often it was right, and the largest error over what is allowed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        tried = row["section"] in ("check", "all") and ("ok" in row or "error" in row)
        if tried and row["implementation"] in ("mosaic", "blocked", "tokamax"):
            found.setdefault(row["operation"], []).append(row)
    lines = []
    for operation, checks in found.items():
        right = sum(row.get("ok", False) for row in checks)
        worst = max((row["worst"] for row in checks if "worst" in row), default=None)
        wrong = [row["case"] for row in checks if not row.get("ok", False)]
        shown = "" if worst is None else f"{worst:.2g}"
        lines.append([operation, f"{right} of {len(checks)}", shown, "; ".join(wrong)])
    names = ["kernel", "right", "largest error over what is allowed", "not right"]
    return ["## Correctness", "", *table(names, lines)]


def _products(rates: Rates) -> list[str]:
    """A line a case and operation, a column a form."""
    return _side_by_side(
        "## Products of experts",
        "TFLOP/s, and of ours the share of the measured product's.",
        rates,
        rates.PRODUCTS,
        lambda row: f"{rates.rate(row, 'flops') / 1e12:.0f}",
        lambda row: rates.share(row, "flops"),
    )


def _moved(rates: Rates) -> list[str]:
    return _side_by_side(
        "## Rows moved and rounded",
        "TB/s of what must cross memory at least, and of ours the share of the measured copy's.",
        rates,
        None,
        lambda row: f"{rates.rate(row, 'bytes') / 1e12:.2f}",
        lambda row: rates.share(row, "bytes"),
    )


def _attention(rates: Rates) -> list[str]:
    return _side_by_side(
        "## Attention to ranges of keys",
        "TFLOP/s of pairs that see each other, and of ours the share of the measured product's.",
        rates,
        rates.ATTENTION,
        lambda row: f"{rates.rate(row, 'flops') / 1e12:.0f}",
        lambda row: rates.share(row, "flops"),
    )


def _side_by_side(
    title: str,
    words: str,
    rates: Rates,
    operations: tuple[str, ...] | None,
    shown: Callable[[dict[str, Any]], str],
    share: Callable[[dict[str, Any]], float | None],
) -> list[str]:
    """Operations (None: all that move bytes), their forms in columns."""
    kind = "flops" if operations else "bytes"
    rows = [
        row
        for row in rates.timed(section=None, operations=operations)
        if row["operation"] not in rates.LIMITS and kind in row
    ]
    forms = sorted({row["implementation"] for row in rows}, key=rates.order)
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found = cases.setdefault((row["operation"], row["case"]), {})
        found[row["implementation"]] = row
    lines = []
    for (operation, case), found in cases.items():
        cells = [shown(found[form]) if form in found else "" for form in forms]
        own = next((found[form] for form in forms if form in rates.OURS and form in found), None)
        part = share(own) if own else None
        lines.append([operation, case, *cells, "" if part is None else f"{part:.0%}"])
    names = ["operation", "case", *forms, "share"]
    return [title, "", words, "", *table(names, lines, left=2)]


def _layers(rates: Rates) -> list[str]:
    """The expert layer and the train step."""
    lines = []
    for row in rates.timed(section=None, operations=rates.WHOLE):
        part = rates.share(row, "flops")
        tokens = row.get("tokens")
        each = float(np.median(row["seconds"]))
        lines.append(
            [
                f"{row['operation']}, {row['case']}",
                _time(row),
                f"{rates.rate(row, 'flops') / 1e12:.1f}",
                "" if part is None else f"{part:.0%}",
                "" if tokens is None else f"{tokens / each:,.0f}",
            ]
        )
    words = "FLOPs of the experts alone (layer), or of the model without recomputation (step)."
    names = ["", "time", "TFLOP/s", "share of the measured product", "tokens/s"]
    return ["## Expert layers and the train step", "", words, "", *table(names, lines)]


def _chunks(rates: Rates) -> list[str]:
    """The expert layer in chunks: the time of one, and of more over it."""
    lines = []
    for operation in rates.IN_CHUNKS:
        times = {
            row["case"]: _time(row)
            for row in rates.timed(operations=(operation,))
            if row["implementation"] == "1 chunk"
        }
        for case, ratios in over_one_chunk(rates, operation).items():
            more = [f"{ratios[n]:.3f}" if n in ratios else "" for n in ("2 chunks", "4 chunks")]
            lines.append([operation, case, times[case], *more])
    words = "One device exchanges with itself, so nothing is hidden: ratios are medians of rounds."
    names = ["operation", "case", "1 chunk", "2 over 1", "4 over 1"]
    return ["## Expert layers in chunks", "", words, "", *table(names, lines, left=2)]


def _host(rates: Rates, rows: Rows) -> list[str]:
    """Steps with arrays in the host's memory: times and memory, measured and predicted."""
    times = {
        (row["case"], row["implementation"]): row for row in rates.timed(operations=(rates.PLACES,))
    }
    lines = []
    for name, (measured, predicted) in over_device(rates).items():
        host, device = times[name, "host"], times[name, "device"]
        right = [
            f"{row['predicted'] / float(np.median(row['seconds'])):.2f}" for row in (host, device)
        ]
        lines.append(
            [name, _time(host), _time(device), f"{measured:.3f}", f"{predicted:.3f}", *right]
        )
    names = ["on the host", "time", "time without", "ratio", "predicted ratio"]
    names += ["predicted over measured", "without"]
    memory = [
        [
            row["implementation"],
            *(
                "" if row[kind] is None else f"{row[kind] / 2**30:.2f}"
                for kind in ("peak_bytes", "compiler_bytes", "predicted_bytes")
            ),
            f"{row['predicted_host_bytes'] / 2**30:.2f}",
        ]
        for row in rows
        if "predicted_host_bytes" in row
    ]
    kinds = ["on the host", "allocator's peak", "compiler's", "predicted", "predicted on the host"]
    return [
        "## Arrays in the host's memory",
        "",
        "A step with moments or residuals there and one without; memory in GiB.",
        "",
        *table(names, lines),
        *table(kinds, memory),
    ]


def _errors(result: dict[str, Any]) -> list[str]:
    """What failed, in the first words of its error, and what there was no time for."""
    lines = ["## What failed or was left out", ""]
    for row in result["rows"]:
        if "error" in row:
            name = ", ".join(filter(None, (row["operation"], row["implementation"], row["case"])))
            said = " ".join(row["error"].split())[:300]
            lines.append(f"* {row['section']}: {name}: `{said.replace('`', '')}`")
    lines += [f"* not tried again: {name}" for name in result["given_up"]]
    lines += [
        f"* {section}: no time for {len(cases)} cases: {'; '.join(cases)}"
        for section, cases in result["left_out"].items()
    ]
    return [*lines, *(["Nothing."] if len(lines) == 2 else []), ""]


def _foot(result: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items() if v is not None)
    absent = ", ".join(k for k, v in result["versions"].items() if v is None)
    seconds = ", ".join(f"{k} {v:.0f}" for k, v in result["section_seconds"].items())
    return [
        f"Versions: {versions}. Not installed: {absent or 'nothing'}.",
        "",
        f"GPU: {json.dumps(result['nvidia_smi'])}",
        "",
        f"Machine: {json.dumps(result['machine'])}",
        "",
        f"Seconds: {seconds}",
    ]


def _time(row: dict[str, Any]) -> str:
    """Median and quartiles in a unit that fits."""
    quarter, median, three = np.quantile(row["seconds"], [0.25, 0.5, 0.75])
    unit, factor = ("us", 1e6) if median < 1e-3 else ("ms", 1e3)
    return f"{median * factor:.4g} ({quarter * factor:.4g} - {three * factor:.4g}) {unit}"
