"""What faults cost a run: how soon they are seen, what is lost, and whether the end is the same.

Two processes of two simulated devices each train a small model, with a checkpoint every ten steps.
A fault meets one of them; the launcher ends both and starts them again, once. The run counts as
recovered if its last checkpoint has the bits of a run without a fault. Writes faults.json and
faults.md. Faults of links and disks need root, ip and tc.

    python -m benchmarks.faults --out benchmarks/results            # 40 minutes
    python -m benchmarks.faults --out /tmp/faults --trials 1
    python -m benchmarks.faults --out /tmp/faults --only link       # these rows anew, others stay
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks.fault_kinds import KINDS, Kind, missing
from benchmarks.machine import stamp
from moejax.screen import screen, text_column
from tests.faults.lab import SECONDS, STEPS, Lab

PAGE = """\
# What faults cost a run

`{command}` wrote this page. Two processes of two simulated
devices each, on one machine; {steps} steps of a small model, a checkpoint every ten;
{deadlines}.
A fault meets one process after a random step. Where processes end, `launch/local --restarts 1`
(`launch/emulate` for links) ends all and starts them again. Seconds are from the fault: *seen*
until all processes have ended, *next step* until the run shows one again; median, and the largest
in brackets. The machine: {where}, JAX {jax}, {date}.

| fault | trials | seen | seen after s | next step after s | steps again | same end |
|---|---:|---:|---:|---:|---:|---:|
{rows}

*Same end*: the last checkpoint has the bits of that of a run without a fault. Where another count
of processes or another mesh takes over, sums have another order: there it says that every batch
is the same, by its digest, and each loss within 1e-4. A process that is killed is
seen when it ends. One that hangs or is cut off is seen by the others after the deadline it falls
under: {silent_s} s where it can say nothing (SIGSTOP, Python's lock, a link), {step_s} s in one
step where it can; by default 60 s and 900 s. While a program is compiled a process may be silent
for long: who stops or dies then is found by JAX's heartbeat after 100 s, or by the launcher, which
ends the others 10 s after one that died. The launcher gives a hung one 10 s to end, too. The
rest is a new start: imports, data, a compiled program from the cache, the restore. A run that was
taken over, or whose disk was full, was started by hand, so there is no next step of its own.

A slow link, a wrong clock and strangers do not end a run: there is nothing to see. Another run's
process and a second run are seen when they are refused; seconds are those of their whole life, of
which a process of another run looks for its own for 4. Damage is seen when files are compared with
their manifest; what is not seen did no harm: a file that was added, or is as before. A flipped
bit in a copy in memory is seen at the next start, which takes the neighbour's copy; seconds are
those of the killed process.
"""


def trials(lab: Lab, kinds: list[Kind], count: int) -> Iterator[dict[str, Any]]:
    """Makes the trials, kind by kind, and yields what came of each."""
    lab.straight()
    for kind in kinds:
        number = KINDS.index(kind)
        for seed in range(count * kind.times):
            trial, same = kind.plan(lab, f"{number}-{seed}", 1000 * number + seed)
            facts = {name: value for name, value in asdict(trial).items() if name != "out"}
            if not same:
                print(trial.out, file=sys.stderr, flush=True)
            yield {"fault": kind.name, "seed": seed, "same": same, **facts}


def page(found: list[dict[str, Any]], machine: dict[str, Any], command: str) -> str:
    """Returns the page of results."""
    rows = []
    for kind in KINDS:
        if not (mine := [one for one in found if one["fault"] == kind.name]):
            continue
        rows.append(
            f"| {kind.name} | {len(mine)} | {sum(one['detected_s'] is not None for one in mine)} "
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
    digits = 0 if max(values) >= 1 or name == "lost" else 2
    return f"{statistics.median(values):.{digits}f} ({max(values):.{digits}f})"


def earlier(path: Path, machine: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the trials of an earlier faults.json; none if there is none.

    Raises:
      SystemExit: if they are of another machine: one page has one.
    """
    if not path.is_file():
        return []
    facts = json.loads(path.read_text(encoding="utf-8"))
    if facts["machine"]["machine"] != machine["machine"]:
        raise SystemExit(
            f"faults.json is of another machine. {path} is of {facts['machine']['machine']['cpu']}"
            ". Rows of one page are of one machine. Choose another --out."
        )
    return facts["trials"]


def chosen(only: list[str]) -> list[Kind]:
    """Returns the kinds of faults whose names hold one of some texts, and can be tried here.

    Raises:
      SystemExit: if there is none, or one that was asked for lacks something.
    """
    wanted = [kind for kind in KINDS if not only or any(text in kind.name for text in only)]
    lacking = missing()
    for kind in wanted:
        if kind.name in lacking:
            print(f"left out: {kind.name}: needs {lacking[kind.name]}", file=sys.stderr)
    listed = "; ".join(kind.name for kind in KINDS)
    if not (able := [kind for kind in wanted if kind.name not in lacking]):
        raise SystemExit(
            f"no fault to try. --only is {', '.join(only)}. It must be a part of a fault's name, "
            f"and the machine must have what that needs. Choose of: {listed}."
        )
    return able


@contextmanager
def progress(total: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows a bar on a terminal, and a line for each trial."""
    console = screen(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        text_column("{task.fields[at]}"),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("trials", total=total, at="a run without a fault")

        def told(one: dict[str, Any]) -> None:
            seen = "-" if one["detected_s"] is None else f"{one['detected_s']:.1f} s"
            end = "same end" if one["same"] else "NOT THE SAME END"
            bar.update(task, advance=1, at=one["fault"])
            text = f"{one['fault']}, {one['seed']}: seen {seen}, {one['lost']} steps again, {end}"
            console.print(text, highlight=False, soft_wrap=True)

        yield told


def main() -> None:
    """Makes the trials and writes the page, after each kind of fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=2, help="of each fault; 2 if not given")
    parser.add_argument(
        "--only",
        metavar="ROW",
        action="append",
        default=[],
        help="a part of a fault's name; its trials replace those in DIR/faults.json",
    )
    args = parser.parse_args()
    kinds, machine = chosen(args.only), stamp()
    args.out.mkdir(parents=True, exist_ok=True)
    # The ends of runs are read here, onto as many devices as they had.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    names = {kind.name for kind in kinds}
    path = args.out / "faults.json"
    found = [one for one in earlier(path, machine) if one["fault"] not in names]
    command = f"python -m benchmarks.faults --out benchmarks/results --trials {args.trials}"
    total = sum(args.trials * kind.times for kind in kinds)
    with tempfile.TemporaryDirectory() as folder, progress(total) as told:
        for one in trials(Lab(Path(folder)), kinds, args.trials):
            told(one)
            found.append(one)
            facts = {"machine": machine, "command": command, "trials": found}
            path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            text = page(found, machine, command)
            (args.out / "faults.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
