"""Trials: two processes meet a fault, are started again, and end as if there were none."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moejax.report.goodput import read_goodput
from tests.integration.runs import REPOSITORY, describe, environment, find_member, write_config

STEPS = 30
CONFIG = describe(STEPS, sample=0, simulated_devices=4)
SECONDS = {"step_s": 15, "silent_s": 6, "save_s": 60, "evaluate_s": 60}  # deadlines


@dataclass
class Trial:
    """What came of a fault.

    Attributes:
      code: the launcher's exit code.
      detected_s: seconds from the fault to the end of all processes; None: none ended.
      recovered_s: to the next step after it.
      lost: steps done again.
      said: what the launcher said of the failure.
    """

    code: int
    out: str
    detected_s: float | None
    recovered_s: float | None
    lost: int
    said: str


class Lab:
    """A directory of runs of one config, which share a cache of compiled programs."""

    def __init__(self, folder: Path):
        self.folder = write_config(folder, CONFIG, folder / "straight")

    def command(self, name: str, wrapped: tuple[str, ...] = ()) -> list[str]:
        """Returns the command of a run, started again once after a failure."""
        launcher = [sys.executable, str(REPOSITORY / "launch" / "local"), "--processes", "2"]
        launcher += [
            "--devices",
            "2",
            "--restarts",
            "1",
            "--logs",
            str(self.folder / f"{name}-logs"),
        ]
        program = wrapped or (sys.executable, "-m", "moejax.train")
        words = ["--config", str(self.folder / "config.yaml")]
        words += [f"--config.run_dir={self.folder / name}"]
        words += [f"--config.watchdog.{key}={value}" for key, value in SECONDS.items()]
        return [*launcher, "--", *program, *words]

    def straight(self) -> Path:
        """Runs without a fault. Returns the run's directory."""
        done = subprocess.run(
            self.command("straight"),
            env=environment(),
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return self.folder / "straight"

    def trial(
        self,
        name: str,
        step: int,
        fault: Callable[[int], None] | None = None,
        wrapped: tuple[str, ...] = (),
    ) -> Trial:
        """Runs until a step is shown, calls the fault, and waits for the end.

        Args:
          fault: is called with the launcher's process number; None if `wrapped` fails by itself.
          wrapped: the program in the place of the train command.
        """
        process = subprocess.Popen(
            self.command(name, wrapped),
            env=environment(PYTHONPATH=str(REPOSITORY)),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        stuck = threading.Timer(240, process.kill)
        stuck.start()
        lines: list[str] = []
        failed = ended = recovered = None
        assert process.stdout is not None
        for line in process.stdout:
            now = time.monotonic()
            lines.append(line)
            if failed is None and f"step {step}/" in line:
                failed = now
                if fault is not None:
                    fault(process.pid)
            elif line.startswith("launcher: ") and "failed first" in line:
                ended = now
            elif ended is not None and recovered is None and re.search(r"step \d+/", line):
                recovered = now
        process.stdout.close()
        code = process.wait()
        stuck.cancel()
        out = "".join(lines)
        restarts = read_goodput(self.folder / name).restarts
        return Trial(
            code,
            out,
            None if None in (failed, ended) else ended - failed,
            None if None in (failed, recovered) else recovered - failed,
            sum(one.lost for one in restarts),
            next((line.strip() for line in lines if "failed first" in line), ""),
        )


def send(number: int, member: int, after_s: float = 0.0) -> Callable[[int], None]:
    """Returns a fault: a signal to a process of the program, after a while."""

    def fault(launcher: int) -> None:
        time.sleep(after_s)
        os.kill(find_member(launcher, member), number)

    return fault


def kill_in_save(lab: Lab, name: str, member: int) -> Callable[[int], None]:
    """Returns a fault: SIGKILL while a checkpoint is being written."""

    def fault(launcher: int) -> None:
        until = time.monotonic() + 30
        while not list((lab.folder / name / "checkpoints").glob("*.orbax-checkpoint-tmp*")):
            assert time.monotonic() < until, "no save was seen"
            time.sleep(0.001)
        os.kill(find_member(launcher, member), signal.SIGKILL)

    return fault


def injected(fault: str, member: int, step: int, once: Path) -> tuple[str, ...]:
    """Returns the train command with a fault in one of its processes."""
    words = ("--fault", fault, "--process", str(member), "--step", str(step), "--once", str(once))
    return (sys.executable, "-m", "tests.faults.faulty", *words, "--")


def seeded(seed: int) -> tuple[int, int, float]:
    """Returns a random process, step and delay for a trial."""
    draw = random.Random(seed)
    return draw.randrange(2), draw.randint(3, STEPS - 4), draw.random()
