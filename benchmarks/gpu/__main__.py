"""Is moejax at a GPU's limits? One call, limited to nine minutes, for an H200.

    python -m benchmarks.gpu --out DIR

Checks every kernel against its plain form, measures what the device can do at most, then times
kernels, attention, expert layers (whole and in chunks) and a train step beside torch's, cuDNN's and
XLA's own, and a step with arrays in the host's memory beside one without, most wanted first.
Needs no installation of moejax: numpy, JAX with CUDA, flax, optax, orbax and chex are enough, and
torch or tokamax are compared with where they are. Each section is a process of its own
(`worker`): one that hangs, dies or is out of time is ended, what it was at is noted and left
out, and the rest goes on. gpu.json and gpu.md are written anew after every case.

With --small everything is tiny and runs anywhere, kernels in Mosaic's interpreter: a test.
"""

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import to_markdown
from benchmarks.machine import ROOT, stamp

# Seconds of each section; what one leaves over goes to the last.
SECTIONS = {
    "check": 75,
    "products": 115,
    "rows": 60,
    "training": 120,
    "attention": 70,
    "chunks": 60,
    "host": 150,
    "sweep": 40,
}
# Seconds without a word after which a process is taken to hang.
SILENCE = {"check": 150, "training": 150, "host": 150, "all": 150}
USUAL_SILENCE = 45
STRIKES = 2  # after so many hangs or deaths of an implementation it is not tried again
RESTARTS = 8  # of a section


@dataclass
class Results:
    """What was found so far; written as JSON and as a page.

    Attributes:
      rows: by operation, implementation and case.
      left_out: cases that there was no time for, by section.
      given_up: what hung or died so often that it is not tried again.
    """

    out: Path
    small: bool
    about: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)
    section_seconds: dict[str, float] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row, in place of an earlier one of the same."""
        names = ("section", "operation", "implementation", "case")
        self.rows[" | ".join(row[name] for name in names)] = row

    def write(self) -> None:
        """Writes both files, each whole or not at all."""
        result = {
            **self.about,
            "small": self.small,
            "versions": self.versions,
            "section_seconds": self.section_seconds,
            "left_out": self.left_out,
            "given_up": self.given_up,
            "rows": list(self.rows.values()),
        }
        texts = {"gpu.json": json.dumps(result, indent=1) + "\n", "gpu.md": to_markdown(result)}
        for name, text in texts.items():
            partial = self.out / f"{name}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.out / name)


@dataclass
class Progress:
    """How far a section got, over all its processes.

    Attributes:
      case: the number of the one it is at.
      doing: the key of what it tries right now.
      started: whether a process of it ever said a word.
      skip: keys not to try: what hung or died, and implementations that did so often.
    """

    case: int = 0
    doing: str | None = None
    started: bool = False
    skip: set[str] = field(default_factory=set)
    finished: bool = False


class Worker:
    """A process that runs a section, and the lines that it writes."""

    def __init__(self, command: list[str], log: Path):
        self.log = log
        self.said = log.stat().st_size if log.exists() else 0
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next line; None at the end.

        Raises:
          queue.Empty: after that many seconds.
        """
        while True:
            line = self.lines.get(timeout=max(seconds, 0))
            # Libraries may print to it too.
            if line is None or line.startswith("{"):
                return None if line is None else json.loads(line)

    def end(self) -> None:
        """Ends it, whatever it does."""
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()

    def last_words(self) -> str:
        """The end of what it wrote to its error stream."""
        text = self.log.read_bytes()[self.said :].decode(errors="replace")
        return "\n".join(text.strip().splitlines()[-6:])[-800:]


