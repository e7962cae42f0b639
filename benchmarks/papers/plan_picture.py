r"""The README's picture: how busy compute and links are over a step, for a rule and the plan.

    python -m moejax.plan --config configs/olmoe_1b_7b.py --topology h200:8 --report plan.html
    python -m benchmarks.papers.plan_picture plan.html --out docs/pictures/plan.svg

Reads the timelines from the page. Each loop over layers is laid out turn after turn; a column of
the picture is as dark as the share of its time in which the lane is busy.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

WIDTH, LEFT, COLUMNS = 900, 132, 384
LANE, GAP, TOP = 20, 4, 34
COLOURS = {"compute": "#2a7de1", "link": "#e0712a"}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.small { font-size: 11px; fill: #57606a }
.lane { fill: #8c959f; fill-opacity: 0.12 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9da7b3 } }
"""


def read_page(path: Path) -> dict[str, Any]:
    """The data that a plan's page holds."""
    found = re.search(
        r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', path.read_text(), re.S
    )
    if found is None:
        raise SystemExit(f"{path} is no page of moejax plan --report.")
    return json.loads(found[1])


def busy(timeline: dict[str, Any], step: float) -> dict[str, list[float]]:
    """Lane -> share of each column in which it is busy; a column is step / COLUMNS seconds."""
    lanes: dict[str, list[float]] = {}
    text, width = timeline["text"], step / COLUMNS

    def add(lane: str, start: float, end: float) -> None:
        row = lanes.setdefault(lane, [0.0] * COLUMNS)
        first, last = int(start / width), min(int(end / width), COLUMNS - 1)
        for column in range(first, last + 1):
            row[column] += (
                max(0.0, min(end, (column + 1) * width) - max(start, column * width)) / width
            )

    def walk(number: int, begin: float) -> None:
        for lane, _, _, start, seconds, _, inner in timeline["nodes"][number]["tasks"]:
            if inner < 0:
                add(text[lane], begin + start, begin + start + seconds)
                continue
            loop = timeline["nodes"][inner]
            for turn in range(round(loop["trip_count"])):
                walk(inner, begin + start + turn * loop["seconds"])

    walk(0, 0.0)
    return lanes


def draw(data: dict[str, Any]) -> str:
    """The picture as SVG."""
    by_name = {one["plan"]: one for one in data["timelines"]}
    rule = next(name for name in by_name if data["rule"] in name.split())
    plans = {plan["name"]: plan for plan in data["plans"]}
    longest = max(plans[name]["seconds"] for name in (rule, "1"))
    parts, y = [], TOP
    for title, name in ((data["rule"], rule), ("chosen", "1")):
        plan = plans[name]
        lanes = busy(by_name[name], longest)
        order = sorted(lanes, key=lambda lane: lane != "compute")
        parts.append(
            f'<text x="8" y="{y - 8}">{title}: {plan["mesh"]}, '
            f"{plan['seconds'] * 1e3:,.0f} ms a step</text>"
        )
        for lane in order:
            share = plan["seconds"] / longest
            parts.append(f'<text class="small" x="8" y="{y + 14}">{lane}</text>')
            parts.append(
                f'<rect class="lane" x="{LEFT}" y="{y}" height="{LANE}" '
                f'width="{(WIDTH - LEFT - 8) * share:.1f}"/>'
            )
            parts += columns(lanes[lane], y, COLOURS["compute" if lane == "compute" else "link"])
            y += LANE + GAP
        y += TOP
    height = y - TOP + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def columns(row: list[float], y: int, colour: str) -> list[str]:
    """Rectangles of one lane; neighbours that are alike are one."""
    width, parts, start = (WIDTH - LEFT - 8) / COLUMNS, [], 0
    shades = [round(min(1.0, share) * 8) / 8 for share in row]
    for column in range(1, COLUMNS + 1):
        if column < COLUMNS and shades[column] == shades[start]:
            continue
        if shades[start]:
            parts.append(
                f'<rect x="{LEFT + start * width:.1f}" y="{y}" height="{LANE}" '
                f'width="{(column - start) * width:.2f}" fill="{colour}" '
                f'fill-opacity="{shades[start]}"/>'
            )
        start = column
    return parts


def main() -> None:
    """Draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="of moejax plan --report")
    parser.add_argument("--out", type=Path, required=True, help="the SVG to write")
    args = parser.parse_args()
    args.out.write_text(draw(read_page(args.page)))


if __name__ == "__main__":
    main()
