"""The train command in a container whose memory runs out at a step, as its files say.

  python -m tests.faults.short_memory --process 1 --step 15 --groups FOLDER -- --config ...

Each process has control groups of its own; those of one of them say so.
"""

import argparse
import os
import sys
from pathlib import Path

GIB, MIB = 2**30, 2**20
LIMIT, LEFT = 8 * GIB, 100 * MIB  # a run ends below 5 % of so small a machine: 410 MiB


def write(folder: Path, left: int) -> None:
    """Writes the files of the only control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{LIMIT}\n")
    (folder / "memory.current").write_text(f"{LIMIT - left}\n")
    (folder / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")


def main() -> int:
    """Runs the command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--groups", type=Path, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()

    from moejax.config.checks import machine
    from moejax.train.__main__ import main as train
    from moejax.train.faults.bad_steps import StepCheck

    index = os.environ.get("MOEJAX_PROCESS", "0")
    machine.PROC, machine.CGROUPS = args.groups / "none", args.groups / index
    write(machine.CGROUPS, LIMIT)
    look = StepCheck.after

    def after(self, step, metrics):
        if index == str(args.process) and step >= args.step:
            write(machine.CGROUPS, LEFT)
        look(self, step, metrics)

    StepCheck.after = after
    return train(args.command[1:])


if __name__ == "__main__":
    sys.exit(main())
