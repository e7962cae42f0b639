import json
import struct

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from moejax.data import tokens
from moejax.data.prepare import writers
from moejax.data.prepare.documents import Document
from moejax.data.tokenizer import FileTokenizer
from moejax.errors import InputError
from tests.data.token_files import EOS, FORMATS, BegunTokenizer, change, read, write_text


def stream(texts):
    """The ids of documents, bytes."""
    return [EOS, *(id for text in texts for id in (*text, EOS))]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=8), st.data())
def test_a_stream_in_memory_has_eos_around_every_document(texts, data):
    source = tokens.from_documents(texts)
    expected = stream(texts)
    start = data.draw(st.integers(0, len(expected)))
    length = data.draw(st.integers(0, len(expected) - start))
    found = source.read(start, length)
    assert found.dtype == np.int32
    assert found.tolist() == expected[start : start + length]
    assert (source.num_tokens, source.target_bytes) == (len(expected), sum(map(len, texts)))


@pytest.mark.parametrize("format", FORMATS)
def test_files_give_back_any_part_of_the_stream_in_sorted_order(tmp_path, format, monkeypatch):
    monkeypatch.setattr(writers, "CHUNK_TOKENS", 16)
    texts = {"d": [""], "c": ["third"], "a": [f"text {i} " * i for i in range(1, 5)], "b": ["2"]}
    for name, some in texts.items():
        path = write_text(tmp_path, *some, name=name, format=format)
    source = read(tmp_path / f"*{path.suffix}", format=format)
    expected = [id for name in "abcd" for id in stream([text.encode() for text in texts[name]])]
    assert source.num_tokens == len(expected)
    assert source.target_bytes == sum(len(text) for some in texts.values() for text in some)
    for start in range(len(expected)):
        for length in (1, 7, 33, len(expected)):
            found = source.read(start, min(length, len(expected) - start))
            assert found.dtype == np.int32
            assert found.tolist() == expected[start : start + length]


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 40])
def test_records_are_full_but_for_the_last_one_which_is_not_empty(
    tmp_path, monkeypatch, num_tokens
):
    library = pytest.importorskip("array_record.python.array_record_module")
    monkeypatch.setattr(writers, "CHUNK_TOKENS", 16)
    left, texts = num_tokens - 1, []
    while left:  # each document has its eos behind it
        texts.append("x" * (min(left, 20) - 1))
        left -= min(left, 20)
    reader = library.ArrayRecordReader(str(write_text(tmp_path, *texts, format="array_record")))
    lengths = [len(record) // 2 for record in reader.read_all()]
    reader.close()
    last = num_tokens % 16
    assert lengths == [16] * (num_tokens // 16) + [last] * (last > 0)


@pytest.mark.parametrize("format", FORMATS)
def test_tokens_outside_of_a_stream_are_no_tokens(tmp_path, format):
    joined = read(write_text(tmp_path, "text", format=format), format=format)
    assert joined.num_tokens == 6
    for source in (joined, joined.sources[0]):
        assert source.read(6, 0).tolist() == source.stretch(0, 0).token_N.tolist() == []
        for start, length in ((-1, 1), (0, 7), (7, 0), (3, -1)):
            for reads in (source.read, source.stretch):
                with pytest.raises(IndexError):
                    reads(start, length)


def test_little_endian_whatever_the_machine(tmp_path):
    assert write_text(tmp_path, "A").read_bytes() == struct.pack("<3H", EOS, ord("A"), EOS)


@pytest.mark.parametrize(("size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_the_dtype_fits_the_vocabulary(tmp_path, size, dtype):
    class Large(BegunTokenizer):
        vocab_size, bos_id = size, size - 1

    source = read(write_text(tmp_path, "x", tokenizer=Large()), model_vocab=size)
    assert source.sources[0].sidecar.dtype == dtype
    assert source.read(0, 3).tolist() == [size - 1, ord("x"), EOS]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["eos", "bos"])
def test_tokens_around_documents_are_refused_inside_of_one(tmp_path, format, name):
    class Wrong(BegunTokenizer):
        def encode_pieces(self, pieces):
            for piece in pieces:
                yield np.array([3, 256 if name == "eos" else 257, 3][: len(piece)])

    writer = FORMATS[format](tmp_path / "a", Wrong(), "bytes")
    with pytest.raises(InputError, match=rf"{name} stands in a document. here holds token 25[67]"):
        writer.add(Document("xx", "here"), Wrong())
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", FORMATS)
def test_verify_accepts_what_was_written_and_sees_any_change(tmp_path, format):
    path = write_text(tmp_path, "some text " * 50, format=format)
    source = read(path).sources[0]
    tokens.verify(source)
    content = bytearray(path.read_bytes())
    for place in (0, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="sha256"):
            tokens.verify(source)


def test_an_id_outside_the_vocabulary_is_refused_with_file_and_offset(tmp_path):
    path = write_text(tmp_path, "0123456789")
    content = bytearray(path.read_bytes())
    content[2 * 7 : 2 * 8] = struct.pack("<H", 257)
    path.write_bytes(content)
    source = read(path)
    assert source.read(0, 7).tolist() == stream([b"012345"])[:-1]
    with pytest.raises(InputError, match=r"a\.bin, token 7: id 257"):
        source.read(3, 6)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_cut_short_is_refused(tmp_path, format):
    path = write_text(tmp_path, "some text " * 900, format=format)
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(InputError, match=path.name):
        read(path).read(0, 100)


@pytest.mark.parametrize("fields", [None, {"dtype": "uint8"}, {"chunk_tokens": 4096}])
def test_records_that_are_damaged_or_do_not_fit_are_refused(tmp_path, fields):
    path = write_text(tmp_path, "some text " * 900, format="array_record")
    if fields is None:
        content = bytearray(path.read_bytes())
        content[200] ^= 0x40
        path.write_bytes(content)
    else:
        change(path, **fields)
    with pytest.raises(InputError, match=r"a\.array_record, record"):
        read(path).read(0, 100)


def test_a_size_that_does_not_fit_is_told(tmp_path):
    path = write_text(tmp_path, "text")
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(InputError, match=r"13 bytes.*1 bytes beyond whole tokens"):
        read(path)
    change(path, dtype="uint32")
    with pytest.raises(InputError, match="6 tokens of uint32"):
        read(path)


def test_a_vocabulary_beyond_the_models_shows_both_numbers(tmp_path):
    path = write_text(tmp_path, "text")
    assert read(path, model_vocab=257).vocab_size == 257
    with pytest.raises(InputError, match=r"257.*256.*loaded weights are fixed.*`added_tokens`"):
        read(path, model_vocab=256)


def test_what_is_advised_about_a_tokenizer_larger_than_its_model_can_be_done(tmp_path):
    """Raising model.vocab_size, as was advised, is refused for loaded weights."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1}, "<eos>"))
    made.add_special_tokens(["<eos>"])
    made.add_tokens(["<extra>"])
    file = tmp_path / "tokenizer.json"
    made.save(str(file))
    assert FileTokenizer(file, "<eos>").vocab_size == 3
    saved = json.loads(file.read_text())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] < 2]
    file.write_text(json.dumps(saved))
    assert FileTokenizer(file, "<eos>").vocab_size == 2


def test_a_file_of_the_other_format_names_the_setting(tmp_path):
    with pytest.raises(InputError, match=r"data\.source=array_record"):
        read(write_text(tmp_path, "text"), format="array_record")
    with pytest.raises(InputError, match=r"data\.source=tokens"):
        read(write_text(tmp_path, "text", format="array_record"), format="bin")


@pytest.mark.parametrize(("end", "name"), [(0, "bos"), (-1, "eos")])
@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_without_the_tokens_at_its_ends_is_refused(tmp_path, end, name, begun):
    path = write_text(tmp_path, "text", tokenizer=BegunTokenizer() if begun else None)
    ids = np.fromfile(path, "<u2")
    ids[end] = 7
    ids.tofile(path)
    name = name if begun else "eos"
    with pytest.raises(InputError, match=rf"no {name} at its ends.*id 7"):
        read(path)


def test_patterns_name_files_of_tokens_and_each_once(tmp_path):
    path = write_text(tmp_path, "text")
    for pattern in ("*.json", "nowhere-*.bin"):  # the first finds only a sidecar
        with pytest.raises(InputError, match=rf"{pattern.replace('*', '.')}'? matches none"):
            read(tmp_path / pattern)
    with pytest.raises(InputError, match="named twice"):
        read(path, tmp_path / "*")


def test_files_whose_text_size_is_unknown_are_read(tmp_path):
    path = write_text(tmp_path, "text")
    change(path, num_bytes=None)
    assert read(path).target_bytes is None
