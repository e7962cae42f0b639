"""Sends tokens to the devices that own their experts, and brings the results home.

Per device. `plan_send` decides in which bucket row each assignment travels; `dispatch` carries the
rows and sorts what arrives by expert; `combine` undoes every step. No row is scattered: each
rearrangement is a gather whose transpose is a gather (kernels.permute).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.comm.exchange import send, send_back
from moejax.comm.route import Route
from moejax.kernels.permute import permute, weighted_sum


class SendPlan(NamedTuple):
    """Where each assignment travels. Bucket rows are numbered peer * J + place in the bucket."""

    slot_NK: Int[Array, "N K"]  # bucket row of an assignment; P * J when it is dropped
    assignment_M: Int[Array, " M"]  # its inverse: n * K + k; N * K for an empty row
    counts_Pe: Int[Array, "P e"]  # rows for each expert of each peer


class Sent(NamedTuple):
    """What `combine` needs to undo `dispatch`."""

    plan: SendPlan
    place_Q1: Int[Array, "QJ 1"]  # row in expert order of each received bucket row; R for none
    source_R: Int[Array, " R"]  # its inverse
    sizes_e: Int[Array, " e"]  # rows of each expert on this device


def rank_in_expert(expert_A: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Each assignment's rank among those to the same expert, in token order; and the counts."""
    order_A = jnp.argsort(expert_A, stable=True)
    positions_A = jnp.arange(expert_A.shape[0], dtype=jnp.int32)
    sorted_A = jnp.zeros_like(positions_A).at[order_A].set(positions_A, unique_indices=True)
    experts_E = jnp.arange(num_experts)
    counts_E = jnp.sum(expert_A[:, None] == experts_E, axis=0, dtype=jnp.int32)
    starts_E = jnp.cumsum(counts_E) - counts_E
    return sorted_A - starts_E[expert_A], counts_E


def plan_send(
    expert_NK: Int[Array, "N K"],
    *,
    num_experts: int,
    num_peers: int,
    bucket_rows: int,
    capacity: int | None = None,
) -> SendPlan:
    """Gives each assignment a row in its peer's bucket, sorted by expert within the bucket.

    Args:
      bucket_rows: J; the caller has made sure that no bucket overflows (or set a capacity).
      capacity: rows this device may send to one expert; later tokens are dropped. None: no limit.
    """
    A = expert_NK.size
    expert_A = expert_NK.reshape(A)
    rank_A, counts_E = rank_in_expert(expert_A, num_experts)
    kept_A = rank_A < (A if capacity is None else capacity)
    counts_E = counts_E if capacity is None else jnp.minimum(counts_E, capacity)
    counts_Pe = counts_E.reshape(num_peers, -1)
    offset_E = (jnp.cumsum(counts_Pe, axis=1) - counts_Pe).reshape(num_experts)
    peer_A = expert_A // (num_experts // num_peers)
    slot_A = peer_A * bucket_rows + offset_E[expert_A] + rank_A
    M = num_peers * bucket_rows
    slot_A = jnp.where(kept_A, slot_A, M)
    assignment_M = jnp.full((M,), A, jnp.int32)
    assignment_M = assignment_M.at[slot_A].set(jnp.arange(A, dtype=jnp.int32), mode="drop")
    return SendPlan(slot_A.reshape(expert_NK.shape), assignment_M, counts_Pe)


def dispatch(
    x_ND: Float[Array, "N D"], plan: SendPlan, route: Route
) -> tuple[Float[Array, "R D"], Sent]:
    """Returns the rows this device's experts work on, sorted by expert, and how to undo it.

    Rows past `sum(sizes_e)` are zero. R = Q * J for Q senders. Wire: `exchange.send` of P * J rows,
    and P * e integers of metadata.
    """
    K = plan.slot_NK.shape[1]
    x_MD = permute(x_ND, plan.assignment_M // K, plan.slot_NK)
    P = plan.counts_Pe.shape[0]
    if not route:
        # One device owns all experts: the one bucket is already sorted by expert.
        rows_R = jnp.arange(x_MD.shape[0], dtype=jnp.int32)
        return x_MD, Sent(plan, rows_R[:, None], rows_R, plan.counts_Pe[0])
    x_QJD = send(x_MD.reshape(P, -1, x_MD.shape[-1]), route)
    counts_Qe = send(plan.counts_Pe, route)
    place_QJ, source_R = _expert_order(counts_Qe, x_QJD.shape[1])
    x_RD = permute(x_QJD.reshape(-1, x_MD.shape[-1]), source_R, place_QJ[:, None])
    return x_RD, Sent(plan, place_QJ[:, None], source_R, jnp.sum(counts_Qe, axis=0))


def _expert_order(counts_Qe: jax.Array, bucket_rows: int) -> tuple[jax.Array, jax.Array]:
    """Where each received bucket row goes when rows are sorted by expert, then sender."""
    R = counts_Qe.shape[0] * bucket_rows
    ends_Qe = jnp.cumsum(counts_Qe, axis=1)
    counts_eQ = counts_Qe.T
    starts_Qe = (
        (jnp.cumsum(counts_eQ.reshape(-1)) - counts_eQ.reshape(-1)).reshape(counts_eQ.shape).T
    )
    place_J = jnp.arange(bucket_rows, dtype=jnp.int32)

    def sender(counts_e, ends_e, starts_e):
        expert_J = jnp.searchsorted(ends_e, place_J, side="right", method="compare_all")
        inside_J = place_J < ends_e[-1]
        expert_J = jnp.minimum(expert_J, counts_e.shape[0] - 1)
        return jnp.where(inside_J, starts_e[expert_J] + place_J - (ends_e - counts_e)[expert_J], R)

    place_R = jax.vmap(sender)(counts_Qe, ends_Qe, starts_Qe).reshape(R)
    source_R = jnp.full((R,), R, jnp.int32)
    source_R = source_R.at[place_R].set(jnp.arange(R, dtype=jnp.int32), mode="drop")
    return place_R, source_R


def combine(
    y_RD: Float[Array, "R D"], weight_NK: Float[Array, "N K"], sent: Sent, route: Route
) -> Float[Array, "N D"]:
    """Brings each expert's rows home and sums each token's K results by weight; undoes `dispatch`.

    A dropped assignment counts as zero. Wire: `exchange.send_back` of Q * J rows.
    """
    if route:
        P = sent.plan.counts_Pe.shape[0]
        y_QD = permute(y_RD, sent.place_Q1[:, 0], sent.source_R[:, None])
        rows = sent.plan.assignment_M.shape[0] // P
        y_RD = send_back(y_QD.reshape(-1, rows, y_RD.shape[-1]), route).reshape(-1, y_RD.shape[-1])
    return weighted_sum(y_RD, weight_NK, sent.plan.slot_NK, sent.plan.assignment_M)
