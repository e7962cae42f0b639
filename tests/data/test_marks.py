"""Token files with marks: format 2."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.data import batches, sidecar, tokens
from moejax.data.marks import BEGIN, CONTEXT, TARGET, MarkedDocument, marks_of
from moejax.data.prepare import command as prepare
from moejax.data.prepare.documents import Document
from moejax.data.tokenizer import ByteTokenizer
from moejax.errors import InputError

KINDS = {"bin": prepare.BinWriter, "array_record": prepare.ArrayRecordWriter}
EOS = 256


def document(prompt, answer):
    ids = [*prompt, *answer]
    marks = [BEGIN, *[CONTEXT] * (len(prompt) - 1), *[TARGET] * len(answer)]
    return MarkedDocument(
        "here", "", np.array(ids), np.array(marks, np.uint8), len(ids), len(answer)
    )


def write(folder, format, documents, *, name="a"):
    """Writes pairs of (prompt, answer), bytes or ids."""
    path = folder / f"{name}{prepare.SUFFIXES[format]}"
    writer = KINDS[format](path, ByteTokenizer(), "bytes", marked=True)
    for pair in documents:
        writer.add_marked(document(*pair))
    writer.finish()
    return path


def write_text(folder, text, name):
    path = folder / f"{name}.bin"
    writer = prepare.BinWriter(path, ByteTokenizer(), "bytes")
    writer.add(Document(text, name), ByteTokenizer())
    writer.finish()
    return path


def read(*paths, format="bin"):
    return tokens.open_files(list(map(str, paths)), format, model_vocab=264)


def change(path, **fields):
    file = sidecar.sidecar_of(path)
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


PAIRS = [(b"question", b"answer"), (b"q", [*b"long answer", EOS, *b"more"]), (b"ab", b"c")]


@pytest.mark.parametrize("format", KINDS)
def test_tokens_and_marks_come_back(tmp_path, format, monkeypatch):
    monkeypatch.setattr("moejax.data.prepare.writers.CHUNK_TOKENS", 8)
    source = read(write(tmp_path, format, PAIRS), format=format)
    ids = [id for prompt, answer in PAIRS for id in (*prompt, *answer)]
    marks = np.concatenate([document(*pair).mark_N for pair in PAIRS])
    assert (source.num_tokens, source.num_targets) == (len(ids), sum(marks == TARGET))
    assert source.target_bytes == sum(len(answer) for _, answer in PAIRS)
    for start in range(len(ids)):
        stretch = source.stretch(start, min(9, len(ids) - start))
        assert stretch.token_N.tolist() == ids[start : start + 9]
        assert stretch.target_N.tolist() == (marks == TARGET)[start : start + 9].tolist()
        assert stretch.begin_N.tolist() == (marks == BEGIN)[start : start + 9].tolist()
    tokens.verify(source.sources[0])


def test_files_without_marks_are_written_as_in_format_1(tmp_path):
    path = write_text(tmp_path, "text", "a")
    facts = json.loads(sidecar.sidecar_of(path).read_text())
    assert facts["format_version"] == 1
    assert set(facts).isdisjoint(sidecar.MARKED_FIELDS)
    assert list(facts)[-1] == "chunk_tokens"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.bin", "a.bin.json"]
    source = read(path)
    assert (source.num_targets, source.num_tokens) == (5, 6), "the eos that opens it is none"
    assert read(path, write_text(tmp_path, "ab", "b")).num_targets == 5 + 4, "but between files"
    # What identifies the data of a checkpoint stays the same between versions.
    assert sidecar.read_sidecar(path).content_digest() == CONTENT_OF_TEXT


CONTENT_OF_TEXT = "d027a0cb82d90e09fca69ba7c7e1cbd3e63c14c171ed59ee4e30fdc278c23f03"


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6))
def test_batches_predict_answers_from_their_own_conversation(tmp_path_factory, lengths):
    folder = tmp_path_factory.mktemp("any")
    source = read(write(folder, "bin", [(b"q" * a, b"a" * b) for a, b in lengths * 4]))
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
    order = batches.Batches(
        source, sequence_length=T, batch_sequences=1, seed=0, shuffle=False, repeat=True
    )
    owner_N = np.cumsum(stream.begin_N)
    for step in range(order.num_sequences):
        rows, start = order.rows(step, 0, 1), step * T
        assert rows.token_BT[0].tolist() == stream.token_N[start : start + T].tolist()
        assert rows.target_BT[0].tolist() == wanted_N[start : start + T].tolist()
        segments = rows.segment_BT[0] - rows.segment_BT[0, 0]
        assert segments.tolist() == (owner_N[start : start + T] - owner_N[start]).tolist()


def test_eos_within_a_conversation_opens_no_document(tmp_path):
    source = read(write(tmp_path, "bin", PAIRS[1:2] * 3))
    rows = batches.Batches(source, sequence_length=20, batch_sequences=1, seed=0, shuffle=False)
    found = rows.rows(0, 0, 1)
    assert EOS in found.token_BT
    assert found.segment_BT[0].tolist() == [1] * 17 + [2] * 3


def test_text_and_conversations_are_one_stream(tmp_path):
    paths = write_text(tmp_path, "ab", "a"), write(tmp_path, "bin", PAIRS, name="b")
    source = read(*paths, write_text(tmp_path, "c", "c"))
    stretch = source.stretch(0, source.num_tokens)
    assert stretch.target_N[:4].all()
    assert stretch.target_N[-3:].all()
    assert stretch.begin_N[:5].tolist() == [True, False, False, True, True]
    assert source.num_targets == np.sum(stretch.target_N[1:])
    found = list(batches.eval_batches(source, sequence_length=5, batch_sequences=1, limit=None))
    assert sum(int(np.sum(batch.target_BT >= 0)) for batch in found) == source.num_targets


def test_marks_that_changed_are_found(tmp_path):
    path = write(tmp_path, "bin", PAIRS)
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


@pytest.mark.parametrize(
    "fields",
    [
        {"marks_sha256": None},
        {"marks_sha256": "0" * 63},
        {"num_targets": 0},
        {"num_targets": None},
        {"num_targets": 10**6},
        {"num_targets": True},
        {"target_bytes": -1},
        {"target_bytes": "3"},
        {"format_version": 1},
    ],
)
def test_a_sidecar_with_a_wrong_field_is_refused(tmp_path, fields):
    path = write(tmp_path, "bin", PAIRS)
    change(path, **fields)
    with pytest.raises(InputError, match=r"sidecar is damaged. .*a\.bin\.json"):
        read(path)


def test_answers_may_spell_no_text(tmp_path):
    """A control token alone, say."""
    path = write(tmp_path, "bin", PAIRS)
    change(path, target_bytes=0)
    assert read(path).target_bytes == 0


def test_other_marks_are_other_data(tmp_path):
    path = write(tmp_path, "bin", PAIRS)
    before = read(path).parts()
    change(path, target_bytes=None)
    assert read(path).parts() == before
    assert read(path).target_bytes is None
    change(path, marks_sha256="0" * 64)
    assert read(path).parts() != before


def test_patterns_leave_marks_out(tmp_path):
    write(tmp_path, "bin", PAIRS)
    assert len(read(tmp_path / "*").sources) == 1
