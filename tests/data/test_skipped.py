"""Which batch a step reads, where some are left out."""

from hypothesis import given
from hypothesis import strategies as st

from moejax.data.skipped import SkippedData, data_position, skip_to


def test_positions_behind_what_is_left_out():
    left = [SkippedData(4, 3)]
    assert [data_position(step, left) for step in (0, 3, 4, 5)] == [0, 3, 7, 8]
    # Back to before that: the second entry covers the first.
    left = skip_to(2, 6, left)
    assert left == [SkippedData(4, 3), SkippedData(2, 7)]
    assert [data_position(step, left) for step in (1, 2, 4, 6)] == [1, 9, 11, 13]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), max_size=6))
def test_no_batch_is_read_again_that_led_to_bad_steps_and_none_else_is_left_out(moves):
    """Steps so many on and goes back so many, again and again, beside lists of what was read."""
    read, bad, left, step = [], set(), [], 0  # read[s]: the batch of step s + 1
    for on, back in moves:
        for _ in range(on):
            read.append(data_position(step, left))
            step += 1
        assert read == sorted(set(read))
        to = max(step - back, 0)
        left = skip_to(to, step, left)
        bad |= set(read[to:])
        read, step = read[:to], to
    following = data_position(step, left)
    assert not set(read) & bad
    assert set(read) | bad == set(range(following))
    assert data_position(step + 5, left) == following + 5
