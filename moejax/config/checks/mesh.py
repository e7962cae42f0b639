"""Rules between the mesh and the sizes that its axes divide."""

import dataclasses
import math

from moejax.config.checks.machine import machine_memory
from moejax.config.checks.planned import is_planned, pinned
from moejax.config.checks.size import MIXERS, state_bytes
from moejax.config.checks.text import divisors_text, multiples, require
from moejax.config.compression import NO_COMPRESSION, build_compression, outer_codec
from moejax.config.fields import get_value
from moejax.config.parts import node_parts, sharing_counts
from moejax.config.pattern import block_kinds
from moejax.config.schema import Config, MeshConfig
from moejax.errors import InputError

AXES = ("stage", "replica", "fsdp", "expert", "tensor")


def resolve_mesh(
    cfg: Config, num_devices: int, platform: str, *, processes: int | None = None
) -> Config:
    """Returns `cfg` with replica axis and nodes known, for a mesh of exactly `num_devices` devices.

    Args:
      processes: number of processes that share the devices, if known.

    Raises:
      InputError: the axes do not multiply to `num_devices`, the batch does not divide by them, or
        the nodes do not fit the axes.
    """
    resolved = _fill_replica(cfg, num_devices, platform)
    check_batch(resolved)
    nodes = resolved.mesh.nodes or processes
    if nodes is not None:
        mesh = dataclasses.replace(resolved.mesh, nodes=nodes)
        resolved = dataclasses.replace(resolved, mesh=mesh)
        _check_nodes(resolved, num_devices)
    _check_context_axes(resolved.mesh)
    _check_slots(resolved)
    return resolved


def check_expert_axis(cfg: Config) -> None:
    """Checks that the number of experts divides by the devices that own them."""
    E, mesh = cfg.moe.num_experts, cfg.mesh
    folded, owners = mesh.expert_weights == "folded", expert_owners(mesh)
    axis = "expert x tensor axis (folded)" if folded else "expert axis"
    require(
        E % owners == 0,
        f"{E} experts on an {axis} of {owners}: choose {divisors_text(E)} or change "
        "moe.num_experts. The axis must divide the experts.",
    )


def expert_owners(mesh: MeshConfig) -> int:
    """Returns the number of devices that own the experts of a layer."""
    return mesh.expert * mesh.tensor if mesh.expert_weights == "folded" else mesh.expert


def _check_slots(cfg: Config) -> None:
    """Checks that each slot's copies come from another device: see `moe.copies.rings`."""
    mesh = cfg.mesh
    own = ("expert", "tensor") if mesh.expert_weights == "folded" else ("expert",)
    parts = node_parts({axis: getattr(mesh, axis) for axis in AXES}, mesh.nodes or 1)
    inside = math.prod(parts[axis][1] for axis in own)
    most = inside - 1 + expert_owners(mesh) // inside - 1
    require(
        cfg.moe.slots <= most,
        f"`moe.slots` = {cfg.moe.slots} needs as many other devices with experts, inside a node "
        f"or across nodes. There are {most}. Set fewer.",
    )


