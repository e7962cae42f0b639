"""What faults cost a run: how soon they are seen, what is lost, and whether the end is the same.

Two processes of two simulated devices each train a small model, with a checkpoint every ten steps.
A fault meets one of them; the launcher ends both and starts them again, once. The run counts as
recovered if its last checkpoint has the bits of a run without a fault. Writes faults.json and
faults.md.

    python -m benchmarks.faults --out benchmarks/results            # about an hour
    python -m benchmarks.faults --out /tmp/faults --trials 1
"""

import argparse
import json
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import stamp
from tests.faults.lab import SECONDS, STEPS, Lab, Trial, injected, kill_in_save, seeded, send
from tests.integration.runs import final_state

PAGE = """\
# What faults cost a run

`{command}` wrote this page. Two processes of two simulated
devices each, on one machine; {steps} steps of a small model, a checkpoint every ten;
{deadlines}.
A fault meets one process after a random step; `launch/local --restarts 1` ends both and starts
them again. Seconds are from the fault: *seen* until all processes have ended, *next step* until
the run shows one again; median, and the largest in brackets. The machine: {where},
JAX {jax}, {date}.

| fault | trials | seen | seen after s | next step after s | steps again | same bits |
|---|---:|---:|---:|---:|---:|---:|
{rows}

*Same bits*: the last checkpoint equals that of a run without a fault. A process that is killed is
seen when it ends. One that hangs is seen by the others after the deadline it falls under:
{silent_s} s where it can say nothing (SIGSTOP, Python's lock), {step_s} s in one step where it
can; by default 60 s and 900 s. The launcher then gives it up to 10 s to end. The rest is a new
start: imports, data, a compiled program from the cache, the restore.
"""
Plan = Callable[[Lab, str, int], Trial]  # of a fault, the run's name and a seed


@dataclass
class Fault:
    """A kind of fault, and how a trial of it is made."""

    name: str
    plan: Plan


def signalled(number: int) -> Plan:
    """Returns trials that send a signal to a random process after a random step."""

    def plan(lab: Lab, name: str, seed: int) -> Trial:
        member, step, delay = seeded(seed)
        return lab.trial(name, step, send(number, member, delay))

    return plan


def in_save(lab: Lab, name: str, seed: int) -> Trial:
    """A trial that kills a random process while a checkpoint is written."""
    member, step, _ = seeded(seed)
    return lab.trial(name, 8 if step < 15 else 18, kill_in_save(lab, name, member))


def inside(fault: str) -> Plan:
    """Returns trials whose program fails by itself in a random process after a random step."""

    def plan(lab: Lab, name: str, seed: int) -> Trial:
        member, step, _ = seeded(seed)
        once = lab.folder / f"{name}.done"
        return lab.trial(name, step, wrapped=injected(fault, member, step, once))

    return plan


FAULTS = (
    Fault("SIGKILL at a random moment", signalled(signal.SIGKILL)),
    Fault("SIGKILL while a checkpoint is written", in_save),
    Fault("SIGSTOP at a random moment", signalled(signal.SIGSTOP)),
    Fault("an endless loop in Python", inside("loop")),
    Fault("a call of C that never returns and keeps Python's lock", inside("hold")),
    Fault("an exception", inside("exception")),
    Fault("an exit without a word", inside("exit")),
)


def trials(lab: Lab, count: int) -> Iterator[dict[str, Any]]:
    """Makes the trials, fault by fault, and yields what came of each."""
    wanted = [x.tobytes() for x in final_state(lab.straight())[1]]
    for number, fault in enumerate(FAULTS):
        for seed in range(count):
            name = f"{number}-{seed}"
            trial = fault.plan(lab, name, 1000 * number + seed)
            same = (
                trial.code == 0
                and [x.tobytes() for x in final_state(lab.folder / name)[1]] == wanted
            )
            facts = {n: v for n, v in asdict(trial).items() if n != "out"}
            print(fault.name, seed, facts, "same" if same else "NOT THE SAME", flush=True)
            if not same:
                print(trial.out, flush=True)
            yield {"fault": fault.name, "seed": seed, "same": same, **facts}


def page(found: list[dict[str, Any]], machine: dict[str, Any], command: str) -> str:
    """Returns the page of results."""
    rows = []
    for fault in FAULTS:
        mine = [one for one in found if one["fault"] == fault.name]
        rows.append(
            f"| {fault.name} | {len(mine)} | {sum(one['detected_s'] is not None for one in mine)} "
            f"| {_spread(mine, 'detected_s')} | {_spread(mine, 'recovered_s')} "
            f"| {_spread(mine, 'lost')} | {sum(one['same'] for one in mine)} |"
        )
    deadlines = ", ".join(f"`watchdog.{name}={value}`" for name, value in SECONDS.items())
    return PAGE.format(
        command=command,
        steps=STEPS,
        deadlines=deadlines,
        where=f"{machine['machine']['cpu']}, {machine['machine']['cpus_used']} cores",
        rows="\n".join(rows),
        **{name: machine[name] for name in ("jax", "date")},
        **SECONDS,
    )


def _spread(found: list[dict[str, Any]], name: str) -> str:
    values = [one[name] for one in found if one[name] is not None]
    if not values:
        return "-"
    return f"{statistics.median(values):.0f} ({max(values):.0f})"


def main() -> None:
    """Makes the trials and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=10, help="of each fault; 10 if not given")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = stamp()
    with tempfile.TemporaryDirectory() as folder:
        found = list(trials(Lab(Path(folder)), args.trials))
    command = f"python -m benchmarks.faults --out benchmarks/results --trials {args.trials}"
    facts = {"machine": machine, "command": command, "trials": found}
    (args.out / "faults.json").write_text(json.dumps(facts, indent=1) + "\n")
    (args.out / "faults.md").write_text(page(found, machine, command))


if __name__ == "__main__":
    main()
