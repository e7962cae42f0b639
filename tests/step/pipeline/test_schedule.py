"""Schedules of pipeline stages: nothing runs before its input, no slot is overwritten early."""

import hypothesis
import hypothesis.strategies as st
import pytest

from moejax.step.pipeline.schedule import build_schedule


@st.composite
def schedules(draw):
    stages = draw(st.integers(2, 8))
    micro_batches = stages * draw(st.integers(1, 8))
    sections = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 7), (2, 1), (3, 1), (5, 1)]))
    names = ["1f1b", "combined_1f1b"] if sections == (1, 1) else ["1f1b"]
    return build_schedule(draw(st.sampled_from(names)), stages, micro_batches, *sections)


def tasks(schedule, *, backward=False):
    """(micro-batch, section) of a stage's tasks in order; a section is a virtual stage or a slice.

    P micro-batches pass through each virtual stage in turn, and all slices of one before the next.
    """
    sections = list(range(schedule.virtual_stages * schedule.slices))
    group_size = 1 if schedule.slices > 1 else schedule.stages
    groups = range(0, schedule.micro_batches, group_size)
    order = sections[::-1] if backward else sections
    return [
        (first + m, section) for first in groups for section in order for m in range(group_size)
    ]


def ticks(schedule):
    """{("forward", s, k, section), ("loss", k, slice), ("backward", s, k, section): tick}."""
    P, at = schedule.stages, {}
    for s in range(P):
        for n, (k, section) in enumerate(tasks(schedule)):
            at["forward", s, k, section] = s + n
            if s == P - 1 and (schedule.slices > 1 or section == schedule.virtual_stages - 1):
                at["loss", k, section * (schedule.slices > 1)] = s + n + 1 - schedule.combined
        for n, (k, section) in enumerate(tasks(schedule, backward=True)):
            at["backward", s, k, section] = schedule.first_backward + P - 1 - s + n
    return at


def phases(schedule):
    """All phases in order, with the ticks that they have in a run."""
    found, first = [], 0
    for cycle in schedule.cycles:
        for _ in range(cycle.times):
            found += [
                phase._replace(start=first + phase.start, stop=first + phase.stop)
                for phase in cycle.phases
            ]
            first += cycle.length
    return found


def test_1f1b_of_two_stages_and_four_micro_batches():
    """The picture in the schedule's docstring, by hand."""
    schedule = build_schedule("1f1b", 2, 4)
    names = [(p.start, p.stop, p.forward, p.loss, p.backward) for p in phases(schedule)]
    assert names == [
        (0, 2, True, False, False),  # warm-up
        (2, 5, True, True, True),  # steady
        (5, 6, False, True, True),  # cool-down
        (6, 7, False, False, True),
    ]
    at = ticks(schedule)
    assert [at["forward", 1, k, 0] for k in range(4)] == [1, 2, 3, 4]
    assert [at["loss", k, 0] for k in range(4)] == [2, 3, 4, 5]
    assert [at["backward", 1, k, 0] for k in range(4)] == [2, 3, 4, 5]
    assert [at["backward", 0, k, 0] for k in range(4)] == [3, 4, 5, 6]


@hypothesis.given(schedules())
def test_every_tick_of_the_rule_is_in_a_phase_that_does_it(schedule):
    does = {
        (name, t)
        for phase in phases(schedule)
        for name in ("forward", "loss", "backward")
        if getattr(phase, name)
        for t in range(phase.start, phase.stop)
    }
    at = ticks(schedule)
    assert does == {(work[0], tick) for work, tick in at.items()}
    edges = [edge for phase in phases(schedule) for edge in (phase.start, phase.stop)]
    assert edges == sorted(edges)
    assert (edges[0], edges[-1]) == (0, schedule.end)
    # Micro-batches enter and leave the pipeline at boundary ticks.
    boundary = {t for p in phases(schedule) if p.boundary for t in range(p.start, p.stop)}
    for k in range(schedule.micro_batches):
        for index in range(schedule.slices):
            last = index + schedule.virtual_stages - 1
            assert at["forward", 0, k, index] in boundary
            assert at["backward", schedule.stages - 1, k, last] in boundary
            # The first stage's gradient is taken at the next tick, at the latest after all.
            assert at["backward", 0, k, index] + 1 in boundary | {schedule.end}


