"""The gated delta nets of the oracle: position by position, in any dtype.

Letters: B sequences, T positions, G key heads, H value heads, C and V channels of them, Z a narrow
layer.
"""

import jax
import jax.numpy as jnp

from moejax.config.schema import Config


def linear(w, x, segments, cfg: Config):
    """A block's linear attention, in the forms below."""
    form = cfg.model.linear
    by_channel = form.form == "kimi_delta"

    def convolved(name):
        y = jnp.einsum("BTD,DHC->BTHC", x, w[f"w_{name}"])
        taps = w[f"convolve_{name}"]
        flat = convolve_by_position(y.reshape(*y.shape[:2], -1), _flat(taps), segments)
        return jax.nn.silu(flat.reshape(y.shape))

    q, k, v = map(convolved, "qkv")
    q, k = (a / jnp.sqrt(jnp.sum(a**2, axis=-1, keepdims=True) + 1e-6) for a in (q, k))
    beta = 1 / (1 + jnp.exp(-x @ w["w_beta"]))
    if by_channel:
        fade, gate = (
            jnp.einsum("BTD,DZ,ZHC->BTHC", x, w[f"w_{name}_down"], w[f"w_{name}_up"])
            for name in ("fade", "gate")
        )
        rate, opened = jnp.exp(w["log_rate"])[:, None], 1 / (1 + jnp.exp(-gate))
    else:
        fade, gate = x @ w["w_fade"], jnp.einsum("BTD,DHC->BTHC", x, w["w_gate"])
        rate, opened = jnp.exp(w["log_rate"]), gate / (1 + jnp.exp(-gate))
    g = -rate * jnp.log1p(jnp.exp(fade + w["fade_bias"]))
    y, _ = delta_by_position(q / form.key_width**0.5, k, v, g, beta, segments)
    size = jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + cfg.model.norm_epsilon)
    return jnp.einsum("BTHC,HCD->BTD", y / size * w["scale"] * opened, w["w_o"])


def _flat(w_HCX):
    return w_HCX.reshape(-1, w_HCX.shape[-1])


def delta_by_position(q, k, v, g, beta, segment_BT, state=None):
    """Returns what each position reads, and the state after the last one, of `gated_delta`.

    Args:
      g: [B, T, H], or [B, T, G, C] for each channel of keys.
    """
    B, _, H, V = v.shape
    g = g[..., None] if g.ndim == 3 else jnp.repeat(g, H // g.shape[2], axis=2)
    q, k = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (q, k))
    if state is None:
        state = jnp.zeros((B, H, k.shape[-1], V), v.dtype)
    begins_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)))

    def position(state, now):
        q, k, v, g, beta, begins = now
        state = jnp.where(begins[:, None, None, None], 0.0, state)
        state = state * jnp.exp(g)[..., None]
        held = jnp.einsum("BHC,BHCV->BHV", k, state)
        state = state + jnp.einsum("BHC,BHV->BHCV", k, beta[..., None] * (v - held))
        return state, jnp.einsum("BHC,BHCV->BHV", q, state)

    steps = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, begins_BT))
    state, y = jax.lax.scan(position, state, steps)
    return jnp.moveaxis(y, 0, 1), state


def convolve_by_position(x_BTX, w_XK, segment_BT):
    """Returns the sum of each position and those right before it, of its document, weighted."""
    T, width = x_BTX.shape[1], w_XK.shape[-1]
    back = jnp.arange(T)[:, None] - jnp.arange(T)
    seen_BTS = segment_BT[:, :, None] == segment_BT[:, None, :]
    total = 0.0
    for tap in range(width):
        near_BTS = seen_BTS & (back == width - 1 - tap)
        total += jnp.einsum("BTS,BSX->BTX", near_BTS.astype(x_BTX.dtype), x_BTX) * w_XK[:, tap]
    return total
