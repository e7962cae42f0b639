"""Gradients on their way back to the layers before the stages, without a model."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.step.pipeline.inputs import Chain, Returning
from moejax.step.pipeline.schedule import schedule_of

NO_INPUT = -1e6  # a gradient that is of no input: of a later chunk, or of a bubble


def chains(schedule):
    """A `Chain` for each stage, whose link brings what the stage before had."""
    before, found = {}, []
    for stage in range(schedule.stages):
        chain = object.__new__(Chain)
        chain.staged = SimpleNamespace(
            stage=jnp.int32(stage),
            stages=schedule.stages,
            schedule=schedule,
            rank=lambda k: (k % schedule.stages, k // schedule.stages),
            numbered=lambda k: (
                jnp.clip(k, 0, schedule.micro_batches - 1),
                (k >= 0) & (k < schedule.micro_batches),
            ),
        )
        chain.behind = SimpleNamespace(
            encode_once=lambda x: x, to_next=lambda _, stage=stage: before[stage]
        )
        found.append(chain)
    return found, before


def left_at(schedule, t):
    """What backward of the first stage left one tick before t: 1 + k, or 1 + k + piece / 10."""
    n = t - 1 - schedule.begins - (schedule.stages - 1)
    k, kind = schedule.micro_batch(n), schedule.kind(n, backward=True)
    if not 0 <= n < schedule.visits or (schedule.slices == 1 and kind != 0):
        return NO_INPUT
    return 1 + k + kind / 10


@pytest.mark.parametrize(
    ("stages", "times", "chunks", "slices"),
    [(2, 1, 1, 1), (2, 2, 2, 1), (3, 2, 3, 1), (4, 3, 2, 1), (2, 2, 1, 4), (4, 1, 1, 2)],
)
def test_every_micro_batch_gets_the_gradient_of_its_own_input_alone(stages, times, chunks, slices):
    """Of the first chunk's, not of later ones', which leave the first stage too."""
    schedule = schedule_of("1f1b", stages, stages * times, chunks, slices)
    every, before = chains(schedule)
    ends = {
        first + turn.length * again + t
        for first, turn in _starts(schedule)
        for again in range(turn.times)
        for phase in turn.phases
        for t in range(phase.start, phase.stop)
        if phase.ends
    }
    back = [Returning(jnp.zeros((1, 1, 1)), jnp.full((times, 1, slices, 1), NO_INPUT))] * stages
    for t in range(schedule.begins, schedule.end + stages):
        before.update({s: back[s - 1].moving if s else jnp.zeros((1, 1, 1)) for s in range(stages)})
        leave = t in ends if t < schedule.end else t == schedule.end
        dx_BtD = jnp.full((1, 1, 1), left_at(schedule, t))
        back = [
            chain.move(x, dx_BtD, jnp.int32(t), leave=leave)
            for chain, x in zip(every, back, strict=True)
        ]
    wanted = 1 + np.arange(stages * times).reshape(times, stages).T[..., None]
    wanted = wanted + (np.arange(slices) / 10 if slices > 1 else np.zeros(1))
    got = np.stack([np.asarray(x.own_JBtD)[:, 0, :, 0] for x in back])
    np.testing.assert_allclose(got, wanted)


def _starts(schedule):
    first = 0
    for turn in schedule.turns:
        yield first, turn
        first += turn.length * turn.times
