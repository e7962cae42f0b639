"""What a planner may choose: the parts of a plan, their values, and the config that they make.

A part whose setting is not at its default is pinned: somebody chose it. The rest is free.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moejax.config.checks import check, resolve_mesh
from moejax.config.checks.planned import CHOSEN, CODECS, EXCHANGE, MESH, REDUCTION
from moejax.config.compression import GRADIENTS, PRESETS
from moejax.config.fields import change, fields, get_value
from moejax.config.schema import Config, PlanConfig
from moejax.errors import InputError
from moejax.layout.route import ROUTES

# What a plan sets: all that a search chooses, and the preset that its codecs stand in for.
SETTINGS = (*CHOSEN, "compression.preset")
MOST_CHUNKS = 8
PIECES = (None, 2**20, 4 * 2**20, 30_000_000)  # bytes; 30 MB is Lina's
# From the least memory saved to the most, and from no recomputation to all.
REMATS = ("none", "dots", "collectives", "token_collectives", "full")


@dataclass(frozen=True)
class Limits:
    """What a search may do.

    Attributes:
      devices: to plan for.
      nodes: they are on.
      platform: "cpu", "gpu" or "tpu".
      codecs: the preset whose codecs may be taken, class by class: none, hybrid or strong.
      pinned: settings that stay.
    """

    devices: int
    nodes: int
    platform: str
    codecs: str = "none"
    pinned: frozenset[str] = frozenset()

    def free(self, name: str) -> bool:
        """Whether a setting may be chosen."""
        return name not in self.pinned


def resolve(cfg: Config, limits: Limits) -> Config | None:
    """Returns the config on the devices of a search, or None if it breaks a rule."""
    mesh = dataclasses.replace(cfg.mesh, nodes=limits.nodes, simulated_devices=None)
    try:
        cfg = dataclasses.replace(cfg, mesh=mesh, plan=PlanConfig(mode="hand"))
        check(cfg)
        return resolve_mesh(cfg, limits.devices, limits.platform)
    except InputError:
        return None


def meshes(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Every way to spread the model over the devices, with the plainest route."""
    for sizes in _factorings(limits.devices, 4):
        values: dict[str, Any] = dict(zip(MESH, sizes, strict=True))
        # A replica axis that is left open is what the others leave.
        fixed = [n for n in MESH if not limits.free(n) and get_value(cfg, n) is not None]
        if any(get_value(cfg, name) != values[name] for name in fixed):
            continue
        tensor, experts = values["mesh.tensor"], cfg.model.has_experts
        layouts = ("sequence", "replicated") if tensor > 1 else ("sequence",)
        weights = ("hidden", "folded", "whole") if tensor > 1 and experts else ("hidden",)
        for activations in _values(cfg, limits, "mesh.activations", layouts):
            for kind in _values(cfg, limits, "mesh.expert_weights", weights):
                own = {"mesh.activations": activations, "mesh.expert_weights": kind}
                found = resolve(_plain_exchange(change(cfg, values | own), limits), limits)
                if found is not None:
                    yield found


def _plain_exchange(cfg: Config, limits: Limits) -> Config:
    """The plainest exchange that the pins allow; a mesh without one has its settings at rest."""
    owners = cfg.mesh.expert * (cfg.mesh.tensor if cfg.mesh.expert_weights == "folded" else 1)
    free = [name for name in EXCHANGE if limits.free(name)]
    defaults = {name: fields()[name].default for name in (EXCHANGE if owners == 1 else free)}
    return change(cfg, defaults)


