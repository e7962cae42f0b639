"""Attention of the oracle, in other forms than the model's.

Latent attention is absorbed: its scores and means are taken in the latent, where the model expands
keys and values for every head. A sink is one more column of the scores. Rotation is a product of
complex numbers, with frequencies found pair by pair.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config.schema import Config, FullAttentionConfig, ModelConfig, RopeConfig
from tests.oracle_delta import linear
from tests.oracle_state_space import mamba


def attend(w, x, segments, block: int, cfg: Config):
    """Attention of a block, by its index in the model."""
    model, T = cfg.model, x.shape[1]
    every = model.full_attention_every
    window = T if model.sliding_window is None else model.sliding_window
    full = every is not None and block % every == every - 1
    if model.layer_attention:
        full = model.layer_attention[block] == "full"
    usual = "linear" if model.linear.form != "none" else "window"
    if not full and (model.layer_attention or (usual,) * (block + 1))[block] == "linear":
        mix = mamba if model.linear.form == "mamba2" else linear
        return mix(w, x, segments, cfg)
    window = T if full else window
    back = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    if model.positions == "window":
        model = dataclasses.replace(model, positions="none" if full else "rotary")
        cfg = dataclasses.replace(cfg, model=model)
    if model.full_attention != FullAttentionConfig():
        plain = dataclasses.replace(model, full_attention=FullAttentionConfig())
        cfg = dataclasses.replace(cfg, model=_full(model) if full else plain)
    near = (back >= 0) & (back < window)
    seen = near[None, None] & (segments[:, None, :, None] == segments[:, None, None, :])
    forms = {"grouped": _grouped, "latent": _latent, "sparse": _sparse}
    return forms[model.attention](w, x, seen, cfg)


def _full(model: ModelConfig) -> ModelConfig:
    """A model all of whose blocks are as its blocks without a window."""
    own = model.full_attention
    changes = {
        "head_width": own.head_width or model.head_width,
        "num_kv_heads": own.num_kv_heads or model.num_kv_heads,
        "rope": dataclasses.replace(model.rope, theta=own.theta or model.rope.theta),
        "attention_sinks": model.attention_sinks and own.sinks,
    }
    return dataclasses.replace(model, **changes)


def norm(x, scale, epsilon):
    """RMSNorm over the last dimension."""
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + epsilon) * scale


def _grouped(w, x, seen, cfg: Config):
    model = cfg.model
    w = w if "w_v" in w else {**w, "w_v": w["w_k"], "b_v": w.get("b_k")}
    q, k, v = (jnp.einsum("BTD,DHC->BTHC", x, w[name]) for name in ("w_q", "w_k", "w_v"))
    if model.attention_bias:
        q, k, v = q + w["b_q"], k + w["b_k"], v + w["b_v"]
    if model.value_norm:
        v = norm(v, 1.0, model.norm_epsilon)
    v = model.value_scale * v
    if model.qk_norm == "head":
        q = norm(q, w["q_norm"]["scale"], model.norm_epsilon)
        k = norm(k, w["k_norm"]["scale"], model.norm_epsilon)
    if model.qk_norm == "full":
        q, k = (
            norm(
                a.reshape(*a.shape[:2], -1), w[n]["scale"].reshape(-1), model.norm_epsilon
            ).reshape(a.shape)
            for a, n in ((q, "q_norm"), (k, "k_norm"))
        )
    R = model.rope_width or model.head_width
    some = model.full_attention.turned_channels  # of full blocks alone, as `_full` leaves it
    q, k = (jnp.concatenate([turned(a[..., :R], model, some), a[..., R:]], axis=-1) for a in (q, k))
    if model.qk_norm == "rotated":
        q, k = (
            norm(a, w[n]["scale"], model.norm_epsilon) for a, n in ((q, "q_norm"), (k, "k_norm"))
        )
    repeats = model.num_heads // model.num_kv_heads
    k, v = jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)
    score = jnp.einsum("BTHC,BSHC->BHTS", q, k) * scale_of_scores(cfg)
    score *= growth(model.rope, x.shape[1])[:, None]
    chance = _chances(score, seen, w["sinks"] if model.attention_sinks else None)
    heads = jnp.einsum("BHTS,BSHC->BTHC", chance, v)
    if model.attention_gate:
        heads = heads / (1 + jnp.exp(-jnp.einsum("BTD,DHC->BTHC", x, w["w_gate"])))
    y = jnp.einsum("BTHC,HCD->BTD", heads, w["w_o"])
    return y + w["b_o"] if model.attention_output_bias else y


def _sparse(w, x, seen, cfg: Config):
    return _latent(w, x, seen & chosen(index_scores(w, x, cfg), seen, cfg)[:, None], cfg)


def chosen(score, seen, cfg: Config):
    """Whether each key is one of those that a query chooses: of the highest scores, [B, T, S]."""
    score = jnp.where(seen[:, 0], score, -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-score, axis=-1, stable=True), axis=-1)
    return rank < cfg.model.indexer.keys


def index_scores(w, x, cfg: Config):
    """Scores of the indexer for all pairs, [B, T, S]; without a gradient to x or attention."""
    model, own = cfg.model, w["indexer"]
    x, down, scale = jax.lax.stop_gradient((x, w["w_dq"], w["q_norm"]["scale"]))
    q = jnp.einsum("BTZ,ZIJ->BTIJ", norm(x @ down, scale, 1e-6), own["w_q"])
    k = x @ own["w_k"]
    k = (k - k.mean(-1, keepdims=True)) / jnp.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k = k * own["k_scale"] + own["k_bias"]
    R = model.rope_width
    q = jnp.concatenate([turned(q[..., :R], model), q[..., R:]], axis=-1)
    k = jnp.concatenate([turned(k[:, :, None, :R], model)[:, :, 0], k[..., R:]], axis=-1)
    each = jnp.maximum(jnp.einsum("BTIJ,BSJ->BTIS", q, k), 0) / model.indexer.width**0.5
    weight = x @ own["w_weights"] / model.indexer.heads**0.5
    return jnp.einsum("BTIS,BTI->BTS", each, weight)


def divergence(w, x, seen, cfg: Config):
    """How far the indexer is from attention over the keys chosen, in nats a position [B, T]."""
    score = index_scores(w, x, cfg)
    seen = seen & chosen(score, seen, cfg)[:, None]
    chance = jax.lax.stop_gradient(latent_chances(w, x, seen, cfg)[0]).mean(1)
    own = jax.nn.softmax(jnp.where(seen[:, 0], score, -1e30), axis=-1)
    terms = jnp.log(jnp.where(chance > 0, chance, 1)) - jnp.log(jnp.where(seen[:, 0], own, 1))
    return (chance * terms).sum(-1)


def _latent(w, x, seen, cfg: Config):
    chance, latent = latent_chances(w, x, seen, cfg)
    mean = jnp.einsum("BHTS,BSZ->BTHZ", chance, latent)
    up_values = w["w_ukv"][..., cfg.model.head_width - cfg.model.rope_width :]
    return jnp.einsum("BTHZ,ZHC,HCD->BTD", mean, up_values, w["w_o"])


def latent_chances(w, x, seen, cfg: Config):
    """The weights of all pairs [B, H, T, S], and the latents of keys and values."""
    model = cfg.model
    R, epsilon = model.rope_width, 1e-6
    plain = model.head_width - R
    if model.q_latent is None:
        q = jnp.einsum("BTD,DHC->BTHC", x, w["w_q"])
    else:
        q = norm(x @ w["w_dq"], w["q_norm"]["scale"], epsilon)
        q = jnp.einsum("BTZ,ZHC->BTHC", q, w["w_uq"])
    down = x @ w["w_dkv"]
    latent = norm(down[..., : model.kv_latent], w["kv_norm"]["scale"], epsilon)
    shared = turned(down[:, :, None, model.kv_latent :], model)[:, :, 0]
    absorbed = jnp.einsum("BTHC,ZHC->BTHZ", q[..., :plain], w["w_ukv"][..., :plain])
    score = jnp.einsum("BTHZ,BSZ->BHTS", absorbed, latent)
    score += jnp.einsum("BTHR,BSR->BHTS", turned(q[..., plain:], model), shared)
    score *= growth(model.rope, x.shape[1])[:, None]
    return _chances(score * scale_of_scores(cfg), seen, None), latent


def _chances(score, seen, sinks):
    score = jnp.where(seen, score, -1e30)
    if sinks is None:
        return jax.nn.softmax(score, axis=-1)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*score.shape[:3], 1))
    return jax.nn.softmax(jnp.concatenate([score, column], axis=-1), axis=-1)[..., :-1]


def scale_of_scores(cfg: Config) -> float:
    """What scores are multiplied by before softmax."""
    rope, scale = cfg.model.rope, cfg.model.score_scale or cfg.model.head_width**-0.5
    if rope.mscale_all_dim is None:
        return scale
    return scale * magnitude(rope.mscale_all_dim, rope.factor) ** 2


def growth(rope: RopeConfig, length: int) -> np.ndarray:
    """The factor of a query's scores by its position."""
    passed = [position // rope.trained_length for position in range(length)]
    return np.array([1 + rope.query_growth * math.log(1 + times) for times in passed])


def magnitude(scale: float, factor: float) -> float:
    """YaRN's `get_mscale`."""
    return 0.1 * scale * math.log(factor) + 1.0


def turned(x, model: ModelConfig, some: int | None = None):
    """Rotary positions as complex multiplication, of all channels of x [B, T, H, R].

    Args:
      some: channels whose pairs turn, the fastest ones; None: all.
    """
    if model.positions == "none":
        return x
    rope, half = model.rope, x.shape[-1] // 2
    speeds = [
        s if some is None or 2 * i < some else 0.0 for i, s in enumerate(frequencies(rope, half))
    ]
    angle = np.arange(x.shape[1])[:, None] * np.array(speeds)
    turn = (factor_of_turns(rope) * np.exp(1j * angle))[None, :, None, :]
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([z.real, z.imag], axis=-1).astype(x.dtype)


def factor_of_turns(rope: RopeConfig) -> float:
    """The length of a turned pair over that of the pair."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale is None:
        return magnitude(1.0, rope.factor)
    return magnitude(rope.mscale, rope.factor) / magnitude(rope.mscale_all_dim, rope.factor)


def frequencies(rope: RopeConfig, half: int) -> np.ndarray:
    """The angle of each pair from a position to the next; plain or yarn."""
    plain = [rope.theta ** (-pair / half) for pair in range(half)]
    if rope.scaling == "none":
        return np.array(plain)
    assert rope.scaling == "yarn"

    def pair_that_turns(times: float) -> float:
        """The pair, as a fraction, that turns so often over the trained length."""
        wanted = times * 2 * math.pi / rope.trained_length
        return -half * math.log(wanted) / math.log(rope.theta)

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    found = []
    for pair, frequency in enumerate(plain):
        share = min(max((pair - first) / max(last - first, 1e-3), 0), 1)  # of the stretched one
        found.append((1 - share) * frequency + share * frequency / rope.factor)
    return np.array(found)
