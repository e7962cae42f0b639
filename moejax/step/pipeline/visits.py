"""Visits of a stage: which one is at a tick, what it starts from, and where its result goes.

Per device, inside the shard_map of the training mesh. Letters: those of `step.pipeline.schedule`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.comm.links import Link
from moejax.step.pipeline.model import StagedModel, Visit


class Moving(NamedTuple):
    """Hidden states on their way forward.

    Attributes:
      arrived: from the stage before, for the next forward.
      fed: what else moves towards the first stage.
      left: what the last forward returned. Each stage has its share of the positions of what the
        last stage returned, except with interleaved stages, where it is spread when it is answered:
        mostly the last stage has only been through one of several chunks.
    """

    arrived: jax.Array
    fed: Any
    left: jax.Array


def build_visit(staged: StagedModel, n: jax.Array, kind: jax.Array) -> Visit:
    """Returns a stage's n-th visit, or in a bubble another that does not count.

    Args:
      kind: the chunk, or the slice.
    """
    schedule, zero = staged.schedule, jnp.int32(0)
    k, valid = staged.numbered(schedule.micro_batch(n))
    base, groups = (jnp.asarray(x)[kind] for x in (schedule.bases, schedule.groups))
    chunk, piece = (zero, kind) if schedule.slices > 1 else (kind, zero)
    return Visit(
        k=k,
        chunk=chunk,
        piece=piece,
        first=chunk * staged.repeats,
        slot=schedule.slot(k, base, groups),
        past_slot=k % schedule.groups[0],
        valid=valid,
    )


def visit_forward(staged: StagedModel, t: jax.Array) -> Visit:
    """Returns this stage's visit on the way forward at a tick."""
    n = t - staged.stage
    return build_visit(staged, n, staged.schedule.kind(n))


def stage_input(
    staged: StagedModel, feed: Any, moving: Moving, t: jax.Array, *, enter: bool
) -> tuple[jax.Array, Any]:
    """Returns this stage's input at a tick, and what moves on towards the first stage.

    Args:
      enter: whether the first stage begins with a micro-batch.
    """
    if not enter:
        return moving.arrived, moving.fed
    first, fed = feed.input(moving.fed, t)
    return jnp.where(staged.stage == 0, first, moving.arrived), fed


def sent(ahead: Link, y_BtD: jax.Array, fed: Any, *, interleaved: bool) -> Moving:
    """Sends what forward returned to where its next chunk is, and to where it is answered."""
    arrived = ahead.to_next(ahead.encode_once(y_BtD), around=interleaved)
    return Moving(arrived, fed, y_BtD if interleaved else ahead.spread_positions(y_BtD))


def first_moving(x_BtD: jax.Array, fed: Any, stages: int, *, interleaved: bool) -> Moving:
    """Returns what moves before the first tick: real tokens."""
    share = x_BtD.shape[1] // stages
    return Moving(x_BtD, fed, x_BtD if interleaved else x_BtD[:, :share])


def to_answer(ahead: Link, moving: Moving, *, interleaved: bool) -> jax.Array:
    """Returns this stage's share of the positions of what the last stage left."""
    return ahead.spread_positions(moving.left) if interleaved else moving.left
