"""The history of each process of a run: starts, saves, faults, and the first failure.

Reads `events/K.jsonl` of the processes (docs/formats/events.md). Of a long run it reads the newest
part of each log, so that a page takes seconds however long the run and however many its processes.
"""

import bisect
import collections
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moejax.report.goodput import (
    EVENTS,
    LOG,
    Start,
    event_of,
    goodput_of,
    starts_of,
    starts_of_run,
)

READ_BYTES = 2**28  # of the logs of all processes together
SHOWN_PROCESSES = 32
SHOWN_STARTS, SHOWN_SAVES = 200, 400  # of a process
SHOWN_RESTARTS = 200
BEHIND = re.compile(r"process (\d+) (?:itself )?is behind")
STEPS = b'"event": "steps"'
KILLED = "killed: it left no last word"
# Errors that a process ends with when it loses another one, which is then the one that failed.
PEER_LOST = ("JaxRuntimeError", "XlaRuntimeError")


def goodput_data(run_dir: Path) -> dict[str, Any] | None:
    """Returns the goodput of a run for its page; None if it has no log of events.

    Returns:
      `goodput`, a share; `seconds` by class; `restarts`, the newest, with the process that failed
      `first` (None where no log tells), and `how`; `restarts_left_out`; over all restarts their
      `number`, the steps `lost` and `recovery`, the median and the longest; `processes`, each
      with `starts` [began, ended, outcome, how] and `saves`; `processes_left_out`; and
      `read_whole`, whether all logs were. Times are in seconds since `began`.
    """
    starts = starts_of_run(run_dir) if (run_dir / LOG).is_file() else []
    if not starts:
        return None
    found, began = goodput_of(starts), starts[0].began
    logs, read_whole = process_starts(run_dir)
    failed = [first_failed(attempt) for attempt in attempts(starts, logs)[:-1]]
    rows = [
        vars(one) | {"time": start.began - began, "first": first, "how": how}
        for one, start, (first, how) in zip(found.restarts, starts[1:], failed, strict=True)
    ]
    recovered = sorted(one.recovered for one in found.restarts if one.recovered is not None)
    shown = shown_processes(logs, [first for first, _ in failed])
    return {
        "began": began,
        "goodput": found.share,
        "seconds": {name: seconds for name, seconds in found.seconds.items() if seconds},
        "restarts": rows[-SHOWN_RESTARTS:],
        "restarts_left_out": max(len(rows) - SHOWN_RESTARTS, 0),
        "number": len(rows),
        "lost": sum(one.lost for one in found.restarts),
        "recovery": [recovered[len(recovered) // 2], recovered[-1]] if recovered else None,
        "processes": [process_data(k, *logs[k], began) for k in shown],
        "processes_left_out": len(logs) - len(shown),
        "read_whole": read_whole,
    }


Log = tuple[list[Start], list[float]]  # of a process: its starts, and times of its saves


def process_starts(run_dir: Path) -> tuple[dict[int, Log], bool]:
    """Returns the starts and saves of each process, and whether all logs were read whole."""
    paths = {
        int(path.stem): path for path in (run_dir / EVENTS).glob("*.jsonl") if path.stem.isdecimal()
    }
    share = READ_BYTES // max(len(paths), 1)
    logs: dict[int, Log] = {}
    for number, path in sorted(paths.items()):
        events = list(newest_events(path, share))
        saves = [
            float(one["time"])
            for one in events
            if one.get("event") == "stage" and one.get("stage") == "save" and one["seconds"]
        ]
        logs[number] = starts_of(events), saves
    return logs, all(path.stat().st_size <= share for path in paths.values())


def newest_events(path: Path, most: int) -> Iterator[dict[str, Any]]:
    """Yields the events in a log's newest bytes; of reports of steps in a row, the last alone."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - most, 0))
        if size > most:
            file.readline()  # half a line
        for of_steps, lines in itertools.groupby(file, lambda line: STEPS in line):
            shown = collections.deque(lines, maxlen=1 if of_steps else None)
            yield from filter(None, map(event_of, shown))


def attempts(starts: Sequence[Start], logs: dict[int, Log]) -> list[dict[int, Start]]:
    """Returns, for each start of the run, the matching starts of its processes, by process.

    A process that failed before its log was opened lacks a start, so they are joined by time.
    """
    found: list[dict[int, Start]] = [{} for _ in starts]
    began = [start.began for start in starts]
    for number, (own, _) in logs.items():
        for start in own:
            after = bisect.bisect(began, start.began)
            near = range(max(after - 1, 0), min(after + 1, len(began)))
            found[min(near, key=lambda n: abs(began[n] - start.began))][number] = start
    return found


def first_failed(attempt: dict[int, Start]) -> tuple[int | None, str]:
    """Returns the process that failed first in a start of the run, and how it failed.

    It is the process that a hang names; else the first that ended by an error of its own; else one
    without a last word, where others had one; else the first that ended by any error. None if the
    logs do not tell, for example if all processes ended at once or went on to a stop.
    """
    in_time = sorted(attempt.items(), key=lambda pair: pair[1].ended)
    for _, one in in_time:
        if one.outcome == "hang":
            match = BEHIND.search(one.how)
            return (int(match[1]) if match else None), one.how
    errors = [(number, one.how) for number, one in in_time if one.outcome == "error"]
    own = [(number, how) for number, how in errors if not how.endswith(PEER_LOST)]
    silent = [(number, KILLED) for number, one in in_time if one.outcome == "silent"]
    if own or (errors and not silent):
        return (own or errors)[0]
    if silent:
        return silent[0] if len(silent) < len(attempt) else (None, KILLED)
    return None, in_time[0][1].how if in_time else KILLED


def shown_processes(logs: dict[int, Log], failed: Sequence[int | None]) -> list[int]:
    """Returns the processes to show: those that failed first, then the lowest numbers."""
    wanted = [*(k for k in reversed(failed) if k is not None and k in logs), *logs]
    return sorted(list(dict.fromkeys(wanted))[:SHOWN_PROCESSES])


def process_data(
    number: int, starts: Sequence[Start], saves: Sequence[float], began: float
) -> dict[str, Any]:
    """Returns the newest starts of a process, and of its saves some, always with the last."""
    every = -(-len(saves) // SHOWN_SAVES) or 1
    return {
        "process": number,
        "starts": [
            [round(one.began - began, 3), round(one.ended - began, 3), one.outcome, one.how]
            for one in starts[-SHOWN_STARTS:]
        ],
        "saves": [round(time - began, 3) for time in saves[::-1][::every][::-1]],
    }
