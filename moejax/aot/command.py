"""The command `python -m moejax.aot`: compiles the train step for a described cluster.

It compiles the trainer's own step with the trainer's own options. Nothing runs, so nothing is
timed; memory, collectives and their order are the same as in a real run.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from moejax.aot.compiled import CompiledCollective
from moejax.aot.step import (
    CONTROLS,
    CompiledStep,
    build_described,
    census,
    compile_step,
    described_config,
    other_peaks,
    overlapped_share,
    update_bytes,
)
from moejax.aot.target import NODE, TARGETS, Target
from moejax.config.command_line import Parser
from moejax.config.compression import PRESETS
from moejax.config.load import load_config, split_overrides
from moejax.errors import InputError, exit_code
from moejax.layout.layout import Layout
from moejax.runtime.compiler import Options
from moejax.screen import screen
from moejax.step.train_step import TrainStep

EPILOG = """\
examples:
  moejax aot --config configs/mixtral_8x7b.py --nodes 8
  moejax aot --config configs/olmoe_1b_7b.py --target v6e
  moejax aot --config tiny --config.route_chunks=4 --compare

A node has eight devices; the axes of the mesh must multiply to all of them.
Schedules show what a device starts, in order: S D an all-to-all from start to
done, A one that is waited for; s d a any other collective; G a matrix product;
W a loop, C a conditional with products. What is between S and D hides it.
"""

# Only traffic that no computation hides is compressed (Optimus-CC): elsewhere a codec adds error
# and work without a gain. Traffic of the compiled program -> classes of traffic with codecs.
TRAFFIC = {
    "tokens": ("dispatch", "combine"),
    "tokens_backward": ("dispatch_backward", "combine_backward"),
    "gradients": ("dense_gradient", "expert_gradient"),
}
HIDDEN = 0.5  # share of bytes above which traffic counts as hidden


def to_json(step: CompiledStep) -> dict[str, Any]:
    """Returns a compiled step as JSON values."""
    names = ("kind", "axes", "dtype", "how", "arrays", "bytes", "enclose_a_product")
    rows = [(*key, *numbers) for key, numbers in census(step.exchanges).items()]
    facts = {name: value for name, value in asdict(step).items() if name != "exchanges"}
    return facts | {
        "hidden_forward": step.hidden_share(backward=False),
        "hidden_backward": step.hidden_share(backward=True),
        "hidden_reductions": step.hidden_reductions(),
        "hidden_gathers": step.hidden_gathers(),
        "hidden_wire": step.hidden_wire(),
        "executed": step.executed(),
        "executed_most": step.executed(most=True),
        "wire": [
            {"kind": kind, "axes": axes, "bytes": size, "hidden": share}
            for (kind, axes), (size, share) in step.wire().items()
        ],
        "reductions_beside_exchanges": len(step.reductions_beside_exchanges()),
        "collectives": [dict(zip(names, row, strict=True)) for row in rows],
    }


def print_compiled(step: CompiledStep, title: str, target: Target, console: Console) -> None:
    """Shows memory, collectives and schedules."""
    table = Table("", "", title=title, show_header=False, title_justify="left")
    table.columns[1].overflow = "fold"
    table.add_row("mesh", " x ".join(f"{axis}={size}" for axis, size in step.mesh.items()))
    table.add_row("compiler options", "\n".join(f"{k}={v}" for k, v in step.options.items()))
    table.add_row("compiled in", f"{step.seconds:.0f} s")
    memory = f"of {target.memory_bytes / 2**30:.0f} GiB"
    fits = "" if step.max_bytes <= target.memory_bytes else ": does not fit"
    table.add_row("peak, a device", f"{_gib(step.max_bytes)} {memory}{fits}")
    for name, size in {"step": step.peak_bytes, **step.other_peaks}.items():
        table.add_row(f"  of {name}", _gib(size))
    table.add_row("arguments (state, batch)", _gib(step.argument_bytes))
    table.add_row("temporaries", _gib(step.temporary_bytes))
    _add_host(table, step)
    for name, backward in (("forward", False), ("backward", True)):
        table.add_row(f"all-to-alls of tokens, {name}", _hidden(step, backward))
    beside = len(step.reductions_beside_exchanges())
    table.add_row(
        "reductions",
        f"{step.hidden_reductions():.0%} of bytes enclose a product; {beside} in flight with an "
        "all-to-all on the same link",
    )
    table.add_row("gathers", f"{step.hidden_gathers():.0%} of bytes enclose a product")
    _add_work(table, step)
    console.print(table)
    table = Table("collective", "axes", "dtype", "", title="arrays a step", title_justify="left")
    for name in ("count", "MiB", "enclose a product"):
        table.add_column(name, justify="right")
    for key, (count, size, hidden) in census(step.exchanges).items():
        table.add_row(*key, f"{count:,}", f"{size / 2**20:,.2f}", f"{hidden:,}")
    console.print(table)
    for schedule in step.schedules:
        line = f"{schedule.calls} x {schedule.letters}"
        console.print(line, highlight=False, soft_wrap=True)


def _add_host(table: Table, step: CompiledStep) -> None:
    """Adds rows about the host's memory, if the step has arrays there."""
    if not step.host_argument_bytes + step.host_temporary_bytes:
        return
    table.add_row("host: arguments", _gib(step.host_argument_bytes))
    table.add_row("host: temporaries", _gib(step.host_temporary_bytes))
    for name, to_device in (("to the device", True), ("to the host", False)):
        size = sum(one.calls * one.bytes for one in step.copies if one.to_device == to_device)
        share = step.hidden_copies(to_device=to_device)
        table.add_row(f"copies {name}", f"{_gib(size)}; {share:.0%} of bytes enclose a product")


