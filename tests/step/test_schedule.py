"""Schedules of pipeline stages: nothing runs before its input, no slot is overwritten early."""

import hypothesis
import hypothesis.strategies as st
import pytest

from moejax.step.pipeline.schedule import schedule_of


@st.composite
def schedules(draw):
    stages = draw(st.integers(2, 8))
    micro_batches = stages * draw(st.integers(1, 8))
    kinds = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 7), (2, 1), (3, 1), (5, 1)]))
    names = ["1f1b", "combined_1f1b"] if kinds == (1, 1) else ["1f1b"]
    return schedule_of(draw(st.sampled_from(names)), stages, micro_batches, *kinds)


def visits(schedule, *, backward=False):
    """(micro-batch, chunk or slice) of a stage's visits.

    P micro-batches pass through each chunk in turn, and all slices of one before the next.
    """
    kinds = list(range(schedule.chunks * schedule.slices))
    together = 1 if schedule.slices > 1 else schedule.stages
    turns = range(0, schedule.micro_batches, together)
    order = kinds[::-1] if backward else kinds
    return [(first + m, kind) for first in turns for kind in order for m in range(together)]


def ticks(schedule):
    """{("forward", s, k, c), ("answer", k, piece) or ("backward", s, k, c): tick}, by the rule."""
    P, at = schedule.stages, {}
    for s in range(P):
        for n, (k, c) in enumerate(visits(schedule)):
            at["forward", s, k, c] = s + n
            if s == P - 1 and (schedule.slices > 1 or c == schedule.chunks - 1):
                at["answer", k, c * (schedule.slices > 1)] = s + n + 1 - schedule.combined
        for n, (k, c) in enumerate(visits(schedule, backward=True)):
            at["backward", s, k, c] = schedule.begins + P - 1 - s + n
    return at


def phases(schedule):
    """All phases in order, with the ticks that they have in a run."""
    found, first = [], 0
    for turn in schedule.turns:
        for _ in range(turn.times):
            found += [
                phase._replace(start=first + phase.start, stop=first + phase.stop)
                for phase in turn.phases
            ]
            first += turn.length
    return found


@hypothesis.given(schedules())
def test_every_tick_of_the_rule_is_in_a_phase_that_does_it(schedule):
    does = {
        (name, t)
        for phase in phases(schedule)
        for name in ("forward", "answer", "backward")
        if getattr(phase, name)
        for t in range(phase.start, phase.stop)
    }
    at = ticks(schedule)
    assert does == {(what[0], tick) for what, tick in at.items()}
    edges = [edge for phase in phases(schedule) for edge in (phase.start, phase.stop)]
    assert edges == sorted(edges)
    assert (edges[0], edges[-1]) == (0, schedule.end)
    # Where stages begin and end is where the ends of the pipeline have something to do.
    ends = {t for phase in phases(schedule) if phase.ends for t in range(phase.start, phase.stop)}
    for k in range(schedule.micro_batches):
        for piece in range(schedule.slices):
            assert at["forward", 0, k, piece] in ends
            assert at["backward", schedule.stages - 1, k, piece + schedule.chunks - 1] in ends
            # The first stage's gradient is taken at the next tick, at the latest after all.
            assert at["backward", 0, k, piece] + 1 in ends | {schedule.end}


@hypothesis.given(schedules())
def test_a_visit_has_the_number_of_its_place_in_the_order(schedule):
    for n, (k, c) in enumerate(visits(schedule)):
        assert (schedule.micro_batch(n), schedule.kind(n)) == (k, c)
    for n, (k, c) in enumerate(visits(schedule, backward=True)):
        assert (schedule.micro_batch(n), schedule.kind(n, backward=True)) == (k, c)
    for n in (-1, -schedule.stages, schedule.visits, schedule.visits + schedule.stages - 1):
        assert not 0 <= schedule.micro_batch(n) < schedule.micro_batches


@hypothesis.given(schedules())
def test_nothing_runs_before_its_input(schedule):
    at, last, V = ticks(schedule), schedule.stages - 1, schedule.chunks
    for k in range(schedule.micro_batches):
        for c in range(V * schedule.slices):
            for s in range(last):
                # It is sent at the end of a tick or at the start of the next, which has it.
                assert at["forward", s + 1, k, c] - at["forward", s, k, c] == 1
                assert at["backward", s, k, c] - at["backward", s + 1, k, c] == 1
            if c and V > 1:
                assert at["forward", 0, k, c] - at["forward", last, k, c - 1] == 1
                assert at["backward", last, k, c - 1] - at["backward", 0, k, c] == 1
            if c and V == 1:  # a slice needs the keys of those before it
                for s in range(last + 1):
                    assert at["forward", s, k, c - 1] < at["forward", s, k, c]
                    assert at["backward", s, k, c - 1] > at["backward", s, k, c]
        for piece in range(schedule.slices):
            end, answer = (last, k, V - 1 + piece), at["answer", k, piece]
            if schedule.combined:  # answers come last in a tick
                assert at["forward", *end] <= answer < at["backward", *end]
            else:  # answers come first
                assert at["forward", *end] < answer <= at["backward", *end]


@hypothesis.given(schedules())
def test_no_slot_is_overwritten_before_it_is_read(schedule):
    at, P = ticks(schedule), schedule.stages
    for s in range(P):
        written = {}
        for k, c in visits(schedule):
            slot = schedule.slot(k, schedule.bases[c], schedule.groups[c])
            assert 0 <= slot < schedule.kept
            if slot in written:
                # In a tick forward writes before backward reads.
                assert at["backward", s, *written[slot]] < at["forward", s, k, c]
            written[slot] = k, c
        # Keys and values of a micro-batch are written from its first slice on.
        started = {}
        for k in range(schedule.micro_batches):
            slot = k % schedule.groups[0]
            if slot in started and schedule.slices > 1:
                assert at["backward", s, started[slot], 0] < at["forward", s, k, 0]
            started[slot] = k
    answers = {}
    for what, tick in sorted(at.items(), key=lambda item: item[1]):
        if what[0] != "answer":
            continue
        k, piece = what[1:]
        slot = schedule.answer_slot(k, piece)
        if slot in answers:
            k_before, piece_before = answers[slot]
            read = at["backward", P - 1, k_before, schedule.chunks - 1 + piece_before]
            assert read <= tick if schedule.combined else read < tick
        answers[slot] = k, piece


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 8), (4, 32)])
def test_1f1b_keeps_inputs_by_stages(stages, micro_batches):
    for name in ("1f1b", "combined_1f1b"):
        assert schedule_of(name, stages, micro_batches).kept <= 2 * stages
    # Half of a stage's layers each: 1.5 P in place of 2 P micro-batches of all.
    assert schedule_of("1f1b", stages, micro_batches, 2).kept <= 3 * stages


@hypothesis.given(schedules())
def test_the_bubble_is_stages_less_one(schedule):
    for name in ("forward", "backward"):
        taken = sum(p.stop - p.start for p in phases(schedule) if getattr(p, name))
        visits = schedule.chunks * schedule.slices * schedule.micro_batches
        assert taken - visits == schedule.stages - 1


@hypothesis.given(st.integers(2, 8), st.integers(2, 6), st.integers(2, 20))
def test_the_program_of_interleaved_stages_does_not_grow_with_micro_batches(stages, chunks, times):
    few = schedule_of("1f1b", stages, 4 * stages, chunks).turns
    many = schedule_of("1f1b", stages, (4 + times) * stages, chunks).turns
    assert [turn.phases for turn in few] == [turn.phases for turn in many]
