"""Chooses the implementation of each operation by platform and shape, and says why."""

import importlib.util
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh

from moejax.compression import build_compression
from moejax.config import Config
from moejax.errors import InputError

HOPPER = "9.0"


@dataclass(frozen=True)
class Place:
    """What a program is compiled for.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      capability: CUDA's compute capability; None where it is not known, as of a mesh that has no
        devices: it is then taken for that of Hopper.
    """

    platform: str
    capability: str | None = None


@dataclass(frozen=True)
class Choice:
    """An implementation, the reason it was taken, and why kernels that come before it were not."""

    implementation: str
    reason: str
    declined: tuple[tuple[str, str], ...] = ()  # implementation, reason


def place_of(mesh: Mesh | AbstractMesh, platform: str) -> Place:
    """What a mesh's devices are; all are alike."""
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
    return Place(platform, getattr(device, "compute_capability", None))


def select_kernels(cfg: Config, place: Place) -> dict[str, Choice]:
    """Returns the choice for each operation that a run has.

    Raises:
      InputError: if a kernel declines that the config names, or any does and `kernels` is
        "required".
    """
    model, found = cfg.model, {}
    found["attention"] = select_attention(place.platform, model.dtype)
    if model.has_experts:
        found["experts"] = select_experts(
            place,
            cfg.moe.implementation,
            dtype=model.dtype,
            width=model.width,
            hidden=cfg.moe.expert_hidden // (cfg.mesh.tensor if _hidden_is_cut(cfg) else 1),
        )
    policy = build_compression(cfg.compression)
    specs = [spec for _, codecs in policy.stages for spec in vars(codecs).values() if spec]
    if specs:
        stochastic = any(spec.stochastic for spec in specs)
        found["quantize"] = select_quantize(
            place, block=cfg.compression.block, stochastic=stochastic
        )
    if cfg.kernels == "required":
        _require(found)
    return found


def _hidden_is_cut(cfg: Config) -> bool:
    return cfg.mesh.expert_weights == "hidden"


def _require(found: dict[str, Choice]) -> None:
    for operation, choice in found.items():
        for name, reason in choice.declined:
            raise InputError(
                f"`kernels` is required, but {name} declines {operation}: {reason}. Set "
                f"kernels=auto to take {choice.implementation}."
            )


def select_experts(place: Place, requested: str, *, dtype: str, width: int, hidden: int) -> Choice:
    """Returns the implementation of `expert_mlp`.

    Args:
      requested: `moe.implementation`.
      width, hidden: D, and F on one device.
    """
    why_not = _products_decline(place, dtype, width, hidden)
    if requested == "tokamax" and importlib.util.find_spec("tokamax") is None:
        why_not = "it is not installed. Install moejax[kernels]"
    if requested != "auto":
        if requested in ("mosaic", "tokamax") and why_not is not None:
            raise InputError(
                f"`moe.implementation` is {requested}, which declines: {why_not}. Choose auto."
            )
        return Choice(requested, "named in moe.implementation")
    if why_not is None:
        return Choice("mosaic", "bfloat16 on Hopper: products of groups on its matrix units")
    declined = (("mosaic", why_not),)
    if place.platform == "tpu":
        # The kernel of that platform: nothing is missing.
        return Choice("ragged_dot", "TPU lowers ragged_dot to a grouped kernel")
    reason = f"ragged_dot multiplies every row by every expert on {place.platform}"
    return Choice("blocked", reason, declined)


def select_quantize(place: Place, *, block: int, stochastic: bool = False) -> Choice:
    """Returns the implementation of `kernels.quantize`.

    Args:
      stochastic: whether something is rounded at random.
    """
    why_not = _mosaic_declines(place)
    if why_not is None and block not in (32, 64, 128, 256):
        why_not = f"blocks of {block} fill no tile. It takes 32, 64, 128 or 256"
    if why_not is not None:
        return Choice("reference", "plain JAX runs everywhere", (("mosaic", why_not),))
    taken = "one pass over memory each way"
    if stochastic:
        why_not = "rounding at random draws from jax.random, outside of it; it decodes all the same"
        return Choice("mosaic", taken, (("mosaic", why_not),))
    return Choice("mosaic", taken)


def select_attention(platform: str, dtype: str) -> Choice:
    """Returns the implementation of `kernels.attention`."""
    if platform == "gpu" and dtype == "bfloat16":
        return Choice("cudnn", "cuDNN's fused attention takes bfloat16 on GPU")
    why_not = f"cuDNN's fused attention does not run {dtype} on {platform}"
    return Choice("blocked", why_not, (("cudnn", why_not),))


def _mosaic_declines(place: Place) -> str | None:
    """Why no kernel of ours for Hopper runs; None if they do."""
    if place.platform != "gpu":
        return f"it is for GPUs, this is {place.platform}"
    if place.capability not in (None, HOPPER):
        return f"it is for Hopper (compute capability {HOPPER}), this is {place.capability}"
    if jax.__version_info__ < (0, 11):
        return f"it needs JAX 0.11, this is {jax.__version__}"
    return None


def _products_decline(place: Place, dtype: str, width: int, hidden: int) -> str | None:
    why_not = _mosaic_declines(place)
    if why_not is None and dtype != "bfloat16":
        why_not = f"it multiplies bfloat16, this is {dtype}"
    if why_not is None and (width % 64 or hidden % 64):
        why_not = f"width {width} and hidden width {hidden} must be multiples of 64"
    return why_not
