"""Softmax attention in which each query sees one range of keys, and keys may come in pieces.

Per device. Legend: B sequences, T queries, S keys, H heads, G heads of keys, C width of a head's
queries and keys, V of its values.

Where keys lie in the order of their positions, causality, a window and documents leave each query
one range of them, in whatever order the queries lie. A kernel returns its result and the log of the
softmax's denominators, so results of several pieces of keys are merged, and sinks join afterwards.
Backward hands each piece the result and the log of all pieces together: its probabilities are those
of the whole softmax, and no merge is differentiated.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.kernels.attention import blocked, splash, tokamax
from moejax.kernels.kept import ATTENDED

IMPLEMENTATIONS = {"blocked": blocked, "splash": splash, "tokamax": tokamax}


class Keys(NamedTuple):
    """A piece of the keys, their values, and the range that each query sees of them.

    Attributes:
      first_BT, last_BT: places in this piece; a query whose last is below its first sees none.
    """

    k_BSGC: Float[Array, "B S G C"]
    v_BSGV: Float[Array, "B S G V"]
    first_BT: Int[Array, "B T"]
    last_BT: Int[Array, "B T"]


class Extent(NamedTuple):
    """The facts about a piece's ranges that a traced program knows.

    All but `most` only set its price. Where `most` is None, ranges begin where documents do.

    Attributes:
      starts: places that the first query may have among the keys, each as likely as another.
      window: keys that a query sees, itself included; None: all before it.
      most: the most that a query may see; None: no window.
      before: whether only keys before the first query are seen.
      run: queries that stand side by side, from one of the starts on; None: all of them.
      inside: share of the pairs that lie inside a document; counts without a window.
    """

    starts: tuple[int, ...]
    window: int | None
    most: int | None
    before: bool = False
    run: int | None = None
    inside: float = 1.0

    def visits(self, queries: int, keys: int, rows: int = 1, block: int = 1) -> float:
        """Returns how many blocks of keys are seen by blocks of `rows` queries, together.

        With blocks of one it is the number of pairs that see each other. A mean over the starts.
        """
        run = min(self.run or queries, queries)
        start_N1, row_M = np.array(self.starts)[:, None], np.arange(0, run, rows)
        last_NM = np.minimum(start_N1 + np.minimum(row_M + rows, run) - 1, keys - 1)
        if self.before:
            last_NM = np.minimum(last_NM, start_N1 - 1)
        none = np.zeros_like(last_NM)
        back = 0 if self.window is None else start_N1 + row_M - self.window + 1
        first_NM = np.maximum(none, back)
        seen = np.maximum(none, last_NM // block - first_NM // block + 1)
        share = self.inside if self.window is None else 1.0
        # Blocks of several queries visit one block of keys at least, however short the documents.
        each = np.where(seen > 0, np.maximum(share * seen, min(rows, 2) - 1), 0)
        return float(np.sum(each)) / len(self.starts) * (queries / run)


class PartialAttention(NamedTuple):
    """The result of keys that queries have seen so far, and the log of its denominators."""

    y_BTHV: Float[Array, "B T H V"]
    log_BTH: Float[Array, "B T H"]


class AttentionForm(NamedTuple):
    """The static arguments."""

    implementation: str
    scale: float
    extents: tuple[Extent, ...]


def ranges(
    segment_BS: Int[Array, "B S"], position_T: Int[Array, " T"], window: int | None
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns the first and the last key that queries at some positions see.

    Args:
      segment_BS: document of each position; a document's positions lie side by side.
    """
    # XLA would take a time quadratic in the sequence to fold the maximum of constants.
    segment_BS = lax.optimization_barrier(segment_BS)
    place_BS = lax.broadcasted_iota(jnp.int32, segment_BS.shape, 1)
    begins_BS = jnp.diff(segment_BS, axis=1, prepend=segment_BS[:, :1]) != 0
    begin_BS = lax.cummax(jnp.where(begins_BS, place_BS, 0), axis=1)
    first_BT = begin_BS[:, position_T]
    if window is not None:
        first_BT = jnp.maximum(first_BT, position_T - window + 1)
    return first_BT, jnp.broadcast_to(position_T, first_BT.shape).astype(jnp.int32)


