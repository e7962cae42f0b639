"""Sums the time of a profiled run by the stages of the code.

A trace names the operations of the compiled program. The program's text, which the run kept beside
the trace, gives the stage of each operation.
"""

import gzip
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from moejax.aot.hlo import computations, kind_of
from moejax.errors import write_whole
from moejax.train.records.profile import DIRECTORY, PROGRAM

KEPT = "stages.json"
STAGES = (
    "embed", "attention", "mlp", "router", "routing", "dispatch", "experts", "combine",
    "activations", "context", "weights", "dense_gradient", "expert_gradient", "stage",
    "stage_gradient", "loss", "predict_ahead", "update",
)  # fmt: skip
OTHER = "other"
LARGEST = 2 * 2**30  # bytes of a trace that is read
# Their bodies' operations have events of their own, on a CPU often in other threads.
CONTROL = ("while", "conditional", "call")

Rows = dict[str, dict[str, float]]  # by stage; see `stage_times`


class Operation(NamedTuple):
    """The purpose of an operation: its stage, its direction, and whether it sends."""

    stage: str
    backward: bool
    sends: bool


class Event(NamedTuple):
    """One run of an operation, in nanoseconds."""

    key: Any
    start: float
    length: float


def stage_times(run_dir: Path) -> dict[str, Any] | None:
    """Returns the times of a profiled run by stage; None if it has no profile to read.

    Returns:
      `directory`, to open with xprof; `devices` and `steps` that were counted; and `rows`, by
      stage: seconds of one step on one device, `forward` and `backward`, and how much of both
      `sends`.
    """
    directory = run_dir / DIRECTORY
    traces = sorted(directory.rglob("*.xplane.pb"))
    if not traces:
        return None
    found: dict[str, Any] = {"directory": str(directory)}
    newest = max(path.parent.name for path in traces)
    trace = next(path for path in traces if path.parent.name == newest)
    program, kept = directory / PROGRAM, directory / KEPT
    made = trace.stat().st_mtime
    if not program.is_file() or program.stat().st_mtime < made or trace.stat().st_size > LARGEST:
        return found
    if kept.is_file() and kept.stat().st_mtime > made:
        # An unreadable file is summed again; brackets nested thousands deep end json so.
        with suppress(OSError, ValueError, TypeError, RecursionError):
            return found | json.loads(kept.read_text("utf-8"))
    text = gzip.decompress(program.read_bytes()).decode("utf-8")
    times = read_trace(trace, text)
    with suppress(OSError):  # a directory that may only be read: the next page sums again
        write_whole(kept, json.dumps(times) + "\n")
    return found | times


def operations_of(text: str) -> dict[str, Operation]:
    """Returns the purpose of each operation in a program's text, without control flow."""
    found = {}
    for lines in computations(text)[0].values():
        for line in lines:
            if line.op not in CONTROL:
                stage, backward = stage_of(line.label)
                found[line.name] = Operation(stage, backward, kind_of(line.op) is not None)
    return found


def stage_of(label: str) -> tuple[str, bool]:
    """Returns the innermost stage in an operation's label, and whether it serves gradients.

    Recomputation for the backward pass counts as backward.
    """
    words = re.findall(r"\w+", label)
    backward = "transpose(" in label or "rematted_computation" in words
    for word in reversed(words):
        stage = word.removesuffix("_backward")
        if stage in STAGES:
            return stage, backward or stage != word
    return OTHER, backward


def read_trace(trace: Path, text: str) -> dict[str, Any]:
    """Sums a trace's time by stage, as `stage_times` says.

    Args:
      text: text of the compiled step, whose operations are counted.
    """
    module = re.match(r"HloModule ([\w.\-]+)", text)
    operations = operations_of(text)
    devices: set[Any] = set()
    runs: dict[Any, dict[Operation, float]] = {}  # nanoseconds, by run of the program
    counts: Counter[Any] = Counter()
    for found, events in lines_of(trace, module[1] if module else ""):
        devices |= found
        for (run, name), length in own_times(events):
            counts[run] += 1
            if (operation := operations.get(name)) is not None:
                sums = runs.setdefault(run, {})
                sums[operation] = sums.get(operation, 0) + length
    # The trace may begin and end inside a step.
    whole = [sums for run, sums in runs.items() if counts[run] > max(counts.values()) / 2]
    shared = 1e9 * max(len(devices), 1) * max(len(whole), 1)
    return {"devices": len(devices), "steps": len(whole), "rows": rows_of(whole, shared)}


def lines_of(trace: Path, module: str) -> Iterator[tuple[set[Any], list[Event]]]:
    """Yields the devices and the events of each line of a trace (a thread, or a stream).

    Args:
      module: name of the program whose events are wanted; their keys are run and operation.
    """
    from jax.profiler import ProfileData

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of JAX's own extension module
        for plane in ProfileData.from_file(str(trace)).planes:
            for line in plane.lines:
                devices, events = set(), []
                for event in line.events:
                    stats = dict(event.stats)
                    if stats.get("hlo_module") == module:
                        devices.add((plane.name, stats.get("device_ordinal")))
                        key = stats.get("run_id"), str(stats.get("hlo_op", event.name))
                        events.append(Event(key, event.start_ns, event.duration_ns))
                yield devices, events


def rows_of(steps: Iterable[Mapping[Operation, float]], divisor: float) -> Rows:
    """Returns the sums of steps by stage, the largest stage first."""
    rows: Rows = {}
    for (stage, backward, sends), length in (pair for sums in steps for pair in sums.items()):
        row = rows.setdefault(stage, {"forward": 0.0, "backward": 0.0, "sends": 0.0})
        row["backward" if backward else "forward"] += length / divisor
        row["sends"] += sends * length / divisor
    return dict(sorted(rows.items(), key=lambda row: -row[1]["forward"] - row[1]["backward"]))


def own_times(events: Iterable[Event]) -> list[tuple[Any, float]]:
    """Returns the time of each event without the events inside it, such as those of a loop."""
    ended: list[tuple[Any, float]] = []
    open_: list[list[Any]] = []  # key, end, own time
    for event in sorted(events, key=lambda one: (one.start, -one.length)):
        while open_ and open_[-1][1] <= event.start:
            key, _, own = open_.pop()
            ended.append((key, own))
        if open_:
            open_[-1][2] -= event.length
        open_.append([event.key, event.start + event.length, event.length])
    return ended + [(key, own) for key, _, own in open_]