def _check_nodes(cfg: Config, num_devices: int) -> None:
    """Checks that nodes hold whole parts of the mesh, and that two-level routes have two levels."""
    mesh = cfg.mesh
    assert mesh.nodes is not None, "resolve_mesh fills it first"
    require(
        num_devices % mesh.nodes == 0,
        f"`mesh.nodes` = {mesh.nodes} does not divide {num_devices} devices. Nodes have equally "
        f"many. Choose {divisors_text(num_devices)}.",
    )
    require(
        mesh.nodes > 1 or build_compression(cfg.compression) == NO_COMPRESSION,
        "`compression` has no effect: all devices are on one node (`mesh.nodes` is 1), and nothing "
        "is compressed inside a node. Set mesh.nodes, or compression=none.",
    )
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    left, inside = num_devices // mesh.nodes, {}
    for axis, (across, inside[axis]) in node_parts(sizes, mesh.nodes).items():
        left //= inside[axis]
        require(
            across == 1 or left == 1,
            f"`mesh.{axis}` = {sizes[axis]} does not fit nodes of {num_devices // mesh.nodes} "
            f"devices: a node would hold {left} pieces of {inside[axis]}. Choose a mesh.{axis} "
            f"that is a multiple or a divisor of {left * inside[axis]}.",
        )
    require(
        mesh.gather_across == "flat"
        or any(inside[axis] < getattr(mesh, axis) for axis in ("fsdp", "expert")),
        f"`mesh.gather_across` = {mesh.gather_across} has no effect: every weight's shards lie "
        f"inside a node (`mesh.nodes` is {mesh.nodes}). Leave it at flat, or choose a mesh.fsdp or "
        "mesh.expert that spans nodes.",
    )
    if cfg.model.has_experts and cfg.route.startswith("two_level"):
        own = ("expert", "tensor") if mesh.expert_weights == "folded" else ("expert",)
        across = any(inside[axis] < getattr(mesh, axis) for axis in own)
        within = math.prod(inside[axis] for axis in own) > 1
        require(
            across and within,
            f"`route` = {cfg.route} needs experts on several nodes and on several devices of each. "
            f"`mesh.nodes` is {mesh.nodes}, and a node holds "
            f"{math.prod(inside[axis] for axis in own)} of {expert_owners(mesh)} owners of "
            "experts. Choose another mesh or route=split.",
        )


def check_tensor_axis(cfg: Config) -> None:
    """Checks that everything sharded over tensor divides by it."""
    model, moe, tensor = cfg.model, cfg.moe, cfg.mesh.tensor
    sizes: dict[str, int] = {}
    for mixer in dict.fromkeys(kind.mixer for kind in block_kinds(model)):
        heads = MIXERS[mixer].heads(model)
        sizes |= {f"model.{name}": size for name, size in heads.items()}
    sizes |= {
        "model.vocab_size": model.vocab_size,
        "data.sequence_length": cfg.data.sequence_length,
    }
    if model.has_dense_blocks:
        sizes["model.mlp_hidden"] = model.mlp_hidden
    if model.has_experts:
        if cfg.mesh.expert_weights == "hidden":
            sizes["moe.expert_hidden"] = moe.expert_hidden
        own = moe.shared_hidden is not None
        name = "moe.shared_hidden" if own else "moe.num_shared_experts x moe.expert_hidden"
        sizes[name] = moe.shared_width
    for name, size in sizes.items():
        require(
            size % tensor == 0,
            f"`{name}` = {size} is not divisible by `mesh.tensor` = {tensor}. Choose a tensor axis "
            f"of {divisors_text(math.gcd(*sizes.values()))}, or {multiples(size, tensor)} here.",
        )


def check_width(cfg: Config) -> None:
    """Checks that the width, and widths of latents, divide by the shards of dense weights.

    These are fsdp x expert. With stages they are stage x fsdp x expert, because the weights outside
    of stages are sharded over `stage` too.
    """
    model, mesh = cfg.model, cfg.mesh
    sizes = {"width": model.width, "q_latent": model.q_latent, "kv_latent": model.kv_latent}
    if model.linear.form == "kimi_delta":
        sizes["linear.value_width"] = model.linear.value_width
    sizes = {f"model.{name}": size for name, size in sizes.items()} | {"moe.latent": cfg.moe.latent}
    axes = ("stage", "fsdp", "expert") if mesh.stage > 1 else ("fsdp", "expert")
    shards = math.prod(getattr(mesh, axis) for axis in axes)
    names = " x ".join(f"mesh.{axis}" for axis in axes)
    product = " x ".join(str(getattr(mesh, axis)) for axis in axes)
    for name, size in sizes.items():
        require(
            size is None or size % shards == 0,
            f"`{name}` = {size} is not divisible by {names} = {product} = {shards}. Choose "
            f"{multiples(size or 0, shards)} for {name}, or smaller axes.",
        )


