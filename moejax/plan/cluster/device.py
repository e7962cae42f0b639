"""The rates of a device: products and memory."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """The rates of one device while its neighbours are as busy.

    Attributes:
      name: JAX's `device_kind`.
      platform: "cpu", "gpu" or "tpu".
      products: dtype -> (FLOPs of a matrix product, FLOP/s), smallest product first.
      copy_bytes_per_s: bytes read and written a second by an elementwise operation on arrays that
        no cache holds.
      gather_bytes_per_s: the same for a gather of rows by index.
      startup_s: time of one small operation.
      copies: (bytes read and written, bytes a second) of smaller operations, smallest first.
      exponentials_per_s: values of exponentials a second; infinite if memory alone counts.
      reductions_per_s: values a second in sums over rows; infinite if memory alone counts.
      program_overhead: compute time of a whole program over the sum of its operations' times.
      oversubscription: devices of a node that share the same cores; 1: no sharing.
    """

    name: str
    platform: str
    memory_bytes: int
    products: dict[str, tuple[tuple[float, float], ...]]
    copy_bytes_per_s: float
    gather_bytes_per_s: float
    startup_s: float
    copies: tuple[tuple[float, float], ...] = ()
    exponentials_per_s: float = math.inf
    reductions_per_s: float = math.inf
    program_overhead: float = 1.0
    oversubscription: float = 1.0

    def curve(self, dtype: str) -> tuple[tuple[float, float], ...]:
        """Returns a dtype's curve, or its stand-in's: bfloat16 for eight bits, else float32."""
        near = "bfloat16" if dtype.startswith("float8") else "float32"
        slowest = min(self.products.values(), key=lambda points: points[-1][1])
        return self.products.get(dtype) or self.products.get(near) or slowest

    def peak(self, dtype: str) -> float:
        """Returns the FLOP/s of the fastest matrix product that is known."""
        return max(rate for _, rate in self.curve(dtype))

    def product_rate(self, dtype: str, flops: float) -> float:
        """Returns the FLOP/s of a matrix product of `flops` FLOPs.

        Linear in logarithms; the largest's rate stays above it, the smallest's time below.
        """
        curve = self.curve(dtype)
        if flops < curve[0][0]:
            return curve[0][1] * flops / curve[0][0]
        return _rate(curve, flops)

    def copy_rate(self, size: float) -> float:
        """Returns the bytes a second of an elementwise operation that reads and writes `size`.

        Linear in logarithms; beyond the largest of `copies` it is `copy_bytes_per_s`.
        """
        if not self.copies or size > self.copies[-1][0]:
            return self.copy_bytes_per_s
        return _rate(self.copies, size)


def _rate(curve: Sequence[tuple[float, float]], size: float) -> float:
    """Returns the rate at a size: between points linear in logarithms, else the nearest point's."""
    index = bisect.bisect_right([point for point, _ in curve], size)
    if index in (0, len(curve)):
        return curve[min(index, len(curve) - 1)][1]
    (low, low_rate), (high, high_rate) = curve[index - 1 : index + 1]
    fraction = math.log(size / low) / math.log(high / low)
    return low_rate * (high_rate / low_rate) ** fraction
