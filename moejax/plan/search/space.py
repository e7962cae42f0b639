"""The planner's choices: the parts of a plan, their values, and the resulting configs.

A setting that is not at its default is pinned: the user chose it. The others are free.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from moejax.config.checks import AXES, check, resolve_mesh
from moejax.config.checks.memory import KEPT_ON_HOST
from moejax.config.checks.planned import CHOSEN, CHUNKS, CODECS, EXCHANGE, MESH, REDUCTION
from moejax.config.compression import GRADIENTS, PRESETS, STAGES
from moejax.config.fields import change, fields, get_value
from moejax.config.parts import sharing_counts
from moejax.config.pattern import layer_groups
from moejax.config.schema import Config, PlanConfig
from moejax.errors import InputError
from moejax.layout.route import ROUTES

# Settings of a plan: all that a search chooses, the preset that its codecs replace, and sites.
OUTER = ("outer.every", "outer.codec", "outer.order")  # chosen where `plan.sites` asks for it
SETTINGS = (*CHOSEN, "compression.preset", *OUTER)
MAX_CHUNKS = 8
TURNS = (2, 8)  # micro-batches for each stage; a search then tries half and twice as many
ROWS = ("mesh.replica", "mesh.fsdp", "mesh.expert")  # axes that share a stage's sequences
PIECES = (None, 2**20, 4 * 2**20, 30_000_000)  # bytes; 30 MB is Lina's
SCHEDULES = ("1f1b", "combined_1f1b")
KEEPS = ("residuals", "input")
HOSTED = ("memory.optimizer", "memory.experts", "memory.residuals")
HEADROOMS = (1.5, 2.0, 3.0)
CONTEXT = "mesh.context"
LONG = 16_384  # positions from which on devices may share sequences although there are enough
# Rules of thumb that people follow without a planner, and their meaning.
RULES = {
    "FSDP": "weights sharded over all devices",
    "HSDP": "weights sharded inside a node, copies across",
    "EP+FSDP": "experts spread inside a node, weights sharded across",
    "EP+DP": "experts spread inside a node, copies across",
    "TP+FSDP": "matrices cut inside a node, weights sharded across",
    "EP": "experts spread over all devices, copies of the rest",
}
# From no recomputation to all, which saves the most memory.
REMATS = ("none", "dots", "experts", "collectives", "attention", "token_collectives", "full")


@dataclass(frozen=True)
class Limits:
    """The limits of a search.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      codecs: preset whose codecs may be chosen, class by class: none, hybrid or strong.
      pinned: settings that keep their values.
      documents: share of the pairs of positions that lie inside a document.
    """

    devices: int
    nodes: int
    platform: str
    codecs: str = "none"
    pinned: frozenset[str] = frozenset()
    documents: float = 1.0

    def free(self, name: str) -> bool:
        """Returns whether a setting may be changed."""
        return name not in self.pinned


def resolve(cfg: Config, limits: Limits) -> Config | None:
    """Returns the resolved config, or None if it breaks a rule."""
    mesh = dataclasses.replace(cfg.mesh, nodes=limits.nodes, simulated_devices=None)
    try:
        cfg = dataclasses.replace(cfg, mesh=mesh, plan=PlanConfig(mode="hand"))
        check(cfg)
        return resolve_mesh(cfg, limits.devices, limits.platform)
    except InputError:
        return None


def meshes(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Yields every mesh, with the simplest route."""
    # A free replica axis takes the devices that the other axes leave.
    fixed = [n for n in MESH if not limits.free(n) and get_value(cfg, n) is not None]
    repeats = layer_groups(cfg.model)[-1][1]
    for sizes in _factorings(limits.devices, len(MESH)):
        values: dict[str, Any] = dict(zip(MESH, sizes, strict=True))
        if any(get_value(cfg, name) != values[name] for name in fixed):
            continue
        if repeats % values["mesh.stage"]:  # found soon, as most are left out by it
            continue
        tensor, experts = values["mesh.tensor"], cfg.model.has_experts
        layouts = ("sequence", "replicated") if tensor > 1 else ("sequence",)
        weights = ("hidden", "folded", "whole") if tensor > 1 and experts else ("hidden",)
        choices = product(
            _values(cfg, limits, "mesh.activations", layouts),
            _values(cfg, limits, "mesh.expert_weights", weights),
            sharing(cfg, limits, values),
        )
        numbers = (
            (*choice, parts)
            for choice in choices
            for parts in _micro_batches(cfg, limits, values, choice[-1]["mesh.context"])
        )
        for activations, kind, shared, parts in numbers:
            own = {"mesh.activations": activations, "mesh.expert_weights": kind, **shared}
            own |= {"train.micro_batches": parts}
            candidate = resolve(_plain_exchange(change(cfg, values | own), limits), limits)
            if candidate is not None:
                yield candidate


