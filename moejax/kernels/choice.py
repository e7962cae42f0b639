"""The hardware that kernels are chosen for, and the choice."""

from dataclasses import dataclass


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
