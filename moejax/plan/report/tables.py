"""Tables and sentences about plans: settings, terms of the step, reasons."""

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.table import Table

from moejax.config.checks import AXES
from moejax.config.checks.planned import CHOSEN, CODECS
from moejax.config.compression import PRESETS, build_compression, describe_codecs
from moejax.config.fields import change, get_value
from moejax.config.schema import CompressionConfig, Config, MoEConfig
from moejax.model.count import count
from moejax.plan.cluster.device import Device
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import PricedPlan
from moejax.plan.price.cost import HOST_MEMORY, SimulatedStep, alone
from moejax.plan.price.host import crossover, saved_by_attention, saved_by_product
from moejax.plan.price.routing import ExpertLoad, busiest_device
from moejax.plan.price.terms import terms, tokens_per_second, why
from moejax.plan.report.sites import advice_text, order_text, sites_texts
from moejax.plan.search.fitting import MEMORY_SHARE
from moejax.plan.search.search import LESS_BUSY, SAME, SearchResult, has_codecs
from moejax.plan.search.space import RULES

KEPT = {
    "optimizer": ("moments on the host", "of matrices: a piece of them at a time comes and goes"),
    "experts": ("experts on the host", "weights come while a layer attends, gradients go"),
    "residuals": ("residuals on the host", "what forward keeps for backward goes, and comes back"),
}


def mesh_text(cfg: Config) -> str:
    """Returns the mesh as text: axes above one."""
    sizes = {axis: getattr(cfg.mesh, axis) for axis in AXES}
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


def codec_text(cfg: Config) -> str:
    """Returns the codecs of the first step as text, or the name of their preset, or none."""
    chosen = build_compression(cfg.compression).at(0)
    for name, codecs in PRESETS.items():
        if codecs and chosen == build_compression(CompressionConfig(preset=name)).at(0):
            return f"codecs {name}"
    return describe_codecs(chosen)


def rest_text(cfg: Config) -> str:
    """Returns codecs, reductions, recomputation and micro-batches that are not the default."""
    codecs = codec_text(cfg)
    return ", ".join([codecs] * (codecs != "none") + [*rest_parts(cfg)]) or "-"


REMAT = {
    "full": "the backward pass computes anew what it needs of a layer",
    "dots": "matrix products are kept; the backward pass computes the rest anew",
}
ACROSS = {"use": "at each use", "passes": "once for both passes", "step": "once a step"}


def rest_parts(cfg: Config) -> dict[str, str]:
    """Returns settings beside mesh, route and codecs that are not the default: name, meaning."""
    mesh, model, size = cfg.mesh, cfg.model, cfg.train.reduction_bytes
    staged, parts = mesh.stage > 1, {}
    if size is not None:
        parts[f"pieces of {size / 2**20:.0f} MiB"] = (
            "gradients travel in pieces while the next are made"
        )
    if cfg.moe.headroom != MoEConfig().headroom:
        parts[f"buckets of {cfg.moe.headroom:g} times the mean"] = (
            "room for the rows that one device sends to another; those beyond it go in rounds after"
        )
    if cfg.moe.slots:
        parts[f"copies of hot experts, {cfg.moe.slots} a device"] = (
            "a busy device shares its hottest experts with others, planned from each micro-batch"
        )
    if mesh.gather_dense == "step":
        parts["dense weights gathered once a step"] = (
            "of attention, MLPs and vocabulary: kept until the step ends, and their gradients "
            "reduced once"
        )
    if mesh.gather_across != "flat":
        parts[f"weights across nodes first, {ACROSS[mesh.gather_across]}"] = (
            "a node receives each weight once, and its devices gather the rest from each other"
        )
    if model.remat != "none":
        part = "the backward pass computes anew a part of what it needs"
        parts[f"remat {model.remat}"] = REMAT.get(model.remat, part)
    if cfg.train.micro_batches > 1:
        parts[f"{cfg.train.micro_batches} micro-batches"] = (
            "one after the other, so that less lives at one time"
        )
    parts |= host_parts(cfg)
    if cfg.outer.every is not None:
        how = "" if cfg.outer.order == "layers" else ", all at once"
        parts[f"copies are sites, H = {cfg.outer.every}, {cfg.outer.codec}{how}"] = (
            "each site trains on its own, and weights are averaged once in H steps"
        )
    if mesh.context > 1:
        parts[f"{mesh.context} devices share a sequence, keys by {mesh.context_exchange}"] = (
            "each holds some of its positions, and sees the others' keys and values"
        )
    return parts | (_stage_parts(cfg) if staged else {})


