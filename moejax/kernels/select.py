"""Chooses the implementation of an operation by platform, and says why."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """An implementation and the reason it was taken."""

    implementation: str
    reason: str


def select_experts(platform: str, requested: str) -> Choice:
    """Returns the implementation of `expert_mlp` on a platform ("cpu", "gpu", "tpu")."""
    if requested != "auto":
        return Choice(requested, "named in moe.implementation")
    if platform == "tpu":
        return Choice("ragged_dot", "TPU lowers ragged_dot to a grouped kernel")
    reason = f"ragged_dot multiplies every row by every expert on {platform}"
    return Choice("blocked", reason)


def select_attention(platform: str, dtype: str) -> Choice:
    """Returns the implementation of `kernels.attention`."""
    if platform == "gpu" and dtype == "bfloat16":
        return Choice("cudnn", "cuDNN's fused attention takes bfloat16 on GPU")
    return Choice("blocked", f"cuDNN's fused attention does not run {dtype} on {platform}")
