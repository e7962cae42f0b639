"""Every rule between settings, checked before any device is touched.

`check` is for a config as it was written; `resolve_mesh` follows once the number of devices is
known. Neither imports JAX. The rules on single values live with the fields in `moejax.config`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

from moejax.compression import NO_COMPRESSION, build_compression
from moejax.config import Config, MeshConfig, ModelConfig
from moejax.errors import InputError
from moejax.fields import fields, get_value, short

AXES = ("replica", "fsdp", "expert", "tensor")
ROUTE_SETTINGS = ("route", "route_chunks", "route_chunks_backward", "route_trim")


def check(cfg: Config) -> None:
    """Raises InputError at the first rule between settings that `cfg` breaks."""
    _check_effects(cfg)
    _check_paths(cfg)
    _check_model(cfg)
    _check_data(cfg)
    _check_training(cfg)
    if has_experts(cfg.model):
        _check_experts(cfg)
        _check_groups(cfg)
        _check_expert_axis(cfg)
        _check_route(cfg)
    _check_compression(cfg)
    _check_tensor_axis(cfg)
    _check_width(cfg)
    _check_batch(cfg)
    if cfg.mesh.simulated_devices is not None:
        resolve_mesh(cfg, cfg.mesh.simulated_devices, "cpu")


def resolve_mesh(
    cfg: Config, num_devices: int, platform: str, *, processes: int | None = None
) -> Config:
    """Returns `cfg` with replica axis and nodes known, for a mesh of exactly `num_devices` devices.

    Args:
      processes: how many share the devices, if that is known already.

    Raises:
      InputError: the axes do not multiply to `num_devices`, the batch does not divide by them, or
        the nodes do not fit the axes.
    """
    resolved = _fill_replica(cfg, num_devices, platform)
    _check_batch(resolved)
    nodes = resolved.mesh.nodes or processes
    if nodes is None:
        return resolved
    resolved = dataclasses.replace(resolved, mesh=dataclasses.replace(resolved.mesh, nodes=nodes))
    _check_nodes(resolved, num_devices)
    return resolved


def has_experts(model: ModelConfig) -> bool:
    """Whether any block has experts."""
    return model.moe_every is not None


def has_dense_blocks(model: ModelConfig) -> bool:
    """Whether any block has a dense MLP."""
    return model.moe_every != 1 or model.first_dense_layers > 0


# A rule on settings that do nothing: the settings (a name or the start of names), whether `cfg`
# uses them, and why not when it does not.
_Effect = tuple[tuple[str, ...], Callable[[Config], bool], str]


def _effects() -> Iterator[_Effect]:
    yield (
        ("moe.", "model.first_dense_layers", "mesh.expert_weights", "mesh.expert", *ROUTE_SETTINGS),
        lambda cfg: has_experts(cfg.model),
        "`model.moe_every` is none, so no block has experts",
    )
    yield (
        ("model.mlp_hidden",),
        lambda cfg: has_dense_blocks(cfg.model),
        "every block has experts (`model.moe_every` is 1, `model.first_dense_layers` is 0)",
    )
    yield (
        ("mesh.expert_weights", "mesh.activations"),
        lambda cfg: cfg.mesh.tensor > 1,
        "`mesh.tensor` is 1",
    )
    yield (
        ("route_chunks", "route_chunks_backward", "route_trim"),
        lambda cfg: _owners(cfg.mesh) > 1 or cfg.route == "spread",
        "one device owns all experts, so nothing is exchanged",
    )
    yield (
        ("compression.block",),
        lambda cfg: build_compression(cfg.compression) != NO_COMPRESSION,
        "`compression` is none",
    )
    yield (
        ("moe.router.groups_per_token",),
        lambda cfg: cfg.moe.router.num_groups > 1,
        "`moe.router.num_groups` is 1",
    )
    yield from _rope_effects()
    yield from _training_effects()


def _rope_effects() -> Iterator[_Effect]:
    scaled = {
        ("model.rope.factor",): ("linear", "llama3", "yarn"),
        ("model.rope.trained_length",): ("llama3", "yarn"),
        ("model.rope.low_frequency_factor", "model.rope.high_frequency_factor"): ("llama3",),
        ("model.rope.beta_fast", "model.rope.beta_slow"): ("yarn",),
    }
    for names, scalings in scaled.items():
        yield (
            names,
            lambda cfg, scalings=scalings: cfg.model.rope.scaling in scalings,
            f"only `model.rope.scaling` {' or '.join(scalings)} reads it",
        )
    yield (
        ("model.rope.scaling",),
        lambda cfg: cfg.model.rope.factor > 1,
        "`model.rope.factor` is 1, which stretches nothing",
    )


def _training_effects() -> Iterator[_Effect]:
    yield (
        ("optimizer.muon_",),
        lambda cfg: cfg.optimizer.name == "muon",
        "`optimizer.name` is not muon",
    )
    yield (
        ("optimizer.final_fraction",),
        lambda cfg: cfg.optimizer.schedule != "constant",
        "`optimizer.schedule` is constant",
    )
    yield (
        ("data.train_files", "data.eval_files"),
        lambda cfg: cfg.data.source != "stdlib",
        "`data.source` is stdlib, which reads the text of Python's own library",
    )
    yield (
        ("train.eval_every", "train.eval_batches"),
        lambda cfg: cfg.data.source == "stdlib" or bool(cfg.data.eval_files),
        "`data.eval_files` is empty, so nothing is evaluated",
    )
    yield (
        ("train.sample_prompt",),
        lambda cfg: cfg.train.sample_tokens > 0,
        "`train.sample_tokens` is 0",
    )
    yield (
        ("mesh.simulated_devices",),
        lambda cfg: cfg.mesh.platform in (None, "cpu"),
        "only CPU devices are simulated; set `mesh.platform` to cpu",
    )


def _check_effects(cfg: Config) -> None:
    """Refuses settings that were changed and then ignored: the user meant something by them."""
    for names, used, reason in _effects():
        if used(cfg):
            continue
        for field in fields().values():
            value = get_value(cfg, field.name)
            named = field.name in names or field.name.startswith(
                tuple(name for name in names if name.endswith((".", "_")))
            )
            if named and value != field.default:
                raise InputError(
                    f"`{field.name}` = {short(value)} has no effect: {reason}. "
                    f"Leave it at {short(field.default)} or change the other setting."
                )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)


def _check_paths(cfg: Config) -> None:
    named = {
        "run_dir": (cfg.run_dir,),
        "checkpoint.init_from": (cfg.checkpoint.init_from,),
        "data.train_files": cfg.data.train_files,
        "data.eval_files": cfg.data.eval_files,
    }
    for name, paths in named.items():
        for path in paths:
            _require(
                path is None or (path.strip() != "" and "\0" not in path),
                f"`{name}` has {short(path)}. A path is not empty and has no null byte. "
                "Name a file or directory.",
            )


def _check_model(cfg: Config) -> None:
    model, rope = cfg.model, cfg.model.rope
    _require(
        model.num_heads % model.num_kv_heads == 0,
        f"`model.num_heads` = {model.num_heads} is not a multiple of `model.num_kv_heads` = "
        f"{model.num_kv_heads}. Choose {_divisors(model.num_heads)} for model.num_kv_heads.",
    )
    _require(
        model.head_width % 2 == 0,
        f"`model.head_width` = {model.head_width} is odd. Rotary positions turn pairs of channels. "
        f"Choose {model.head_width - 1} or {model.head_width + 1}.",
    )
    if model.moe_every is not None:
        rest = model.num_layers - model.first_dense_layers
        _require(
            rest >= 1,
            f"`model.first_dense_layers` = {model.first_dense_layers} leaves none of "
            f"{model.num_layers} layers for experts. It must be below `model.num_layers`; set "
            "model.moe_every=none for a dense model.",
        )
        _require(
            model.moe_every <= rest,
            f"`model.moe_every` = {model.moe_every} leaves no block with experts. It must be at "
            f"most num_layers - first_dense_layers = {rest}; set none for a dense model.",
        )
    pairs = {"llama3": ("low_frequency_factor", "high_frequency_factor")}
    pairs["yarn"] = ("beta_slow", "beta_fast")
    if rope.scaling in pairs:
        low, high = pairs[rope.scaling]
        _require(
            getattr(rope, low) < getattr(rope, high),
            f"`model.rope.{low}` = {getattr(rope, low)} must be below `model.rope.{high}` = "
            f"{getattr(rope, high)}. Lower the first or raise the second.",
        )


def _check_data(cfg: Config) -> None:
    if cfg.data.source == "stdlib":
        _require(
            cfg.model.vocab_size >= 257,
            f"`model.vocab_size` = {cfg.model.vocab_size} is too small for `data.source` stdlib: "
            "256 bytes and the end of a document need at least 257. Set model.vocab_size=264.",
        )
    else:
        _require(
            len(cfg.data.train_files) > 0,
            f"`data.train_files` is empty, but `data.source` is {cfg.data.source}. Name token "
            "files or globs, or set data.source=stdlib.",
        )


def _check_training(cfg: Config) -> None:
    optimizer, train = cfg.optimizer, cfg.train
    _require(
        optimizer.warmup_steps <= train.num_steps,
        f"`optimizer.warmup_steps` = {optimizer.warmup_steps} is more than `train.num_steps` = "
        f"{train.num_steps}. Lower the warm-up or train longer.",
    )
    for name in ("beta1", "beta2", "muon_momentum"):
        _require(
            getattr(optimizer, name) < 1,
            f"`optimizer.{name}` = {getattr(optimizer, name)} must be below 1: an average that "
            "never forgets never learns. Choose 0.9 to 0.999.",
        )
    _require(
        train.seed < 2**32,
        f"`train.seed` = {train.seed} does not fit in 32 bits, so JAX would cut it. Choose a seed "
        "below 4294967296.",
    )


def _check_experts(cfg: Config) -> None:
    moe = cfg.moe
    _require(
        moe.experts_per_token <= moe.num_experts,
        f"`moe.experts_per_token` = {moe.experts_per_token} is more than `moe.num_experts` = "
        f"{moe.num_experts}. Lower the first or raise the second.",
    )


def _check_groups(cfg: Config) -> None:
    E, K, router = cfg.moe.num_experts, cfg.moe.experts_per_token, cfg.moe.router
    G, chosen = router.num_groups, router.groups_per_token
    if G == 1:
        return
    _require(
        E % G == 0,
        f"`moe.num_experts` = {E} is not a multiple of `moe.router.num_groups` = {G}. "
        f"Choose {_divisors(E)} groups.",
    )
    _require(
        chosen <= G,
        f"`moe.router.groups_per_token` = {chosen} is more than `moe.router.num_groups` = {G}. "
        "Lower the first or raise the second.",
    )
    _require(
        chosen * (E // G) >= K,
        f"`moe.experts_per_token` = {K} is more than the {chosen * (E // G)} experts that a token "
        f"can reach: `moe.router.groups_per_token` = {chosen} times {E // G} experts a group. "
        "Raise the second or lower the first.",
    )
    _require(
        router.score != "sigmoid" or E // G >= 2,
        f"`moe.router.num_groups` = {G} leaves one expert in a group of {E}. With sigmoid scores "
        f"a group counts by its two best experts. Choose at most {E // 2} groups.",
    )


def _check_expert_axis(cfg: Config) -> None:
    E, mesh = cfg.moe.num_experts, cfg.mesh
    folded, owners = mesh.expert_weights == "folded", _owners(mesh)
    axis = "expert x tensor axis (folded)" if folded else "expert axis"
    _require(
        E % owners == 0,
        f"{E} experts on an {axis} of {owners}: choose {_divisors(E)} or change "
        "moe.num_experts. The axis must divide the experts.",
    )


def _owners(mesh: MeshConfig) -> int:
    """Devices that the experts of a layer are spread over."""
    return mesh.expert * mesh.tensor if mesh.expert_weights == "folded" else mesh.expert


def _chunks(cfg: Config) -> tuple[int, int]:
    return cfg.route_chunks, cfg.route_chunks_backward or cfg.route_chunks


def _check_route(cfg: Config) -> None:
    mesh, route = cfg.mesh, cfg.route
    if route in ("duplicate", "spread", "gather_home"):
        _require(
            mesh.tensor > 1 and mesh.expert_weights == "hidden",
            f"`route` = {route} is for experts whose hidden width is sharded. `mesh.tensor` is "
            f"{mesh.tensor}, `mesh.expert_weights` is {mesh.expert_weights}. Choose split, or a "
            "tensor axis above 1 and hidden.",
        )
    _require(
        not cfg.route_trim or (route != "gather_home" and _chunks(cfg) == (1, 1)),
        f"`route_trim` sends each bucket in one piece. `route` is {route} with "
        f"{' and '.join(map(str, _chunks(cfg)))} chunks, which cuts it. Leave `route_trim` off, or "
        "choose one chunk and another route than gather_home.",
    )
    if route in ("merge", "two_level_merge"):
        plain = "split" if route == "merge" else "two_level"
        _require(
            cfg.moe.experts_per_token > 1,
            f"`route` = {route} merges a token's copies. `moe.experts_per_token` is 1, so there is "
            f"one. Choose {plain}.",
        )


def _check_compression(cfg: Config) -> None:
    """Codecs are codecs, and blocks pack into words."""
    build_compression(cfg.compression)
    _require(
        cfg.compression.block % 4 == 0,
        f"`compression.block` is {cfg.compression.block}. It must be a multiple of 4.",
    )


def _check_nodes(cfg: Config, num_devices: int) -> None:
    """Nodes hold whole pieces of the mesh; two levels need experts across and inside them."""
    mesh = cfg.mesh
    assert mesh.nodes is not None, "resolve_mesh fills it first"
    _require(
        num_devices % mesh.nodes == 0,
        f"`mesh.nodes` = {mesh.nodes} does not divide {num_devices} devices. Nodes have equally "
        f"many. Choose {_divisors(num_devices)}.",
    )
    _require(
        mesh.nodes > 1 or build_compression(cfg.compression) == NO_COMPRESSION,
        "`compression` has no effect: all devices are on one node (`mesh.nodes` is 1), and nothing "
        "is compressed inside a node. Set mesh.nodes, or compression=none.",
    )
    room, inside = num_devices // mesh.nodes, {}
    for axis in reversed(AXES):
        size = getattr(mesh, axis)
        inside[axis] = math.gcd(size, room)
        room //= inside[axis]
        _require(
            inside[axis] == size or room == 1,
            f"`mesh.{axis}` = {size} does not fit nodes of {num_devices // mesh.nodes} devices: a "
            f"node would hold {room} pieces of {inside[axis]}. Choose a mesh.{axis} that is a "
            f"multiple or a divisor of {room * inside[axis]}.",
        )
    if has_experts(cfg.model) and cfg.route.startswith("two_level"):
        own = ("expert", "tensor") if mesh.expert_weights == "folded" else ("expert",)
        across = any(inside[axis] < getattr(mesh, axis) for axis in own)
        within = math.prod(inside[axis] for axis in own) > 1
        _require(
            across and within,
            f"`route` = {cfg.route} needs experts on several nodes and on several devices of each. "
            f"`mesh.nodes` is {mesh.nodes}, and a node holds "
            f"{math.prod(inside[axis] for axis in own)} of {_owners(mesh)} owners of experts. "
            "Choose another mesh or route=split.",
        )


def _check_tensor_axis(cfg: Config) -> None:
    """Everything that is cut in `mesh.tensor` parts must divide by it."""
    model, moe, tensor = cfg.model, cfg.moe, cfg.mesh.tensor
    sizes = {
        "model.num_heads": model.num_heads,
        "model.num_kv_heads": model.num_kv_heads,
        "model.vocab_size": model.vocab_size,
        "data.sequence_length": cfg.data.sequence_length,
    }
    if has_dense_blocks(model):
        sizes["model.mlp_hidden"] = model.mlp_hidden
    if has_experts(model):
        if cfg.mesh.expert_weights == "hidden":
            sizes["moe.expert_hidden"] = moe.expert_hidden
        shared = moe.num_shared_experts * moe.expert_hidden
        sizes["moe.num_shared_experts x moe.expert_hidden"] = shared
    for name, size in sizes.items():
        _require(
            size % tensor == 0,
            f"`{name}` = {size} is not divisible by `mesh.tensor` = {tensor}. Choose a tensor axis "
            f"of {_divisors(math.gcd(*sizes.values()))}, or {_multiples(size, tensor)} here.",
        )


def _check_width(cfg: Config) -> None:
    """Dense weights spread their width over fsdp x expert; expert weights over fsdp alone."""
    width, fsdp, expert = cfg.model.width, cfg.mesh.fsdp, cfg.mesh.expert
    _require(
        width % (fsdp * expert) == 0,
        f"`model.width` = {width} is not divisible by mesh.fsdp x mesh.expert = {fsdp} x {expert} "
        f"= {fsdp * expert}. Choose {_multiples(width, fsdp * expert)} for model.width, or smaller "
        "axes.",
    )


def _check_batch(cfg: Config) -> None:
    """Every device needs the same whole number of sequences, in each micro-batch."""
    mesh, batch = cfg.mesh, cfg.train.batch_sequences
    if mesh.replica is None:
        parts = mesh.fsdp * mesh.expert * cfg.train.micro_batches
        axes = f"mesh.fsdp {mesh.fsdp} x mesh.expert {mesh.expert}"
    else:
        parts = mesh.replica * mesh.fsdp * mesh.expert * cfg.train.micro_batches
        axes = f"mesh.replica {mesh.replica} x mesh.fsdp {mesh.fsdp} x mesh.expert {mesh.expert}"
    _require(
        batch % parts == 0,
        f"`train.batch_sequences` = {batch} is not divisible by {parts} = {axes} x "
        f"train.micro_batches {cfg.train.micro_batches}. Choose {_multiples(batch, parts)}.",
    )


def _fill_replica(cfg: Config, num_devices: int, platform: str) -> Config:
    mesh = cfg.mesh
    others = mesh.fsdp * mesh.expert * mesh.tensor
    replica = mesh.replica if mesh.replica is not None else max(1, num_devices // others)
    needed = replica * others
    if needed != num_devices:
        raise InputError(_describe_misfit(mesh, num_devices, platform, needed))
    return dataclasses.replace(cfg, mesh=dataclasses.replace(mesh, replica=replica))


def _describe_misfit(mesh: MeshConfig, num_devices: int, platform: str, needed: int) -> str:
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size is not None)
    ways = [
        f"choose axis sizes that multiply to {num_devices} (each one of {_divisors(num_devices)})"
    ]
    others = mesh.fsdp * mesh.expert * mesh.tensor
    if mesh.replica is not None and num_devices % others == 0:
        ways.append("set mesh.replica=none to use all")
    if platform == "cpu":
        multiple = others * math.ceil(num_devices / others) if mesh.replica is None else needed
        ways.append(f"set mesh.simulated_devices={multiple}")
    verb = "needs a multiple of" if mesh.replica is None else "needs"
    count = others if mesh.replica is None else needed
    hint = ", or ".join(ways)
    return (
        f"mesh {shown} {verb} {count} devices, found {num_devices} ({platform}). "
        f"{hint[0].upper()}{hint[1:]}."
    )


def _divisors(n: int) -> str:
    """The divisors of `n` as a list in words; of many, the smallest ones and `n`."""
    # Sizes have no upper bound, so only small candidates are tried.
    small = [d for d in range(1, min(n, 4096) + 1) if n % d == 0][:12]
    return ", ".join(map(str, small if small[-1] == n else [*small, n]))


def _multiples(n: int, step: int) -> str:
    """The multiples of `step` on either side of `n`, in words."""
    below = n // step * step
    return f"{below} or {below + step}" if below else f"{below + step}"
