"""The command `moejax doctor`: installed versions, and the implementation of each operation.

With a config it answers for that run; without one, for a model of the default shape in the dtype
that such devices train in. `--target` answers for accelerators that are not here.
`--smoke` runs small versions of all parts on the devices here (`doctor.smoke`), and `--mesh` checks
all processes of a program together (`doctor.mesh`).
"""

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from moejax.aot.target import TARGETS
from moejax.config.command_line import Parser
from moejax.config.fields import change
from moejax.config.load import load_config, split_overrides
from moejax.config.schema import Config
from moejax.doctor.place import Finding, check_coordinator, check_directory
from moejax.errors import InputError, exit_code
from moejax.kernels.select import HOPPER, Choice, Hardware, select_kernels
from moejax.screen import screen
from moejax.version import __version__

EPILOG = """\
examples:
  moejax doctor                                # this machine
  moejax doctor --smoke                        # kernels, steps, a checkpoint
  moejax doctor --run_dir /shared/runs/a --coordinator node1:29400
  moejax doctor --config configs/olmoe_1b_7b.py --target h200
  launch/local --processes 2 --devices 4 -- moejax doctor --mesh
"""
PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jax-cuda13-plugin",
    "jax-cuda12-plugin", "libtpu",
)  # fmt: skip
DEADLINE_S = 60.0  # of one check of the mesh


class Above(NamedTuple):
    """The checks that import the trainer; each returns the exit code."""

    smoke: Callable[[Console], int]
    mesh: Callable[[Config | None, Path | None, float, Console], int]


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


def main(argv: list[str] | None = None, above: Above | None = None) -> int:
    """Runs the command. Returns the exit code.

    Args:
      above: the checks of `--smoke` and `--mesh`; None for a command without them.
    """
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(rest)
    return exit_code(
        lambda: _run(args, overrides, above), stopped="nothing was changed", debug=args.debug
    )


def _run(args: argparse.Namespace, overrides: list[str], above: Above | None) -> int | None:
    """Runs what the flags ask for. Returns the exit code; None for 0."""
    _check_flags(args, overrides)
    console = screen()
    if args.mesh:
        assert above is not None
        cfg = None if args.config is None else load_config(args.config, overrides)
        return above.mesh(cfg, args.run_dir, args.deadline or DEADLINE_S, console)
    if args.run_dir is not None or args.coordinator is not None:
        return check_places(args.run_dir, args.coordinator, console)
    if args.smoke:
        assert above is not None
        return above.smoke(console)
    hardware = _hardware(args.target)
    if args.config is not None:
        show(load_config(args.config, overrides), hardware, console)
        return None
    dtype = "float32" if hardware.platform == "cpu" else "bfloat16"
    show(change(Config(), {"model.dtype": dtype}), hardware, console)
    console.print(f"no config: for the default model in {dtype}", highlight=False)
    return None


def _check_flags(args: argparse.Namespace, overrides: list[str]) -> None:
    """Checks that the flags go together.

    Raises:
      InputError: if not.
    """
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


def check_places(run_dir: Path | None, coordinator: str | None, console: Console) -> int:
    """Checks a run's directory and the address of process 0; prints a verdict.

    Returns the exit code: 1 if something does not hold.
    """
    findings = [] if run_dir is None else check_directory(run_dir)
    findings += [] if coordinator is None else check_coordinator(coordinator)
    return show_findings(findings, console)


def show_findings(findings: Sequence[Finding], console: Console) -> int:
    """Prints a table of findings, and a verdict. Returns the exit code: 1 if one does not hold."""
    table = Table("check", "holds", "")
    for one in findings:
        table.add_row(one.check, "yes" if one.holds else "NO", one.text)
    console.print(table)
    failed = [one.check for one in findings if not one.holds]
    verdict = f"not ready: {', '.join(failed)}" if failed else "ready"
    console.print(verdict, highlight=False, soft_wrap=True)
    return 1 if failed else 0


def versions() -> dict[str, str]:
    """Returns the versions of Python, moejax and its installed dependencies."""
    found = {"Python": platform.python_version(), "moejax": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _hardware(target: str | None) -> Hardware:
    if target is not None:
        return Hardware(TARGETS[target].platform, HOPPER if target == "h200" else None)
    device = devices_here()[0]
    return Hardware(device.platform, getattr(device, "compute_capability", None))


def devices_here() -> list[Any]:
    """The devices of this process.

    Raises:
      InputError: in place of JAX's error, which names no setting of ours.
    """
    try:
        return jax.local_devices()
    # JAX asserts that a platform it knows nothing of has devices.
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or ["it knows no such platform here"])[0]
        raise InputError(
            f"no devices. JAX says: {reason}. Set JAX_PLATFORMS to what this host has (cpu, cuda "
            f"or tpu), and install the extra for it: docs/guide/cluster.md."
        ) from error


def show(cfg: Config, hardware: Hardware, console: Console) -> None:
    """Prints versions, the hardware and the choices.

    Raises:
      InputError: from `select_kernels`, after everything is printed.
    """
    text = ", ".join(f"{name} {version}" for name, version in versions().items())
    console.print(text, highlight=False, soft_wrap=True)
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