def exchanges(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Every route on a mesh, the most elaborate first, and chunks as they are."""
    if not cfg.model.has_experts:
        return
    for route in _values(cfg, limits, "route", tuple(reversed(ROUTES))):
        found = resolve(change(cfg, {"route": route}), limits)
        if found is not None and found != cfg:
            yield found


def more_chunks(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Twice the chunks: both ways, forward alone, backward alone."""
    if not cfg.model.has_experts:
        return
    ahead, back = cfg.route_chunks, cfg.route_chunks_backward or cfg.route_chunks
    seen = {cfg}
    for chunks, behind in ((2 * ahead, 2 * back), (2 * ahead, back), (ahead, 2 * back)):
        if max(chunks, behind) > MOST_CHUNKS or not (
            limits.free("route_chunks") or chunks == ahead
        ):
            continue
        values: dict[str, Any] = {"route_chunks": chunks}
        if limits.free("route_chunks_backward"):
            values["route_chunks_backward"] = None if behind == chunks else behind
        found = resolve(change(cfg, values), limits)
        if found is not None and found not in seen:
            seen.add(found)
            yield found


def codecs(cfg: Config, limits: Limits) -> Iterator[Config]:
    """The codecs of the allowed preset: all together, gradients alone, tokens alone, each alone."""
    allowed = {f"compression.{k}": codec for k, codec in PRESETS[limits.codecs].items()}
    allowed = {name: codec for name, codec in allowed.items() if limits.free(name)}
    gradients = [name for name in allowed if name.rpartition(".")[2] in GRADIENTS]
    groups = [list(allowed), gradients, [name for name in allowed if name not in gradients]]
    groups += [[name] for name in allowed]
    seen: list[list[str]] = []
    for group in groups:
        if group and group not in seen:
            seen.append(group)
            found = resolve(change(cfg, {name: allowed[name] for name in group}), limits)
            if found is not None:
                yield found


def without_codecs(cfg: Config, limits: Limits) -> Config:
    """The same with those codecs at rest that may be chosen."""
    return change(cfg, {n: fields()[n].default for n in CODECS if limits.free(n)})


def pieces(cfg: Config, limits: Limits) -> Iterator[Config]:
    """Sizes of the pieces in which gradients are reduced."""
    for size in _values(cfg, limits, "train.reduction_bytes", PIECES):
        found = resolve(change(cfg, {"train.reduction_bytes": size}), limits)
        if found is not None and found != cfg:
            yield found


def lighter(cfg: Config, limits: Limits) -> Iterator[Config]:
    """The same plan with less memory: more recomputed, more micro-batches; least change first.

    Not resolved, which takes longer than all else here: most are only estimated.
    """
    ranks = cfg.mesh.fsdp * cfg.mesh.expert * (cfg.mesh.replica or 1)
    rows = max(1, cfg.train.batch_sequences // ranks)
    micro = [n for n in divisors(rows) if n >= cfg.train.micro_batches]
    for parts in _values(cfg, limits, "train.micro_batches", tuple(micro)):
        at = REMATS.index(cfg.model.remat)
        for remat in _values(cfg, limits, "model.remat", REMATS[at:]):
            found = change(cfg, {"train.micro_batches": parts, "model.remat": remat})
            if found != cfg:
                yield found


def baseline(cfg: Config, limits: Limits) -> Config | None:
    """What people take who do not plan: experts over all devices that divide them, flat, no codec.

    As DeepSpeed lays it out: expert parallelism across nodes, data parallelism for the rest.
    """
    expert = math.gcd(cfg.moe.num_experts, limits.devices) if cfg.model.has_experts else 1
    sizes = (limits.devices // expert, 1, expert, 1)
    values = dict(zip(MESH, sizes, strict=True)) | {"compression.preset": "none"}
    values |= {name: fields()[name].default for name in (*EXCHANGE, *REDUCTION, *CODECS)}
    values |= {"mesh.activations": "sequence", "mesh.expert_weights": "hidden"}
    return resolve(change(cfg, values), limits)


def plan_of(cfg: Config) -> dict[str, Any]:
    """The settings that make a plan, by name."""
    return {name: get_value(cfg, name) for name in SETTINGS}


def divisors(number: int) -> list[int]:
    """Smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _values(cfg: Config, limits: Limits, name: str, choices: tuple) -> tuple:
    """What a setting may be: all choices, or what it is."""
    return choices if limits.free(name) else (get_value(cfg, name),)


def _factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every ordered way to write a number as a product of so many."""
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in _factorings(number // first, parts - 1):
            yield (first, *rest)
