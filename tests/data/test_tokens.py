import json
import struct
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from moejax.config.schema import DataConfig
from moejax.data import corpus, sidecar, tokens
from moejax.data.prepare import command as prepare
from moejax.data.prepare import writers
from moejax.data.prepare.documents import Document
from moejax.data.sources import open_sources
from moejax.data.tokenizer import ByteTokenizer, FileTokenizer
from moejax.errors import InputError

FORMATS = ("bin", "array_record")
EOS = 256
documents = st.lists(st.binary(max_size=40), min_size=1, max_size=8)


def _write(folder, format, texts, *, name="a"):
    """Writes a file of byte tokens as `moejax prepare` does. Returns its path."""
    path = folder / f"{name}{prepare.SUFFIXES[format]}"
    kind = prepare.BinWriter if format == "bin" else prepare.ArrayRecordWriter
    writer = kind(path, ByteTokenizer(), "bytes")
    for text in texts:
        writer.add(Document(text, name), ByteTokenizer())
    writer.finish()
    return path


def _open(path, format="bin", *, model_vocab=264):
    return tokens.open_files([str(path)], format, model_vocab=model_vocab)


def _change(path, **fields):
    """Edits the sidecar of a token file; a value of None takes the field out."""
    file = sidecar.sidecar_of(path)
    kept = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({k: v for k, v in kept.items() if v is not None}))


def _stream(texts):
    joined = [EOS]
    for text in texts:
        joined += [*text, EOS]
    return joined


@given(documents, st.data())
def test_a_stream_in_memory_has_eos_around_every_document(texts, data):
    source = tokens.from_documents(texts)
    expected = _stream(texts)
    start = data.draw(st.integers(0, len(expected)))
    length = data.draw(st.integers(0, len(expected) - start))
    read = source.read(start, length)
    assert read.dtype == np.int32
    assert read.tolist() == expected[start : start + length]
    assert (source.num_tokens, source.target_bytes) == (len(expected), sum(map(len, texts)))


@pytest.mark.parametrize("format", FORMATS)
def test_files_give_back_any_part_of_the_stream(tmp_path, format, monkeypatch):
    monkeypatch.setattr(writers, "CHUNK_TOKENS", 16)
    texts = [f"document {i} " * i for i in range(1, 9)]
    source = _open(_write(tmp_path, format, texts), format)
    expected = _stream([text.encode() for text in texts])
    assert source.num_tokens == len(expected)
    assert source.target_bytes == sum(map(len, texts))
    for start in range(0, len(expected), 5):
        for length in (1, 7, 16, 33):
            length = min(length, len(expected) - start)
            read = source.read(start, length)
            assert read.dtype == np.int32
            assert read.tolist() == expected[start : start + length]


