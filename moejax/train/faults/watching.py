"""Watches a run: a log of events in every process, and a watchdog over its stages."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from moejax.config.schema import Config, WatchdogConfig
from moejax.runtime.event_log import EventLog
from moejax.runtime.interrupt import stops_at_sigterm
from moejax.runtime.processes import Processes
from moejax.runtime.watch import STEPPING, Deadlines, Watch, Watchdog, end_process

DIRECTORY = "events"  # in the run directory: one file a process
WRITE_EVERY_S = 10.0  # stages of steps are short: their seconds are summed for so long


class ProcessLog(EventLog):
    """The event log of this process: its stages with their seconds, and its faults."""

    def __init__(self, run_dir: Path, index: int):
        directory = run_dir / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        self.hang_file = directory / f"{index}.hang.txt"
        super().__init__(directory / f"{index}.jsonl")
        self._last: tuple[str, int, float] | None = None  # a stage that may go on
        self._sums: dict[str, float] = {}
        self._first: int | None = None  # the first step in the sums
        self._done = 0  # the last step that is done
        self._written = time.monotonic()

    def ended(self, stage: str, step: int, seconds: float) -> None:
        """Records a stage that has ended. Stages of steps are summed first."""
        if stage not in STEPPING:
            self._write_steps()
            if self._last is not None and self._last[:2] == (stage, step):
                seconds += self._last[2]  # such as the batches of an evaluation
            else:
                self._write_stage()
            self._last = (stage, step, seconds)
            return
        self._write_stage()
        self._sums[stage] = self._sums.get(stage, 0) + seconds
        if stage == "input":
            self._done = step - 1
        # A step goes on after a save or an evaluation: its rest belongs to the next report.
        self._first = self._first or self._done + 1
        if stage == "step":
            self._done = step
            if time.monotonic() - self._written > WRITE_EVERY_S:
                self._write_steps()

    def _write_stage(self) -> None:
        if self._last is not None:
            stage, step, seconds = self._last
            self.write("stage", step=step, stage=stage, seconds=round(seconds, 3))
        self._last = None

    def _write_steps(self) -> None:
        if self._first is not None:
            sums = {f"{stage}_s": round(seconds, 3) for stage, seconds in self._sums.items()}
            self.write("steps", step=self._done, first=self._first, **sums)
        self._sums, self._first, self._written = {}, None, time.monotonic()

    def flush(self) -> None:
        """Writes the sums and the stage that are still held back."""
        self._write_steps()
        self._write_stage()


@contextmanager
def watching(cfg: Config, processes: Processes) -> Iterator[Watch]:
    """Opens this process's log and starts the watchdog; ends both.

    Yields:
      The watch, which is told of each stage that the run enters.
    """
    log = ProcessLog(Path(cfg.run_dir), processes.index)
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "processes": processes.count}
    log.write("begin", step=0, **facts)
    watch = Watch(log.ended)
    hang = partial(_end_hung, watch, log)
    watchdog = Watchdog(watch, deadlines_of(cfg.watchdog), processes, hang)

    def before_steps() -> str | None:
        # Later a save may be under way, also while an evaluation is compiled.
        return None if watch.stepped else str(watch.now[0])

    try:
        with stops_at_sigterm(before_steps):
            yield watch
        _write_end(watch, log)
    except BaseException as error:
        _write_end(watch, log, error=type(error).__name__)
        raise
    finally:
        watchdog.close()
        log.close()


def _write_end(watch: Watch, log: ProcessLog, **values: str) -> None:
    step = watch.now[0].step
    watch.enter("end", step)
    log.flush()
    log.write("end", step=step, **values)


def deadlines_of(cfg: WatchdogConfig) -> Deadlines:
    """Returns the deadline of each stage."""
    return Deadlines(
        {
            **dict.fromkeys(("start", "plan", "restore"), cfg.start_s),
            **dict.fromkeys(("input", "step"), cfg.step_s),
            **dict.fromkeys(("evaluate", "sample"), cfg.evaluate_s),
            **dict.fromkeys(("save", "finish"), cfg.save_s),
            "compile": cfg.compile_s,
        },
        cfg.silent_s,
    )


def _end_hung(watch: Watch, log: ProcessLog, found: str) -> None:
    """Records a hang, and ends the process."""
    place = watch.now[0]
    log.flush()
    log.write("hang", step=place.step, stage=place.stage, text=found)
    end_process(found, log.hang_file)
