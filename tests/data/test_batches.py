import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.data import batches, tokens
from moejax.errors import InputError

EOS = 9
GOLDEN_ORDER = [7, 1, 0, 3, 4, 2, 5, 6, 6, 0, 4, 2, 7, 3, 1, 5]


def _count_up(num_tokens):
    """A stream whose ids are their own positions."""
    ids = np.arange(num_tokens, dtype=np.uint32)
    return tokens.MemorySource(ids, vocab_size=num_tokens + 1, eos_id=num_tokens, target_bytes=None)


def _digits(text):
    ids = np.array([int(c) for c in text], np.uint32)
    return tokens.MemorySource(ids, vocab_size=10, eos_id=EOS, target_bytes=None)


def _batches(source, *, T=4, B=2, **changes):
    chosen = {"seed": 0, "shuffle": True, "repeat": True, "isolate_documents": True, **changes}
    return batches.Batches(source, sequence_length=T, batch_sequences=B, **chosen)


def _order(found, steps):
    """Which sequences the steps read, from streams that count up."""
    T = found.rows(0, 0, 1).token_BT.shape[1]
    B = found.batch_sequences
    return [int(i) for s in steps for i in found.rows(s, 0, B).token_BT[:, 0] // T]


sizes = {"T": st.integers(1, 9), "B": st.integers(1, 6), "extra": st.integers(1, 60)}


@given(**sizes, shuffle=st.booleans())
def test_a_sequence_is_T_inputs_and_the_same_shifted_by_one(T, B, extra, shuffle):
    found = _batches(_count_up(T * B + extra), T=T, B=B, shuffle=shuffle).rows(0, 0, B)
    assert found.token_BT.shape == found.target_BT.shape == found.segment_BT.shape == (B, T)
    assert found.token_BT.dtype == found.target_BT.dtype == found.segment_BT.dtype == np.int32
    np.testing.assert_array_equal(found.target_BT, found.token_BT + 1)
    assert not np.any(found.token_BT[:, 0] % T)


@given(**sizes, step=st.integers(0, 10**6), data=st.data())
@settings(max_examples=40)
def test_rows_on_any_split_of_processes_equal_the_whole_batch(T, B, extra, step, data):
    found = _batches(_count_up(T * B + extra), T=T, B=B)
    cuts = sorted(data.draw(st.sets(st.integers(0, B))) | {0, B})
    whole = found.rows(step, 0, B)
    parts = [found.rows(step, a, b) for a, b in itertools.pairwise(cuts)]
    for name in ("token_BT", "target_BT", "segment_BT"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(whole, name))


@given(steps=st.integers(1, 6), B=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8)
def test_every_epoch_visits_every_sequence_once(steps, B, seed):
    found = _batches(_count_up(steps * B * 3 + 1), T=3, B=B, seed=seed)
    for epoch in range(3):
        order = _order(found, range(epoch * steps, (epoch + 1) * steps))
        assert sorted(order) == list(range(steps * B))
    plain = _batches(_count_up(steps * B * 3 + 1), T=3, B=B, shuffle=False)
    assert _order(plain, range(2 * steps)) == [*range(steps * B)] * 2


@pytest.mark.parametrize("shuffle", [True, False])
def test_sites_take_turns_and_read_what_one_run_of_larger_batches_does(shuffle):
    one = _batches(_count_up(97), B=6, shuffle=shuffle)
    sites = [_batches(_count_up(97), B=2, shuffle=shuffle, share=(i, 3)) for i in range(3)]
    for step in range(7):
        found = [site for own in sites for site in _order(own, [step])]
        assert found == _order(one, [step])
    once = _batches(_count_up(97), B=2, repeat=False, share=(1, 3))
    once.check_steps(4)  # 24 sequences
    with pytest.raises(InputError, match=r"5 steps need 30 sequences.*num_steps to 4"):
        once.check_steps(5)


def test_order_differs_between_epochs_and_seeds():
    source = _count_up(64 * 4 + 1)
    orders = [
        tuple(_order(_batches(source, seed=seed), range(epoch * 32, epoch * 32 + 32)))
        for seed in range(4)
        for epoch in range(4)
    ]
    assert len(set(orders)) == 16
    assert tuple(range(64)) not in orders


@given(step=st.integers(0, 9), seed=st.integers(0, 99))
@settings(max_examples=6)
def test_a_run_resumed_at_any_step_sees_what_a_straight_run_sees(step, seed):
    source = _count_up(7 * 4 + 1)  # an epoch ends inside a batch
    straight = _order(_batches(source, seed=seed), range(10))
    resumed = _order(_batches(source, seed=seed), range(step, 10))
    assert resumed == straight[2 * step :]


def test_the_order_stays_the_same_between_versions():
    # A run resumes by its step alone: another order would repeat some text and leave out other.
    assert _order(_batches(_count_up(8 * 4 + 1), seed=7), range(8)) == GOLDEN_ORDER


def test_segments_count_documents_and_eos_opens_its_own():
    found = _batches(_digits("9119229333"), T=9, B=1, shuffle=False).rows(0, 0, 1)
    assert found.token_BT.tolist() == [[9, 1, 1, 9, 2, 2, 9, 3, 3]]
    assert found.segment_BT.tolist() == [[1, 1, 1, 2, 2, 2, 3, 3, 3]]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 7))