@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17, 32, 40])
def test_records_are_full_but_for_the_last_one_which_is_not_empty(
    tmp_path, monkeypatch, num_tokens
):
    library = pytest.importorskip("array_record.python.array_record_module")
    monkeypatch.setattr(writers, "CHUNK_TOKENS", 16)
    left, texts = num_tokens - 1, []
    while left:  # each document has its eos behind it
        texts.append("x" * (min(left, 20) - 1))
        left -= min(left, 20)
    path = _write(tmp_path, "array_record", texts)
    reader = library.ArrayRecordReader(str(path))
    lengths = [len(record) // 2 for record in reader.read_all()]
    reader.close()
    last = num_tokens % 16
    assert lengths == [16] * (num_tokens // 16) + [last] * (last > 0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, 7), (6, 1), (7, 0), (3, -1)])
def test_tokens_outside_of_a_stream_are_no_tokens(tmp_path, format, start, length):
    joined = _open(_write(tmp_path, format, ["text"]), format)
    assert joined.num_tokens == 6
    for source in (joined, joined.sources[0]):
        assert source.read(6, 0).tolist() == source.stretch(0, 0).token_N.tolist() == []
        with pytest.raises(IndexError):
            source.read(start, length)
        with pytest.raises(IndexError):
            source.stretch(start, length)


@pytest.mark.parametrize("format", FORMATS)
def test_several_files_are_one_stream_in_sorted_order(tmp_path, format):
    texts = {"c": ["third"], "a": ["first", "one"], "b": ["second"]}
    paths = {name: _write(tmp_path, format, texts[name], name=name) for name in texts}
    pattern = str(tmp_path / f"*{paths['a'].suffix}")
    source = tokens.open_files([pattern], format, model_vocab=264)
    expected = [id for name in "abc" for id in _stream([t.encode() for t in texts[name]])]
    assert source.num_tokens == len(expected)
    for start in range(len(expected)):
        assert source.read(start, len(expected) - start).tolist() == expected[start:]
        assert source.read(0, start + 1).tolist() == expected[: start + 1]


def test_little_endian_whatever_the_machine(tmp_path):
    path = _write(tmp_path, "bin", ["A"])
    assert path.read_bytes() == struct.pack("<3H", EOS, ord("A"), EOS)


@pytest.mark.parametrize("format", FORMATS)
def test_verify_accepts_what_was_written_and_sees_any_change(tmp_path, format):
    path = _write(tmp_path, format, ["some text " * 50])
    source = _open(path, format).sources[0]
    tokens.verify(source)
    content = bytearray(path.read_bytes())
    for place in (0, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="sha256"):
            tokens.verify(source)


def test_an_id_outside_the_vocabulary_is_refused_with_file_and_offset(tmp_path):
    path = _write(tmp_path, "bin", ["0123456789"])
    content = bytearray(path.read_bytes())
    content[2 * 7 : 2 * 8] = struct.pack("<H", 257)
    path.write_bytes(content)
    source = _open(path)
    assert source.read(0, 7).tolist() == _stream([b"012345"])[:-1]
    with pytest.raises(InputError, match=r"a\.bin, token 7: id 257"):
        source.read(3, 6)


def test_a_damaged_array_record_is_refused_with_its_file(tmp_path):
    path = _write(tmp_path, "array_record", ["some text " * 900])
    content = bytearray(path.read_bytes())
    content[200] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.array_record"):
        _open(path, "array_record").read(0, 100)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_cut_short_is_refused(tmp_path, format):
    path = _write(tmp_path, format, ["some text " * 900])
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(InputError, match=path.name):
        _open(path, format).read(0, 100)


def test_a_size_that_is_no_whole_number_of_tokens_is_told(tmp_path):
    path = _write(tmp_path, "bin", ["text"])
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(InputError, match=r"13 bytes.*1 bytes beyond whole tokens"):
        _open(path)


def test_a_wrong_dtype_is_seen_by_the_size(tmp_path):
    path = _write(tmp_path, "bin", ["text"])
    _change(path, dtype="uint32")
    with pytest.raises(InputError, match="6 tokens of uint32"):
        _open(path)


def test_a_newer_format_asks_for_an_upgrade(tmp_path):
    path = _write(tmp_path, "bin", ["text"])
    _change(path, format_version=4)
    with pytest.raises(InputError, match=r"newer moejax.*4.*up to 3.*Upgrade"):
        _open(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"format_version": "1"},
        {"format_version": 2},
        {"num_targets": 3},
        {"num_tokens": None},
        {"num_tokens": -3},
        {"num_tokens": 6.0},
        {"vocab_size": "many"},
        {"eos_id": 257},
        {"dtype": "float32"},
        {"format": "zip"},
        {"surplus": 1},
        {"format_version": True},
        {"num_tokens": 1},
        {"vocab_size": 2**31},
        {"num_bytes": "many"},
        {"num_bytes": -1},
        {"num_documents": -1},
        {"sha256": 5},
        {"sha256": "0" * 63},
        {"tokenizer": ".."},
        {"tokenizer": "folder\\name"},
        {"tokenizer": "C:name"},
        {"tokenizer": "../../elsewhere.json"},
        {"tokenizer": "/elsewhere.json"},
        {"format": "array_record", "chunk_tokens": None},
        {"format": "array_record", "chunk_tokens": 0},
    ],
)
def test_a_sidecar_with_a_wrong_field_is_refused(tmp_path, fields):
    path = _write(tmp_path, "bin", ["text"])
    _change(path, **fields)
    with pytest.raises(InputError, match=r"a\.bin\.json"):
        sidecar.read_sidecar(path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b'"text"', b"\xff\xfe{}", b"[" * 100_000]
)
def test_a_sidecar_that_is_no_json_object_is_refused(tmp_path, content):
    path = _write(tmp_path, "bin", ["text"])
    sidecar.sidecar_of(path).write_bytes(content)
    with pytest.raises(InputError, match=r"a\.bin\.json"):
        sidecar.read_sidecar(path)


def test_a_huge_sidecar_is_not_read(tmp_path):
    path = _write(tmp_path, "bin", ["text"])
    sidecar.sidecar_of(path).write_bytes(b" " * (2**20 + 1))
    with pytest.raises(InputError, match="too large"):
        sidecar.read_sidecar(path)


def test_a_token_file_without_sidecar_is_refused(tmp_path):
    path = _write(tmp_path, "bin", ["text"])
    sidecar.sidecar_of(path).unlink()
    with pytest.raises(InputError, match=r"a\.bin\.json does not exist"):
        _open(path)


