"""`moejax doctor --smoke`: runs small versions of a training run's parts on the devices here.

Every check runs by itself: one that fails does not stop the others. `doctor.smoke_checks` has them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from moejax.doctor.machine import devices_here
from moejax.doctor.smoke_checks import Check, SkippedError, smoke_checks
from moejax.screen import waiting

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
LETTERS = 200  # of an error that are shown


@dataclass(frozen=True)
class Outcome:
    """The result of a check: its seconds, and why it failed or was left out."""

    check: Check
    outcome: str
    seconds: float
    why: str = ""


def smoke(console: Console, make_checks: Callable[[], Sequence[Check]] | None = None) -> int:
    """Runs all checks and prints a table.

    Args:
      make_checks: gives the checks; None for all, on the devices of this process.
    Returns:
      The exit code: 0 if every check holds, 1 if any fails.
    Raises:
      InputError: if there are no devices.
    """
    devices = devices_here()
    console.print(f"{len(devices)} x {devices[0].device_kind}", highlight=False)
    outcomes = []
    for check in (make_checks or (lambda: smoke_checks(devices)))():
        with waiting(console, check.name):
            outcomes.append(_run(check))
    console.print(_table(outcomes))
    failed = [one for one in outcomes if one.outcome == FAILED]
    for one in failed:
        console.print(f"{one.check.name} failed. {one.check.advice}", highlight=False)
    return 1 if failed else 0


def _run(check: Check) -> Outcome:
    began = time.perf_counter()
    try:
        check.run()
        outcome, why = OK, ""
    except SkippedError as error:
        outcome, why = SKIPPED, str(error)
    except Exception as error:  # of any kind: the rest must run
        outcome, why = FAILED, f"{type(error).__name__}: {_first_line(error)}"
    return Outcome(check, outcome, time.perf_counter() - began, why)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:LETTERS]


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("check", "outcome", "seconds", "why")
    for one in outcomes:
        table.add_row(one.check.name, one.outcome, f"{one.seconds:.1f}", one.why)
    return table
