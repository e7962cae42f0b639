import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config.schema import DataConfig
from moejax.data import corpus
from moejax.data.prepare import command as prepare
from moejax.data.prepare.documents import Document
from moejax.data.sidecar import Sidecar, sidecar_of
from moejax.data.sources import (
    describe_sources,
    describe_tokens,
    is_tokenizer_of,
    keep_tokenizer,
    open_sources,
)
from moejax.data.tokenizer import ByteTokenizer, FileTokenizer, digest
from moejax.data.tokens import FileSource, JoinedSource, from_documents
from moejax.errors import InputError


def write(path, *texts):
    """Writes a file of byte tokens as `moejax prepare` does."""
    writer = prepare.BinWriter(path, ByteTokenizer(), "bytes")
    for text in texts:
        writer.add(Document(text, ""), ByteTokenizer())
    writer.finish()
    return str(path)


def test_the_standard_library_is_read_whole_and_split_as_the_corpus_says():
    found = open_sources(DataConfig(), model_vocab=264)
    for source, documents in zip(found[:2], corpus.documents(), strict=True):
        assert source.target_bytes == sum(map(len, documents))
        assert source.num_tokens == source.target_bytes + len(documents) + 1
    head = found.train.read(1, len(corpus.documents()[0][0])).tolist()
    assert found.tokenizer.decode(head) == corpus.documents()[0][0].decode()


def test_files_without_held_out_text_are_enough(tmp_path):
    data = DataConfig(source="tokens", train_files=(write(tmp_path / "a.bin", "text"),))
    found = open_sources(data, model_vocab=264)
    assert found.held_out is None
    assert found.tokenizer.decode(found.train.read(0, found.train.num_tokens).tolist()) == "text"


def test_held_out_files_must_fit_the_model_too(tmp_path):
    files = {name: (write(tmp_path / f"{name}.bin", "text"),) for name in ("train", "eval")}
    data = DataConfig(source="tokens", train_files=files["train"], eval_files=files["eval"])
    assert open_sources(data, model_vocab=257).held_out.target_bytes == 4
    with pytest.raises(InputError, match="vocabulary 257"):
        open_sources(data, model_vocab=256)


def test_weights_make_a_mixture_of_the_training_files_in_their_order(tmp_path):
    names = write(tmp_path / "b.bin", "second"), write(tmp_path / "a.bin", "one")
    data = DataConfig(source="tokens", train_files=names, train_weights=(3.0, 1.0))
    mixture = open_sources(data, model_vocab=264).mixture
    assert [weight for _, weight in mixture] == [3.0, 1.0]
    read = [bytes(source.read(1, source.num_tokens - 2).tolist()) for source, _ in mixture]
    assert read == [b"second", b"one"]
    with pytest.raises(InputError, match="vocabulary 257"):
        open_sources(data, model_vocab=256)
    assert open_sources(replace(data, train_weights=()), model_vocab=264).mixture == ()


