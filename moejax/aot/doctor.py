"""The command `moejax doctor`: installed versions, and the implementation of each operation.

With a config it answers for that run; without one, for a model of the default shape in the dtype
that such devices train in. `--target` answers for accelerators that are not here.
`--smoke` runs all of it in small on the devices that are (`train.smoke`).
"""

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from moejax.aot.target import TARGETS
from moejax.config.command_line import Parser
from moejax.config.fields import change
from moejax.config.load import load_config, split_overrides
from moejax.config.schema import Config
from moejax.errors import InputError, exit_code
from moejax.kernels.select import HOPPER, Choice, Hardware, select_kernels
from moejax.runtime.place_checks import check_coordinator, check_directory

EPILOG = """\
examples:
  moejax doctor                                # this machine
  moejax doctor --smoke                        # kernels, steps, a checkpoint
  moejax doctor --run_dir /shared/runs/a --coordinator node1:29400
  moejax doctor --config configs/olmoe_1b_7b.py --target h200
"""
PACKAGES = ("jax", "jaxlib", "flax", "optax", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    command = Parser(
        prog="moejax doctor",
        description="What is installed, which implementation each operation takes, and why.",
        epilog=EPILOG,
    )
    command.add_argument("--config", metavar="FILE", help="config file, as for moejax train")
    command.add_argument("--config.FIELD", metavar="VALUE", dest="_", help="override a setting")
    command.add_argument("--target", choices=sorted(TARGETS), help="accelerators that are not here")
    command.add_argument(
        "--smoke", action="store_true", help="run kernels, collectives, steps and a checkpoint here"
    )
    command.add_argument(
        "--run_dir", type=Path, metavar="DIR", help="try there what a run does with files"
    )
    command.add_argument(
        "--coordinator", metavar="ADDRESS:PORT", help="look whether process 0 can be reached"
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
    return command


def main(argv: list[str] | None = None, smoke: Callable[[Console], int] | None = None) -> int:
    """Runs the command. Returns the exit code.

    Args:
      smoke: what `--smoke` runs, which lies above this package; returns the exit code.
    """
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(rest)

    def run() -> int | None:
        if args.run_dir is not None or args.coordinator is not None:
            return check_places(args.run_dir, args.coordinator, Console())
        if args.smoke:
            assert smoke is not None
            if args.target is not None or args.config is not None or overrides:
                raise InputError(
                    "--smoke beside other options. It runs a tiny model of its own on the devices "
                    "that are here. Leave out the others."
                )
            return smoke(Console())
        if overrides and args.config is None:
            raise InputError("settings without a config. Add --config FILE.")
        hardware, console = _hardware(args.target), Console()
        if args.config is not None:
            show(load_config(args.config, overrides), hardware, console)
            return None
        dtype = "float32" if hardware.platform == "cpu" else "bfloat16"
        show(change(Config(), {"model.dtype": dtype}), hardware, console)
        console.print(f"no config: for the default model in {dtype}", highlight=False)
        return None

    return exit_code(run, stopped="nothing was changed", debug=args.debug)


def check_places(run_dir: Path | None, coordinator: str | None, console: Console) -> int:
    """Checks a run's directory and the address of process 0; prints a verdict.

    Returns the exit code: 1 if something does not hold.
    """
    findings = [] if run_dir is None else check_directory(run_dir)
    findings += [] if coordinator is None else check_coordinator(coordinator)
    table = Table("check", "holds", "")
    for one in findings:
        table.add_row(one.check, "yes" if one.holds else "NO", one.text)
    console.print(table)
    failed = [one.check for one in findings if not one.holds]
    verdict = f"not fit: {', '.join(failed)}" if failed else "fit"
    console.print(verdict, highlight=False, soft_wrap=True)
    return 1 if failed else 0


def _hardware(target: str | None) -> Hardware:
    if target is not None:
        return Hardware(TARGETS[target].platform, HOPPER if target == "h200" else None)
    device = jax.devices()[0]
    return Hardware(device.platform, getattr(device, "compute_capability", None))


def show(cfg: Config, hardware: Hardware, console: Console) -> None:
    """Prints versions, the hardware and the choices.

    Raises:
      InputError: from `select_kernels`, after everything is printed.
    """
    versions = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    console.print(", ".join(versions), highlight=False, soft_wrap=True)
    capability = f", compute capability {hardware.capability}" if hardware.capability else ""
    console.print(f"platform {hardware.platform}{capability}", highlight=False)
    try:
        console.print(_table(select_kernels(cfg, hardware)))
    except InputError:
        open_choice = replace(cfg, kernels="auto", moe=replace(cfg.moe, implementation="auto"))
        console.print(_table(select_kernels(open_choice, hardware)))
        raise


def _table(choices: dict[str, Choice]) -> Table:
    table = Table("operation", "takes", "because", "declined", title_justify="left")
    for operation, choice in choices.items():
        declined = "\n".join(f"{name}: {reason}" for name, reason in choice.declined)
        table.add_row(operation, choice.implementation, choice.reason, declined)
    return table


if __name__ == "__main__":
    sys.exit(main())
