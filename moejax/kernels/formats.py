"""The number formats of block quantisation, and the tile that kernels and callers agree on."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

TILE = 64  # blocks of a kernel's tile: several rows, or a part of a longer row
TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Format:
    """A number format of quantised values.

    The error of a value x in a block with largest magnitude a and scale s = a / largest is at
    most max(|x| * relative, s * absolute) + largest * tiny: half a step between neighbours, and
    the loss when s is denormal.

    Attributes:
      largest: the largest number.
      relative: half a step over the value, where steps grow with values; 0 where they do not.
      absolute: half of the smallest step.
      bits: bits of a value on the wire.
    """

    largest: float
    relative: float
    absolute: float
    bits: int
    dtype: Any


FORMATS = {
    "int8": Format(127, 0, 0.5, 8, jnp.int8),
    "int4": Format(7, 0, 0.5, 4, jnp.int8),
    "e4m3": Format(448, 2**-4, 2**-10, 8, jnp.float8_e4m3fn),
    "e5m2": Format(57344, 2**-3, 2**-17, 8, jnp.float8_e5m2),
}
