"""Gradients that return to the leading layers, without a model."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.step.pipeline.inputs import LeadingInputs, ReturningGradients
from moejax.step.pipeline.schedule import build_schedule

NO_INPUT = -1e6  # the gradient of no input: of a later virtual stage, or of the bubble


def inputs_of_stages(schedule):
    """`LeadingInputs` of each stage, and {stage: the gradient that its link brings}."""
    arriving, found = {}, []
    for stage in range(schedule.stages):
        inputs = object.__new__(LeadingInputs)
        inputs.staged = SimpleNamespace(
            stage_index=jnp.int32(stage),
            stages=schedule.stages,
            schedule=schedule,
            owner=lambda k: (k % schedule.stages, k // schedule.stages),
            nearest=lambda k: (
                jnp.clip(k, 0, schedule.micro_batches - 1),
                (k >= 0) & (k < schedule.micro_batches),
            ),
        )
        inputs.gradient_link = SimpleNamespace(
            encode_once=lambda x: x, to_next=lambda _, stage=stage: arriving[stage]
        )
        found.append(inputs)
    return found, arriving


def input_gradient(schedule, t):
    """The first stage's input gradient of the tick before t: 1 + k, or 1 + k + slice / 10."""
    n = t - 1 - schedule.first_backward - (schedule.stages - 1)
    k, section = schedule.micro_batch(n), schedule.section(n, backward=True)
    if not 0 <= n < schedule.tasks or (schedule.slices == 1 and section != 0):
        return NO_INPUT
    return 1 + k + section / 10


@pytest.mark.parametrize(
    ("stages", "local", "virtual_stages", "slices"),
    [(2, 1, 1, 1), (2, 2, 2, 1), (3, 2, 3, 1), (4, 3, 2, 1), (2, 2, 1, 4), (4, 1, 1, 2)],
)
def test_every_micro_batch_gets_the_gradient_of_its_own_input_alone(
    stages, local, virtual_stages, slices
):
    """The gradient of its first virtual stage; those of later ones leave the first stage too."""
    schedule = build_schedule("1f1b", stages, stages * local, virtual_stages, slices)
    inputs, arriving = inputs_of_stages(schedule)
    boundary = {
        first + cycle.length * repeat + t
        for first, cycle in _starts(schedule)
        for repeat in range(cycle.times)
        for phase in cycle.phases
        for t in range(phase.start, phase.stop)
        if phase.boundary
    }
    zero = jnp.zeros((1, 1, 1))
    states = [ReturningGradients(zero, jnp.full((local, 1, slices, 1), NO_INPUT))] * stages
    for t in range(schedule.first_backward, schedule.end + stages):
        arriving.update({s: states[s - 1].in_transit_BtD if s else zero for s in range(stages)})
        at_boundary = t in boundary if t < schedule.end else t == schedule.end
        dx_BtD = jnp.full((1, 1, 1), input_gradient(schedule, t))
        states = [
            of_stage.backward_at(state, dx_BtD, jnp.int32(t), boundary=at_boundary)
            for of_stage, state in zip(inputs, states, strict=True)
        ]
    wanted = 1 + np.arange(stages * local).reshape(local, stages).T[..., None]
    wanted = wanted + (np.arange(slices) / 10 if slices > 1 else np.zeros(1))
    got = np.stack([np.asarray(state.arrived_JBtD)[:, 0, :, 0] for state in states])
    np.testing.assert_allclose(got, wanted)


def _starts(schedule):
    first = 0
    for cycle in schedule.cycles:
        yield first, cycle
        first += cycle.length * cycle.times
