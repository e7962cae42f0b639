"""Rounding to a float format and back, compiled for an H200, is not taken for nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from moejax.aot.target import TARGETS, describe_devices
from moejax.kernels.experts.quantize import dequantize, quantize

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("compiled_anew")]


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_what_a_codec_rounds_is_rounded(name: str, dtype: object):
    def error(x: jax.Array) -> jax.Array:
        rounded = dequantize(quantize(x, name, block=128), name, x.shape[-1], dtype=x.dtype)
        return x - rounded

    device = SingleDeviceSharding(describe_devices(TARGETS["h200"], 1)[0])
    compiled = partial(jax.jit, in_shardings=device, out_shardings=device)(error)
    text = compiled.lower(jax.ShapeDtypeStruct((64, 1024), dtype)).compile().as_text()
    assert f"f8{name}" in text
