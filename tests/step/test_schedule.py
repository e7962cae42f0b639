"""Schedules of pipeline stages: nothing runs before its input, no slot is overwritten early."""

import hypothesis
import hypothesis.strategies as st
import pytest

from moejax.step.schedule import schedule_of


@st.composite
def schedules(draw):
    stages = draw(st.integers(2, 8))
    micro_batches = stages * draw(st.integers(1, 8))
    names = ["gpipe", "1f1b", "combined_1f1b"]
    return schedule_of(draw(st.sampled_from(names)), stages, micro_batches)


def ticks(schedule):
    """{("forward", s, k) or ("answer", k) or ("backward", s, k): tick}, by the documented rule."""
    P, M = schedule.stages, schedule.micro_batches
    at = {}
    for k in range(M):
        at["answer", k] = P - schedule.combined + k
        for s in range(P):
            at["forward", s, k] = s + k
            at["backward", s, k] = schedule.begins + P - 1 - s + k
    return at


@hypothesis.given(schedules())
def test_every_tick_of_the_rule_is_in_a_phase_that_does_it(schedule):
    does = {
        (name, t)
        for phase in schedule.phases
        for name in ("forward", "answer", "backward")
        if getattr(phase, name)
        for t in range(phase.start, phase.stop)
    }
    wanted = {(what[0], tick) for what, tick in ticks(schedule).items()}
    assert does == wanted
    edges = [edge for phase in schedule.phases for edge in (phase.start, phase.stop)]
    assert edges == sorted(edges)
    assert edges[0] == 0


@hypothesis.given(schedules())
def test_nothing_runs_before_its_input(schedule):
    at, last = ticks(schedule), schedule.stages - 1
    for k in range(schedule.micro_batches):
        for s in range(last):
            # It is sent at the end of a tick or at the start of the next, which has it.
            assert at["forward", s, k] < at["forward", s + 1, k]
            assert at["backward", s + 1, k] < at["backward", s, k]
        if schedule.combined:  # answers come last in a tick
            assert at["forward", last, k] <= at["answer", k] < at["backward", last, k]
        else:  # answers come first
            assert at["forward", last, k] < at["answer", k] <= at["backward", last, k]


@hypothesis.given(schedules())
def test_no_slot_is_overwritten_before_it_is_read(schedule):
    at, P = ticks(schedule), schedule.stages
    for s in range(P):
        written = {}
        for k in range(schedule.micro_batches):
            slot = (s + k) % schedule.kept
            if slot in written:
                # In a tick forward writes before backward reads.
                assert at["backward", s, written[slot]] < at["forward", s, k]
            written[slot] = k
    answers = {}
    for k in range(schedule.micro_batches):
        slot = k % schedule.answers
        if slot in answers:
            read = at["backward", P - 1, answers[slot]]
            assert read <= at["answer", k] if schedule.combined else read < at["answer", k]
        answers[slot] = k


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 8), (4, 32)])
def test_1f1b_keeps_inputs_by_stages_and_gpipe_by_micro_batches(stages, micro_batches):
    for name in ("1f1b", "combined_1f1b"):
        assert schedule_of(name, stages, micro_batches).kept <= 2 * stages
    assert schedule_of("gpipe", stages, micro_batches).kept == micro_batches


@hypothesis.given(schedules())
def test_the_bubble_is_stages_less_one(schedule):
    for name in ("forward", "backward"):
        taken = sum(p.stop - p.start for p in schedule.phases if getattr(p, name))
        assert taken - schedule.micro_batches == schedule.stages - 1