def test_a_pattern_without_matches_is_shown(tmp_path):
    with pytest.raises(InputError, match=r"nowhere-\*\.bin"):
        _open(tmp_path / "nowhere-*.bin")


def test_a_vocabulary_beyond_the_models_shows_both_numbers(tmp_path):
    path = _write(tmp_path, "bin", ["text"])
    assert _open(path, model_vocab=257).vocab_size == 257
    with pytest.raises(InputError, match=r"257.*256.*loaded weights are fixed.*`added_tokens`"):
        _open(path, model_vocab=256)


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


@pytest.mark.parametrize("field", [{"vocab_size": 260}, {"tokenizer_sha256": "0" * 64}])
def test_files_of_different_tokenizers_are_refused(tmp_path, field):
    first, second = (_write(tmp_path, "bin", ["text"], name=name) for name in "ab")
    _change(second, **field)
    with pytest.raises(InputError, match=f"disagree.*{first.name}.*{second.name}"):
        _open(tmp_path / "*.bin")


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_of_the_other_format_names_the_setting(tmp_path, format):
    path = _write(tmp_path, format, ["text"])
    other = FORMATS[1 - FORMATS.index(format)]
    with pytest.raises(InputError, match=r"data\.source"):
        _open(path, other)


def test_the_standard_library_is_a_source_of_bytes():
    sources = open_sources(DataConfig(), model_vocab=264)
    train, held_out = corpus.documents()
    assert isinstance(sources.tokenizer, ByteTokenizer)
    for source, texts in ((sources.train, train), (sources.held_out, held_out)):
        assert source.num_tokens == sum(map(len, texts)) + len(texts) + 1
        assert source.read(0, 9).tolist() == [EOS, *texts[0][:8]]
        assert source.read(source.num_tokens - 1, 1).tolist() == [EOS]


@pytest.mark.parametrize("format", FORMATS)
def test_the_config_names_training_and_held_out_files(tmp_path, format):
    train = _write(tmp_path, format, ["training"], name="train")
    held_out = _write(tmp_path, format, ["held out"], name="eval")
    source = "tokens" if format == "bin" else format
    data = DataConfig(source=source, train_files=(str(train),), eval_files=(str(held_out),))
    found = open_sources(data, model_vocab=264)
    assert found.tokenizer.decode(found.train.read(0, 10).tolist()) == "training"
    assert found.tokenizer.decode(found.held_out.read(0, 10).tolist()) == "held out"
    without = open_sources(DataConfig(source=source, train_files=(str(train),)), model_vocab=264)
    assert without.held_out is None


def test_the_sidecar_is_checked_without_asserts(tmp_path):
    path = _write(tmp_path, "bin", ["text"])
    _change(path, tokenizer="../elsewhere.json")
    program = (
        "import pathlib, sys\n"
        "from moejax.data.sidecar import read_sidecar\n"
        "read_sidecar(pathlib.Path(sys.argv[1]))\n"
    )
    command = [sys.executable, "-O", "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "InputError: sidecar is damaged" in done.stderr


@pytest.mark.parametrize("fields", [{"dtype": "uint8"}, {"chunk_tokens": 4096}])
def test_records_that_do_not_fit_the_sidecar_are_refused(tmp_path, fields):
    path = _write(tmp_path, "array_record", ["some text " * 900])
    _change(path, **fields)
    with pytest.raises(InputError, match=r"a\.array_record, record 0"):
        _open(path, "array_record")


@pytest.mark.parametrize("end", [0, -1])
def test_a_stream_without_eos_at_an_end_is_refused(tmp_path, end):
    path = _write(tmp_path, "bin", ["text"])
    ids = np.fromfile(path, "<u2")
    ids[end] = 7
    ids.tofile(path)
    with pytest.raises(InputError, match=r"no eos at its ends.*id 7"):
        _open(path)


def test_a_pattern_that_finds_only_sidecars_is_refused(tmp_path):
    _write(tmp_path, "bin", ["text"])
    with pytest.raises(InputError, match="matches none"):
        _open(tmp_path / "*.json")


def test_a_file_named_twice_is_refused(tmp_path):
    path = _write(tmp_path, "bin", ["text"])
    with pytest.raises(InputError, match="named twice"):
        tokens.open_files([str(path), str(tmp_path / "*")], "bin", model_vocab=264)


def test_files_whose_text_size_is_unknown_are_read(tmp_path):
    path = _write(tmp_path, "bin", ["text"])
    file = sidecar.sidecar_of(path)
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_bytes": None}))
    assert _open(path).target_bytes is None
