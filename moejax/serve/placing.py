"""The devices and the mesh on which a checkpoint's model generates."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from jax.sharding import Mesh

from moejax.config.checks import resolve_mesh
from moejax.config.checks.mesh import check_expert_axis
from moejax.config.load import parse_overrides
from moejax.config.schema import Config, MeshConfig
from moejax.errors import InputError
from moejax.evaluate.checkpoint import Chosen, on_all_devices
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.runtime.processes import ALONE, Processes
from moejax.runtime.start import platform_of, start
from moejax.serve.programs import Programs, build_programs
from moejax.step.train_step import TrainStep
from moejax.train.records.summary import memory_limit

ROOM = 0.9  # of a device's memory that weights and cache may take where no call gathers weights

# Settings of the forward pass that generation decides by itself, and why.
DECIDED = {
    "moe.capacity_factor": "Experts take all tokens where texts are generated, so that no text "
    "depends on others",
    "model.scan_layers": "Texts are generated with each layer's weights apart",
}


class PlacedModel(NamedTuple):
    """The config, mesh and platform of a model on devices, and how they hold its weights."""

    cfg: Config  # with its mesh resolved
    mesh: Mesh
    platform: str
    gathered: bool = False  # as in `Layout`


def place_weights(
    placed: PlacedModel, processes: Processes, *, named: bool, beside: int = 0, **form: int
) -> tuple[PlacedModel, Programs]:
    """Returns a mesh for generation on the same devices, and the programs of a form there.

    A call for a few tokens would take longer to gather weights than to multiply by them. So the
    layout is the first of these whose weights and cache fit the devices; nothing is checked of the
    last, the given one:

      1. The given mesh. A device holds all that it would gather: whole dense weights, whole
         experts. Over fsdp, experts lie in copies.
      2. The same with experts over fsdp as well: their rows travel further.
      3. As the second, with dense weights sharded.

    Args:
      named: whether a user named the mesh, which then stays.
      beside: bytes that a device holds besides.
      form: arguments of `build_programs`.
    """
    limit = memory_limit(processes) * ROOM - beside
    for one in _layouts(placed, named):
        programs = build_programs(*one, **form)
        held = sum(programs.train_step.argument_bytes().values())
        if held + programs.bytes_beside_weights() <= limit:
            return one, programs
    return placed, build_programs(*placed, **form)


def _layouts(placed: PlacedModel, named: bool) -> Iterator[PlacedModel]:
    """Yields layouts in which calls gather less than in the given one."""
    cfg = placed.cfg
    # What comes from the host at each call comes in shards, and is gathered over faster links.
    if cfg.mesh.fsdp * cfg.mesh.expert == 1 or cfg.memory.experts == "host":
        return
    yield placed._replace(gathered=True)
    merged = replace(cfg.mesh, fsdp=1, expert=cfg.mesh.fsdp * cfg.mesh.expert)
    wider = replace(cfg, mesh=merged)
    if named or merged == cfg.mesh or not cfg.model.has_experts:
        return
    try:
        check_expert_axis(wider)
        wider = resolve_mesh(wider, placed.mesh.size, placed.platform)
    except InputError:  # the experts do not divide, or sequences are shared over fsdp alone
        return
    devices = placed.mesh.devices.flatten().tolist()
    other = PlacedModel(wider, build_mesh(build_layout(wider.mesh), devices), placed.platform)
    yield other._replace(gathered=True)
    yield other


def place(chosen: Chosen, processes: Processes = ALONE) -> PlacedModel:
    """Starts the devices. Returns the mesh of the run, or of all devices if it names no axis."""
    devices = start(chosen.cfg.mesh)
    platform = platform_of(devices)
    cfg = without_stages(on_all_devices(chosen.cfg, len(devices)))
    cfg = resolve_mesh(cfg, len(devices), platform, processes=processes.count)
    return PlacedModel(cfg, build_mesh(build_layout(cfg.mesh), devices), platform)


def place_beside(train_step: TrainStep, cfg: Config, processes: Processes) -> PlacedModel:
    """Returns the mesh of a model on the devices of a run that trains, in their order.

    Args:
      cfg: the run's for an evaluation.
    """
    assert isinstance(train_step.mesh, Mesh), "the step is only traced"
    devices, platform = train_step.mesh.devices.flatten().tolist(), train_step.platform
    cfg = resolve_mesh(without_stages(cfg), len(devices), platform, processes=processes.count)
    return PlacedModel(cfg, build_mesh(build_layout(cfg.mesh), devices), platform)


def without_stages(cfg: Config) -> Config:
    """Returns a config whose pipeline stages are shards: one token at a time fills no pipeline.

    Where shards share sequences, stages that become shards do too.
    """
    mesh, stages = cfg.mesh, cfg.mesh.stage
    usual = {
        name: getattr(MeshConfig(), name) for name in ("schedule", "stage_keeps", "stage_slices")
    }
    mesh = replace(mesh, stage=1, fsdp=mesh.fsdp * stages, **usual)
    if mesh.context > mesh.expert:  # shared over fsdp, of which whole axes count
        positions, rest = divmod(cfg.data.sequence_length, 2 * mesh.context * stages)
        stripe = math.gcd(positions, mesh.context_stripe)
        shared = {"context": mesh.context * stages, "context_stripe": stripe}
        alone = {name: getattr(MeshConfig(), name) for name in shared}
        mesh = replace(mesh, **(alone if rest else shared))
    train = replace(cfg.train, micro_batches=cfg.train.micro_batches // stages)
    return replace(cfg, mesh=mesh, train=train)


def check_expert_slots(cfg: Config, slots: int) -> None:
    """Refuses slots for experts that lie in the host's memory."""
    if slots and cfg.memory.experts == "host":
        raise InputError(
            f"no slots for experts on the host. Got {slots}, and `memory.experts` is host. Slots "
            "are for copies between devices. Set memory.experts=device, or leave slots out."
        )


def check_overrides(overrides: Iterable[str]) -> None:
    """Refuses settings of DECIDED."""
    for name in parse_overrides(overrides):
        if name in DECIDED:
            raise InputError(f"`{name}` has no effect. {DECIDED[name]}. Leave it out.")
