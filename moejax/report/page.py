"""Writes the page about runs: one HTML file that contains everything it needs.

Python collects the data; `page.html`, `goodput.js`, `page.js` and Apache ECharts
(`echarts.min.js`) draw it.
Names of users' files are embedded as JSON in which no tag can end, and shown as text, never as
markup.
"""

import base64
import itertools
import math
from array import array
from pathlib import Path
from typing import Any

from moejax.errors import InputError, write_whole
from moejax.html import embed, filled
from moejax.report.runs import Column, RunRecord, read_run
from moejax.report.stages import stage_times
from moejax.report.timeline import goodput_data

HERE = Path(__file__).parent
TEMPLATE, LIBRARY = HERE / "page.html", HERE / "echarts.min.js"
SCRIPTS = HERE / "goodput.js", HERE / "page.js"  # one script: the second begins to draw
SHOWN_LOADS = 400  # snapshots of experts' load that a page holds at most
FITTED = 20, 500  # lines of a run at least, and at most, from which the cost of a round is found
TOKENS = "train.batch_sequences", "data.sequence_length"  # of a step, multiplied
SHOWN_EVENTS = 2000  # events of a run that a page holds at most, the newest


def write_report(directories: list[Path], out: Path) -> None:
    """Writes the page of one run or several; raises as `page_data` does."""
    page = page_of(page_data(directories))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page)


def page_data(directories: list[Path], *, live: bool = False) -> dict[str, Any]:
    """Returns the data of a page about runs.

    Args:
      live: whether the page asks its server for news.

    Raises:
      InputError: if a directory holds no run.
    """
    named = zip(directories, names_of(directories), strict=True)
    return {"live": live, "runs": [run_data(read_run(path, name)) for path, name in named]}


def names_of(directories: list[Path]) -> list[str]:
    """Returns a short name for each directory: the last parts of its path that tell it apart.

    Raises:
      InputError: if a directory is named twice.
    """
    paths = [path.resolve() for path in directories]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise InputError(f"a run stands twice. {twice}. Each is compared once. Name it once.")
    longest = max(len(path.parts) for path in paths)
    found = (["/".join(path.parts[-n:]) for path in paths] for n in range(1, longest + 1))
    return next(names for names in found if len(set(names)) == len(names))


def page_of(data: dict[str, Any]) -> str:
    """Returns the page of `page_data` as text."""
    scripts = "".join(path.read_text("utf-8") for path in SCRIPTS)
    return filled(TEMPLATE, LIBRARY=LIBRARY.read_text("utf-8"), SCRIPT=scripts, DATA=embed(data))


def run_data(run: RunRecord) -> dict[str, Any]:
    """Returns a run's data for the page."""
    return {
        "name": run.name,
        "columns": {
            name: column_data(column) for name, column in run.columns.items() if column.steps
        },
        "events": run.events[-SHOWN_EVENTS:],
        "left_out": max(len(run.events) - SHOWN_EVENTS, 0),
        # Without configs, which `changes` tells.
        "starts": [{k: v for k, v in start.items() if k != "config"} for start in run.starts],
        "changes": changes(run.starts),
        "config": flat(run.config),
        "experts": loads_data(run),
        "plan": plan_data(run),
        "round_cost": round_cost(run),
        "goodput": goodput_data(run.directory),
        "profile": stage_times(run.directory),
        "damaged": run.damaged,
    }


def round_cost(run: RunRecord) -> dict[str, float] | None:
    """Returns the seconds of an overflow round, their 95 % interval, and the share of all rounds.

    The seconds are the slope of a step's time over its number of rounds: the median of all pairs
    of lines (Theil and Sen), which a few slow steps do not change. The share is of the steps' time.
    None if there are few lines, or if the interval holds zero.
    """
    speed, rounds = (run.columns.get(name) for name in ("tokens_per_second", "rounds_per_step"))
    settings = flat(run.config)
    sequences, length = (settings.get(key) for key in TOKENS)
    if speed is None or rounds is None or not (sequences and length):
        return None
    by_step = dict(zip(speed.steps, speed.values, strict=True))
    pairs = [
        (count, sequences * length / by_step[step])
        for step, count in zip(rounds.steps, rounds.values, strict=True)
        if count is not None and by_step.get(step)
    ]
    pairs = pairs[:: math.ceil(len(pairs) / FITTED[1]) or 1]
    counts, seconds = zip(*pairs, strict=True) if pairs else ((), ())
    if len(pairs) < FITTED[0] or len(set(counts)) < 2:
        return None
    from scipy.stats import theilslopes  # takes half a second to import

    slope, _, low, high = (float(one) for one in tuple(theilslopes(seconds, counts)))
    if low <= 0:
        return None
    share = slope * sum(counts) / sum(seconds)
    return {"seconds": slope, "low": low, "high": high, "share": min(share, 1.0)}


def column_data(column: Column) -> dict[str, str]:
    """Returns a column as float64 in base64; a value that is absent is NaN."""
    values = array("d", (math.nan if v is None else v for v in column.values))
    return {"steps": base64_of(array("d", column.steps)), "values": base64_of(values)}


def base64_of(values: array) -> str:
    """Returns an array's bytes, lowest first, in base64."""
    return base64.b64encode(values.tobytes()).decode("ascii")


def loads_data(run: RunRecord) -> dict[str, Any] | None:
    """Returns experts' load over the mean of their layer, in thousandths; None if none is known.

    Of many snapshots it takes every second, every third and so on, and always the last.
    """
    if not run.loads:
        return None
    every = math.ceil(len(run.loads) / SHOWN_LOADS)
    shown = run.loads[::-1][::every][::-1]
    layers = shown[0].assignments
    thousandths = array("H")
    for load in shown:
        for layer in load.assignments:
            mean = sum(layer) / len(layer) or 1.0
            thousandths.extend(min(round(1000 * n / mean), 65535) for n in layer)
    return {
        "steps": [load.step for load in shown],
        "layers": len(layers),
        "experts": len(layers[0]),
        "values": base64_of(thousandths),
    }


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted names of settings and their values."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def changes(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the differences between one start and the next: `step`, `name`, `before`, `after`."""
    rows = []
    for first, second in itertools.pairwise(starts):
        old, new = _facts(first), _facts(second)
        for name in sorted({*old, *new}):
            before, after = old.get(name), new.get(name)
            if before != after:
                rows.append(dict(step=second["step"], name=name, before=before, after=after))
    return rows


def _facts(start: dict[str, Any]) -> dict[str, Any]:
    kept = ("devices", "device", "processes", "nodes", "jax", "moejax")
    config = start.get("config")
    settings = flat(config) if isinstance(config, dict) else {}
    return settings | {name: start[name] for name in kept if name in start}


def plan_data(run: RunRecord) -> dict[str, Any] | None:
    """Returns the plan's prediction, and the planner's page of the run if there is one."""
    if run.plan is None:
        return None
    page = run.directory / "plan.html"
    facts = {name: run.plan.get(name) for name in ("topology", "predicted", "settings")}
    return facts | {"page": page.read_text("utf-8") if page.is_file() else None}