def print_comparison(steps: dict[str, CompiledStep], console: Console) -> None:
    """Shows the step compiled with the trainer's options beside the controls."""
    table = Table("options", "peak", "forward", "backward", title_justify="left")
    table.title = "all-to-alls of tokens"
    for name, step in steps.items():
        hidden = [_hidden(step, backward) for backward in (False, True)]
        table.add_row(name, _gib(step.peak_bytes), *hidden)
    console.print(table)


def traffic_of(exchange: CompiledCollective, layout: Layout) -> str | None:
    """Returns a collective's traffic class, or None if no codec applies.

    The compiled program does not name what it sends: both directions of tokens count as one class
    here, and so do gradients of dense weights and of experts, which cross nodes on the same axes.
    """
    if "float" not in exchange.dtype or not set(exchange.axes) & set(layout.slow):
        return None
    if exchange.kind == "all_to_all":
        return "tokens_backward" if exchange.backward else "tokens"
    if exchange.kind == "all_gather" and set(exchange.axes) & set(layout.fsdp + layout.expert):
        return "weights"
    if exchange.kind in ("all_reduce", "reduce_scatter") and exchange.backward:
        return "gradients"
    return None


def hidden_shares(exchanges: Iterable[CompiledCollective], layout: Layout) -> dict[str, float]:
    """Returns the share of each class's bytes across nodes that overlap a matrix product."""
    by_class: dict[str, list[CompiledCollective]] = {}
    for exchange in exchanges:
        if (kind := traffic_of(exchange, layout)) is not None:
            by_class.setdefault(kind, []).append(exchange)
    return {kind: overlapped_share(found) for kind, found in by_class.items()}


def compress_exposed(
    exchanges: Iterable[CompiledCollective], layout: Layout, preset: str
) -> dict[str, str]:
    """Returns the settings of `compression` that leave hidden classes as they are.

    Args:
      exchanges: exchanges of the step compiled without codecs.
      preset: preset with the codecs of the exposed classes.
    """
    chosen = {"preset": "none"}
    for kind, share in hidden_shares(exchanges, layout).items():
        if share <= HIDDEN:
            for name in TRAFFIC.get(kind, (kind,)):
                if name in PRESETS[preset]:
                    chosen[name] = PRESETS[preset][name]
    return chosen


def print_exposed(step: CompiledStep, train_step: TrainStep, preset: str, console: Console) -> None:
    """Shows the hidden share of each class of traffic across nodes, and codecs for the rest."""
    for kind, share in hidden_shares(step.exchanges, train_step.layout).items():
        console.print(f"{kind} across nodes: {share:.0%} of bytes enclose a product")
    chosen = compress_exposed(step.exchanges, train_step.layout, preset)
    text = [f"--config.compression.{name}={codec}" for name, codec in chosen.items()]
    console.print(" ".join(text), highlight=False, soft_wrap=True)


