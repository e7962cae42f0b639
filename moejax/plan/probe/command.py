"""The command `python -m moejax.plan probe`: measures the cluster and writes its topology.

Runs as the trainer does, in every process that a launcher of `launch/` starts. Process 0 writes the
file and talks to the user.
"""

import argparse
from functools import partial
from pathlib import Path

from moejax.config.checks.paths import check_output
from moejax.config.command_line import Parser
from moejax.config.fields import short
from moejax.config.schema import MeshConfig
from moejax.errors import InputError, exit_code
from moejax.plan.cluster.file import write_topology
from moejax.plan.probe.measure import QUICK_SECONDS, SECONDS, Effort, expected_text, probe
from moejax.plan.probe.show import print_probe, progress_line
from moejax.runtime.processes import Processes
from moejax.runtime.start import join, start
from moejax.screen import screen

EPILOG = """\
examples:
  moejax plan probe --out topology.json
  launch/emulate --hosts 2 --link 100mbit -- \\
      moejax plan probe --out topology.json
  srun ... moejax plan probe --out topology.json   # see launch/slurm.sbatch

Run it in the same processes, on the same devices, as the training that is to
be planned, and on an otherwise idle cluster. Exit codes: docs/formats/exit.md.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = Parser(
        prog="moejax plan probe",
        description="Measures links and devices, and writes a topology file for the planner.",
        epilog=EPILOG,
    )
    command.add_argument("--out", metavar="FILE", required=True, help="the topology to write")
    command.add_argument(
        "--quick", action="store_true", help="measure fewer sizes and skip pairs and contention"
    )
    command.add_argument(
        "--seconds",
        type=float,
        help=f"bounds the time for the links, about (default {SECONDS:g}, quick "
        f"{QUICK_SECONDS:g}); devices and a whole program take their time beside it",
    )
    command.add_argument("--nodes", type=int, help="number of nodes, if the devices do not show it")
    command.add_argument("--name", help="name of the cluster (default: from the file)")
    command.add_argument(
        "--platform", choices=("cpu", "gpu", "tpu"), help="default: the first that JAX finds"
    )
    command.add_argument("--simulated-devices", type=int, help="CPU devices, over all processes")
    command.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
    return command


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 0, or 2 for bad input."""
    args = parser().parse_args(argv)

    def run() -> None:
        out, name = _checked(args)
        with join() as processes:
            _run(args, out, name, processes)

    return exit_code(run, stopped="nothing was written", debug=args.debug, files=True)


def _checked(args: argparse.Namespace) -> tuple[Path, str]:
    """Checks the flags before a device is touched. Returns the file's path, the cluster's name."""
    out = Path(args.out)
    if not out.parent.is_dir():
        raise InputError(
            f"cannot write. --out is {out}. It must name a file in a folder that exists. Make the "
            f"folder, or correct the path."
        )
    check_output(out, "--out")
    name = args.name if args.name is not None else out.stem
    if not name or not name.isprintable():
        raise InputError(
            f"no name for the cluster. It is {short(name)}. It must be text on one line. Give "
            f"--name."
        )
    for flag in ("seconds", "nodes", "simulated_devices"):
        value = getattr(args, flag)
        if value is not None and not 0 < value < 1e6:
            raise InputError(
                f"--{flag.replace('_', '-')} is {value}. It must be above 0. Correct it."
            )
    return out, name


def _run(args: argparse.Namespace, out: Path, name: str, processes: Processes) -> None:
    mesh = MeshConfig(platform=args.platform, simulated_devices=args.simulated_devices)
    devices = processes.together(partial(start, mesh))
    effort = Effort(args.seconds or (QUICK_SECONDS if args.quick else SECONDS), args.quick)
    with progress_line(processes) as progress:
        progress(expected_text(effort.quick))
        topology, odd = probe(
            processes, devices, name=name, nodes=args.nodes, effort=effort, progress=progress
        )
    if processes.first:
        write_topology(topology, out)
        print_probe(topology, odd, screen())
        print(f"wrote {out}; now: moejax plan --topology {out} --config FILE")
    processes.gather("written")
