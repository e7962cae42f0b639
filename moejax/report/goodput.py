"""The command `moejax goodput`: the time of a run in steps that count, and in everything else.

Reads `events/0.jsonl`, the log of process 0 (docs/formats/events.md). A run is a row of starts,
each with its beginning, its stages and its last event. Steps that a later start did again were
lost, as were steps that a run rolled back. The last steps of a killed start are in `metrics.jsonl`
alone.
"""

import argparse
import bisect
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moejax.config.command_line import Parser
from moejax.errors import InputError, exit_code
from moejax.runtime.event_log import parse_line
from moejax.screen import screen

EPILOG = """\
examples:
  moejax goodput runs/tiny
  moejax goodput runs/tiny --json      # for scripts

Goodput is the share of time in steps that count: not those that a later start
did again, or that the run rolled back. docs/formats/events.md says what a run
writes down for it.
"""

EVENTS = Path("events")
LOG = EVENTS / "0.jsonl"
METRICS = "metrics.jsonl"
# Class of time -> the stages in it.
CLASSES = {
    "start": ("start", "plan"),
    "restore": ("restore",),
    "compile": ("compile",),
    "evaluation": ("evaluate", "sample", "on_step"),
    "saving": ("save", "finish", "end"),
    "waiting for sites": ("sites",),
}
TRAINING, REPEATED, ROLLED_BACK, INPUT, DOWN, UNKNOWN = (
    "training",
    "steps done again",
    "steps rolled back",
    "waiting for data",
    "down between starts",
    "not told",
)
BEGIN = (("time", None),)
# Event -> its numbers, each with its default; None: it must be there.
NEEDED = {
    "stage": (*BEGIN, ("seconds", None)),
    "steps": (*BEGIN, ("first", None), ("step", None), ("step_s", 0), ("input_s", 0)),
    # of metrics
    "first_step": (*BEGIN, ("step", None)),
    "step": (*BEGIN, ("step", None)),
    "start": (*BEGIN, ("step", None)),
    "rolled_back": (*BEGIN, ("to", None)),
}
IN_METRICS = ("first_step", "step", "start", "rolled_back")
LARGEST = 1e12  # seconds or steps: what is more is a damaged line


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command = Parser(
        prog="moejax goodput",
        description="Tells how a run spent its time, and what its restarts cost.",
        epilog=EPILOG,
    )
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="of a run")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
    return command


def main(argv: list[str]) -> int:
    """Runs the command. Returns the exit code."""
    args = parser().parse_args(argv)
    stopped = "nothing of the run was changed"
    return exit_code(lambda: _run(args), stopped=stopped, debug=args.debug, files=True)


def _run(args: argparse.Namespace) -> None:
    found = read_goodput(args.run_dir)
    if args.json:
        print(json.dumps({"goodput": found.share, **asdict(found)}))
    else:
        show(found, screen())