@hypothesis.given(schedules())
def test_a_task_has_the_number_of_its_place_in_the_order(schedule):
    for n, (k, section) in enumerate(tasks(schedule)):
        assert (schedule.micro_batch(n), schedule.section(n)) == (k, section)
    for n, (k, section) in enumerate(tasks(schedule, backward=True)):
        assert (schedule.micro_batch(n), schedule.section(n, backward=True)) == (k, section)
    for n in (-1, -schedule.stages, schedule.tasks, schedule.tasks + schedule.stages - 1):
        assert not 0 <= schedule.micro_batch(n) < schedule.micro_batches


@hypothesis.given(schedules())
def test_nothing_runs_before_its_input(schedule):
    at, last, V = ticks(schedule), schedule.stages - 1, schedule.virtual_stages
    for k in range(schedule.micro_batches):
        for section in range(V * schedule.slices):
            for s in range(last):
                # It is sent at the end of a tick or at the start of the next, which has it.
                assert at["forward", s + 1, k, section] - at["forward", s, k, section] == 1
                assert at["backward", s, k, section] - at["backward", s + 1, k, section] == 1
            if section and V > 1:
                assert at["forward", 0, k, section] - at["forward", last, k, section - 1] == 1
                assert at["backward", last, k, section - 1] - at["backward", 0, k, section] == 1
            if section and V == 1:  # a slice needs the keys of those before it
                for s in range(last + 1):
                    assert at["forward", s, k, section - 1] < at["forward", s, k, section]
                    assert at["backward", s, k, section - 1] > at["backward", s, k, section]
        for index in range(schedule.slices):
            task, loss = (last, k, V - 1 + index), at["loss", k, index]
            if schedule.combined:  # the loss step is the last of a tick
                assert at["forward", *task] <= loss < at["backward", *task]
            else:  # the loss step is the first of a tick
                assert at["forward", *task] < loss <= at["backward", *task]


@hypothesis.settings(max_examples=50)
@hypothesis.given(schedules())
def test_no_slot_is_overwritten_before_it_is_read(schedule):
    at, P = ticks(schedule), schedule.stages
    for s in range(P):
        written = {}
        for k, section in tasks(schedule):
            first_group, groups = schedule.first_groups[section], schedule.saved_groups[section]
            slot = schedule.slot(k, first_group, groups)
            assert 0 <= slot < schedule.slots
            if slot in written:
                # In a tick forward writes before backward reads.
                assert at["backward", s, *written[slot]] < at["forward", s, k, section]
            written[slot] = k, section
        # Keys and values of a micro-batch are written from its first slice on.
        started = {}
        for k in range(schedule.micro_batches):
            slot = k % schedule.saved_groups[0]
            if slot in started and schedule.slices > 1:
                assert at["backward", s, started[slot], 0] < at["forward", s, k, 0]
            started[slot] = k
    losses = {}
    for work, tick in sorted(at.items(), key=lambda item: item[1]):
        if work[0] != "loss":
            continue
        k, index = work[1:]
        slot = schedule.loss_slot(k, index)
        if slot in losses:
            k_before, index_before = losses[slot]
            read = at["backward", P - 1, k_before, schedule.virtual_stages - 1 + index_before]
            assert read <= tick if schedule.combined else read < tick
        losses[slot] = k, index


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 8), (4, 32)])
def test_1f1b_has_slots_by_stages(stages, micro_batches):
    for name in ("1f1b", "combined_1f1b"):
        assert build_schedule(name, stages, micro_batches).slots <= 2 * stages
    # Half of a stage's layers each: 1.5 P in place of 2 P micro-batches of all.
    assert build_schedule("1f1b", stages, micro_batches, 2).slots <= 3 * stages


@hypothesis.given(st.integers(2, 8), st.integers(2, 6), st.integers(2, 20))
def test_the_program_of_interleaved_stages_does_not_grow_with_micro_batches(stages, V, times):
    few = build_schedule("1f1b", stages, 4 * stages, V).cycles
    many = build_schedule("1f1b", stages, (4 + times) * stages, V).cycles
    assert [cycle.phases for cycle in few] == [cycle.phases for cycle in many]
