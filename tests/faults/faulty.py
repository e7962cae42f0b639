"""The train command with a fault in it: one process fails after a step, once.

  python -m tests.faults.faulty --fault loop --process 1 --step 15 --once FILE -- --config ...

`exception` raises; `loop` never returns, though other threads run; `hold` never returns and lets no
other thread run; `exit` ends the process without a word; `pause` waits until somebody else makes
FILE, so that a run is sure to be there meanwhile. `clock` is there from the beginning: every two
seconds the wall clock jumps from 30 hours ahead to as many behind, and back.
"""

import argparse
import ctypes
import os
import sys
import time
from pathlib import Path

FAULTS = ("exception", "loop", "hold", "exit", "pause", "clock")
JUMPS_EVERY_S, HOURS = 2.0, 30


class InjectedError(Exception):
    """The fault that was asked for."""


def fail(fault: str, once: Path) -> None:
    """Fails as asked."""
    if fault == "pause":
        while not once.exists():
            time.sleep(0.05)
        return
    once.touch()
    if fault == "exception":
        raise InjectedError("a fault on one process")
    if fault == "exit":
        os._exit(41)  # no code of the contract
    if fault == "hold":
        ctypes.PyDLL(None).sleep(100_000)  # keeps Python's lock
    while True:
        pass


def make_clock_wrong() -> None:
    """Replaces this process's `time.time`."""
    right, began = time.time, time.monotonic()

    def wrong() -> float:
        behind = int((time.monotonic() - began) / JUMPS_EVERY_S) % 2
        return right() + (-HOURS if behind else HOURS) * 3600

    time.time = wrong


def main() -> int:
    """Runs the command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=FAULTS, required=True)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--once", type=Path, help="made when it fails")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    mine = os.environ.get("MOEJAX_PROCESS", "0") == str(args.process)
    if mine and args.fault == "clock":
        make_clock_wrong()

    from moejax.train.__main__ import main as train
    from moejax.train.faults.bad_steps import StepCheck

    look = StepCheck.after

    def after(self, step, metrics):
        if step >= args.step and not args.once.exists():
            fail(args.fault, args.once)
        look(self, step, metrics)

    if mine and args.fault != "clock":
        StepCheck.after = after
    return train(args.command[1:])


if __name__ == "__main__":
    sys.exit(main())