def test_a_target_is_predicted_from_its_own_document(lengths, T):
    # Document number i is written with the digit i modulo 9; eos belongs to what it opens.
    body = "".join("9" + str(i % 9) * n for i, n in enumerate(lengths)) + "9"
    owner = [i for i, n in enumerate(lengths) for _ in range(n + 1)]
    found = _batches(_digits(body * 8), T=T, B=1, shuffle=False)
    for step in range((len(body) - 1) // T):
        segment_T = found.rows(step, 0, 1).segment_BT[0]
        own = owner[step * T : step * T + T]
        for a in range(T):
            for b in range(T):
                assert (segment_T[a] == segment_T[b]) == (own[a] == own[b])


def test_without_isolation_a_row_is_one_segment():
    source = _digits("9119229333")
    found = _batches(source, T=9, B=1, isolate_documents=False).rows(0, 0, 1)
    assert not found.segment_BT.any()
    for held_out in _eval(source, T=4, B=2, isolate_documents=False):
        assert not held_out.segment_BT.any()


def test_too_little_data_for_a_sequence_shows_counts():
    with pytest.raises(InputError, match="4 tokens"):
        _batches(_count_up(4), T=4, B=1)
    assert _batches(_count_up(5), T=4, B=1).num_sequences == 1
    with pytest.raises(InputError, match="3 tokens hold no sequence of 4"):
        _batches(_count_up(9), mixture=[(_count_up(9), 1.0), (_count_up(3), 1.0)])


def test_steps_beyond_the_data_are_refused_before_training():
    source = _count_up(10 * 4 + 1)
    once = _batches(source, repeat=False)
    once.check_steps(5)
    assert sorted(_order(once, range(5))) == list(range(10))
    with pytest.raises(InputError, match=r"6 steps need 12 sequences.*10.*data\.repeat"):
        once.check_steps(6)
    # Ten sequences are five batches; the run leaves out two of them.
    once.check_steps(3, left_out=2)
    with pytest.raises(InputError, match=r"need 12 sequences.*Lower train\.num_steps to 3, or"):
        once.check_steps(4, left_out=2)
    _batches(source).check_steps(10**9)


def _eval(source, *, T, B, limit=None, **more):
    return list(
        batches.eval_batches(source, sequence_length=T, batch_sequences=B, limit=limit, **more)
    )


@given(n=st.integers(2, 150), T=st.integers(1, 9), B=st.integers(1, 5))
def test_evaluation_covers_every_target_exactly_once(n, T, B):
    found = _eval(_count_up(n), T=T, B=B)
    target = np.concatenate([batch.target_BT.ravel() for batch in found])
    token = np.concatenate([batch.token_BT.ravel() for batch in found])
    assert target[target >= 0].tolist() == list(range(1, n))
    assert token[target >= 0].tolist() == list(range(n - 1))
    assert set(target[target < 0].tolist()) <= {-1}
    assert all(batch.token_BT.shape == batch.target_BT.shape == (B, T) for batch in found)
    assert token.min() >= 0
    assert token.max() <= n  # padding too is an id of the vocabulary


@given(n=st.integers(2, 400), limit=st.integers(1, 30))
def test_a_limited_evaluation_takes_distinct_batches_in_order(n, limit):
    everything = [batch.target_BT.tolist() for batch in _eval(_count_up(n), T=3, B=2)]
    some = [batch.target_BT.tolist() for batch in _eval(_count_up(n), T=3, B=2, limit=limit)]
    assert len(some) == min(limit, len(everything))
    places = [everything.index(batch) for batch in some]
    assert places == sorted(set(places))
    if limit > 1 and len(everything) > limit:  # spread over the stream
        assert (places[0], places[-1]) == (0, len(everything) - 1)
        assert np.ptp(np.diff(places)) <= 1


@pytest.mark.parametrize("depth", [1, 2, 20])
def test_prefetch_gives_every_step_in_order_and_errors_in_their_places(depth):
    def compute(step):
        if step == 11:
            raise InputError("the last")
        return step * step

    found = batches.prefetch(compute, 3, 12, depth=depth)
    assert [next(found) for _ in range(8)] == [step * step for step in range(3, 11)]
    with pytest.raises(InputError, match="the last"):
        next(found)
    assert list(batches.prefetch(compute, 4, 4, depth=depth)) == []


def test_prefetch_works_ahead_of_its_reader_but_not_far():
    done = []
    found = batches.prefetch(lambda step: done.append(step), 0, 100, depth=3)
    next(found)
    deadline = time.monotonic() + 10
    while len(done) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert 3 <= len(done) <= 4
    found.close()


def test_closing_prefetch_ends_its_thread():
    before = set(threading.enumerate())
    found = batches.prefetch(lambda step: step, 0, 10**6)
    next(found)
    assert set(threading.enumerate()) - before
    found.close()
    assert not set(threading.enumerate()) - before
    assert list(found) == []


def test_weights_share_out_the_sequences_whatever_the_streams_sizes():
    small, large = _count_up(9), _count_up(401)  # 2 and 100 sequences of 4
    mixed = _batches(small, mixture=[(small, 3.0), (large, 1.0)], B=8)
    rows = [mixed.rows(step, 0, 8) for step in range(25)]
    ids = np.concatenate([one.token_BT[:, 0] for one in rows]) // 4
    # Each batch of eight has six of the first: nothing but 0 and 1, each as often.
    assert all(np.sum(one.token_BT[:, 0] < 8) >= 6 for one in rows)
    assert np.bincount(ids)[:2].tolist() == pytest.approx([75, 75], abs=2)
    # The other gives 50 sequences, none of them twice.
    assert np.bincount(ids)[2:].max() == 1
    assert len(ids) == 200


def test_a_mixture_is_a_function_of_seed_and_step():
    streams = [(_count_up(41), 1.0), (_count_up(81), 2.0)]
    first, second = (_batches(streams[0][0], mixture=streams, seed=3) for _ in range(2))
    assert _order(first, range(9)) == _order(second, range(9))[:18]
    assert _order(first, [7]) == _order(second, range(9))[14:16]


def test_streams_of_a_mixture_have_orders_of_their_own():
    """Those of the seed and of the seed after it: a resumed run goes on in the same order."""
    streams = [(_count_up(64 * 4 + 1), 1.0), (_count_up(64 * 4 + 1), 1.0)]
    mixed = _order(_batches(streams[0][0], mixture=streams, seed=3), range(64))
    alone = [_order(_batches(streams[0][0], seed=seed), range(32)) for seed in (3, 4)]
    assert sorted([mixed[0::2], mixed[1::2]]) == sorted(alone)


def test_a_mixture_seen_once_ends_with_its_first_stream_to_end():
    streams = [(_count_up(9), 1.0), (_count_up(401), 1.0)]
    mixed = _batches(streams[0][0], mixture=streams, repeat=False)
    assert mixed.num_sequences == 4
    mixed.check_steps(2)
    with pytest.raises(InputError, match="3 steps need 6 sequences"):
        mixed.check_steps(3)
