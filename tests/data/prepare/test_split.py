import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.data.prepare import split
from moejax.data.prepare.documents import Document, TextFile, rank_of
from moejax.data.prepare.split import Split, choose

SIZES = st.dictionaries(st.floats(0, 1), st.integers(1, 1000), min_size=2, max_size=8)


@given(SIZES, st.floats(0.001, 0.999))
def test_no_other_document_comes_nearer_and_something_is_left(sizes, share):
    total = sum(sizes.values())
    chosen = choose(sizes, share, total)
    taken = sum(sizes[rank] for rank in chosen)
    assert chosen
    assert chosen < sizes.keys()
    least = (1 - share) * total / 2
    assert total - taken >= least - 1e-6
    off = abs(taken - share * total)
    if off <= split.EXACT * share * total:
        return
    for out, into in itertools.product((None, *chosen), (None, *(sizes.keys() - chosen))):
        other = taken - sizes.get(out, 0) + sizes.get(into, 0)
        if other and total - other > least + 1e-6:
            assert abs(other - share * total) >= off - 1e-6


@pytest.mark.parametrize(
    ("sizes", "share", "chosen"),
    [
        ([80, 12], 0.01, [1]),  # the smallest where none fits
        ([3, 5, 4], 0.5, [0, 2]),  # 7 of 12; the first two would be 8
        ([20, 40, 30, 10], 0.3, [0, 3]),  # what fits, in the order of hashes
        ([10, 20, 26, 4], 0.5, [0, 1]),  # the last two would be as near
        ([99, 1], 0.99, [0]),  # 1 of 100 is what was meant for training
        ([999, 1], 0.99, [1]),  # 1 of 1000 is less than half of it
        ([7], 0.5, []),
    ],
)
def test_documents_are_chosen_by_hash_and_size(sizes, share, chosen):
    ranks = dict(enumerate(sizes))
    assert choose(ranks, share, sum(sizes)) == frozenset(chosen)


def count(split, texts):
    """Counts documents of these texts. Returns those that are held out."""
    held_out = []
    for text in texts:
        if held := split.holds_out(Document(text, "")):
            held_out.append(text)
        split.count(len(text), held)
    return held_out


def test_many_documents_are_split_by_their_texts_alone():
    """So that they stay on their side when others are added."""
    texts = [f"text {number:05}" for number in range(20_000)]
    whole, half = Split(0.1), Split(0.1)
    held_out = count(whole, texts)
    assert whole.nearer() is None
    assert count(half, texts[:10_000]) == [text for text in texts[:10_000] if text in set(held_out)]
    assert half.nearer() is None
    assert held_out == [text for text in texts if rank_of(Document(text, "")) < 0.1]


def test_more_documents_than_are_kept_are_split_by_their_texts_alone(monkeypatch):
    monkeypatch.setattr(split, "KNOWN", 30)
    texts = [f"{number:02}" for number in range(40)]
    one = Split(0.5)
    held_out = count(one, [*texts, max(texts, key=lambda text: rank_of(Document(text, ""))) * 99])
    assert held_out
    assert not one.is_near
    assert one.nearer() is None
    rare = Split(1e-9)
    count(rare, texts)
    assert (better := rare.nearer()) is not None
    assert len(count(better, texts)) == 1


def test_the_end_of_a_file_stays_where_its_lines_cut_it(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("abc")
    parts = Split(0.01)
    assert not parts.holds_out(TextFile(file, 0, 1, held_out=False))
    parts.count(1, False)
    assert parts.holds_out(TextFile(file, 1, 3, held_out=True))
    parts.count(2, True)
    assert parts.nearer() is None