def test_a_tokenizer_that_came_is_that_of_the_texts_unless_another_is_known(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    tokens = DataConfig(source="tokens", train_files=(write(tmp_path / "a.bin", "text"),))
    described = describe_tokens(tokens)
    of_bytes = {"step": 9, "data": tokens, "described": described}
    of_it = replace(described.sidecar, tokenizer_sha256=digest(tmp_path / "tokenizer.json"))
    for wanted, facts in (
        (False, of_bytes),
        (True, of_bytes | {"step": 0}),
        (True, of_bytes | {"described": described._replace(sidecar=of_it)}),
        (True, {"step": 9, "data": tokens, "described": None}),
        (False, {"step": 9, "data": DataConfig(), "described": None}),
    ):
        assert is_tokenizer_of(tmp_path / "tokenizer.json", **facts) == wanted


def content(tmp_path, name="a.bin", **sidecar):
    """What identifies the data of a run on one file, its sidecar changed as asked."""
    path = tmp_path / name
    facts = json.loads(sidecar_of(path).read_text()) | sidecar
    sidecar_of(path).write_text(json.dumps(facts))
    return describe_sources(open_sources(files(path), model_vocab=300))


def files(*train, held_out=()):
    return DataConfig(
        source="tokens",
        train_files=tuple(map(str, train)),
        eval_files=tuple(map(str, held_out)),
    )


@pytest.mark.parametrize(
    "changes", [{"sha256": "1" * 64}, {"tokenizer_sha256": "1" * 64, "tokenizer": "bytes"}]
)
def test_what_changes_the_tokens_or_their_meaning_changes_the_content(tmp_path, changes):
    write(tmp_path / "a.bin", "text")
    before = content(tmp_path)
    assert content(tmp_path) == before
    assert [part["tokens"] for part in before["train"]] == [6]
    assert content(tmp_path, **changes)["train"][0]["digest"] != before["train"][0]["digest"]


@pytest.mark.parametrize("changes", [{"num_bytes": None}, {"num_documents": 7}])
def test_what_only_describes_the_text_does_not(tmp_path, changes):
    write(tmp_path / "a.bin", "text")
    assert content(tmp_path, **changes) == content(tmp_path)


def test_the_content_has_every_file_of_both_streams(tmp_path):
    one, two, three = (Path(write(tmp_path / f"{name}.bin", name)) for name in "abc")
    found = describe_sources(open_sources(files(one, two, held_out=[three]), model_vocab=300))
    assert [part["name"] for part in found["train"]] == [str(one), str(two)]
    assert [part["name"] for part in found["held_out"]] == [str(three)]
    digests = [part["digest"] for parts in found.values() for part in parts]
    assert len(set(digests)) == 3
    assert json.loads(json.dumps(found)) == found


def test_the_built_in_text_is_told_by_its_tokens():
    found = describe_sources(open_sources(DataConfig(), model_vocab=264))
    train, held_out = found["train"][0], found["held_out"][0]
    assert train["digest"] != held_out["digest"]
    assert train["tokens"] > held_out["tokens"]
    other = from_documents([b"text"]).parts()[0]
    assert other["digest"] == from_documents([b"text"]).parts()[0]["digest"]
    assert other["digest"] != from_documents([b"next"]).parts()[0]["digest"]


class Listed(FileSource):
    """A token file whose content is a list."""

    def __init__(self, tokens):
        n = len(tokens)
        said = Sidecar(1, "bin", "uint8", 100, 0, n, n, 1, "0" * 64, "bytes")
        super().__init__(Path("listed.bin"), said)
        self._tokens = tokens

    def _read(self, start, length):
        return self._tokens[start : start + length]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_joined_streams_read_as_one_across_any_ends(lengths, data):
    whole = np.arange(sum(lengths), dtype=np.int32)
    parts = np.split(whole, np.cumsum(lengths)[:-1])
    joined = JoinedSource([Listed(part) for part in parts])
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - start))
    read = joined.read(start, length)
    assert read.dtype == np.int32
    assert read.tolist() == whole[start : start + length].tolist()
    assert (joined.num_tokens, joined.target_bytes) == (len(whole), len(whole))


def test_a_run_keeps_what_says_how_its_text_became_tokens(tmp_path):
    pytest.importorskip("tokenizers")
    from tests.data.chats import write_model

    model, run = write_model(tmp_path / "model"), tmp_path / "run"
    (tmp_path / "a.txt").write_text("all")
    command = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "t"), "--eval-fraction", "0"]
    assert prepare.main([*command, "--tokenizer", str(model)]) == 0
    data = DataConfig("tokens", (str(tmp_path / "t.train.bin"),))
    assert describe_tokens(data).path == tmp_path / "t.train.bin"
    keep_tokenizer(data, run)
    for file in tmp_path.glob("t.*"):
        file.unlink()
    assert describe_tokens(data) is None
    described = describe_tokens(data, [tmp_path, run])
    assert described.tokenizer_file.read_bytes() == model.read_bytes()
    wanted = FileTokenizer(model)
    found = described.open_tokenizer()
    assert (found.eos_id, found.bos_id) == (wanted.eos_id, wanted.bos_id)
    # A later start on other data keeps those; bytes have no file.
    assert prepare.main(command) == 0
    keep_tokenizer(data, run)
    described = describe_tokens(data, [run])
    assert described.tokenizer_file is None
    assert described.open_tokenizer().vocab_size == 257
    keep_tokenizer(DataConfig(), run)
    assert describe_tokens(data, [run]).path == tmp_path / "t.train.bin"
