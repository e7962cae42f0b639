"""Chooses the implementation of each operation by platform and shape, and says why."""

import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from moejax.config.compression import BLOCKS, TOKENS, build_compression
from moejax.config.pattern import settings_of
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.kernels.attention import splash
from moejax.kernels.attention.tokamax import INSTALLED
from moejax.kernels.formats import TILE

HOPPER = "9.0"
# Largest mask of cuDNN's attention on a device, two bytes for each pair of positions; above it
# our own attention, which needs no mask, is selected.
MASK_BYTES = 2**30
SHARED_BYTES = 227 * 1024  # shared memory of a thread block on Hopper


@dataclass(frozen=True)
class Hardware:
    """The hardware that a program is compiled for.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      capability: CUDA's compute capability; None if unknown, as for a mesh without devices: then
        Hopper is assumed.
    """

    platform: str
    capability: str | None = None


@dataclass(frozen=True)
class Choice:
    """An implementation, the reason for it, and why preferred kernels were declined."""

    implementation: str
    reason: str
    declined: tuple[tuple[str, str], ...] = ()  # implementation, reason


def select_splash(
    dtype: str, width: int, value_width: int, length: int, window: int | None
) -> Choice:
    """Returns the choice of attention on TPUs, of whole sequences or parts of them.

    Args:
      length: of whole sequences.
      window: `model.sliding_window`.
    """
    why_not = None
    if dtype != "bfloat16":
        why_not = f"it takes bfloat16, this is {dtype}"
    elif window is not None and not splash.fits(length, min(window, length)):
        why_not = f"it takes no window of {window} among {length} keys"
    elif wrong := [size for size in (width, value_width) if size % 8 or size > 256]:
        why_not = f"heads are {wrong[0]} wide. It takes multiples of 8 up to 256"
    if why_not is not None:
        return Choice("blocked", "attention of our own runs everywhere", (("splash", why_not),))
    return Choice("splash", "JAX's splash kernel, which takes ranges of keys: no mask is made")


def select_tpu_experts(dtype: str, width: int, hidden: int) -> Choice:
    """Returns the choice of `expert_mlp` on TPUs."""
    why_not = megablox_declines(Hardware("tpu"), dtype, width, hidden)
    if why_not is None:
        return Choice("megablox", "bfloat16 on TPU: products of groups in tiles that fit them")
    reason = "XLA lowers it to a grouped kernel on TPU, with tiles of its own"
    return Choice("ragged_dot", reason, (("megablox", why_not),))


def megablox_declines(hardware: Hardware, dtype: str, width: int, hidden: int) -> str | None:
    """Returns why megablox does not run; None if it does."""
    if hardware.platform != "tpu":
        return f"it is for TPUs, this is {hardware.platform}"
    if dtype != "bfloat16":
        return f"it is taken for bfloat16, this is {dtype}"
    if width % splash.LANES or hidden % splash.LANES:
        return f"width {width} and hidden width {hidden} must be multiples of {splash.LANES}"
    return None


def hardware_of(mesh: Mesh | AbstractMesh, platform: str) -> Hardware:
    """Returns the hardware of a mesh, whose devices are all alike."""
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
    return Hardware(platform, getattr(device, "compute_capability", None))


def select_kernels(cfg: Config, hardware: Hardware) -> dict[str, Choice]:
    """Returns the choice for each operation that a run has.

    Raises:
      InputError: if the config names a kernel that declines, or if `kernels` is "required" and any
        kernel declines.
    """
    model, choices = cfg.model, _attention_choices(cfg, hardware)
    tensor, hidden_is_cut = cfg.mesh.tensor, cfg.mesh.expert_weights == "hidden"
    if model.has_experts:
        choices["experts"] = select_experts(
            hardware,
            cfg.moe.implementation,
            dtype=model.dtype,
            width=cfg.moe.latent or model.width,
            hidden=cfg.moe.expert_hidden // (tensor if hidden_is_cut else 1),
            plain=model.activation == "swiglu" and not cfg.moe.expert_bias,
        )
    policy = build_compression(cfg.compression)
    specs = [spec for _, codecs in policy.stretches for spec in vars(codecs).values() if spec]
    if specs:
        choices["quantize"] = select_quantize(hardware, block=cfg.compression.block)
    tokens = {kind: {spec.name for spec in policy.all_of(kind)} for kind in TOKENS}
    if model.has_experts and any(tokens.values()):
        choices["quantized_rows"] = select_quantized_rows(
            hardware,
            tokens,
            block=cfg.compression.block,
            width=cfg.moe.latent or model.width,
            dtype=model.dtype,
            choices=cfg.moe.experts_per_token,
        )
    if cfg.kernels == "required":
        for operation, choice in choices.items():
            for name, reason in choice.declined:
                raise InputError(
                    f"`kernels` is required, but {name} declines {operation}: {reason}. Set "
                    f"kernels=auto to take {choice.implementation}."
                )
    return choices


