"""The command `python -m moejax.plan`: plans a model for a cluster, and says why."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path

from rich.console import Console

from moejax.config.checks import check
from moejax.config.checks.paths import check_output
from moejax.config.checks.planned import check_chosen, check_nodes, chosen_names, pinned
from moejax.config.command_line import Parser
from moejax.config.fields import change
from moejax.config.load import (
    keep_given,
    load_with_notes,
    parse_overrides,
    pin_notes,
    split_overrides,
)
from moejax.config.schema import Config
from moejax.errors import InputError, exit_code, located
from moejax.plan.cluster.file import known_clusters, load_topology, to_text
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.routing import ExpertLoad
from moejax.plan.published import Published, read_published
from moejax.plan.search.search import SearchResult
from moejax.screen import screen, waiting

ALIKE = 0.05  # relative difference below which two rates of a link are shown as one
EPILOG = """\
examples:
  moejax plan --config configs/mixtral_8x7b.py --topology h200:8
  moejax plan --config tiny --topology topology.json --out plan.json
  moejax plan --hf downloads/Qwen3-30B-A3B --topology h200:8 --as megatron
  moejax plan --topology h200:2 --print_topology > mine.json
  moejax plan probe --out topology.json     # measures the links here

Settings of mesh, route and memory in a file are for one cluster: the planner
chooses them anew. --config.mesh.expert=8 pins a setting, and
--config.plan.keep=NAMES keeps settings of the file. With --as the output ends
in settings for that trainer, and the parts of the plan that it lacks.
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command = Parser(
        prog="moejax plan",
        description="Chooses mesh, route, codecs and recomputation for a model on a cluster.",
        epilog=EPILOG,
    )
    command.add_argument("--config", metavar="FILE", help="config file, as for moejax train")
    command.add_argument(
        "--hf",
        metavar="FOLDER|FILE",
        type=Path,
        help="a published model, in place of --config",
    )
    command.add_argument("--config.FIELD", metavar="VALUE", dest="_", help="override a setting")
    command.add_argument("--topology", metavar="NAME|FILE", help="the cluster")
    command.add_argument(
        "--clusters",
        nargs="?",
        const="",
        metavar="NAME",
        help="list the known clusters, or show one with sources",
    )
    command.add_argument(
        "--print_topology",
        action="store_true",
        help="print the file of --topology, to change, and exit",
    )
    _add_search_flags(command)
    command.add_argument(
        "--as",
        dest="trainer",
        choices=("maxtext", "megatron", "torchtitan"),
        help="also show the best plan as settings of another trainer",
    )
    command.add_argument("--top", type=int, default=8, help="plans to show (default 8)")
    command.add_argument("--out", metavar="FILE.json", type=Path, help="write the best plan")
    command.add_argument("--report", metavar="FILE.html", type=Path, help="write a page about it")
    command.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
    return command


