"""Tables and sentences about plans: settings, terms of the step, reasons."""

from rich.console import Console
from rich.table import Table

from moejax.config.compression import PRESETS, build_compression, describe_codecs
from moejax.config.schema import CompressionConfig, Config
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import PricedPlan
from moejax.plan.price.terms import terms, why
from moejax.plan.search.search import SearchResult


def mesh_text(cfg: Config) -> str:
    """Returns the mesh as text: axes above one."""
    sizes = {axis: getattr(cfg.mesh, axis) for axis in ("replica", "fsdp", "expert", "tensor")}
    parts = [f"{axis} {size}" for axis, size in sizes.items() if size and size > 1]
    if cfg.mesh.tensor > 1:
        parts += [cfg.mesh.activations, f"experts {cfg.mesh.expert_weights}"]
    return ", ".join(parts) or "one device"


def exchange_text(cfg: Config) -> str:
    """Returns the route and its chunks as text; empty without an exchange."""
    owners = cfg.mesh.expert * (cfg.mesh.tensor if cfg.mesh.expert_weights != "whole" else 1)
    if not cfg.model.has_experts or owners == 1:
        return "-"
    back = cfg.route_chunks_backward or cfg.route_chunks
    chunks = "" if cfg.route_chunks == back == 1 else f", chunks {cfg.route_chunks}/{back}"
    return cfg.route + chunks


def _codec_text(cfg: Config) -> str:
    """Returns the codecs of the first step as text, or the name of their preset."""
    chosen = build_compression(cfg.compression).at(0)
    for name, codecs in PRESETS.items():
        if codecs and chosen == build_compression(CompressionConfig(preset=name)).at(0):
            return f"codecs {name}"
    return describe_codecs(chosen)


def rest_text(cfg: Config) -> str:
    """Returns codecs, reductions, recomputation and micro-batches that are not the default."""
    parts = []
    if (codecs := _codec_text(cfg)) != "none":
        parts.append(codecs)
    if cfg.train.reduction_bytes is not None:
        parts.append(f"pieces of {cfg.train.reduction_bytes / 2**20:.0f} MiB")
    if cfg.mesh.gather_dense == "step":
        parts.append("dense weights gathered once a step")
    if cfg.model.remat != "none":
        parts.append(f"remat {cfg.model.remat}")
    if cfg.train.micro_batches > 1:
        parts.append(f"{cfg.train.micro_batches} micro-batches")
    return ", ".join(parts) or "-"


def print_ranked(
    result: SearchResult, topology: Topology, console: Console, max_rows: int = 8
) -> None:
    """Shows the plans, fastest first, the usual default last."""
    best, table = result.ranked[0], Table(title="plans", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("mesh; route of tokens; the rest", overflow="fold")
    for name in ("GiB", "ms", "x best"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(str(index + 1), plan) for index, plan in enumerate(result.ranked[:max_rows])]
    if result.baseline is not None:
        rows.append(("default", result.baseline))
    for name, plan in rows:
        gib = f"{plan.peak.bytes / 2**30:.2f}" + "!" * (plan.peak.bytes > result.memory_budget)
        parts = f"{plan.seconds * 1e3:,.2f}", f"{plan.seconds / best.seconds:.2f}"
        table.add_row(name, plan_text(plan.cfg), gib, *parts)
    console.print(table)
    memory = topology.device.memory_bytes / 2**30
    console.print(
        f"{result.meshes:,} meshes estimated, {result.traced} plans traced, {result.too_large} of "
        f"them too large (!) for {memory:.1f} GiB, in {result.seconds:.1f} s. GiB is per "
        "device, ms per step. default: experts over all devices, flat exchange, no codecs.",
        highlight=False,
    )
    if result.cut is not None:
        console.print(f"note: {result.cut}", highlight=False, soft_wrap=True)


def plan_text(cfg: Config) -> str:
    """Returns a plan in one line."""
    parts = [mesh_text(cfg), exchange_text(cfg), rest_text(cfg)]
    return "; ".join(word for word in parts if word != "-")


def print_why(result: SearchResult, console: Console) -> None:
    """Shows the terms of the best plan's step, and which terms differ from other plans."""
    best = result.ranked[0]
    table = Table(title="where the step goes", title_justify="left")
    table.add_column("term")
    for name in ("ms", "share"):
        table.add_column(name, justify="right")
    for name, seconds in terms(best).items():
        if seconds > 0.01 * best.seconds:
            table.add_row(name, f"{seconds * 1e3:,.2f}", f"{seconds / best.seconds:.0%}")
    console.print(table)
    others = [("the runner-up", plan) for plan in result.ranked[1:2]]
    if result.baseline is not None:
        fits = result.baseline.peak.bytes <= result.memory_budget
        name = "the default" if fits else "the default, which does not fit"
        others.append((name, result.baseline))
    for name, compared in others:
        if compared.cfg != best.cfg:
            console.print(sentence(best, compared, name), highlight=False, soft_wrap=True)


def sentence(best: PricedPlan, other: PricedPlan, name: str) -> str:
    """Returns one line: by how much the best plan wins, and through which terms."""
    changes = [
        f"{term} {mine * 1e3:,.2f} ms, not {theirs * 1e3:,.2f}"
        for term, mine, theirs in why(best, other)
        if abs(theirs - mine) > 0.005 * best.seconds
    ]
    factor = other.seconds / best.seconds
    parts = "; ".join(changes) or "no term differs by 0.5 %"
    return f"{factor:.2f} x as fast as {name} ({mesh_text(other.cfg)}): {parts}"