def sharing(cfg: Config, limits: Limits, mesh: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the ways in which devices of a mesh may share sequences, fewest devices first.

    They share where sequences are fewer than devices, as few as need be, and for long sequences
    also the next two numbers that whole axes give.
    """
    counts = sharing_counts({axis: mesh[f"mesh.{axis}"] for axis in AXES}, limits.nodes)
    ranks = math.prod(mesh[name] for name in ROWS)
    enough = [c for c in counts if cfg.train.batch_sequences * c % ranks == 0]
    if cfg.data.sequence_length < LONG or mesh["mesh.stage"] > 1 or cfg.mesh.stage_slices > 1:
        enough = enough[:1]
    ways = [
        _stripes(cfg, limits, count) for count in _values(cfg, limits, CONTEXT, tuple(enough[:3]))
    ]
    return [way for way in ways if way is not None]


def _stripes(cfg: Config, limits: Limits, count: int) -> dict[str, Any] | None:
    """Returns the settings with which some devices share a sequence; None if it does not divide.

    A stripe has eight windows at least, where the sequence permits: neighbours exchange one each.
    """
    name, length = "mesh.context_stripe", cfg.data.sequence_length
    if count == 1 or not limits.free(name):
        return {CONTEXT: count}
    wanted = max(fields()[name].default, 8 * (cfg.model.sliding_window or 0))
    pairs, rest = divmod(length, 2 * count)
    if rest:
        return None
    return {CONTEXT: count, name: max(size for size in divisors(pairs) if size <= wanted)}


def _micro_batches(cfg: Config, limits: Limits, mesh: dict[str, Any], context: int) -> list[int]:
    """Returns the numbers of micro-batches to estimate on a mesh.

    With stages they decide how long stages are idle: `TURNS` for each stage, as far as they divide
    the batch. Without stages fewer are faster, and memory may ask for more.
    """
    stages, fewest = mesh["mesh.stage"], cfg.train.micro_batches
    if stages == 1 or not limits.free("train.micro_batches"):
        return [fewest]
    rows = _rows(cfg, math.prod(mesh[name] for name in ROWS) // context)
    numbers = [turns * stages for turns in TURNS]
    return [n for n in numbers if rows % n == 0 and n >= fewest]


def _rows(cfg: Config, ranks: int) -> int:
    """Returns the sequences of a step on one of `ranks` devices or groups that share them."""
    return max(1, cfg.train.batch_sequences // ranks)


def _plain_exchange(cfg: Config, limits: Limits) -> Config:
    """Returns the simplest exchange that the pins allow; defaults on a mesh without exchange."""
    owners = cfg.mesh.expert * (cfg.mesh.tensor if cfg.mesh.expert_weights == "folded" else 1)
    free = [name for name in EXCHANGE if limits.free(name)]
    defaults = {name: fields()[name].default for name in (EXCHANGE if owners == 1 else free)}
    return change(cfg, defaults)


def changed(cfg: Config, limits: Limits, changes: Iterable[dict[str, Any]]) -> Iterator[Config]:
    """Yields the configs with one of the changes each that obey the rules and are not `cfg`."""
    for values in changes:
        candidate = resolve(change(cfg, values), limits)
        if candidate is not None and candidate != cfg:
            yield candidate


def _each(cfg: Config, limits: Limits, name: str, choices: Iterable) -> Iterator[Config]:
    """Yields the other values of one setting; none if it is pinned."""
    if limits.free(name):
        yield from changed(cfg, limits, ({name: value} for value in choices))


def exchanges(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Yields every route on a mesh, the most elaborate first, with unchanged chunks."""
    if cfg.model.has_experts:
        yield from _each(cfg, limits, "route", reversed(ROUTES))


def headrooms(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Yields larger buckets, so that fewer of them overflow."""
    larger = [headroom for headroom in HEADROOMS if headroom > cfg.moe.headroom]
    return _each(cfg, limits, "moe.headroom", larger)


def slots(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Yields plans with copies of hot experts, chosen by the step before or by each call."""
    if cfg.model.has_experts and limits.free("moe.slots"):
        sources = ("last", "now") if limits.free("moe.slots_from") else (cfg.moe.slots_from,)
        both = [(r, source) for r in range(1, 4) for source in sources]
        changes = [{"moe.slots": r, "moe.slots_from": source} for r, source in both]
        yield from changed(cfg, limits, changes)


def more_chunks(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Yields twice the chunks: in both passes, forward alone, backward alone."""
    if not cfg.model.has_experts:
        return
    forward, backward = cfg.route_chunks, cfg.route_chunks_backward or cfg.route_chunks
    changes = []
    for ahead, behind in ((2, 2), (2, 1), (1, 2)):
        chunks, behind = ahead * forward, behind * backward
        if max(chunks, behind) <= MAX_CHUNKS and (limits.free("route_chunks") or ahead == 1):
            values: dict[str, Any] = {"route_chunks": chunks}
            if limits.free("route_chunks_backward"):
                values["route_chunks_backward"] = None if behind == chunks else behind
            changes.append(values)
    yield from dict.fromkeys(changed(cfg, limits, changes))


def codecs(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Yields the preset's codecs: all, gradients alone, tokens alone, each alone."""
    allowed = {f"compression.{k}": codec for k, codec in PRESETS[limits.codecs].items()}
    allowed = {name: codec for name, codec in allowed.items() if limits.free(name)}
    gradients = [name for name in allowed if name.rpartition(".")[2] in GRADIENTS]
    groups = [list(allowed), gradients, [name for name in allowed if name not in gradients]]
    stages = {f"compression.{kind}" for kind in STAGES if cfg.mesh.stage == 1}
    groups += [[name] for name in allowed if name not in stages]
    for group in filter(None, dict.fromkeys(map(tuple, groups))):
        candidate = resolve(change(cfg, {name: allowed[name] for name in group}), limits)
        if candidate is not None:
            yield candidate


def without_codecs(cfg: Config, limits: Limits) -> Config:
    """Returns the config without the codecs that may be changed."""
    return change(cfg, {n: fields()[n].default for n in CODECS if limits.free(n)})


def pieces(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Yields sizes of the pieces in which gradients are reduced."""
    return _each(cfg, limits, "train.reduction_bytes", PIECES)


def gathers(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Yields other ways to gather weights and reduce their gradients."""
    across = ("use", "passes", "flat")
    # In one micro-batch, once a step is once for both passes, and nothing hides it.
    if cfg.train.micro_batches > 1:
        across = ("step", *across)
    yield from _each(cfg, limits, "mesh.gather_dense", ("step", "use"))
    yield from _each(cfg, limits, "mesh.gather_across", across)


def key_exchanges(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Yields other ways to exchange the keys of shared sequences, and other numbers of devices."""
    if cfg.mesh.context == 1:
        return
    yield from _each(cfg, limits, "mesh.context_exchange", ("ring", "gather"))
    ways = sharing(cfg, limits, {name: get_value(cfg, name) for name in MESH})
    yield from changed(cfg, limits, (way for way in ways if way[CONTEXT] != cfg.mesh.context))


def orders(limits: Limits) -> tuple[str, ...]:
    """Returns the values of `mesh.schedule` that may pay.

    An exchange that hides behind the other pass must be asynchronous, which none is on CPU.
    Where many rows overflow, the price flatters combined 1F1B: decision 0027.
    """
    return SCHEDULES[:1] if limits.platform == "cpu" else SCHEDULES


def schedules(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Yields other schedules of stages: saved values, order, number of micro-batches."""
    if cfg.mesh.stage > 1:
        parts = cfg.train.micro_batches
        yield from _each(cfg, limits, "mesh.stage_keeps", KEEPS)
        yield from _each(cfg, limits, "mesh.schedule", orders(limits))
        yield from _each(cfg, limits, "train.micro_batches", (2 * parts, parts // 2))


def shorter_tasks(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Yields twice and half as many slices of positions, and chunks of layers for each stage."""
    for name in ("mesh.stage_slices", CHUNKS) if cfg.mesh.stage > 1 else ():
        now = get_value(cfg, name)
        yield from _each(cfg, limits, name, (2 * now, now // 2) if now > 1 else (2,))


def lighter(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Yields plans with more recomputation and micro-batches, the smallest change first.

    Not resolved, because that is slow and most of them are only estimated.
    """
    ranks = cfg.mesh.fsdp * cfg.mesh.expert * (cfg.mesh.replica or 1)
    rows = _rows(cfg, ranks // cfg.mesh.context)
    micro = [n for n in divisors(rows) if n >= cfg.train.micro_batches]
    names = ("train.micro_batches", "model.remat", "mesh.stage_keeps")
    at = REMATS.index(cfg.model.remat)
    keeps = KEEPS[KEEPS.index(cfg.mesh.stage_keeps) :] if cfg.mesh.stage > 1 else KEEPS[:1]
    choices = (tuple(micro), REMATS[at:], keeps)
    wanted = (_values(cfg, limits, n, values) for n, values in zip(names, choices, strict=True))
    for values in product(*wanted):
        candidate = change(cfg, dict(zip(names, values, strict=True)))
        if candidate != cfg:
            yield candidate


def heavier(cfg: Config, first: Config, limits: Limits) -> Iterator[Config]:
    """Yields plans with fewer micro-batches or less recomputation, down to those of a first config.

    Not resolved, as `lighter`.
    """
    staged, names = cfg.mesh.stage > 1, ("train.micro_batches", "model.remat", "mesh.stage_keeps")
    choices = (
        dict.fromkeys((first.train.micro_batches, cfg.train.micro_batches)),
        REMATS[REMATS.index(first.model.remat) : REMATS.index(cfg.model.remat) + 1],
        KEEPS[: KEEPS.index(cfg.mesh.stage_keeps) + 1],
    )
    wanted = [_values(cfg, limits, n, tuple(own)) for n, own in zip(names, choices, strict=True)]
    if staged:  # micro-batches are what fills the stages
        wanted[0] = (cfg.train.micro_batches,)
    for values in product(*wanted):
        candidate = change(cfg, dict(zip(names, values, strict=True)))
        if candidate != cfg:
            yield candidate


def hosted(cfg: Config, limits: Limits, names: Iterable[str] = HOSTED) -> Iterator[Config]:
    """Yields plans that keep more in the host's memory, the fewest kinds of arrays first.

    Not resolved, as `lighter`.
    """
    own = [
        name
        for name in names
        if limits.free(name) and get_value(cfg, name) == "device" and _is_kept(cfg, name)
    ]
    for count in range(1, len(own) + 1):
        for chosen in combinations(own, count):
            yield change(cfg, dict.fromkeys(chosen, "host"))


def _is_kept(cfg: Config, name: str) -> bool:
    """Returns whether a step has the arrays that a setting of `HOSTED` moves."""
    staged = cfg.mesh.stage > 1
    if name == "memory.experts":
        return cfg.model.has_experts and not staged and cfg.lora.rank is None
    if name == "memory.residuals":
        return cfg.mesh.stage_keeps == KEEPS[0] if staged else cfg.model.remat in KEPT_ON_HOST
    return True


def rules(cfg: Config, limits: Limits) -> dict[str, Config]:
    """Returns the plans of `RULES` that differ and break no rule of configs; flat, no codec.

    None of them has sites.
    """
    if cfg.outer.every is not None:
        return {}
    devices, inside = limits.devices, limits.devices // limits.nodes
    sizes = {"FSDP": {"fsdp": devices}, "HSDP": {"fsdp": inside, "replica": limits.nodes}}
    if cfg.model.has_experts:
        near, far = (math.gcd(cfg.moe.num_experts, count) for count in (inside, devices))
        sizes["EP+FSDP"] = {"expert": near, "fsdp": devices // near}
        sizes["EP+DP"] = {"expert": near, "replica": devices // near}
        sizes["EP"] = {"expert": far, "replica": devices // far}
    plans = {name: _by_rule(cfg, limits, own) for name, own in sizes.items()}
    for tensor in reversed(divisors(inside)[1:]):
        own = {"tensor": tensor, "fsdp": devices // tensor}
        plans["TP+FSDP"] = plans.get("TP+FSDP") or _by_rule(cfg, limits, own)
    firsts = {plan: name for name, plan in reversed(plans.items()) if plan is not None}
    return {name: plan for name, plan in plans.items() if plan and firsts[plan] == name}


def _by_rule(cfg: Config, limits: Limits, sizes: dict[str, int]) -> Config | None:
    """Returns a mesh of these axes with all else at its default; None if it breaks a rule.

    Where sequences are fewer than devices, devices share them.
    """
    mesh = dict.fromkeys(MESH, 1) | {f"mesh.{axis}": size for axis, size in sizes.items()}
    values = mesh | {"compression.preset": "none"}
    values |= {name: fields()[name].default for name in (*EXCHANGE, *REDUCTION, *CODECS)}
    values |= {"mesh.activations": "sequence", "mesh.expert_weights": "hidden"}
    shared = sharing(cfg, replace(limits, pinned=frozenset()), mesh)[:1]
    return resolve(change(cfg, values | shared[0]), limits) if shared else None


def plan_of(cfg: Config) -> dict[str, Any]:
    """Returns a plan's settings by name."""
    return {name: get_value(cfg, name) for name in SETTINGS}


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _values(cfg: Config, limits: Limits, name: str, choices: tuple) -> tuple:
    """Returns all choices of a setting, or only its value if it is pinned."""
    return choices if limits.free(name) else (get_value(cfg, name),)


def _factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in _factorings(number // first, parts - 1):
            yield (first, *rest)
