"""The command `moejax doctor`: what is installed here, and checks of it.

Without flags: versions, and the implementation of each operation, for a config's run or for a model
of the default shape in the dtype that such devices train in (`machine`). `--target` answers for
accelerators that are not here. `--smoke` runs small versions of all parts on the devices here, and
`--mesh` checks all processes of a program together. `--run_dir` and `--coordinator` touch no
device (`place`).
"""

import argparse
import sys
from pathlib import Path

from moejax.aot.target import TARGETS
from moejax.config.command_line import Parser
from moejax.config.fields import change
from moejax.config.load import load_config, split_overrides
from moejax.config.schema import Config
from moejax.doctor.machine import hardware_of_target, show
from moejax.doctor.place import check_coordinator, check_directory, show_findings
from moejax.errors import InputError, exit_code
from moejax.screen import screen

EPILOG = """\
examples:
  moejax doctor                                # this machine
  moejax doctor --smoke                        # kernels, steps, a checkpoint
  moejax doctor --run_dir /shared/runs/a --coordinator node1:29400
  moejax doctor --config configs/olmoe_1b_7b.py --target h200
  launch/local --processes 2 --devices 4 -- moejax doctor --mesh
"""
DEADLINE_S = 60.0  # of one check of the mesh


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    command = Parser(
        prog="moejax doctor",
        description="Shows installed versions, each operation's implementation, and the reason.",
        epilog=EPILOG,
    )
    command.add_argument("--config", metavar="FILE", help="config file, as for moejax train")
    command.add_argument("--config.FIELD", metavar="VALUE", dest="_", help="override a setting")
    command.add_argument("--target", choices=sorted(TARGETS), help="accelerators that are not here")
    command.add_argument(
        "--smoke", action="store_true", help="run kernels, collectives, steps and a checkpoint here"
    )
    command.add_argument(
        "--mesh", action="store_true", help="check processes, devices and links of a program"
    )
    command.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help=f"with --mesh: seconds after which a check counts as hung (default {DEADLINE_S:g})",
    )
    command.add_argument(
        "--run_dir", type=Path, metavar="DIR", help="check a run's file operations there"
    )
    command.add_argument(
        "--coordinator", metavar="ADDRESS:PORT", help="check that process 0 can be reached"
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
    return command


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(rest)
    return exit_code(lambda: _run(args, overrides), stopped="nothing was changed", debug=args.debug)


def _run(args: argparse.Namespace, overrides: list[str]) -> int | None:
    """Returns the exit code; None for 0."""
    _check_flags(args, overrides)
    console = screen()
    # The trainer is imported where a check needs it.
    if args.mesh:
        from moejax.doctor.mesh import check_mesh

        cfg = None if args.config is None else load_config(args.config, overrides)
        return check_mesh(cfg, args.run_dir, args.deadline or DEADLINE_S, console)
    if args.run_dir is not None or args.coordinator is not None:
        findings = [] if args.run_dir is None else check_directory(args.run_dir)
        findings += [] if args.coordinator is None else check_coordinator(args.coordinator)
        return show_findings(findings, console)
    if args.smoke:
        from moejax.doctor.smoke import smoke

        return smoke(console)
    hardware = hardware_of_target(args.target)
    if args.config is not None:
        show(load_config(args.config, overrides), hardware, console)
        return None
    dtype = "float32" if hardware.platform == "cpu" else "bfloat16"
    show(change(Config(), {"model.dtype": dtype}), hardware, console)
    console.print(f"no config: for the default model in {dtype}", highlight=False)
    return None


def _check_flags(args: argparse.Namespace, overrides: list[str]) -> None:
    if args.mesh and (args.smoke or args.target is not None or args.coordinator is not None):
        raise InputError(
            "--mesh beside --smoke, --target or --coordinator. It checks the devices that are "
            "here, of processes that a launcher started. Leave out the others."
        )
    if args.deadline is not None and not (args.mesh and 1 <= args.deadline < 1e5):
        raise InputError(
            f"--deadline is {args.deadline:g}. It is for --mesh, in seconds from 1 on. Correct it, "
            "or leave it out."
        )
    if args.smoke and (args.target is not None or args.config is not None or overrides):
        raise InputError(
            "--smoke beside other options. It runs a tiny model of its own on the devices "
            "that are here. Leave out the others."
        )
    if overrides and args.config is None:
        raise InputError("settings without a config. Add --config FILE.")
