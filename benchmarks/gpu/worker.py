"""Runs one section of the GPU benchmark on the device, in a process that may hang or die of it.

Says what it is about to try before it tries it, and what came of it: see `case`.
"""

import argparse
import os
import sys
import time
from typing import Any

# XLA would take most of the memory at once, and torch needs some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")  # runtime/memory.py says why

from benchmarks.gpu import sections
from benchmarks.gpu.case import Case, Reporter


def load_torch() -> Any:
    """PyTorch, if it has a GPU."""
    import torch  # type: ignore[import-not-found]

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    torch.zeros(1, device="cuda").add_(1).item()
    return torch


def run_section(cases: list[Case], report: Reporter, first: int, seconds: float) -> None:
    """Runs cases from number `first` on, while there is time for one more."""
    ends, longest = time.monotonic() + seconds, 0.0
    for number in range(first, len(cases)):
        began = time.monotonic()
        if began + longest > ends:
            report.say(left_out=[case.name for case in cases[number:]])
            return
        report.say(case=number)
        report.case = cases[number].name
        cases[number].run(report)
        longest = max(longest, time.monotonic() - began)


def main() -> None:
    """Runs a section."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("section")
    parser.add_argument("--first", type=int, default=0, help="case to begin with")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--skip", nargs="*", default=[], help="keys that are not tried again")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    section = sections.SECTIONS[args.section]
    report = Reporter(args.section, set(args.skip), small=args.small)
    report.say(versions=sections.versions())
    if not (report.gpu or report.small):
        sys.exit("JAX found no GPU here; --small runs anywhere")
    if section.torch:
        report.case = "torch"
        report.torch = report.attempt("import", "torch", load_torch)
    run_section(section.cases(small=args.small), report, args.first, args.seconds)


if __name__ == "__main__":
    main()