def _attention_choices(cfg: Config, hardware: Hardware) -> dict[str, Choice]:
    """Returns the choice for attention of whole sequences, and of parts if there are any."""
    model, mesh, train = cfg.model, cfg.mesh, cfg.train
    ranks = (mesh.replica or 1) * mesh.fsdp * mesh.expert // mesh.context
    # One choice for all blocks, so for the widest of their heads.
    widest = max((settings_of(model, window) for window in (1, None)), key=lambda m: m.head_width)
    heads = {"dtype": model.dtype, "width": widest.head_width}
    heads |= {"value_width": widest.value_channels}
    heads |= {"length": cfg.data.sequence_length, "window": model.sliding_window}
    if mesh.context > 1:
        return {"attention": select_ranged(hardware, **heads)}
    attends = partial(
        select_attention,
        hardware,
        **heads,
        sinks=model.attention_sinks,
        sequences=max(1, train.batch_sequences // ranks // train.micro_batches),
        isolated=cfg.data.isolate_documents,
    )
    choices = {"attention": attends()}
    if (parts := _parts_of_sequence(cfg)) > 1:
        choices["sliced_attention"] = attends(slices=parts)
    return choices


def _parts_of_sequence(cfg: Config) -> int:
    """Returns the number of parts in which a sequence's queries attend; 1: whole sequences alone.

    A part is a slice, or for the block of `model.predict_ahead` a stage's share. If tensor ranks
    hold different positions, the share itself is in parts (`comm.links.parts_per_share`).
    """
    mesh = cfg.mesh
    if mesh.stage_slices > 1:
        return mesh.stage_slices
    if mesh.stage == 1 or not cfg.model.predict_ahead:
        return 1
    return mesh.stage * (mesh.tensor if mesh.activations == "sequence" else 1)


def select_experts(
    hardware: Hardware,
    requested: str,
    *,
    dtype: str,
    width: int,
    hidden: int,
    plain: bool = True,
) -> Choice:
    """Returns the implementation of `expert_mlp`.

    Args:
      requested: `moe.implementation`.
      width, hidden: D, and F on one device.
      plain: whether experts are SwiGLU without biases, which one kernel fuses with a product.
    """
    if requested == "auto" and hardware.platform == "tpu":
        return select_tpu_experts(dtype, width, hidden)
    decline = megablox_declines if requested == "megablox" else _products_decline
    why_not = decline(hardware, dtype, width, hidden)
    if requested == "tokamax" and importlib.util.find_spec("tokamax") is None:
        why_not = "it is not installed. Install moejax[kernels]"
    if requested != "auto":
        if requested in ("mosaic", "mosaic_e4m3", "tokamax", "megablox") and why_not is not None:
            raise InputError(
                f"`moe.implementation` is {requested}, which declines: {why_not}. Choose auto."
            )
        return Choice(requested, "named in moe.implementation")
    if why_not is None:
        reason = "bfloat16 on Hopper: products of groups on its matrix units"
        if not plain:
            reason += (
                "; biases and other than SwiGLU stand between them, not in one kernel with them"
            )
        return Choice("mosaic", reason)
    reason = f"ragged_dot multiplies every row by every expert on {hardware.platform}"
    return Choice("blocked", reason, (("mosaic", why_not),))


def select_quantize(hardware: Hardware, *, block: int) -> Choice:
    """Returns the implementation of `kernels.experts.quantize`."""
    why_not = _blocks_decline(hardware, block)
    if why_not is not None:
        return Choice("reference", "plain JAX runs everywhere", (("mosaic", why_not),))
    return Choice("mosaic", "one pass over memory each way")


def select_quantized_rows(
    hardware: Hardware,
    codecs: Mapping[str, set[str]],
    *,
    block: int,
    width: int,
    dtype: str,
    choices: int,
) -> Choice:
    """Returns the implementation of `quantized_rows`, or "separate" for operations in turn.

    Args:
      codecs: the codec names that each class of `compression.TOKENS` uses at some step.
      width, choices: D and K.
    """
    blocks = [kind for kind in TOKENS if codecs[kind] & set(BLOCKS)]
    if not blocks:
        return Choice("separate", "no class of tokens is quantised, so rows are only permuted")
    why_not = _rows_decline(hardware, block, width, dtype, choices)
    if why_not is not None:
        return Choice("separate", "rows are permuted and quantised in turn", (("mosaic", why_not),))
    reason = f"one pass over memory permutes and quantises rows of {', '.join(blocks)}"
    if rest := [kind for kind in TOKENS if kind not in blocks]:
        reason += f"; those of {', '.join(rest)} are only permuted"
    return Choice("mosaic", reason)


def select_attention(
    hardware: Hardware,
    *,
    dtype: str,
    width: int,
    length: int,
    sequences: int,
    isolated: bool,
    value_width: int | None = None,
    window: int | None = None,
    sinks: bool = False,
    slices: int = 1,
) -> Choice:
    """Returns the implementation of `kernels.attention.attention`.

    Args:
      width, value_width: width of a head's queries and keys, and of its values; None: the same.
      length, sequences: T, and B on one device in one micro-batch.
      isolated: whether attention stays inside documents, for which cuDNN needs a mask.
      window: `model.sliding_window`.
      sinks: whether a learned logit takes part in each softmax.
      slices: slices of the positions (`sliced_attention`); above one they need a mask too.
    """
    widest, queries = max(width, value_width or width), length // slices
    if hardware.platform == "tpu":
        return select_splash(dtype, width, value_width or width, length, window)
    masked = isolated or slices > 1
    mask_bytes = 2 * sequences * queries * length if masked else 0
    why_not = _cudnn_declines(hardware, dtype, widest, sinks)
    if why_not is None and masked:
        why_not = _mask_declines(mask_bytes, queries, isolated, slices)
    if why_not is not None or slices > 1:
        why_not_ranges = _tokamax_declines(hardware, dtype, widest)
        if why_not_ranges is None:
            beside = f" (cuDNN: {why_not})" if why_not else ""
            reason = f"tokamax's attention, which skips what no query sees: no mask is made{beside}"
            return Choice("tokamax", reason)
        if why_not is not None:
            both = (("cudnn", why_not), ("tokamax", why_not_ranges))
            declined = both if hardware.platform == "gpu" else both[:1]
            return Choice("blocked", "attention of our own runs everywhere", declined)
    if masked:
        kept = "documents apart" if isolated else "slices in order"
        taken = f"cuDNN's fused attention; a mask of {mask_bytes / 2**20:.0f} MiB keeps {kept}"
    else:
        taken = "cuDNN's fused attention, causal by itself: no mask is made"
    if value_width not in (None, width):
        both = f"{width} channels of keys and {value_width} of values"
        taken += f"; heads of {both} are padded to {widest}"
    return Choice("cudnn_masked" if masked else "cudnn", taken)


def select_ranged(
    hardware: Hardware, dtype: str, width: int, value_width: int, length: int, window: int | None
) -> Choice:
    """Returns the choice of attention from stripes of a sequence, which only ranges describe."""
    if hardware.platform == "tpu":
        return select_splash(dtype, width, value_width, length, window)
    why_not = _tokamax_declines(hardware, dtype, max(width, value_width))
    if why_not is None:
        return Choice("tokamax", "tokamax's attention, which takes ranges of keys")
    reason = "attention of our own runs everywhere, and takes ranges of keys"
    return Choice("blocked", reason, (("tokamax", why_not),))


def _cudnn_declines(hardware: Hardware, dtype: str, width: int, sinks: bool) -> str | None:
    """Returns why cuDNN's fused attention does not run; None if it does."""
    if hardware.platform != "gpu":
        return f"it is for GPUs, this is {hardware.platform}"
    if dtype != "bfloat16":
        return f"it takes bfloat16, this is {dtype}"
    if sinks:
        return "JAX's call of it takes no sinks (model.attention_sinks), which join the softmax"
    known = (math.inf,) if hardware.capability is None else _number(hardware.capability)
    if known is None or known < (8, 0):
        return f"it is for NVIDIA's from compute capability 8.0, this is {hardware.capability}"
    widest = 256 if known >= (9, 0) else 128
    if width % 8 or width > widest:
        return f"heads are {width} wide. It takes multiples of 8 up to {widest}"
    return None


def _mask_declines(mask_bytes: int, queries: int, isolated: bool, slices: int) -> str | None:
    """Returns why cuDNN's fused attention does not run with a mask; None if it does."""
    if queries % 2:
        return f"with a mask it takes an even number of positions, this is {queries}"
    if mask_bytes <= MASK_BYTES:
        return None
    what = "documents would be kept apart" if isolated else "slices would be kept in order"
    none = "It needs none with data.isolate_documents=False, and" if slices == 1 else "It needs"
    return (
        f"{what} by a mask of {mask_bytes / 2**30:.1f} GiB. At most "
        f"{MASK_BYTES / 2**30:.0f} is given to it. {none} less with more train.micro_batches"
    )


def _tokamax_declines(hardware: Hardware, dtype: str, width: int) -> str | None:
    """Returns why tokamax's attention does not run; None if it does."""
    if hardware.platform != "gpu":
        return f"it is for GPUs, this is {hardware.platform}"
    if hardware.capability is not None and not re.match(r"(9|10)\.", hardware.capability):
        return f"it is for Hopper and Blackwell, this is {hardware.capability}"
    if dtype != "bfloat16":
        return f"it takes bfloat16, this is {dtype}"
    if width > 256:
        return f"heads are {width} wide. It takes up to 256"
    if not INSTALLED:
        return "it is not installed. Install moejax[kernels]"
    return None


def _number(capability: str) -> tuple[float, ...] | None:
    """A compute capability as numbers that compare; None for AMD's, which are names."""
    match = re.fullmatch(r"(\d+)\.(\d+)", capability)
    return match and (int(match[1]), int(match[2]))


def _mosaic_declines(hardware: Hardware) -> str | None:
    """Returns why our kernels for Hopper do not run; None if they do."""
    if hardware.platform != "gpu":
        return f"it is for GPUs, this is {hardware.platform}"
    if hardware.capability not in (None, HOPPER):
        return f"it is for Hopper (compute capability {HOPPER}), this is {hardware.capability}"
    if jax.__version_info__ < (0, 11):
        return f"it needs JAX 0.11, this is {jax.__version__}"
    return None


def _blocks_decline(hardware: Hardware, block: int) -> str | None:
    why_not = _mosaic_declines(hardware)
    if why_not is None and block not in (32, 64, 128, 256):
        why_not = f"blocks of {block} fill no tile. It takes 32, 64, 128 or 256"
    return why_not


def _rows_decline(
    hardware: Hardware, block: int, width: int, dtype: str, choices: int
) -> str | None:
    why_not = _blocks_decline(hardware, block)
    if why_not is not None:
        return why_not
    blocks = -(-width // block)
    if blocks % (8 if blocks <= TILE else TILE):  # copies go in groups of eight blocks
        return (
            f"rows of {blocks} blocks of {block} fill no tile. It takes multiples of 8 up to "
            f"{TILE}, and multiples of {TILE}"
        )
    # A token's results are on their way at once, values, scales and a barrier, beside their sum.
    sums = TILE * block * jnp.dtype(dtype).itemsize
    held = choices * (TILE * (block + 4) + 8) + sums
    if held > SHARED_BYTES:
        return f"{choices} tiles of blocks of {block} are {held} bytes. It takes {SHARED_BYTES}"
    return None


def _products_decline(hardware: Hardware, dtype: str, width: int, hidden: int) -> str | None:
    why_not = _mosaic_declines(hardware)
    if why_not is None and dtype != "bfloat16":
        why_not = f"it multiplies bfloat16, this is {dtype}"
    if why_not is None and (width % 64 or hidden % 64):
        why_not = f"width {width} and hidden width {hidden} must be multiples of 64"
    return why_not
