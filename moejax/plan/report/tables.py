"""Says what a plan is, what its step is made of, and why it beats another."""

from rich.console import Console
from rich.table import Table

from moejax.config.compression import PRESETS, build_compression, describe_codecs
from moejax.config.schema import CompressionConfig, Config
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import PricedPlan
from moejax.plan.price.terms import terms, why
from moejax.plan.search.search import SearchResult


def mesh_text(cfg: Config) -> str:
    """The mesh in a few words: axes above one."""
    sizes = {axis: getattr(cfg.mesh, axis) for axis in ("replica", "fsdp", "expert", "tensor")}
    parts = [f"{axis} {size}" for axis, size in sizes.items() if size and size > 1]
    if cfg.mesh.tensor > 1:
        parts += [cfg.mesh.activations, f"experts {cfg.mesh.expert_weights}"]
    return ", ".join(parts) or "one device"


def exchange_text(cfg: Config) -> str:
    """The route and its chunks, where tokens travel at all."""
    owners = cfg.mesh.expert * (cfg.mesh.tensor if cfg.mesh.expert_weights != "whole" else 1)
    if not cfg.model.has_experts or owners == 1:
        return "-"
    back = cfg.route_chunks_backward or cfg.route_chunks
    chunks = "" if cfg.route_chunks == back == 1 else f", chunks {cfg.route_chunks}/{back}"
    return cfg.route + chunks


def _codec_words(cfg: Config) -> str:
    """The codecs of the first step; by a preset's name where they are just its own."""
    found = build_compression(cfg.compression).at(0)
    for name, codecs in PRESETS.items():
        if codecs and found == build_compression(CompressionConfig(preset=name)).at(0):
            return f"codecs {name}"
    return describe_codecs(found)


def rest_text(cfg: Config) -> str:
    """Codecs, pieces of gradients, recomputation and micro-batches that are not the plain ones."""
    parts = []
    if (codecs := _codec_words(cfg)) != "none":
        parts.append(codecs)
    if cfg.train.reduction_bytes is not None:
        parts.append(f"pieces of {cfg.train.reduction_bytes / 2**20:.0f} MiB")
    if cfg.model.remat != "none":
        parts.append(f"remat {cfg.model.remat}")
    if cfg.train.micro_batches > 1:
        parts.append(f"{cfg.train.micro_batches} micro-batches")
    return ", ".join(parts) or "-"


def print_ranked(
    found: SearchResult, topology: Topology, console: Console, max_rows: int = 8
) -> None:
    """Shows the plans, fastest first, the expert's default last."""
    best, table = found.ranked[0], Table(title="plans", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("mesh; route of tokens; the rest", overflow="fold")
    for name in ("GiB", "ms", "x best"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(str(place + 1), one) for place, one in enumerate(found.ranked[:max_rows])]
    if found.baseline is not None:
        rows.append(("default", found.baseline))
    for name, one in rows:
        gib = f"{one.peak.bytes / 2**30:.2f}" + "!" * (one.peak.bytes > found.memory_budget)
        parts = f"{one.seconds * 1e3:,.2f}", f"{one.seconds / best.seconds:.2f}"
        table.add_row(name, plan_text(one.cfg), gib, *parts)
    console.print(table)
    memory = topology.device.memory_bytes / 2**30
    console.print(
        f"{found.meshes:,} meshes estimated, {found.traced} plans traced, {found.too_large} of "
        f"them too large (!) for {memory:.1f} GiB, in {found.seconds:.1f} s. GiB: of one "
        "device; ms: a step. default: experts over all devices, flat, no codecs.",
        highlight=False,
    )


def plan_text(cfg: Config) -> str:
    """A plan in one line."""
    parts = [mesh_text(cfg), exchange_text(cfg), rest_text(cfg)]
    return "; ".join(word for word in parts if word != "-")


def print_why(found: SearchResult, console: Console) -> None:
    """Shows what the best plan's step is made of, and which terms fell against others."""
    best = found.ranked[0]
    table = Table(title="where the step goes", title_justify="left")
    table.add_column("term")
    for name in ("ms", "share"):
        table.add_column(name, justify="right")
    for name, seconds in terms(best).items():
        if seconds > 0.01 * best.seconds:
            table.add_row(name, f"{seconds * 1e3:,.2f}", f"{seconds / best.seconds:.0%}")
    console.print(table)
    others = [("the runner-up", one) for one in found.ranked[1:2]]
    if found.baseline is not None:
        fits = found.baseline.peak.bytes <= found.memory_budget
        name = "the default" if fits else "the default, which does not fit"
        others.append((name, found.baseline))
    for name, other in others:
        if other.cfg != best.cfg:
            console.print(sentence(best, other, name), highlight=False, soft_wrap=True)


def sentence(best: PricedPlan, other: PricedPlan, name: str) -> str:
    """One line: by how much the best plan wins, and by which terms."""
    changes = [
        f"{term} {mine * 1e3:,.2f} ms, not {theirs * 1e3:,.2f}"
        for term, mine, theirs in why(best, other)
        if abs(theirs - mine) > 0.005 * best.seconds
    ]
    factor = other.seconds / best.seconds
    parts = "; ".join(changes) or "no term differs by 0.5 %"
    return f"{factor:.2f} x as fast as {name} ({mesh_text(other.cfg)}): {parts}"