def run_section(
    name: str, seconds: float, results: Results, skip: set[str], command: list[str]
) -> set[str]:
    """Runs a section, in as many processes as it takes.

    Args:
      skip: what is not tried.
      command: of the worker.
    Returns:
      `skip`, and what hung or died now.
    """
    progress, ends = Progress(skip=set(skip)), time.monotonic() + seconds
    for _ in range(RESTARTS):
        left = ends - time.monotonic()
        if left <= 0 or progress.finished:
            break
        words = [name, "--first", str(progress.case), "--seconds", str(round(left, 1))]
        words += ["--small"] if results.small else []
        words += ["--skip", *sorted(progress.skip)] if progress.skip else []
        worker = Worker([*command, *words], results.out / "gpu.log")
        try:
            _listen(worker, name, ends, results, progress)
        finally:
            worker.end()
    return progress.skip


def _listen(worker: Worker, name: str, ends: float, results: Results, progress: Progress) -> None:
    """Takes what a process says until it ends, hangs, or is out of time."""
    silence, progress.doing = SILENCE.get(name, USUAL_SILENCE), None
    while True:
        out_of_time = False
        left = ends - time.monotonic()
        try:
            said = worker.next(min(left, silence))
        except queue.Empty:
            out_of_time = left <= silence
            why = "there was no time left" if out_of_time else f"said nothing for {silence} s"
            _blame(worker, name, results, progress, why, strike=not out_of_time)
            progress.finished = out_of_time
            return
        if said is None:
            code = worker.process.wait()
            if code == 0:
                progress.finished = True
            else:
                _blame(worker, name, results, progress, f"ended with code {code}", strike=True)
            return
        progress.started = True
        progress.case = said.get("case", progress.case)
        progress.doing = None if "end" in said else said.get("begin", progress.doing)
        if "row" in said:
            results.add(said["row"])
        results.versions |= said.get("versions", {})
        if "left_out" in said:
            results.left_out[name] = said["left_out"]
        if "case" in said:
            results.write()


def _blame(
    worker: Worker, name: str, results: Results, progress: Progress, why: str, *, strike: bool
) -> None:
    """Writes down what a process was at when it ended, and what is not to be tried again."""
    if progress.doing is None:
        # Between two tries, so the case itself is at fault; or the process never got to one.
        row = {"operation": "the process", "implementation": "", "case": f"{progress.case}"}
        results.add({"section": name, **row, "error": f"{why}\n{worker.last_words()}"})
        progress.finished |= not progress.started
        progress.case += 1
        return
    operation, implementation, case = progress.doing.split(" | ")
    row = {"operation": operation, "implementation": implementation, "case": case}
    key = " | ".join((name, operation, implementation, case))
    said = results.rows.get(key, {}).get("error")
    results.add({"section": name, **row, "error": said or f"{why}\n{worker.last_words()}"})
    if strike:
        progress.skip.add(progress.doing)
        kind = f"{operation} | {implementation}"
        if sum(key.startswith(f"{kind} | ") for key in progress.skip) >= STRIKES:
            progress.skip.add(kind)
            results.given_up.append(kind)


def nvidia_smi() -> list[str] | None:
    """What the driver says of the GPUs; None where there is none."""
    if not shutil.which("nvidia-smi"):
        return None
    fields = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem"
    words = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    return done.stdout.strip().splitlines() if done.returncode == 0 else None


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for gpu.json, gpu.md")
    parser.add_argument("--seconds", type=float, default=520, help="at most, about")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="sections to run")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any machine")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    about = stamp() | {"nvidia_smi": nvidia_smi()}
    results = Results(args.out, args.small, about)
    command = [sys.executable, "-m", "benchmarks.gpu.worker"]
    (args.out / "gpu.log").unlink(missing_ok=True)
    wanted = ["all"] if args.small else (args.only or list(SECTIONS))
    skip: set[str] = set()
    for number, name in enumerate(wanted):
        left = args.seconds - (time.monotonic() - began)
        seconds = left if number == len(wanted) - 1 else min(SECTIONS[name], left)
        print(f"gpu: {name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
        started = time.monotonic()
        skip = run_section(name, seconds, results, skip, command)
        results.section_seconds[name] = round(time.monotonic() - started, 1)
        results.write()
    print(to_markdown(json.loads((args.out / "gpu.json").read_text())))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main())
