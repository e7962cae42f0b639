"""Reads a run's directory: metrics, events, experts' load, config, plan.

A run that is killed may leave half a line, and one that resumes repeats steps: the later line of a
step counts. If a start went on after the step from which the next one resumed, its later lines are
dropped, because its weights were lost too.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moejax.errors import InputError
from moejax.runtime.event_log import parse_line

METRICS, EXPERTS, CONFIG, PLAN = "metrics.jsonl", "experts.jsonl", "config.json", "plan.json"
# Events that are curves on the page; all others are marks on the axis of steps.
CURVES = ("step", "eval", "final_eval", "predicted")


@dataclass
class Column:
    """A recorded value over the run: parallel lists in order of steps."""

    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def add(self, step: int, value: float | None) -> None:
        """Adds a value, and forgets values at this step and later."""
        self.forget_from(step)
        self.steps.append(step)
        self.values.append(value)

    def forget_from(self, step: int) -> None:
        """Forgets values at `step` and later."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()


@dataclass
class Load:
    """Experts' load at one step: assignments to each expert, by expert layer."""

    step: int
    assignments: list[list[int]]


@dataclass
class RunRecord:
    """The records in the directory of a run.

    Attributes:
      columns: by name, the fields of docs/formats/metrics.md; `time` is in seconds since 1970, and
        held-out values begin with `held_out_`.
      events: all events that are not curves, in the order in which they were written.
      starts: the events `start`, one for each start and resume.
      config: the newest config; empty if there is none.
      plan: the plan file's content; None for a run that was not planned.
      damaged: lines and files that could not be read, for the reader of the page.
    """

    name: str
    directory: Path
    columns: dict[str, Column] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    damaged: list[str] = field(default_factory=list)


def read_run(directory: Path, name: str | None = None) -> RunRecord:
    """Reads a run directory.

    Args:
      name: name on the page; by default the directory's.

    Raises:
      InputError: if nothing there is a run.
    """
    path = directory / METRICS
    if not path.is_file():
        raise InputError(
            f"no run to report. {directory} has no {METRICS}. A run writes it at its start. "
            "Name a run directory, as in runs/tiny."
        )
    run = RunRecord(name or directory.resolve().name, directory)
    for line in lines_of(path, run):
        _add(run, line)
    run.loads = _loads(directory / EXPERTS, run)
    run.config = _json_file(directory / CONFIG, run) or {}
    run.plan = _json_file(directory / PLAN, run)
    return run


def lines_of(path: Path, run: RunRecord) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSONL file, and notes lines that hold none, such as half of one."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            line = parse_line(text)
            if isinstance(line.get("step"), int):
                yield line
            elif text.strip():
                run.damaged.append(f"{path.name}, line {number}: no record")


def _add(run: RunRecord, line: dict[str, Any]) -> None:
    """Adds a line of `metrics.jsonl`."""
    event, step = str(line.get("event")), line["step"]
    if event == "first_step":  # a start, perhaps from an older step than the last one recorded
        for column in run.columns.values():
            column.forget_from(step)
    if event == "rolled_back" and isinstance(line.get("to"), int):
        for column in run.columns.values():
            column.forget_from(line["to"] + 1)
    if event == "start":
        run.starts.append(line)
    if event not in CURVES:
        run.events.append({k: v for k, v in line.items() if k != "config"})
        return
    prefix = "held_out_" if "eval" in event else "predicted_" if event == "predicted" else ""
    losses = line.pop("losses", None)
    if isinstance(losses, list):  # the last is the line's own `loss`
        for before, loss in enumerate(losses[:-1], step + 1 - len(losses)):
            _add_value(run, "loss", before, loss)
    for name, value in line.items():
        if name in ("step", "event") or (prefix and name == "time"):
            continue
        if isinstance(value, list):
            value = float(sum(value))
        _add_value(run, prefix + name, step, value)


def _add_value(run: RunRecord, name: str, step: int, value: Any) -> None:
    """Adds a value to its column, if it is a number or null."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        run.columns.setdefault(name, Column()).add(step, value)


def _loads(path: Path, run: RunRecord) -> list[Load]:
    """Returns the recorded loads in order of steps; of a step that stands twice, the later one."""
    if not path.is_file():
        return []
    found: list[Load] = []
    for line in lines_of(path, run):
        if not _is_load(line.get("load")):
            run.damaged.append(f"{path.name}, step {line['step']}: no table of counts")
            continue
        while found and found[-1].step >= line["step"]:
            found.pop()
        found.append(Load(line["step"], line["load"]))
    return [one for one in found if _shape(one.assignments) == _shape(found[-1].assignments)]


def _is_load(value: Any) -> bool:
    """Returns whether a value is a table of counts: layers of equally many experts."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(layer, list) and len(layer) == len(value[0]) > 0 for layer in value)
        and all(isinstance(n, int) and n >= 0 for layer in value for n in layer)
    )


def _shape(load: list[list[int]]) -> tuple[int, int]:
    return len(load), len(load[0])


def _json_file(path: Path, run: RunRecord) -> dict[str, Any] | None:
    """Returns a JSON file's object; None if it is absent or, which is noted, no object."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict):
            return found
        reason = "no JSON object"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    run.damaged.append(f"{path.name}: {reason}")
    return None
