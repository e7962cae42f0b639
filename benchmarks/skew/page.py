"""The page about uneven experts."""

import json
from typing import Any

BAR = 1.1  # under it copies of hot experts are not worth building, as was said before
WAYS_BALANCED = ("balance loss", "selection bias", "bias and sequence loss")
SLOTS = {"in order": "in order", "rearranged": "rearranged"} | {
    str(n): f"{n} slot{'s' * (n > 1)}" for n in (1, 2, 3)
}
COLUMNS = {"expert": "expert", "4": "4 devices", "8": "8", "16": "16"}


def pair(found: dict[str, Any]) -> str:
    """Median and worst of the layers."""
    return f"{found['median']:.2f} / {found['worst']:.2f}"


def table(heads: list[str], rows: list[list[str]], texts: int = 1) -> list[str]:
    """A table; columns behind the first ones are numbers."""
    lines = [f"| {' | '.join(heads)} |"]
    lines.append("|" + "---|" * texts + "---:|" * (len(heads) - texts))
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def sizes(result: dict[str, Any]) -> list[str]:
    """The last step on held-out text of the kind of training."""
    rows = []
    cases = {way: one["texts"]["own"] for way, one in result["ways"].items()}
    for way, found in {**cases, "even draws": result["even"]}.items():
        for size, by in found.items():
            rows.append([way, size, *(pair(by[column]) for column in COLUMNS)])
    return table(["balanced by", "tokens", *COLUMNS.values()], rows, 2)


def over_steps(result: dict[str, Any]) -> list[str]:
    """The busiest of eight devices by step."""
    steps = list(next(iter(result["ways"].values()))["steps"])
    rows = [
        [way, *(pair(one["steps"][step]["4k"]["8"]) for step in steps)]
        for way, one in result["ways"].items()
    ]
    return table(["balanced by", *(f"step {step}" for step in steps)], rows)


def by_layer(result: dict[str, Any]) -> list[str]:
    """The busiest of eight devices by layer."""
    rows = [
        [way, *(f"{x:.2f}" for x in one["texts"]["own"]["4k"]["8"]["layers"])]
        for way, one in result["ways"].items()
    ]
    return table(["balanced by", *(str(n) for n in range(len(rows[0]) - 1))], rows)


def on_texts(result: dict[str, Any]) -> list[str]:
    """The busiest of eight devices on each kind of text."""
    kinds = list(next(iter(result["ways"].values()))["texts"])
    rows = [
        [way, *(pair(one["texts"][kind]["4k"]["8"]) for kind in kinds)]
        for way, one in result["ways"].items()
    ]
    return table(["balanced by", *kinds], rows)


def lasting(result: dict[str, Any]) -> list[str]:
    """How long the hottest eighth stays hot."""
    rows, first = [], next(iter(result["ways"].values()))["lasting"]
    for way, one in result["ways"].items():
        cells = [
            f"{100 * found['median']:.0f} / {100 * found['worst']:.0f} %"
            for by in one["lasting"].values()
            for found in by.values()
        ]
        rows.append([way, *cells])
    heads = [
        f"{name}{f', {apart} apart' if name != 'steps' else ' ' + apart}"
        for name, by in first.items()
        for apart in by
    ]
    return table(["balanced by", *heads], rows)


def foretold(result: dict[str, Any]) -> list[str]:
    """How well the next layer's experts are told."""
    names = {"0, 1": "popularity", "id": "the token's id"}
    for key in next(iter(result["ways"].values()))["foretold"]:
        length, _, least = key.partition(", ")
        few = "" if least == "1" else f", seen {least} times"
        names.setdefault(key, f"path of {length}{few}")
    rows = []
    for key, name in names.items():
        found = [one["foretold"][key] for one in result["ways"].values()]
        cells = [f"{100 * one['first']:.0f} / {100 * one['share']:.0f} %" for one in found]
        seen = [f"{100 * one['seen']:.0f}" for one in found if "seen" in one]
        rows.append([name, *cells, ", ".join(seen)])
    chance = 100 * result["setup"]["choices"] / result["setup"]["experts"]
    rows.insert(0, ["chance", *[f"{chance:.0f} / {chance:.0f} %"] * len(result["ways"]), ""])
    return table(["told by", *result["ways"], "% that had the path"], rows)


def placements(result: dict[str, Any], kind: str) -> list[str]:
    """The busiest device by placement and table."""
    rows = []
    for way, one in result["ways"].items():
        for devices, by in one["placed"][kind].items():
            cells = [pair(by["in order"]["same"])]
            for name in list(SLOTS)[1:]:
                of_tables = by[name].values()
                cells.append(", ".join(f"{found['median']:.2f}" for found in of_tables))
            rows.append([way, devices, *cells])
    return table(["balanced by", "devices", *SLOTS.values()], rows, 2)


def worst_balanced(result: dict[str, Any]) -> tuple[float, str]:
    """The busiest device over the mean with a way to balance, own text, 4k and 16k: the worst."""
    found = [
        (by[devices]["worst"], f"{way}, {size} tokens, {devices} devices")
        for way in WAYS_BALANCED
        for size, by in result["ways"][way]["texts"]["own"].items()
        if size != "1k"
        for devices in ("4", "8", "16")
    ]
    return max(found)


def page(result: dict[str, Any], doc: str) -> str:
    """The results as Markdown."""
    lines = ["# How unevenly tokens fall on experts", "", *doc.strip().splitlines()]
    parts = [sizes, over_steps, by_layer, on_texts, lasting, foretold]
    for part in parts:
        lines += ["", f"## {part.__name__}", "", *part(result)]
    for kind in next(iter(result["ways"].values()))["placed"]:
        lines += ["", f"## {kind}", "", *placements(result, kind)]
    lines += ["", json.dumps({way: one["bits"] for way, one in result["ways"].items()})]
    return "\n".join([*lines, "", f"JAX {result['jax']}, {result['date']}.", ""])
