"""Mamba-2 of the oracle: position by position, in any dtype.

Letters: B sequences, T positions, G groups (key heads), H heads, C channels of a state's keys, V of
its values.
"""

import jax
import jax.numpy as jnp

from moejax.config.schema import Config
from tests.oracle_delta import convolve_by_position


def mamba(w, x, segments, cfg: Config):
    """A block's Mamba-2."""
    form = cfg.model.linear

    def convolved(name):
        y = jnp.einsum("BTD,DHC->BTHC", x, w[f"w_{name}"])
        taps = w[f"convolve_{name}"]
        flat = y.reshape(*y.shape[:2], -1)
        flat = convolve_by_position(flat, taps.reshape(-1, taps.shape[-1]), segments)
        z = flat.reshape(y.shape) + w.get(f"bias_{name}", 0.0)
        return z / (1 + jnp.exp(-z))

    q, k, v = map(convolved, "qkv")
    step = jnp.log1p(jnp.exp(x @ w["w_step"] + w["step_bias"]))
    step = jnp.where(step < form.least_step, form.least_step, step)
    g = -jnp.exp(w["log_rate"]) * step
    y, _ = states_by_position(q, k, v * step[..., None], g, segments)
    gate = jnp.einsum("BTD,DHC->BTHC", x, w["w_gate"])
    y = (y + w["skip"][:, None] * v) * gate / (1 + jnp.exp(-gate))
    each = form.value_heads // form.key_heads  # heads of a group
    sizes = []
    for group in range(form.key_heads):
        own = y[:, :, group * each : (group + 1) * each]
        mean = jnp.mean(own**2, axis=(-2, -1), keepdims=True)
        sizes.append(jnp.repeat(jnp.sqrt(mean + cfg.model.norm_epsilon), each, axis=2))
    y = y / jnp.concatenate(sizes, axis=2) * w["scale"]
    return jnp.einsum("BTHC,HCD->BTD", y, w["w_o"])


def states_by_position(q, k, v, g, segment_BT, state=None):
    """Returns what each position reads, and the state after the last one, of `state_space`."""
    B, _, H, V = v.shape
    q, k = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (q, k))
    if state is None:
        state = jnp.zeros((B, H, k.shape[-1], V), v.dtype)
    begins_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)))

    def position(state, now):
        q, k, v, g, begins = now
        state = jnp.where(begins[:, None, None, None], 0.0, state)
        state = state * jnp.exp(g)[..., None, None] + jnp.einsum("BHC,BHV->BHCV", k, v)
        return state, jnp.einsum("BHC,BHCV->BHV", q, state)

    steps = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, begins_BT))
    state, y = jax.lax.scan(position, state, steps)
    return jnp.moveaxis(y, 0, 1), state
