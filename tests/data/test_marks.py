"""Token files with marks: format 2."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.data import batches, sidecar, tokens
from moejax.data.marks import BEGIN, CONTEXT, TARGET, marks_of
from moejax.errors import InputError
from tests.data.token_files import EOS, FORMATS, change, marked, read, write_marked, write_text

PAIRS = [(b"question", b"answer"), (b"q", [*b"long answer", EOS, *b"more"]), (b"ab", b"c")]


@pytest.mark.parametrize("format", FORMATS)
def test_tokens_and_marks_come_back(tmp_path, format, monkeypatch):
    monkeypatch.setattr("moejax.data.prepare.writers.CHUNK_TOKENS", 8)
    write_marked(tmp_path, PAIRS, format=format)
    source = read(tmp_path / "*")  # patterns leave marks out
    ids = [id for prompt, answer in PAIRS for id in (*prompt, *answer)]
    marks = np.concatenate([marked(*pair).mark_N for pair in PAIRS])
    assert (source.num_tokens, source.num_targets) == (len(ids), sum(marks == TARGET))
    assert source.target_bytes == sum(len(answer) for _, answer in PAIRS)
    for start in range(len(ids)):
        stretch = source.stretch(start, min(9, len(ids) - start))
        assert stretch.token_N.tolist() == ids[start : start + 9]
        assert stretch.target_N.tolist() == (marks == TARGET)[start : start + 9].tolist()
        assert stretch.begin_N.tolist() == (marks == BEGIN)[start : start + 9].tolist()
    tokens.verify(source.sources[0])


CONTENT_OF_TEXT = "d027a0cb82d90e09fca69ba7c7e1cbd3e63c14c171ed59ee4e30fdc278c23f03"


def test_files_without_marks_are_written_as_in_format_1(tmp_path):
    path = write_text(tmp_path, "text")
    facts = json.loads(sidecar.sidecar_of(path).read_text())
    assert facts["format_version"] == 1
    assert set(facts).isdisjoint(sidecar.MARKED_FIELDS)
    assert list(facts)[-1] == "chunk_tokens"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.bin", "a.bin.json"]
    source = read(path)
    assert (source.num_targets, source.num_tokens) == (5, 6), "the eos that opens it is none"
    other = write_text(tmp_path, "ab", name="b")
    assert read(path, other).num_targets == 5 + 4, "but between files"
    # What identifies the data of a checkpoint stays the same between versions.
    assert sidecar.read_sidecar(path).content_digest() == CONTENT_OF_TEXT


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6))
def test_batches_predict_answers_from_their_own_conversation(tmp_path_factory, lengths):
    folder = tmp_path_factory.mktemp("any")
    source = read(write_marked(folder, [(b"q" * a, b"a" * b) for a, b in lengths * 4]))
    T, B = 7, 2
    stream = source.stretch(0, source.num_tokens)
    wanted_N = np.where(stream.target_N, stream.token_N, -1)[1:]
    found = list(batches.eval_batches(source, sequence_length=T, batch_sequences=B, limit=None))
    target_N = np.concatenate([batch.target_BT.ravel() for batch in found])
    assert target_N[: len(wanted_N)].tolist() == wanted_N.tolist()
    assert set(target_N[len(wanted_N) :]) <= {-1}
    assert np.sum(target_N >= 0) == source.num_targets
    if source.num_tokens <= T:
        return
    order = batches.Batches(source, sequence_length=T, batch_sequences=1, seed=0, shuffle=False)
    owner_N = np.cumsum(stream.begin_N)
    for step in range(order.num_sequences):
        rows, start = order.rows(step, 0, 1), step * T
        assert rows.token_BT[0].tolist() == stream.token_N[start : start + T].tolist()
        assert rows.target_BT[0].tolist() == wanted_N[start : start + T].tolist()
        segments = rows.segment_BT[0] - rows.segment_BT[0, 0]
        assert segments.tolist() == (owner_N[start : start + T] - owner_N[start]).tolist()


def test_eos_within_a_conversation_opens_no_document(tmp_path):
    source = read(write_marked(tmp_path, PAIRS[1:2] * 3))
    rows = batches.Batches(source, sequence_length=20, batch_sequences=1, seed=0, shuffle=False)
    found = rows.rows(0, 0, 1)
    assert EOS in found.token_BT
    assert found.segment_BT[0].tolist() == [1] * 17 + [2] * 3


def test_text_and_conversations_are_one_stream(tmp_path):
    paths = write_text(tmp_path, "ab"), write_marked(tmp_path, PAIRS, name="b")
    source = read(*paths, write_text(tmp_path, "c", name="c"))
    stretch = source.stretch(0, source.num_tokens)
    assert stretch.target_N[:4].all()
    assert stretch.target_N[-3:].all()
    assert stretch.begin_N[:5].tolist() == [True, False, False, True, True]
    assert source.num_targets == np.sum(stretch.target_N[1:])
    found = list(batches.eval_batches(source, sequence_length=5, batch_sequences=1, limit=None))
    assert sum(int(np.sum(batch.target_BT >= 0)) for batch in found) == source.num_targets


def test_marks_that_changed_are_found(tmp_path):
    path = write_marked(tmp_path, PAIRS)
    raw = bytearray(marks_of(path).read_bytes())
    raw[3] = TARGET
    marks_of(path).write_bytes(raw)
    with pytest.raises(InputError, match=r"damaged. .*a\.bin\.marks has sha256"):
        tokens.verify(read(path).sources[0])
    raw[3] = 3
    marks_of(path).write_bytes(raw)
    with pytest.raises(InputError, match=r"marks are damaged. .*a\.bin\.marks, byte 3: 3"):
        read(path).stretch(1, 5)
    raw[0] = CONTEXT
    marks_of(path).write_bytes(raw)
    with pytest.raises(InputError, match=r"do not begin with a document"):
        read(path)
    marks_of(path).write_bytes(raw[:-1])
    with pytest.raises(InputError, match=r"wrong size. .*a\.bin\.marks has \d+ bytes"):
        read(path)
    marks_of(path).unlink()
    with pytest.raises(InputError, match=r"no marks. .*a\.bin\.marks does not exist"):
        read(path)


def test_other_marks_are_other_data(tmp_path):
    path = write_marked(tmp_path, PAIRS)
    before = read(path).parts()
    for size in (0, None):  # an answer may be a control token alone, or its size unknown
        change(path, target_bytes=size)
        assert read(path).target_bytes == size
        assert read(path).parts() == before
    change(path, marks_sha256="0" * 64)
    assert read(path).parts() != before