def check_context(cfg: Config) -> None:
    """Checks that the devices that share a sequence get equally many positions."""
    mesh, length = cfg.mesh, cfg.data.sequence_length
    if mesh.context == 1:
        return
    shared = mesh.fsdp * mesh.expert
    require(
        shared % mesh.context == 0,
        f"`mesh.context` = {mesh.context} does not divide mesh.fsdp x mesh.expert = {shared}, "
        f"whose devices share sequences. Choose {divisors_text(shared)}, or larger axes.",
    )
    pair = 2 * mesh.context * mesh.context_stripe
    require(
        length % pair == 0,
        f"`data.sequence_length` = {length} is not divisible by 2 x mesh.context x "
        f"mesh.context_stripe = {pair}. Each device has pairs of stripes. Choose "
        f"{multiples(length, pair)}, or a smaller mesh.context_stripe.",
    )
    require(
        mesh.context_exchange == "gather" or not cfg.model.is_latent,
        "`mesh.context_exchange` is ring and `model.attention` is latent. Latents are narrow, so "
        "that gathering them sends less. Set mesh.context_exchange=gather.",
    )
    reach = cfg.model.linear.convolution - 1
    require(
        not cfg.model.is_linear or reach <= mesh.context_stripe,
        f"`model.linear.convolution` sees {reach} positions back, and `mesh.context_stripe` is "
        f"{mesh.context_stripe}. A stripe gets them from the one before it. Choose at least "
        f"{reach} for mesh.context_stripe.",
    )
    own, ranks = length // mesh.context, mesh.tensor * mesh.stage
    require(
        own % ranks == 0,
        f"`mesh.context` = {mesh.context} leaves {own} of {length} positions to a device, which "
        f"mesh.tensor x mesh.stage = {ranks} do not divide. Choose a larger "
        "data.sequence_length, or smaller axes.",
    )
    require(
        mesh.stage_slices == 1,
        f"`mesh.stage_slices` is {mesh.stage_slices} and `mesh.context` is {mesh.context}. Both "
        "cut sequences. Set one of them to 1.",
    )
    require(
        mesh.stage == 1 or not cfg.model.predict_ahead,
        f"`model.predict_ahead` with `mesh.stage` = {mesh.stage} cuts sequences over the stages, "
        f"and `mesh.context` = {mesh.context} cuts them too. Set one of the three to its default.",
    )


def _check_context_axes(mesh: MeshConfig) -> None:
    """Checks that whole mesh axes share a sequence, after those that span nodes are split."""
    choices = sharing_counts({axis: getattr(mesh, axis) for axis in AXES}, mesh.nodes or 1)
    require(
        mesh.context in choices,
        f"`mesh.context` = {mesh.context} is no product of whole axes: the last of mesh.fsdp = "
        f"{mesh.fsdp} and mesh.expert = {mesh.expert}, each cut where a node ends. Choose one of "
        f"{', '.join(map(str, choices))}, or other axes.",
    )


def check_outer(cfg: Config) -> None:
    """Refuses what an outer loop across sites cannot be combined with."""
    if cfg.outer.every is None and not cfg.plan.sites:
        return
    outer_codec(cfg)
    if cfg.outer.every is None:
        return
    usual = (
        ("mesh.stage", 1, "Stages lie across sites in the order of the mesh."),
        ("lora.rank", "none", "Sites average all weights."),
        ("memory.optimizer", "device", "Sites keep what they train on their devices."),
        ("memory.experts", "device", "Sites keep what they train on their devices."),
    )
    for name, value, why in usual:
        found = get_value(cfg, name)
        require(
            found in (None, value),
            f"`{name}` is {found}, and `outer.every` is {cfg.outer.every}. {why} Set {name}="
            f"{value}, or outer.every=none.",
        )
    require(
        not is_planned(cfg) or cfg.plan.sites or "mesh.replica" in pinned(cfg),
        f"`outer.every` is {cfg.outer.every}, and the planner would choose the number of sites, "
        "which changes training. Set plan.sites=true, or mesh.replica to it.",
    )
    if cfg.outer.hub is not None:
        _check_hub(cfg)


