"""What kernels are chosen for, and what a choice says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """The hardware that a program is compiled for.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      capability: CUDA's compute capability; None where it is not known, as of a mesh that has no
        devices: it is then taken for that of Hopper.
    """

    platform: str
    capability: str | None = None


@dataclass(frozen=True)
class Choice:
    """An implementation, the reason for it, and why preferred kernels were declined."""

    implementation: str
    reason: str
    declined: tuple[tuple[str, str], ...] = ()  # implementation, reason
