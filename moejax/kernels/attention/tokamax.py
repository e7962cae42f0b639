"""tokamax's attention on Hopper and Blackwell: tiles that no query sees are skipped, with no mask.

Per device. Legend as in `kernels.attention.ranged`. Its backward pass takes the maximum and the sum
of the softmax, so that a log stands for both with a sum of one.
"""

import importlib.util
import logging
from typing import Any

import jax
import jax.numpy as jnp

from moejax.kernels.attention.blocked import LOWEST, MASKED
from moejax.kernels.costs import jitted

INSTALLED = importlib.util.find_spec("tokamax") is not None


def forward(q_BTHC, k_BSGC, v_BSGV, first_BT, last_BT, *, scale: float, extent: Any):
    """Returns the mean of the values [B, T, H, V], in their dtype, and the log, in float32."""
    run = jitted(_forward, "attention_forward", 2 * _channels(q_BTHC, v_BSGV, extent), scale=scale)
    return run(q_BTHC, k_BSGC, v_BSGV, first_BT, last_BT)


def gradients(
    q_BTHC, k_BSGC, v_BSGV, first_BT, last_BT, y_BTHV, log_BTH, dy_BTHV, *, scale, extent: Any
):
    """Returns the gradients of q, k and v.

    Args:
      y_BTHV, log_BTH: results of all pieces together, sinks included.
    """
    flops = 7 * _channels(q_BTHC, v_BSGV, extent)  # scores twice, for queries and for keys
    run = jitted(_gradients, "attention_backward", flops, scale=scale)
    whole = y_BTHV, log_BTH, dy_BTHV
    return run(q_BTHC, k_BSGC, v_BSGV, first_BT, last_BT, *whole)


def _channels(q_BTHC: jax.Array, v_BSGV: jax.Array, extent: Any) -> int:
    """FLOPs of one product of the pairs that see each other, of mean width."""
    B, T, H, C = q_BTHC.shape
    return round(B * H * (C + v_BSGV.shape[-1]) * extent.visits(T, v_BSGV.shape[1]))


def _quiet(record: logging.LogRecord) -> bool:
    """Whether a line is none of those about tuning that tokamax writes for each shape."""
    return "Autotuning cache miss" not in record.getMessage()


logging.getLogger("absl").addFilter(_quiet)


def _forward(q_BTHC, k_BSGC, v_BSGV, first_BT, last_BT, *, scale: float):
    from tokamax._src.ops.attention import pallas_mosaic_gpu  # type: ignore[import-not-found]

    attend = pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()
    form = _form(first_BT, last_BT, scale)
    y_BTHV, residuals = attend(q_BTHC, k_BSGC, v_BSGV, return_residuals=True, **form)
    top_BHT, total_BHT = residuals
    seen_BHT = total_BHT > 0
    log_BHT = jnp.where(seen_BHT, top_BHT + jnp.log(jnp.where(seen_BHT, total_BHT, 1)), MASKED)
    return y_BTHV, log_BHT.swapaxes(1, 2)


def _gradients(
    q_BTHC, k_BSGC, v_BSGV, first_BT, last_BT, y_BTHV, log_BTH, dy_BTHV, *, scale: float
):
    from tokamax._src.ops.attention import (  # type: ignore[import-not-found]
        pallas_mosaic_gpu,
        pallas_mosaic_gpu_vjp,
    )

    attend = pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()
    bound = attend.bind(q_BTHC, k_BSGC, v_BSGV, **_form(first_BT, last_BT, scale))
    form = {name: x for name, x in bound.kwargs.items() if name != "return_residuals"}
    # A query that sees nothing has no weights: here its logarithm is above every score.
    log_BHT = jnp.where(log_BTH > LOWEST, log_BTH, -MASKED).swapaxes(1, 2)
    residuals = log_BHT, jnp.ones_like(log_BHT)
    pull = pallas_mosaic_gpu_vjp.PallasMosaicGpuFlashAttentionVjp()
    found = pull(residuals, y_BTHV, dy_BTHV, *bound.args, **form)
    return found["q"], found["k"], found["v"]


def _form(first_BT: jax.Array, last_BT: jax.Array, scale: float) -> dict[str, Any]:
    from tokamax._src.ops.attention import base  # type: ignore[import-not-found]

    mask = base.Mask(k_start=first_BT[:, None], k_end=last_BT[:, None] + 1)
    return {"mask": mask, "logits_scale": scale}
