"""Shape annotations of jaxtyping. The tests check them.

They say nothing at run time, so where jaxtyping is not installed they stand for any array.
"""

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING or importlib.util.find_spec("jaxtyping"):
    from jaxtyping import Array, Bool, Float, Int, UInt8
else:
    from jax import Array

    class Shaped:
        """`Shaped[Array, "M D"]` is any array."""

        def __class_getitem__(cls, _: tuple[type, str]) -> type:
            return Array

    Bool = Float = Int = UInt8 = Shaped

__all__ = ["Array", "Bool", "Float", "Int", "UInt8"]
