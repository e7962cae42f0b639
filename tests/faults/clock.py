"""The train command, in which the wall clock of one process is wrong.

  python -m tests.faults.clock --process 1 --hours 30 -- --config ...

Every two seconds it jumps from so many hours ahead to as many behind, and back.
"""

import argparse
import os
import sys
import time

JUMPS_EVERY_S = 2.0


def make_wrong(hours: float) -> None:
    """Replaces this process's `time.time`."""
    right, began = time.time, time.monotonic()

    def wrong() -> float:
        behind = int((time.monotonic() - began) / JUMPS_EVERY_S) % 2
        return right() + (-hours if behind else hours) * 3600

    time.time = wrong


def main() -> int:
    """Runs the command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--hours", type=float, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if os.environ.get("MOEJAX_PROCESS", "0") == str(args.process):
        make_wrong(args.hours)

    from moejax.train.__main__ import main as train

    return train(args.command[1:])


if __name__ == "__main__":
    sys.exit(main())