def ranged_attention(
    q_BTHC: Float[Array, "B T H C"],
    pieces: tuple[Keys, ...],
    extents: tuple[Extent, ...],
    *,
    scale: float,
    implementation: str,
    sinks_H: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H V"]:
    """Returns each query's mean of the values that it sees, weighted by the softmax of its scores.

    A query that sees no key gets zeros.

    Args:
      extents: of each piece.
      scale: factor of the scores.
      implementation: "blocked", which runs everywhere; "splash", on TPUs; "tokamax", on Hopper
        and Blackwell.
      sinks_H: logits that take part in the softmax of each of a head's queries and have no value.
    """
    return _attend(AttentionForm(implementation, scale, extents), q_BTHC, pieces, sinks_H)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: AttentionForm, q_BTHC, pieces: tuple[Keys, ...], sinks_H):
    return _forward(form, q_BTHC, pieces, sinks_H)[0]


def _forward(form: AttentionForm, q_BTHC, pieces: tuple[Keys, ...], sinks_H):
    kernel = IMPLEMENTATIONS[form.implementation]
    results = [
        PartialAttention(*kernel.forward(q_BTHC, *keys, scale=form.scale, extent=extent))
        for keys, extent in zip(pieces, form.extents, strict=True)
    ]
    y_BTHV, log_BTH = join_sinks(merge(results), sinks_H)
    y_BTHV = y_BTHV.astype(pieces[0].v_BSGV.dtype)
    y_BTHV, log_BTH = (checkpoint_name(x, ATTENDED) for x in (y_BTHV, log_BTH))
    return y_BTHV, (q_BTHC, pieces, sinks_H, y_BTHV, log_BTH)


def merge(results: list[PartialAttention]) -> PartialAttention:
    """Returns the results of several pieces as those of one."""
    if len(results) == 1:
        return results[0]
    y_NBTHV, log_NBTH = (jnp.stack(x) for x in zip(*results, strict=True))
    log_BTH = jax.nn.logsumexp(log_NBTH, axis=0)
    weight_NBTH1 = jnp.exp(log_NBTH - log_BTH)[..., None]
    return PartialAttention(jnp.sum(y_NBTHV.astype(jnp.float32) * weight_NBTH1, axis=0), log_BTH)


def join_sinks(merged: PartialAttention, sinks_H: jax.Array | None) -> PartialAttention:
    """Returns the result with sinks in each softmax."""
    if sinks_H is None:
        return merged
    y_BTHV, log_BTH = merged
    share_BTH1 = jax.nn.sigmoid(log_BTH - sinks_H)[..., None]
    return PartialAttention(y_BTHV * share_BTH1, jnp.logaddexp(log_BTH, sinks_H))


def sink_gradient(sinks_H: jax.Array | None, y_BTHV, log_BTH, dy_BTHV) -> jax.Array | None:
    """Returns the gradient of sinks: each has a weight like a key, and a value of zeros.

    Args:
      y_BTHV, log_BTH: results with sinks.
    """
    if sinks_H is None:
        return None
    dot_BTH = jnp.sum(y_BTHV.astype(jnp.float32) * dy_BTHV, axis=-1)
    return -jnp.sum(jnp.exp(sinks_H - log_BTH) * dot_BTH, axis=(0, 1))


def _backward(form: AttentionForm, saved, dy_BTHV):
    q_BTHC, pieces, sinks_H, y_BTHV, log_BTH = saved
    kernel = IMPLEMENTATIONS[form.implementation]
    dq_BTHC: Any = 0
    none: Any = None  # no gradient of integers
    of_pieces = []
    for keys, extent in zip(pieces, form.extents, strict=True):
        whole = y_BTHV, log_BTH, dy_BTHV
        part_BTHC, dk_BSGC, dv_BSGV = kernel.gradients(
            q_BTHC, *keys, *whole, scale=form.scale, extent=extent
        )
        dq_BTHC += part_BTHC.astype(jnp.float32)
        dk_BSGC = dk_BSGC.astype(keys.k_BSGC.dtype)
        of_pieces.append(Keys(dk_BSGC, dv_BSGV.astype(keys.v_BSGV.dtype), none, none))
    dsinks_H = sink_gradient(sinks_H, y_BTHV, log_BTH, dy_BTHV)
    return dq_BTHC.astype(q_BTHC.dtype), tuple(of_pieces), dsinks_H


_attend.defvjp(_forward, _backward)
