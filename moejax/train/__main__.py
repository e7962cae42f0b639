"""The command `python -m moejax.train`."""

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from moejax.config.checks import check, resolve_mesh
from moejax.config.checks.planned import is_planned
from moejax.config.command_line import Parser
from moejax.config.load import describe_fields, load_with_notes, split_overrides, to_dict
from moejax.config.schema import Config
from moejax.errors import STOPPED, InputError, exit_code, located
from moejax.screen import screen

if TYPE_CHECKING:
    from moejax.step.train_step import TrainStep
    from moejax.train.planning import RunPlan
    from moejax.train.records.summary import Summary

EPILOG = """\
examples:
  moejax train --config tiny                # a config that comes with moejax
  moejax train --config configs/tiny.py --config.run_dir=runs/b
  moejax train --config tiny --config.mesh.simulated_devices=4 --dry_run

The same command again resumes from the newest checkpoint in run_dir. Ctrl-C
once saves and stops, twice stops at once. Exit codes: 0 done, 2 bad input,
3 stopped before the last step, 4 diverged, 5 disk full, 130 stopped at once
(docs/formats/exit.md).
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    command = Parser(
        prog="moejax train",
        description="Trains a Mixture-of-Experts language model.",
        epilog=EPILOG,
    )
    command.add_argument(
        "--config",
        metavar="FILE",
        help="Python (get_config), YAML or JSON file; or a name, as tiny",
    )
    command.add_argument(
        "--config.FIELD", metavar="VALUE", dest="_", help="override a setting; see --settings"
    )
    command.add_argument("--settings", action="store_true", help="list every setting and exit")
    command.add_argument("--print_config", action="store_true", help="print the config and exit")
    instead = command.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry_run",
        action="store_true",
        help="check everything, trace the step, print sizes and collectives, and exit",
    )
    instead.add_argument(
        "--replay_step",
        metavar="STEP",
        type=int,
        help="run a step of the run in run_dir again, compare to the bit, and exit",
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
    return command


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(rest)
    stopped = "the last finished checkpoint is intact"
    return exit_code(lambda: run(args, overrides), stopped=stopped, debug=args.debug)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """Trains, or obeys a flag that asks for something else."""
    console = screen()
    if args.settings:
        print_settings(console)
        return 0
    if args.config is None:
        raise InputError("moejax train needs --config FILE, for example --config tiny.")
    cfg, notes = load_with_notes(args.config, overrides)
    check(cfg)
    if args.print_config:
        console.print_json(data=to_dict(cfg), ensure_ascii=True)
        return 0
    if notes:
        from moejax.runtime.processes import find_rank

        for note in notes if find_rank().index == 0 else ():
            console.print(note, highlight=False, soft_wrap=True)
    if args.dry_run:
        return dry_run(cfg, console)
    # Imported late, so that everything above works without JAX.
    if args.replay_step is not None:
        from moejax.train.replay import replay

        return 0 if replay(cfg, args.replay_step, console) else 1
    from moejax.train.loop import train

    return STOPPED if train(cfg, console).stopped else 0


def dry_run(cfg: Config, console: Console) -> int:
    """Checks data and config, traces the step under an abstract mesh, prints the summary."""
    import jax

    from moejax.layout.layout import build_layout
    from moejax.layout.mesh import build_abstract_mesh
    from moejax.runtime.jax_settings import fix_settings
    from moejax.runtime.patches import described_gpu
    from moejax.runtime.processes import find_rank
    from moejax.step.model import check_adapters
    from moejax.step.train_step import build_step
    from moejax.train.inputs import open_inputs
    from moejax.train.planning import plan_dry, planned_devices
    from moejax.train.records.summary import print_summary, summarize
    from moejax.train.start import check_paths

    # Describing the optimizer makes a few scalars: on the CPU, to start no accelerator.
    jax.config.update("jax_platforms", "cpu")
    fix_settings()
    check_adapters(cfg)
    mesh, replica = cfg.mesh, cfg.mesh.replica
    others = mesh.stage * mesh.fsdp * mesh.expert * mesh.tensor
    if replica is None:
        replica = max((mesh.simulated_devices or others) // others, 1)
    devices = replica * others
    if is_planned(cfg):
        devices = mesh.simulated_devices or planned_devices(cfg) or devices
    planned = plan_dry(replace(cfg, mesh=replace(mesh, replica=replica)), devices)
    # Only simulated devices must be shared by this program's processes; others need not be here.
    processes = None if mesh.simulated_devices is None else find_rank().count
    platform = mesh.platform or (planned.plan and planned.plan.platform) or "cpu"
    cfg = resolve_mesh(planned.cfg, devices, platform, processes=processes)
    open_inputs(cfg)
    check_paths(cfg)
    layout = build_layout(cfg.mesh)
    with described_gpu():
        train_step = build_step(cfg, build_abstract_mesh(layout), platform)
        summary = summarize(train_step)
    for note in (*planned.notes, *_dry_notes(train_step, summary, planned)):
        console.print(note, highlight=False, soft_wrap=True)
    print_summary(summary, train_step, console, planned.rows())
    return 0


def _dry_notes(train_step: "TrainStep", summary: "Summary", planned: "RunPlan") -> list[str]:
    """Returns notes beside the table of a dry run: omissions, assumptions and warnings."""
    from moejax.config.compression import NO_COMPRESSION
    from moejax.train.records.summary import gather_note, host_warnings, memory_warnings

    notes, mesh, plan = [], train_step.cfg.mesh, planned.plan
    platform, memory = (plan.platform, plan.device_memory_bytes) if plan else (None, None)
    if mesh.nodes is None and train_step.spec.compression != NO_COMPRESSION:
        notes.append(
            "codecs are not counted below: they work across nodes, and how many there are is not "
            "known. Set mesh.nodes to see them."
        )
    named = mesh.platform or mesh.simulated_devices or platform
    if not named and train_step.layout.size(train_step.layout.mesh_axes) > 1:
        notes.append(
            "peak memory below is that of CPUs, whose kernels differ. If the devices are others, "
            "add --config.mesh.platform=gpu (or tpu)."
        )
    if memory is not None and train_step.platform == platform:
        notes += memory_warnings(summary, memory)
    notes += host_warnings(train_step, summary, planned.topology)
    note = gather_note(train_step, summary, planned.topology)
    return notes if note is None else [*notes, note]


def print_settings(console: Console) -> None:
    """Lists every setting with its type, default, range and meaning."""
    for name, kind, default, help_text, allowed in describe_fields():
        shown = f"{name}  ({kind}, default {default}{', ' + allowed if allowed else ''})"
        console.print(shown, highlight=False, style="bold", soft_wrap=True)
        console.print(f"    {located(help_text)}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
