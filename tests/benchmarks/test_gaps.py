from hypothesis import given
from hypothesis import strategies as st

from benchmarks.emulated.workers.gaps import Gap, assign

GAPS = st.lists(st.builds(Gap, st.floats(0, 10), st.integers(0, 20)), max_size=8)


def test_pieces_fill_the_gaps_in_order_and_the_rest_rolls_on():
    gaps = [Gap(0.25, ready=4), Gap(0.05), Gap(0.1, ready=2), Gap(0.5)]
    assert assign(gaps, 0.1) == [2, 0, 1, 3, 0]


def test_what_no_gap_has_time_for_comes_last():
    assert assign([Gap(0.1, ready=5)], 0.1) == [1, 4]
    assert assign([], 0.1) == [0]


@given(gaps=GAPS, seconds=st.floats(0.01, 5))
def test_every_piece_goes_once_not_before_it_is_ready_and_no_gap_overflows(gaps, seconds):
    taken = assign(gaps, seconds)
    assert len(taken) == len(gaps) + 1
    assert sum(taken) == sum(gap.ready for gap in gaps)
    for place, gap in enumerate(gaps):
        assert sum(taken[: place + 1]) <= sum(g.ready for g in gaps[: place + 1])
        assert taken[place] * seconds <= gap.seconds * (1 + 1e-9)
        # No piece waits while there is time for it.
        waiting = sum(g.ready for g in gaps[: place + 1]) - sum(taken[: place + 1])
        assert waiting == 0 or (taken[place] + 1) * seconds > gap.seconds * (1 - 1e-9)