def _check_hub(cfg: Config) -> None:
    """Checks what a site that is a run of its own needs."""
    outer, (host, _, port) = cfg.outer, (cfg.outer.hub or "").rpartition(":")
    require(
        bool(host) and port.isdecimal() and 0 < int(port) < 65536,
        f"`outer.hub` is {outer.hub}. It is where `moejax sites` listens. It must be HOST:PORT.",
    )
    require(
        not is_planned(cfg),
        "`outer.hub` is set, and the planner would choose the mesh, which sites must have alike. "
        "Set plan.mode=hand.",
    )
    require(
        outer.site < outer.sites,
        f"`outer.site` = {outer.site}, and `outer.sites` is {outer.sites}. Sites are numbered from "
        "zero. Choose a smaller outer.site, or raise outer.sites at all sites.",
    )
    require(
        outer.order == "layers",
        f"`outer.order` is {outer.order}, and `outer.hub` is set. Sites that are runs of their own "
        "send a part in each round. Set outer.order=layers, or outer.hub=none.",
    )


def check_batch(cfg: Config) -> None:
    """Checks that every device gets the same number of sequences in each micro-batch."""
    batch, micro = cfg.train.batch_sequences, cfg.train.micro_batches
    sizes = {f"mesh.{axis}": getattr(cfg.mesh, axis) for axis in ("replica", "fsdp", "expert")}
    sizes = {axis: size for axis, size in sizes.items() if size is not None}
    parts = math.prod(sizes.values()) // cfg.mesh.context * micro
    axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    axes += f" / mesh.context {cfg.mesh.context}" if cfg.mesh.context > 1 else ""
    require(
        batch % parts == 0,
        f"`train.batch_sequences` = {batch} is not divisible by {parts} = {axes} x "
        f"train.micro_batches {micro}. Choose {multiples(batch, parts)}.",
    )


def _fill_replica(cfg: Config, num_devices: int, platform: str) -> Config:
    mesh = cfg.mesh
    others = mesh.stage * mesh.fsdp * mesh.expert * mesh.tensor
    replica = mesh.replica if mesh.replica is not None else max(1, num_devices // others)
    needed = replica * others
    if needed != num_devices:
        raise InputError(_describe_misfit(cfg, num_devices, platform, needed))
    return dataclasses.replace(cfg, mesh=dataclasses.replace(mesh, replica=replica))


def _describe_misfit(cfg: Config, num_devices: int, platform: str, needed: int) -> str:
    mesh = cfg.mesh
    sizes = {axis: getattr(mesh, axis) for axis in AXES if axis != "stage" or mesh.stage > 1}
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size is not None)
    remedies = [
        f"choose axis sizes that multiply to {num_devices} (each one of "
        f"{divisors_text(num_devices)})"
    ]
    others = mesh.stage * mesh.fsdp * mesh.expert * mesh.tensor
    if mesh.replica is not None and num_devices % others == 0:
        remedies.append("set mesh.replica=none to use all")
    if platform == "cpu":
        multiple = others * math.ceil(num_devices / others) if mesh.replica is None else needed
        state = state_bytes(cfg)
        if state <= machine_memory():
            remedies.append(f"set mesh.simulated_devices={multiple}")
        else:
            remedies.append(
                f"start on {multiple} real devices (weights, optimizer state and gradients take "
                f"{state / 2**30:,.0f} GiB, this machine has {machine_memory() / 2**30:,.0f})"
            )
    wanted = f"a multiple of {others}" if mesh.replica is None else needed
    hint = ", or ".join(remedies)
    return (
        f"mesh {shown} needs {wanted} devices, found {num_devices} ({platform}). "
        f"{hint[0].upper()}{hint[1:]}."
    )
