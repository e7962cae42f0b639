"""Trials: two processes meet a fault, are started again, and end as if there were none."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejax.checkpoint.manifest import finished_steps
from tests.integration.runs import (
    REPOSITORY,
    assert_same_end,
    describe,
    environment,
    find_member,
    write_config,
)

STEPS = 30
CONFIG = describe(STEPS, sample=0, simulated_devices=4)
SECONDS = {"step_s": 15, "silent_s": 6, "save_s": 60, "evaluate_s": 60}  # deadlines
HANGS = SECONDS["step_s"] + 15  # seconds within which a hang has ended all processes
DEATHS = 15  # the same of a process that is gone
MOST_LOST = 20  # steps: a save, of every tenth, is whole before the next one begins
TRAIN = (sys.executable, "-m", "moejax.train")
TWO = ("local", "--processes", "2", "--devices", "2")  # a launcher and its flags
SHOWN = re.compile(r"\[\w+\] step (\d+)/")  # as a process shows a step; the launcher repeats some
RESUMED = re.compile(r"resuming at step (\d+) from")
LONGEST_S = 300  # after so long a launcher is killed


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

    def program(self, name: str, wrapped: Sequence[str] = (), words: Sequence[str] = ()) -> list:
        """Returns the command of one process of a run.

        Args:
          wrapped: the program in the place of the train command.
          words: further settings.
        """
        settings = ["--config", str(self.folder / "config.yaml")]
        settings += [f"--config.run_dir={self.folder / name}"]
        settings += [f"--config.watchdog.{key}={value}" for key, value in SECONDS.items()]
        return [*(wrapped or TRAIN), *settings, *words]

    def command(
        self,
        name: str,
        wrapped: Sequence[str] = (),
        launcher: Sequence[str] = TWO,
        restarts: int = 1,
        words: Sequence[str] = (),
    ) -> list[str]:
        """Returns the command of a run, started again after a failure, once if not said.

        Args:
          launcher: a file of launch/ and its flags.
        """
        file, *flags = launcher
        flags += ["--restarts", str(restarts), "--logs", str(self.folder / f"{name}-logs")]
        start = [sys.executable, str(REPOSITORY / "launch" / file), *flags]
        return [*start, "--", *self.program(name, wrapped, words)]

    def straight(self) -> Path:
        """Runs without a fault, and records the batches. Returns the run's directory."""
        done = self.run("straight", recording(self.folder / "straight-batches"))
        assert done.returncode == 0, done.stdout
        return self.folder / "straight"

    def run(
        self,
        name: str,
        wrapped: Sequence[str] = (),
        launcher: Sequence[str] = TWO,
        words: Sequence[str] = (),
        restarts: int = 0,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command of `command` to its end. Returns code and output."""
        command = self.command(name, wrapped, launcher, restarts, words)
        return subprocess.run(command, **self.here, timeout=LONGEST_S)

    @property
    def here(self) -> dict[str, Any]:
        """How a command is started, whose output and errors are read together."""
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return {"env": environment(), "cwd": self.folder, **both}

    def trial(
        self,
        name: str,
        step: int,
        fault: Callable[[int], None] | None = None,
        wrapped: Sequence[str] = (),
        launcher: Sequence[str] = TWO,
        words: Sequence[str] = (),
        *,
        begun: Callable[[int], None] = lambda _: None,
        failed: Callable[[int], None] = lambda _: None,
        restarts: int = 1,
    ) -> Trial:
        """Runs until a step is shown, calls the fault, and waits for the end.

        Args:
          fault: is called with the launcher's process number; None if `wrapped` fails by itself.
          begun, failed: are called with the same, when the launcher was started, and when it says
            that the run has failed.
        """
        command = self.command(name, wrapped, launcher, restarts, words)
        process = subprocess.Popen(command, **self.here)
        stuck = threading.Timer(LONGEST_S, process.kill)
        stuck.start()
        try:
            begun(process.pid)
            lines, times = _follow(process, step, fault, failed)
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
        finally:
            stuck.cancel()
        began, ended, recovered = times
        before, _, after = "".join(lines).partition("launcher: ")
        return Trial(
            code,
            "".join(lines),
            _between(began, ended),
            _between(began, recovered),
            steps_again(before, after),
            next((line.strip() for line in lines if "failed first" in line), ""),
        )


def recovered(lab: Lab, name: str, trial: Trial, within: float) -> None:
    """Asserts that the fault was seen in time, little was lost, and the end has the same bits."""
    assert trial.code == 0, trial.out
    assert trial.detected_s is not None, trial.out
    assert trial.detected_s < within, trial.out
    assert trial.lost <= MOST_LOST
    assert_same_end(lab.folder / "straight", lab.folder / name)


def undisturbed(lab: Lab, name: str, trial: Trial) -> None:
    """Asserts that a run ended without a failure, with the bits of one without a fault."""
    assert trial.code == 0, trial.out
    assert (trial.said, trial.lost) == ("", 0), trial.out
    assert_same_end(lab.folder / "straight", lab.folder / name)


def _between(began: float | None, ended: float | None) -> float | None:
    return None if began is None or ended is None else ended - began


def _follow(
    process: subprocess.Popen,
    step: int,
    fault: Callable[[int], None] | None,
    failed: Callable[[int], None],
) -> tuple[list[str], tuple[float | None, float | None, float | None]]:
    """Returns a launcher's lines, and when the fault, the end of all and the next step were."""
    lines: list[str] = []
    began = ended = recovered = None
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            now = time.monotonic()
            lines.append(line)
            if began is None and f"step {step}/" in line:
                began = now
                if fault is not None:
                    fault(process.pid)
            elif line.startswith("launcher: ") and "failed first" in line:
                ended = now
                failed(process.pid)
            elif ended is not None and recovered is None and SHOWN.match(line):
                recovered = now
    return lines, (began, ended, recovered)


def steps_again(before: str, after: str) -> int:
    """Returns how many steps a start did again.

    Args:
      before: what the start before it showed.
      after: what it showed itself; nothing if there was none.
    """
    if not SHOWN.search(after):
        return 0
    resumed = RESUMED.search(after)
    return max(map(int, SHOWN.findall(before)), default=0) - (int(resumed[1]) if resumed else 0)


def send(number: int, member: int, after_s: float = 0.0) -> Callable[[int], None]:
    """Returns a fault: a signal to a process of the program, after a while."""

    def fault(launcher: int) -> None:
        time.sleep(after_s)
        os.kill(find_member(launcher, member), number)

    return fault


def _wait(ready: Callable[[], Any], missing: str) -> None:
    until = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < until, missing
        time.sleep(0.001)


def once_saved(run_dir: Path, step: int, fault: Callable[[int], None]) -> Callable[[int], None]:
    """Returns a fault that waits for a checkpoint first, whose save goes on beside later steps."""

    def later(launcher: int) -> None:
        saved = run_dir / "checkpoints"
        _wait(lambda: step in finished_steps(saved), f"step {step} was not saved")
        fault(launcher)

    return later


def kill_in_save(lab: Lab, name: str, member: int) -> Callable[[int], None]:
    """Returns a fault: SIGKILL while a checkpoint is being written."""

    def fault(launcher: int) -> None:
        saves = lab.folder / name / "checkpoints"
        _wait(lambda: list(saves.glob("*.orbax-checkpoint-tmp*")), "no save was seen")
        os.kill(find_member(launcher, member), signal.SIGKILL)

    return fault


def injected(fault: str, member: int, step: int, once: Path) -> tuple[str, ...]:
    """Returns the train command with a fault in one of its processes."""
    words = ("--fault", fault, "--process", str(member), "--step", str(step), "--once", str(once))
    return (sys.executable, "-m", "tests.faults.faulty", *words, "--")


def recording(folder: Path) -> tuple[str, ...]:
    """Returns the train command, which records in a folder what it trains on."""
    return (sys.executable, "-m", "tests.faults.recording", "--to", str(folder), "--")


def with_wrong_clock(member: int) -> tuple[str, ...]:
    """Returns the train command, in which the wall clock of one of its processes is wrong."""
    words = ("--fault", "clock", "--process", str(member))
    return (sys.executable, "-m", "tests.faults.faulty", *words, "--")


def seeded(seed: int) -> tuple[int, int, float]:
    """Returns a random process, step and delay for a trial."""
    draw = random.Random(seed)
    return draw.randrange(2), draw.randint(3, STEPS - 4), draw.random()