def _add_search_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--routing", help="balanced, zipf:POWER or routing.json")
    command.add_argument(
        "--codecs", choices=("none", "hybrid", "strong"), help="preset whose codecs may be chosen"
    )
    command.add_argument(
        "--sites",
        action="store_true",
        help="also plan sites, which changes what is trained",
    )
    command.add_argument(
        "--free",
        default="",
        metavar="NAMES",
        help="settings of the file to choose anew too: compression,...",
    )
    command.add_argument(
        "--fewer", action="store_true", help="also plan for half the nodes, a quarter, and so on"
    )
    command.add_argument("--traces", type=int, help="traces after which the search ends")
    command.add_argument(
        "--seconds",
        type=float,
        help="time cap of the whole search (default 120, or 600 for more than 64 devices)",
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(rest)
    return exit_code(lambda: run(args, overrides), stopped="nothing was written", debug=args.debug)


def run(args: argparse.Namespace, overrides: list[str]) -> None:
    """Checks the flags, then shows clusters or plans."""
    if args.clusters is not None or args.print_topology:
        return _show_clusters(args)
    _check_sources(args)
    if args.out is not None and args.out.suffix != ".json":
        raise InputError(f"--out is {args.out}. A plan file ends in .json. Rename it.")
    _check_flags(args)
    topology = load_topology(args.topology)
    published = None if args.hf is None else read_published(args.hf, topology.devices, overrides)
    cfg, notes = config_to_plan(args, overrides, topology, published)
    check(cfg)
    if args.trainer is not None:
        from moejax.plan.others.show import check_trainer

        check_trainer(args.trainer, cfg, topology)
    import jax

    from moejax.runtime.jax_settings import fix_settings

    jax.config.update("jax_platforms", "cpu")  # tracing needs no accelerator
    fix_settings()
    if published is not None:
        notes = [published.describe(), *notes]
    _plan(cfg, topology, args, notes)
    if published is not None:
        print(how_to_go_on(published, cfg, args))


def _show_clusters(args: argparse.Namespace) -> None:
    """Lists the known clusters, or shows one, or prints a topology file."""
    if args.print_topology:
        if args.topology is None:
            raise InputError(
                "no topology to print. Got none. --print_topology needs one. Add --topology h200:2."
            )
        print(to_text(load_topology(args.topology)), end="")
    elif args.clusters:
        print_cluster(args.clusters, screen())
    else:
        print_clusters(screen())


def print_clusters(console: Console) -> None:
    """Shows each known cluster in one line."""
    rows = [("name", "size", "device", "links")]
    for name in known_clusters():
        known = load_topology(name)
        size = f"{known.nodes} x {known.tiers[0].size}"
        rows.append((name, size, known.device.name, links_text(known)))
    lines = [f"{name:13} {size:8} {device:27} {links}" for name, size, device, links in rows]
    lines += [
        "size: nodes x devices of a node; --topology NAME:4 is the same with 4 nodes.",
        "links: GB/s of a device one way; of two, the first is that of an all-to-all.",
        "Where the rates come from: --clusters NAME, and docs/rates.md.",
    ]
    for line in lines:
        console.print(located(line), highlight=False, soft_wrap=True)


def print_cluster(name: str, console: Console) -> None:
    """Shows one cluster, and the sources of its rates.

    Raises:
      InputError: if there is no such cluster.
    """
    known = load_topology(name)
    lines = [
        f"{name}: {known.nodes} x {known.tiers[0].size} {known.device.name}",
        f"links, GB/s of a device one way: {links_text(known)}",
        f"memory that a program may use: {known.device.memory_bytes / 2**30:.1f} GiB",
    ]
    if (host := known.host) is not None:
        rates = f"{host.to_device / 1e9:.3g} GB/s to a device, {host.from_device / 1e9:.3g} back"
        lines.append(f"memory of a node's host: {host.memory_bytes / 2**30:,.1f} GiB; {rates}")
    for line in (*lines, f"source: {known.source}"):
        console.print(line, highlight=False, soft_wrap=True)


def links_text(topology: Topology) -> str:
    """Returns the links in a few words: rates of an all-to-all, and of gathers if others."""
    parts = []
    for tier in topology.tiers:
        first, other = (tier.links[k].bytes_per_s / 1e9 for k in ("all_to_all", "all_gather"))
        alike = abs(other / first - 1) < ALIKE
        parts.append(f"{tier.name} {first:.3g}" + ("" if alike else f" / {other:.3g}"))
    return ", ".join(parts)


def how_to_go_on(published: Published, cfg: Config, args: argparse.Namespace) -> str:
    """Returns the ways to use the plan of a published model, a line for each."""
    folder = published.path.parent
    name = folder.absolute().name
    lines = [
        "how to go on:",
        f"  train it here:  moejax hf import {folder} --out imported/{name}   (needs the weights)",
        f"                  moejax train --config imported/{name}/config.json "
        f"--config.plan={args.out or 'plan.json'} "
        f"--config.data.sequence_length={cfg.data.sequence_length} "
        f"--config.train.batch_sequences={cfg.train.batch_sequences}",
    ]
    if args.out is None:
        lines.append(
            "                  (the plan as a file: this command again with --out plan.json)"
        )
    if args.trainer is None:
        lines.append("  train it with another trainer:  --as maxtext, megatron or torchtitan")
    return "\n".join(lines)


def _check_sources(args: argparse.Namespace) -> None:
    """Refuses a command without a model or a cluster, or with two models."""
    if args.config is not None and args.hf is not None:
        raise InputError(
            f"two models. --config is {args.config}, --hf is {args.hf}. A plan is of one. Leave "
            "one of them out."
        )
    if args.config is None and args.hf is None:
        raise InputError("moejax plan needs --config FILE, or --hf FILE for a published model.")
    if args.topology is None:
        raise InputError(
            "no topology. Got none. A plan needs one. Add --topology: a file that moejax plan "
            "probe wrote, or a known cluster as h200:2, which has 2 nodes; moejax plan --clusters "
            "lists them."
        )


def _check_flags(args: argparse.Namespace) -> None:
    """Refuses numbers out of range and outputs that cannot be written."""
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        raise InputError(
            f"--seconds is {args.seconds:g}. It must be a time above 0. Correct it, or leave it "
            "out."
        )
    if args.traces is not None and args.traces < 2:
        raise InputError(
            f"--traces is {args.traces}. It must be at least 2, because the default is traced too. "
            "Correct it, or leave it out."
        )
    if args.top < 1:
        raise InputError(f"--top is {args.top}. It must be at least 1. Correct it.")
    for flag in ("out", "report"):
        if (path := getattr(args, flag)) is not None:
            check_output(path, f"--{flag}")


def config_to_plan(
    args: argparse.Namespace,
    overrides: list[str],
    topology: Topology,
    published: Published | None = None,
) -> tuple[Config, list[str]]:
    """Returns the config of a search, and lines about free and pinned settings.

    Args:
      published: the model of --hf; None: the config file of --config.
    Raises:
      InputError: for a file, setting or name that is wrong, and other nodes than the topology's.
    """
    freed = [name for name in args.free.split(",") if name]
    for name in freed:
        check_chosen(name, "--free")
    free = [setting for name in freed for setting in chosen_names(name)]
    overrides = [*overrides, "plan.mode=auto"]
    given = parse_overrides(overrides)
    if published is None:
        cfg, notes = load_with_notes(args.config, overrides, free)
    else:
        cfg = keep_given(change(published.cfg, {"plan.mode": "auto"}), given)
        notes = pin_notes(cfg, given)
    if "mesh.nodes" in given:  # nodes of a file are those of its own cluster
        check_nodes(cfg, topology.nodes, f"--topology {args.topology}")
    simulated = cfg.mesh.simulated_devices
    ours = topology.devices if topology.device.platform == "cpu" else None
    if simulated not in (None, ours):
        notes.append(
            f"note: the config simulates {simulated} devices, this plan is for {topology.devices}: "
            f"train with --config.mesh.simulated_devices={'none' if ours is None else ours}."
        )
    flags = {name: getattr(args, name) for name in ("routing", "codecs", "traces", "seconds")}
    wishes = {f"plan.{name}": value for name, value in flags.items() if value is not None}
    wishes |= {"plan.sites": True} if args.sites else {}
    mesh = replace(cfg.mesh, simulated_devices=None, nodes=None, platform=None)
    return change(replace(cfg, mesh=mesh), wishes | {"plan.topology": None}), notes


def _plan(cfg: Config, topology: Topology, args: argparse.Namespace, notes: Sequence[str]) -> None:
    """Searches, shows the result and writes the files; `notes` come before it."""
    from moejax.plan.price.routing import read_expert_load
    from moejax.plan.report.tables import print_ranked, print_why, remarks, speed_text
    from moejax.plan.search.file import plan_from, save_plan
    from moejax.plan.search.search import nodes_text

    load = read_expert_load(cfg.plan.routing, cfg.moe.num_experts)
    console = screen()
    say = partial(console.print, highlight=False, soft_wrap=True)
    for note in notes:
        say(note)
    documents = _share_inside(cfg, say)
    find = partial(_find, cfg, load, documents)
    result = find(topology)
    console.print(
        f"{args.config or args.hf} on {topology.name}: {topology.devices} devices on "
        f"{nodes_text(topology.nodes)}; routing {load.name} (busiest expert {load.skew:.2f} x the "
        "mean)",
        highlight=False,
    )
    print_ranked(result, topology, console, args.top)
    say(f"the chosen plan: {speed_text(result.ranked[0], topology)}")
    print_why(result, console)
    for remark in remarks(result, topology, load):
        say(remark)
    if args.trainer is not None:
        from moejax.plan.others.show import TRAINERS, print_translation

        translation = TRAINERS[args.trainer](result.ranked[0].cfg, topology)
        print_translation(translation, result, topology, load, console)
    if args.fewer:
        _print_fewer(result, topology, find, console)
    if args.out is not None:
        save_plan(plan_from(result, topology, cfg.plan.routing), args.out)
        say(f"wrote {args.out}; train with --config.plan={args.out}")
    if args.report is not None:
        from moejax.plan.report.page import write_report

        write_report(result, topology, load, args.report)
        console.print(f"wrote {args.report}", highlight=False)


def _share_inside(cfg: Config, say: Callable[[str], None]) -> float:
    """Returns `share_inside`, or 1 where the data is elsewhere, and says so."""
    from moejax.data.sources import share_inside

    try:
        share = share_inside(cfg)
    except InputError as error:
        say(f"note: priced as if each sequence were one document, as the data is not here. {error}")
        return 1.0
    if share < 1:
        say(f"{share:.1%} of the pairs of positions lie inside a document (`plan.documents`)")
    return share


def _find(cfg: Config, load: ExpertLoad, documents: float, cluster: Topology) -> SearchResult:
    """Searches for the plan of a cluster, and shows on a terminal how far the search is."""
    from moejax.plan.search.sites import search_all
    from moejax.plan.search.space import Limits

    platform = cluster.device.platform
    limits = Limits(
        cluster.devices, cluster.nodes, platform, cfg.plan.codecs, pinned(cfg), documents
    )
    with waiting(screen(stderr=True), "planning") as say:

        def progress(text: str) -> None:
            say(f"planning for {cluster.devices} devices: {text}")

        plan = cfg.plan
        limit = {"traces": plan.traces, "seconds": plan.seconds}
        return search_all(cfg, cluster, limits, load, **limit, reorder=True, progress=progress)


def _print_fewer(result, topology, find, console: Console) -> None:
    from moejax.plan.price.terms import tokens_per_second
    from moejax.plan.report.tables import mesh_text
    from moejax.plan.search.search import nodes_text

    say = partial(console.print, highlight=False, soft_wrap=True)
    best = result.ranked[0]
    nodes = topology.nodes
    rows = [(nodes, best)]
    while nodes % 2 == 0:
        nodes //= 2
        try:
            rows.append((nodes, find(topology.of_nodes(nodes)).ranked[0]))
        except (InputError, ValueError) as error:
            say(f"{nodes_text(nodes)}: {error}")
            break
    for nodes, plan in sorted(rows, key=itemgetter(0)):
        rate = tokens_per_second(plan)
        say(
            f"{nodes_text(nodes)}: {rate:,.0f} tokens/s ({rate / tokens_per_second(best):.2f} of "
            f"what {nodes_text(topology.nodes)} do), {mesh_text(plan.cfg)}"
        )