def show(found: "Goodput", console: Console) -> None:
    """Prints the tables of times and of restarts."""
    console.print(f"goodput {found.share:.1%} of {found.total:,.0f} s", highlight=False)
    table = Table("time in", "seconds", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, seconds in sorted(found.seconds.items(), key=lambda pair: -pair[1]):
        if seconds:
            table.add_row(name, f"{seconds:,.1f}", f"{seconds / found.total:.1%}")
    console.print(table)
    if not found.restarts:
        console.print("no restarts")
        return
    table = Table("restart at step", "steps lost", "down s", "to next steps s", "before it")
    for one in found.restarts:
        recovered = "-" if one.recovered is None else f"{one.recovered:,.1f}"
        table.add_row(str(one.step), str(one.lost), f"{one.down:,.1f}", recovered, one.how)
    console.print(table)


@dataclass
class Steps:
    """Steps that were reported together: the first and the last of them, and their seconds.

    If `first` is one more than `last`, they are the rest of the last step.
    """

    first: int
    last: int
    seconds: float
    input_seconds: float

    def shared(self, kept: float) -> tuple[float, float]:
        """Returns the seconds of steps up to `kept`, which count, and of later steps."""
        number = self.last - self.first + 1
        share = (kept - self.first + 1) / number if number > 0 else float(self.last <= kept)
        share = min(max(share, 0), 1)
        return self.seconds * share, self.seconds * (1 - share)


@dataclass
class Start:
    """One start of a run.

    Attributes:
      began, ended: seconds since 1970, of its beginning and its last event.
      stages: seconds by stage.
      how: how it ended, in words.
      outcome: "silent" without a last word, "hang", "error", or "ended".
    """

    began: float
    ended: float
    stages: dict[str, float] = field(default_factory=dict)
    steps: list[Steps] = field(default_factory=list)
    how: str = "killed, or still running"
    outcome: str = "silent"
    trained: float | None = None  # when its first steps were done
    went_back: bool = False  # since its last steps

    @property
    def first(self) -> int | None:
        """Its first step."""
        return self.steps[0].first if self.steps else None

    @property
    def last(self) -> int:
        """Its last step that was reported, since it last went back."""
        return self.steps[-1].last if self.steps else 0

    def add(self, steps: Steps, time: float) -> None:
        """Adds steps that were told at a time; they follow the last ones, unless it went back.

        Older logs have `first` one too low behind a save, and a last step of 0 at a stop.
        """
        first = steps.first if self.went_back else max(steps.first, self.last + 1)
        self.steps.append(replace(steps, first=first, last=max(steps.last, first - 1)))
        self.trained, self.went_back = self.trained or time, False


@dataclass
class Restart:
    """The time between one start and the next.

    Attributes:
      step: step from which the next start went on.
      lost: steps done again, as far as events or metrics tell of them.
      down: seconds until the next start began; recovered: until its first steps were done, if any.
    """

    how: str
    step: int
    lost: int
    down: float
    recovered: float | None


@dataclass
class Goodput:
    """The time of a run by class, and its restarts.

    Attributes:
      seconds: seconds by class, over the whole run.
    """

    seconds: dict[str, float]
    restarts: list[Restart]

    @property
    def total(self) -> float:
        """Seconds from the first event to the last."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Goodput: the share of time in steps that count."""
        return self.seconds[TRAINING] / self.total if self.total else 0.0


def read_goodput(run_dir: Path) -> Goodput:
    """Reads a run's log.

    Raises:
      InputError: if there is none, or nothing in it.
    """
    path = run_dir / LOG
    if not path.is_file():
        raise InputError(
            f"no log of events. {run_dir} has no {LOG}. A run writes it from its start on. Name a "
            "run directory, as runs/tiny."
        )
    starts = starts_of_run(run_dir)
    if not starts:
        raise InputError(
            f"log of events is empty. {path} tells of no start. A run begins with one. Name "
            "another run."
        )
    return goodput_of(starts)


def starts_of_run(run_dir: Path) -> list[Start]:
    """Returns the starts of a run, from the log of process 0 and from later metrics."""
    starts = starts_of(events_of(run_dir / LOG))
    if (metrics := run_dir / METRICS).is_file():
        _add_metrics(starts, metrics)
    return starts


def _add_metrics(starts: Sequence[Start], metrics: Path) -> None:
    """Adds to each start the steps that only metrics tell of: events of steps are rarer."""
    names = tuple(f'"event": "{name}"' for name in IN_METRICS)
    began = [start.began for start in starts]
    behind = 0  # the step from which the start goes on, or to which it went back
    with metrics.open(encoding="utf-8", errors="replace") as file:
        for event in map(event_of, (text for text in file if any(name in text for name in names))):
            number = -1 if event is None else bisect.bisect(began, float(event["time"])) - 1
            if event is None or number < 0:
                continue
            kind, time, start = event["event"], float(event["time"]), starts[number]
            if kind in ("start", "rolled_back"):
                behind = int(event["step" if kind == "start" else "to"])
                start.went_back = start.went_back or (kind != "start" and time > start.ended)
                continue
            first = start.last + 1 if start.steps and not start.went_back else behind + 1
            if time > start.ended and (step := int(event["step"])) >= first:
                start.add(Steps(first, step, time - start.ended, 0), time)
                start.ended = time


def events_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a log; skips damaged lines, such as half a line after a kill."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from filter(None, map(event_of, file))


def event_of(text: str | bytes) -> dict[str, Any] | None:
    """Returns the event of a line; None if it holds none, or one without its fields."""
    event = parse_line(text)
    kind = event.get("event")
    needed = NEEDED.get(kind, BEGIN) if isinstance(kind, str) else BEGIN
    whole = all(_is_number(event.get(name, default)) for name, default in needed)
    return event if whole else None


def _is_number(value: Any) -> bool:
    """Returns whether a value can be seconds or a step."""
    return type(value) in (int, float) and 0 <= value < LARGEST


def starts_of(events: Iterable[Mapping[str, Any]]) -> list[Start]:
    """Returns the starts that events record."""
    starts: list[Start] = []
    for event in events:
        kind, time = event.get("event"), float(event["time"])
        if kind == "begin":
            starts.append(Start(time, time))
        if not starts:
            continue
        now = starts[-1]
        now.ended = max(now.ended, time)
        if kind == "stage":
            stage, seconds = str(event.get("stage")), float(event["seconds"])
            now.stages[stage] = now.stages.get(stage, 0) + seconds
            now.went_back = now.went_back or stage == "restore"
        elif kind == "steps":
            spent = [float(event.get(name, 0)) for name in ("step_s", "input_s")]
            now.add(Steps(int(event["first"]), int(event["step"]), *spent), time)
        elif kind == "hang":
            now.how, now.outcome = str(event.get("text", "hung")), "hang"
        elif kind == "end":
            now.how, now.outcome = "ended", "ended"
            if "error" in event:
                now.how, now.outcome = f"ended by {event['error']}", "error"
    return starts


def goodput_of(starts: list[Start]) -> Goodput:
    """Sums the time of starts by class."""
    seconds = _of_steps(starts) | dict.fromkeys((INPUT, *CLASSES, DOWN, UNKNOWN), 0.0)
    for start in starts:
        seconds[INPUT] += sum(one.input_seconds for one in start.steps)
        for name, stages in CLASSES.items():
            seconds[name] += sum(start.stages.get(stage, 0) for stage in stages)
        known = sum(one.seconds + one.input_seconds for one in start.steps)
        known += sum(start.stages.values())
        seconds[UNKNOWN] += max(start.ended - start.began - known, 0)
    restarts = [_restart(before, start) for before, start in itertools.pairwise(starts)]
    for one in restarts:
        seconds[DOWN] += one.down
    return Goodput(seconds, restarts)


def _of_steps(starts: list[Start]) -> dict[str, float]:
    """Returns the seconds in steps that count, and in steps that were lost.

    Steps are lost if the log has the same numbers, or lower ones, later: in another start they were
    repeated, in the same start the run went back.
    """
    seconds: dict[str, float] = {TRAINING: 0.0, REPEATED: 0.0, ROLLED_BACK: 0.0}
    kept: list[Steps] = []  # in order of steps
    for start in starts:
        for number, steps in enumerate(start.steps):
            while kept and kept[-1].last >= steps.first:
                one = kept.pop()
                counts, lost = one.shared(steps.first - 1)
                seconds[ROLLED_BACK if number else REPEATED] += lost
                if one.first < steps.first:
                    kept.append(replace(one, last=steps.first - 1, seconds=counts))
            kept.append(steps)
    seconds[TRAINING] = sum(one.seconds for one in kept)
    return seconds


def _restart(before: Start, start: Start) -> Restart:
    step = before.last if start.first is None else start.first - 1
    return Restart(
        before.how,
        step,
        max(before.last - step, 0),
        max(start.began - before.ended, 0),
        None if start.trained is None else max(start.trained - before.ended, 0),
    )
