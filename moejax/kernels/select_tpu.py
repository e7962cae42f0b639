"""Chooses the implementation of attention and of the experts on TPUs."""

from moejax.kernels.choice import Choice, Hardware
from moejax.kernels.splash import LANES


def select_splash(
    dtype: str, width: int, value_width: int, length: int, isolated: bool, slices: int = 1
) -> Choice:
    """Returns the choice of attention on TPUs; sinks and heads of two widths are taken."""
    why_not = None
    if dtype != "bfloat16":
        why_not = f"it takes bfloat16, this is {dtype}"
    elif slices > 1:
        why_not = f"it takes all positions of a sequence at once, here are {slices} slices"
    elif length % LANES:
        why_not = f"it takes multiples of {LANES} positions, this is {length}"
    elif wrong := [size for size in (width, value_width) if size % 8 or size > 256]:
        why_not = f"heads are {wrong[0]} wide. It takes multiples of 8 up to 256"
    if why_not is not None:
        return Choice("blocked", "attention of our own runs everywhere", (("splash", why_not),))
    if isolated:
        return Choice("splash", "JAX's splash kernel, which compares documents: no mask is made")
    return Choice("splash_whole", "JAX's splash kernel, causal by itself: no mask is made")


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
    if width % LANES or hidden % LANES:
        return f"width {width} and hidden width {hidden} must be multiples of {LANES}"
    return None