def _stage_parts(cfg: Config) -> dict[str, str]:
    mesh, parts = cfg.mesh, {}
    if mesh.schedule != "1f1b":
        parts[f"schedule {mesh.schedule}"] = (
            "one micro-batch goes forward while another goes back, so that each hides the other's "
            "exchanges"
        )
    if cfg.model.stage_chunks > 1:
        parts[f"{cfg.model.stage_chunks} chunks a stage"] = (
            "each stage has several parts of the model, so that it waits less at the start and the "
            "end"
        )
    if mesh.stage_slices > 1:
        parts[f"{mesh.stage_slices} slices"] = (
            "parts of a micro-batch's positions follow one another through the stages"
        )
    if mesh.stage_keeps == "input":
        parts["stages keep inputs alone"] = (
            "of a micro-batch a stage keeps its input, and computes the rest again for backward"
        )
    return parts


def print_ranked(
    result: SearchResult, topology: Topology, console: Console, max_rows: int = 8
) -> None:
    """Shows the plans, the chosen one first and the others by time, the rules of thumb last."""
    best, table = result.ranked[0], Table(title="plans", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("mesh; route of tokens; the rest", overflow="fold")
    for name in ("GiB", "ms", "x best"):
        table.add_column(name, justify="right", no_wrap=True)
    rows, folded = shown_rows(result.ranked, max_rows)
    for name, plan in named_rows(rows, result):
        fits = result.fits(plan)
        gib = f"{plan.peak.bytes / 2**30:.2f}" + "!" * (not fits)
        ratio = f"{plan.seconds / best.seconds:.2f}" if fits else "-"
        table.add_row(name, plan_text(plan.cfg), gib, f"{plan.seconds * 1e3:,.2f}", ratio)
    console.print(table)
    for note in _order_notes(result.ranked, folded):
        console.print(note, highlight=False, soft_wrap=True)
    memory = topology.device.memory_bytes / 2**30
    console.print(
        f"{result.meshes:,} meshes estimated, {result.traced} plans traced, {result.too_large} of "
        f"them too large (!): more than {MEMORY_SHARE:.0%} of a device's {memory:.1f} GiB; in "
        f"{result.seconds:.1f} s. GiB is per device, ms per step.",
        highlight=False,
    )
    words = " ".join(f"{name}: {RULES[name]}." for name in result.rules) or "none fits."
    said = f"{gain_text(result)} Rules of thumb, without codecs: {words}"
    console.print(said, highlight=False)
    if result.cut is not None:
        console.print(f"note: {result.cut}", highlight=False, soft_wrap=True)


def speed_text(plan: PricedPlan, topology: Topology) -> str:
    """Returns a plan's tokens a second, FLOP/s of a device, and their share of the peak (MFU)."""
    tokens = tokens_per_second(plan)
    rate = tokens * model_flops(plan) / topology.devices
    peak = topology.device.peak(plan.cfg.model.dtype)
    return (
        f"{tokens:,.0f} tokens/s; {rate / 1e12:,.4g} TFLOP/s a device, {rate / peak:.0%} of its "
        f"fastest {plan.cfg.model.dtype} matrix product (MFU by measured peak)"
    )


def model_flops(plan: PricedPlan) -> int:
    """Returns the FLOPs that the model needs for a token, without recomputation."""
    step = plan.traced.train_step
    return count(plan.cfg, step.parameter_sizes(), step.adapter_sizes()).flops_per_token


def shown_rows(
    ranked: Sequence[PricedPlan], max_rows: int
) -> tuple[list[tuple[str, PricedPlan]], int]:
    """Returns (rank, plan) of the plans to show, and how many between them are left out.

    A plan is left out if it differs from a shown one by nothing but the pieces in which gradients
    are reduced, and takes as long.
    """
    rows: list[tuple[str, PricedPlan]] = []
    for rank, plan in enumerate(ranked):
        if len(rows) == max_rows:
            return rows, rank - max_rows
        if not any(_is_as(plan, other) for _, other in rows):
            rows.append((str(rank + 1), plan))
    return rows, len(ranked) - len(rows)


def named_rows(
    rows: Sequence[tuple[str, PricedPlan]], result: SearchResult
) -> list[tuple[str, PricedPlan]]:
    """Returns rows with the names of rules of thumb; rules that are not among them come last."""
    names = {plan.cfg: name for name, plan in result.rules.items()}
    shown = {plan.cfg for _, plan in rows}
    named = [(f"{rank} {names.get(plan.cfg, '')}".strip(), plan) for rank, plan in rows]
    return named + [(n, plan) for n, plan in result.rules.items() if plan.cfg not in shown]


def gain_text(result: SearchResult) -> str:
    """Returns the gain over the best rule of thumb, with and without codecs."""
    best, plain, name = result.ranked[0], result.plain, result.best_rule
    if name is None:
        return "No rule of thumb fits."
    if best.cfg == result.rules[name].cfg:
        return f"The plan is itself a rule of thumb, {name}: no other is faster."
    seconds = result.rules[name].seconds
    said = f"The plan is {seconds / best.seconds:.2f} x as fast as the best rule of thumb, {name}"
    if plain is None or not has_codecs(best):
        return f"{said}."
    return f"{said}; without codecs {seconds / plain.seconds:.2f} x."


def remarks(result: SearchResult, topology: Topology, load: ExpertLoad) -> list[str]:
    """Returns the lines below the reasons of a plan, as far as there is something to say."""
    found, without = result.sites, ""
    if found is not None and found.without is not None:
        without = plan_text(found.without.cfg)
    sites = () if found is None else sites_texts(found, topology, without)
    texts = (
        *sites,
        order_text(result, topology, load),
        advice_text(result, topology, load),
        host_text(result.ranked[0], result),
        residuals_text(result, topology),
        copies_text(result, load),
        small_products(result.ranked[0], topology.device),
    )
    return [text for text in texts if text is not None]


def host_parts(cfg: Config) -> dict[str, str]:
    """Returns the arrays that a plan keeps in the host's memory: name, meaning."""
    return dict(KEPT[name] for name, place in vars(cfg.memory).items() if place == "host")


def host_text(plan: PricedPlan, result: SearchResult) -> str | None:
    """Returns both memories of a plan and its copies between them; None if it takes no host's."""
    if not plan.node_bytes:
        return None
    device, host, node = (n / 2**30 for n in (plan.peak.bytes, plan.host_bytes, plan.node_bytes))
    moved, waited = host_seconds(plan)
    return (
        f"memory: {device:,.2f} GiB of a device and {host:,.2f} of its host, whose node needs "
        f"{node:,.1f} of {result.host_budget / 2**30:,.1f} GiB that may be used. Copies between "
        f"them take {moved * 1e3:,.2f} ms of a step; it waits {waited * 1e3:,.2f} ms for them."
    )


def host_seconds(plan: PricedPlan) -> tuple[float, float]:
    """Returns the seconds of copies between host and device in a step, and those exposed."""
    moved = waited = 0.0
    for share, simulated in plan.parts:
        sent = simulated.totals.sent
        moved += share * sum(seconds for (_, name), seconds in sent.items() if name == HOST_MEMORY)
        waited += share * simulated.totals.exposed.get(HOST_MEMORY, 0.0)
    return moved, waited


def residuals_text(result: SearchResult, topology: Topology) -> str | None:
    """Returns KARMA's rule on this cluster, where a plan recomputes or keeps residuals on hosts."""
    cfg, host = result.ranked[0].cfg, topology.host
    keeps = any(plan.cfg.memory.residuals == "host" for plan in result.ranked)
    again = cfg.model.remat != "none" or cfg.mesh.stage_keeps == "input"
    if host is None or not (keeps or again):
        return None
    rate = topology.device.peak(cfg.model.dtype)
    least = crossover(rate, host.to_device, host.from_device)
    kinds = {
        f"a product's result {cfg.model.width:,}": saved_by_product(cfg.model.width),
        f"causal attention's {cfg.data.sequence_length:,}": saved_by_attention(
            cfg.data.sequence_length
        ),
    }
    saved = " and ".join(kinds)
    pays = [name.partition("'s")[0] for name, flops in kinds.items() if flops > least]
    verdict = f"only {' and '.join(pays)} pays" if pays else "neither pays"
    return (
        f"Residuals on the host: of each byte kept, {saved} FLOPs are saved; where nothing hides "
        f"the copies, keeping beats recomputing above {least:,.0f}, so there {verdict}."
    )


def copies_text(result: SearchResult, load: ExpertLoad) -> str | None:
    """Returns what copies of hot experts gain, or why there are none; None for an even load."""
    best = result.ranked[0]
    alone = change(best.cfg, {"moe.slots": 0, "moe.slots_from": "now"})
    busiest = busiest_device(load, alone)
    if not best.cfg.model.has_experts or busiest < 1 + LESS_BUSY:
        return None
    said = f"The busiest device gets {busiest:.2f} x the mean choices."

    def fastest(has_copies: bool) -> PricedPlan | None:
        plans = [plan for plan in result.ranked if bool(plan.cfg.moe.slots) == has_copies]
        return min(plans, key=attrgetter("seconds"), default=None)

    copied, plain = fastest(True), fastest(False)
    if copied is None:
        return (
            f"{said} No plan with copies of hot experts (`moe.slots`) was traced: they take less "
            f"than {LESS_BUSY:g} of the mean off it, it is fixed, or the traces were spent."
        )
    slots, left = copied.cfg.moe.slots, busiest_device(load, copied.cfg)
    said += f" Copies in {slots} slot{'s' * (slots > 1)} a device, on their mesh: {left:.2f} x."
    if plain is None:
        return f"{said} No plan without them fits."
    gain = plain.seconds / copied.seconds
    if best.cfg.moe.slots:
        return f"{said} The plan is {gain:.2f} x as fast as the best without."
    return f"{said} The step would take {1 / gain:.2f} x as long: to send them costs more."


def _is_as(plan: PricedPlan, other: PricedPlan) -> bool:
    pieces = {"train.reduction_bytes": other.cfg.train.reduction_bytes}
    return change(plan.cfg, pieces) == other.cfg and same_time(plan, other)


def same_time(plan: PricedPlan, other: PricedPlan) -> bool:
    """Returns whether the times of two plans differ by at most the share `SAME`."""
    first, second = sorted((plan.seconds, other.seconds))
    return second <= (1 + SAME) * first


def _order_notes(ranked: Sequence[PricedPlan], folded: int) -> list[str]:
    """Returns notes on a first plan that is not the fastest, and on plans not shown."""
    notes, fastest = [], min(ranked, key=attrgetter("seconds"))
    if fastest is not ranked[0]:
        place = next(rank for rank, plan in enumerate(ranked) if plan is fastest) + 1
        notes.append(
            f"1 and {place} take equally long, within {SAME:.1%}. Of such plans the one that "
            "changes the fewest settings is chosen."
        )
    if folded:
        them = "1 plan is" if folded == 1 else f"{folded} plans are"
        notes.append(
            f"{them} not shown: they differ from one above by the pieces in which gradients are "
            f"reduced, and by less than {SAME:.1%} of the time."
        )
    return notes


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
    rule = result.best_rule or next(iter(result.rules), None)
    if rule is not None:
        others.append((f"the rule of thumb {rule}", result.rules[rule]))
    for name, compared in others:
        if compared.cfg != best.cfg:
            text = sentence(best, compared, name, result)
            console.print(text, highlight=False, soft_wrap=True)


def sentence(best: PricedPlan, other: PricedPlan, name: str, result: SearchResult) -> str:
    """Returns one line: the factor by which the best plan wins, and the terms behind it.

    A plan that does not fit is not compared.
    """
    name = f"{name} ({different_text(other.cfg, best.cfg)})"
    if not result.fits(other):
        needed, budget, whose = other.peak.bytes, result.memory_budget, "device"
        if needed <= budget:
            needed, budget, whose = other.node_bytes, result.host_budget, "node's host"
        gib = f"{needed / 2**30:,.1f} GiB of a {whose}, {budget / 2**30:,.1f} may be used"
        return f"{name} does not fit: it needs {gib}"
    if same_time(best, other):
        return (
            f"as fast as {name}, within {SAME:.1%}: {other.seconds / best.seconds:.4f} x its time"
        )
    changes = [
        f"{term} {mine * 1e3:,.2f} ms, not {theirs * 1e3:,.2f}"
        for term, mine, theirs in why(best, other)
        if abs(theirs - mine) > 0.005 * best.seconds
    ]
    factor = other.seconds / best.seconds
    parts = "; ".join(changes) or "no term differs by 0.5 %"
    return f"{factor:.2f} x as fast as {name}: {parts}"


def different_text(cfg: Config, other: Config) -> str:
    """Returns a plan in few words: its mesh, or its other settings if the mesh is the same."""
    mesh = mesh_text(cfg)
    if mesh != mesh_text(other):
        return mesh
    names = [name for name in CHOSEN if get_value(cfg, name) != get_value(other, name)]
    shown = (f"{name} = {_shown(cfg, name)}" for name in names)
    return f"{mesh}, as here, but {', '.join(shown)}" if names else mesh


def _shown(cfg: Config, name: str) -> str:
    """Returns a setting's value; for a codec left to the preset, the preset's codec."""
    value: Any = get_value(cfg, name)
    if name in CODECS and value == "preset":
        value = PRESETS[cfg.compression.preset].get(name.rpartition(".")[2])
        return "no codec" if value is None else str(value)
    return "none" if value is None else str(value)


FAR_BELOW = 100.0  # times: a product so much smaller than the smallest measured one is a guess
NOTEWORTHY = 0.1  # share of the step that such products take; below it they change no choice


def small_products(plan: PricedPlan, device: Device) -> str | None:
    """Returns a warning where products far below a device's smallest are much of a step.

    A product below the smallest measured one takes as long as that one. Where a topology file has
    one large product only, small products, as a router's, seem to take seconds.
    """
    seconds: dict[str, float] = defaultdict(float)
    for share, simulated in plan.parts:
        _add(simulated, device, share, seconds)
    dtype = max(seconds, key=lambda name: seconds[name], default="")
    if not dtype or sum(seconds.values()) < NOTEWORTHY * plan.seconds:
        return None
    least = device.curve(dtype)[0][0]
    return (
        f"warning: {sum(seconds.values()) / plan.seconds:.0%} of the step are products of less "
        f"than 1/{FAR_BELOW:g} of the smallest that the topology has, which count as slow as that "
        f"one (`device.products` of {dtype} begin at {least:.3g} FLOPs). Add smaller products to "
        "the topology file, or probe the devices."
    )


def _add(step: SimulatedStep, device: Device, times: float, seconds: dict[str, float]) -> None:
    """Adds the seconds of products far below the smallest measured ones, by dtype."""
    for task, op in enumerate(step.ops):
        if task in step.inside:
            trip, count = step.inside[task]
            _add(trip, device, times * count, seconds)
        elif op.kind == "product" and op.flops * FAR_BELOW < device.curve(op.dtype)[0][0]:
            seconds[op.dtype] += times * device.program_overhead * alone(op, device)