def _add_work(table: Table, step: CompiledStep) -> None:
    work, executed = step.work, step.executed()
    classes = ", ".join(f"{name} {share:.2f}" for name, share in executed.items() if name != "all")
    most = f"at whole buffers {step.executed(most=True)['all']:.2f}"
    table.add_row("FLOPs over the model's", f"{executed['all']:.2f} ({classes}); {most}")
    control = f"{work.loops:,} loops of {work.iterations:,} iterations, {work.conditionals:,} "
    uncounted = f"; {work.uncounted:,} loops of unknown length" if work.uncounted else ""
    table.add_row("kernels launched", f"{work.launches:,}; {control}conditionals{uncounted}")
    table.add_row("memory traffic beside products", f"{work.other_bytes / 1e12:.2f} TB")
    sent = sum(size for size, _ in step.wire().values())
    hidden = f"{step.hidden_wire():.0%} of bytes enclose a product"
    table.add_row("sent by a device", f"{sent / 1e9:.1f} GB; {hidden}")


def _hidden(step: CompiledStep, backward: bool) -> str:
    count = sum(exchange.calls for exchange in step.token_exchanges(backward=backward))
    return f"{step.hidden_share(backward=backward):.0%} of {count:,} enclose a product"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    command = Parser(
        prog="moejax aot",
        description="Compiles the train step for a cluster that is not here.",
        epilog=EPILOG,
    )
    command.add_argument(
        "--config", metavar="FILE", required=True, help="config file, as for moejax train"
    )
    command.add_argument("--config.FIELD", metavar="VALUE", dest="_", help="override a setting")
    command.add_argument(
        "--nodes", type=int, default=1, help="number of nodes, eight devices each (default 1)"
    )
    command.add_argument("--target", choices=sorted(TARGETS), default="h200", help="default h200")
    command.add_argument(
        "--compare", action="store_true", help="also compile without the trainer's options"
    )
    command.add_argument(
        "--compress-exposed",
        choices=("hybrid", "strong"),
        help="name a preset's codecs for the traffic that no computation hides",
    )
    command.add_argument(
        "--update",
        action="store_true",
        help="also compile the gradients alone, to measure the memory of the optimizer's update",
    )
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")
    command.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
    return command


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(rest)
    stopped = "nothing was compiled to the end"
    return exit_code(lambda: run(args, overrides), stopped=stopped, debug=args.debug)


def run(args: argparse.Namespace, overrides: list[str]) -> None:
    """Compiles and prints."""
    if args.nodes < 1:
        raise InputError(f"--nodes is {args.nodes}. It must be at least 1.")
    target, cluster = TARGETS[args.target], f"{args.nodes} x {NODE} {args.target}"
    cfg = described_config(load_config(args.config, overrides), target, args.nodes)
    train_step = build_described(cfg, target)
    wanted: dict[str, Options] = {"the trainer's": {}}
    if args.compare:
        wanted |= CONTROLS[target.platform]
    steps = {}
    for name, options in wanted.items():
        _progress(f"tracing and compiling for {cluster}, options {name}: a minute, or several")
        steps[name] = compile_step(train_step, options)
        _progress(f"compiled in {steps[name].seconds:.0f} s")
    own = steps["the trainer's"]
    _progress("compiling evaluation and sampling")
    steps["the trainer's"] = replace(own, other_peaks=other_peaks(train_step, own))
    console = screen()
    if args.json:
        console.print_json(
            data={name: to_json(step) for name, step in steps.items()}, ensure_ascii=True
        )
        return
    print_compiled(steps["the trainer's"], f"{args.config} on {cluster}", target, console)
    if args.compare:
        print_comparison(steps, console)
    if args.update:
        needed = update_bytes(train_step, steps["the trainer's"])
        console.print(f"update: {_gib(needed)} in addition to state and gradients")
    if args.compress_exposed:
        print_exposed(steps["the trainer's"], train_step, args.compress_exposed, console)


def _progress(text: str) -> None:
    print(f"moejax: {text}", file=sys.stderr, flush=True)
