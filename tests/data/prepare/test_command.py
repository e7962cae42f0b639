import itertools
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import tokenizers

from moejax.config.schema import DataConfig
from moejax.data import tokens
from moejax.data.batches import eval_batches
from moejax.data.prepare import command as prepare
from moejax.data.sources import open_sources
from moejax.data.tokenizer import FileTokenizer
from moejax.errors import InputError
from tests.data.chats import write_model

KINDS = ("text", "jsonl", "parquet")
FORMATS = {"bin": "tokens", "array_record": "array_record"}
TEXTS = [f"document {i}: caf\u00e9 " * (i % 7 + 1) for i in range(40)]


def _inputs(folder, kind, texts):
    """Writes texts as input files of a kind. Returns their paths."""
    if kind == "text":
        for number, text in enumerate(texts):
            (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
        return sorted(str(path) for path in folder.glob("*.txt"))
    if kind == "jsonl":
        path = folder / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        path = folder / "texts.parquet"
        table = pyarrow.table({"text": texts, "other": list(range(len(texts)))})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    return [str(path)]


def _run(*arguments):
    return prepare.main([str(argument) for argument in arguments])


def _documents(source, eos_id):
    """Splits a stream at eos, which must stand around every document."""
    ids = source.read(0, source.num_tokens)
    ends = np.flatnonzero(ids == eos_id)
    assert ends[0] == 0
    assert ends[-1] == len(ids) - 1
    return [ids[a + 1 : b].tolist() for a, b in itertools.pairwise(ends)]


def _open(out, format, splits=("train", "eval")):
    ending = prepare.SUFFIXES[format]
    train, held_out = (
        (f"{out}.{split}{ending}",) if split in splits else () for split in ("train", "eval")
    )
    data = DataConfig(source=FORMATS[format], train_files=train, eval_files=held_out)
    return open_sources(data, model_vocab=1000)


def texts_of(out, split="train", format="bin"):
    """The documents of a split of bytes, as text."""
    found = _open(out, format, ("train",) if split == "train" else ("train", "eval"))
    source = found.train if split == "train" else found.held_out
    return [bytes(document).decode() for document in _documents(source, 256)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_document_comes_back_from_one_of_the_two_splits(tmp_path, kind, format):
    files = _inputs(tmp_path, kind, TEXTS)
    out = tmp_path / "out" / "name"
    assert _run(*files, "--out", out, "--format", format, "--eval-fraction", "0.3") == 0
    found = _open(out, format)
    train, held_out = (texts_of(out, split, format) for split in ("train", "eval"))
    assert train
    assert held_out
    # The order of the input is kept in both.
    assert train == [text for text in TEXTS if text not in held_out]
    assert held_out == [text for text in TEXTS if text not in train]
    for source in (*found.train.sources, *found.held_out.sources):
        tokens.verify(source)


def test_the_sidecar_says_what_the_file_holds(tmp_path):
    out = tmp_path / "name"
    _run(*_inputs(tmp_path, "jsonl", TEXTS), "--out", out, "--eval-fraction", "0")
    said = json.loads((tmp_path / "name.train.bin.json").read_text())
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    counts = {key: said[key] for key in ("num_documents", "num_bytes", "num_tokens")}
    assert counts == {
        "num_documents": len(TEXTS),
        "num_bytes": num_bytes,
        "num_tokens": num_bytes + len(TEXTS) + 1,
    }
    assert (said["dtype"], said["vocab_size"], said["eos_id"]) == ("uint16", 257, 256)
    assert not (tmp_path / "name.eval.bin").exists()


@pytest.mark.parametrize("format", ["bin", "array_record"])
def test_documents_begin_with_the_token_that_begins_texts(tmp_path, format):
    path = write_model(tmp_path / "model")
    said = FileTokenizer(path)
    bos, eos = said.bos_id, said.eos_id
    assert None not in (bos, eos)
    texts = ["all", "then a longer one", "x"]
    files, out = _inputs(tmp_path, "jsonl", texts), tmp_path / "name"
    flags = ("--tokenizer", path, "--eval-fraction", 0, "--format", format)
    assert _run(*files, "--out", out, *flags) == 0
    found = _open(out, format, splits=("train",))
    ids = [[bos, *said.encode(text), eos] for text in texts]
    stretch = found.train.stretch(0, found.train.num_tokens)
    assert stretch.token_N.tolist() == [id for document in ids for id in document]
    assert stretch.begin_N.tolist() == [id == bos for id in stretch.token_N]
    assert stretch.target_N.tolist() == [id != bos for id in stretch.token_N], "bos is not learned"
    assert found.train.num_targets == sum(len(document) - 1 for document in ids)
    assert found.train.target_bytes == sum(map(len, texts))
    assert (found.tokenizer.eos_id, found.tokenizer.bos_id) == (eos, bos)
    file = Path(f"{out}.train.{format}")
    assert json.loads(Path(f"{file}.json").read_text())["format_version"] == 3
    # Behind another file as alone.
    joined = tokens.JoinedSource([*found.train.sources, *found.train.sources])
    assert joined.num_targets == 2 * found.train.num_targets
    batches = eval_batches(joined, sequence_length=4, batch_sequences=2, limit=None)
    targets = [batch.target_BT for batch in batches]
    assert sum(int(np.sum(target_BT >= 0)) for target_BT in targets) == joined.num_targets


def test_files_of_two_tokenizers_of_one_size_are_not_opened_together(tmp_path):
    """All that tells them apart is the digest that the command itself has written."""
    files = _inputs(tmp_path, "jsonl", ["word more"])
    orders = ("word", "more"), ("more", "word"), ("word", "more")
    for name, words in zip(("a", "a.b", "c"), orders, strict=True):
        vocabulary = {"<eos>": 0} | {word: id for id, word in enumerate(words, 1)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<eos>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save(str(tmp_path / f"{name}.json"))
        command = (*files, "--out", tmp_path / name, "--tokenizer", tmp_path / f"{name}.json")
        assert _run(*command, "--eval-fraction", "0") == 0
        (tmp_path / f"{name}.json").unlink()  # there is a copy

    def train_on(first, second):
        paths = [str(tmp_path / f"{name}.train.bin") for name in (first, second)]
        return tokens.open_files(paths, "bin", model_vocab=3)

    # The same tokenizer under another name is the same.
    assert train_on("a", "c").read(0, 8).tolist() == [0, 1, 2, 0, 0, 1, 2, 0]
    with pytest.raises(InputError, match=r"disagree.*a\.train\.bin.*a\.b\.train\.bin"):
        train_on("a", "a.b")
    found = [_open(tmp_path / name, "bin", ("train",)).tokenizer for name in ("a", "a.b")]
    assert [tokenizer.encode("word") for tokenizer in found] == [[1], [2]], "none was replaced"


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("x.jsonl", b'{"text": "a"}\n{bad\n', (), r"x.jsonl, line 2"),
        ("x.jsonl", b'{"text": "a"}\n\n{"body": "b"}\n', (), r"x.jsonl, line 3 has body"),
        ("x.jsonl", b'["text"]\n', (), r"x.jsonl, line 1"),
        ("x.jsonl", b'{"text": "\\ud800"}\n', (), r"x.jsonl, line 1, character 0"),
        ("x.jsonl", b"[" * 100_000 + b"\n", (), r"x.jsonl, line 1"),
        ("x.txt", b"text", ("--eos", "5"), r"`--eos` has no effect"),
        ("x.txt", b"fine\n\xff", (), r"not UTF-8.*x.txt"),
        ("x.txt", b"", (), r"no train documents"),
        ("x.parquet", b"PAR1 not really PAR1", (), r"damaged.*x.parquet"),
        ("x.txt", b"text", ("--eval-fraction", "1.5"), r"--eval-fraction"),
        ("x.txt", b"text", ("--tokenizer", "nowhere.json"), r"nowhere.json"),
    ],
)
def test_bad_input_ends_with_one_line_and_no_files(
    tmp_path, capsys, name, content, arguments, message
):
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out" / "name"
    defaults = () if "--eval-fraction" in arguments else ("--eval-fraction", "0")
    assert _run(tmp_path / name, "--out", out, *defaults, *arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert lines[-1].startswith("moejax: error: ")
    assert re.search(message, lines[-1])
    assert not out.parent.exists() or os.listdir(out.parent) == []


def test_a_file_or_a_column_that_does_not_exist_is_named(tmp_path, capsys):
    assert _run(tmp_path / "nowhere.txt", "--out", tmp_path / "x") == 2
    assert "nowhere.txt does not exist" in capsys.readouterr().err
    files = _inputs(tmp_path, "parquet", TEXTS)
    assert _run(*files, "--out", tmp_path / "x", "--text-field", "body") == 2
    assert "columns text, other" in capsys.readouterr().err


def test_output_is_replaced_only_when_asked(tmp_path, capsys):
    files = _inputs(tmp_path, "jsonl", TEXTS)
    command = (*files, "--out", tmp_path / "x", "--eval-fraction", "0")
    assert _run(*command) == 0
    before = (tmp_path / "x.train.bin").read_bytes()
    _inputs(tmp_path, "jsonl", ["changed"])
    assert _run(*command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "x.train.bin").read_bytes() == before
    assert _run(*command, "--overwrite") == 0
    assert _open(tmp_path / "x", "bin", splits=("train",)).train.num_tokens == 9
    # A replacement that fails leaves the old files.
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.glob("x.*"))
    (tmp_path / "texts.jsonl").write_text('{"text": "fine"}\nbroken\n')
    assert _run(*command, "--overwrite") == 2
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.glob("x.*")) == before


def test_without_pyarrow_the_extra_is_named(tmp_path, capsys, monkeypatch):
    files = _inputs(tmp_path, "parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert _run(*files, "--out", tmp_path / "x") == 2
    assert "moejax[data]" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_told_with_the_flag(tmp_path, capsys):
    assert _run(*_inputs(tmp_path, "jsonl", TEXTS), "--out", "/proc/x") == 2
    error = capsys.readouterr().err
    assert error.startswith("moejax: error: --out /proc/x cannot be written. /proc: ")
    assert error.count("\n") == 1
    (tmp_path / "file").write_text("in the way")
    assert _run(*_inputs(tmp_path, "jsonl", TEXTS), "--out", tmp_path / "file" / "x") == 2
    assert capsys.readouterr().err.startswith("moejax: error: ")


@pytest.mark.parametrize("out", ["a/", "a/..", "a/caf\u00e9", "a/.hidden"])
def test_an_output_name_that_a_sidecar_could_not_hold_is_refused(tmp_path, capsys, out):
    files = _inputs(tmp_path, "jsonl", TEXTS)
    out = f"{tmp_path}/{out}" if out != "a/" else ""
    assert _run(*files, "--out", out) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize("format", FORMATS)
def test_verify_tells_damage_from_health(tmp_path, capsys, format):
    files = _inputs(tmp_path, "jsonl", ["long text " * 3000])
    _run(*files, "--out", tmp_path / "x", "--format", format, "--eval-fraction", "0")
    path = tmp_path / f"x.train{prepare.SUFFIXES[format]}"
    assert _run("--verify", path) == 0
    assert "sha256 is right" in capsys.readouterr().out
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    assert _run("--verify", path) == 2
    assert path.name in capsys.readouterr().err


def _sides(folder, texts, *fraction):
    """The texts that are held out and those that are learned."""
    out = folder / "x"
    assert _run(*_inputs(folder, "jsonl", texts), "--out", out, "--overwrite", *fraction) == 0
    return tuple(sorted(texts_of(out, split)) for split in ("eval", "train"))


def test_of_few_documents_one_is_held_out(tmp_path, capsys):
    """Of 27 texts a hundredth is none in three cases of four; the smallest comes nearest to it."""
    texts = [f"text {number} " * (3 + number) for number in (4, 0, 1, 2, 3)]
    held_out, train = _sides(tmp_path, texts)
    assert held_out == ["text 0 " * 3]
    assert sorted(held_out + train) == sorted(texts)
    assert "held out: 12 % of the text, the nearest to 1 %" in capsys.readouterr().err  # 3 of 25


@pytest.mark.parametrize("fraction", ["0.01", "0.99"])
@pytest.mark.parametrize("large", ["b", "d"])
def test_next_to_nothing_is_never_left_to_train_on(tmp_path, capsys, fraction, large):
    """Whichever of both has the lower hash."""
    texts = [large * 80_000, "twelve bytes"]
    held_out, train = _sides(tmp_path, texts, "--eval-fraction", fraction)
    assert (held_out, train) == (["twelve bytes"], [large * 80_000])
    assert "held out: 0.015 % of the text" in capsys.readouterr().err


def test_equal_documents_stay_together_at_a_share_of_a_half(tmp_path, capsys):
    texts = ["same", "same", "one.", "same", "two.", "same"]
    held_out, train = _sides(tmp_path, texts, "--eval-fraction", "0.5")
    assert sorted(held_out + train) == sorted(texts)
    assert not set(held_out) & set(train)
    assert len(held_out) in (2, 4)  # of 6: both are one document from the half
    assert "% of the text, the nearest to 50 %" in capsys.readouterr().err


def test_documents_of_one_text_cannot_be_shared_out(tmp_path, capsys):
    files = _inputs(tmp_path, "jsonl", ["same"] * 4)
    assert _run(*files, "--out", tmp_path / "out" / "x", "--eval-fraction", "0.5") == 2
    assert os.listdir(tmp_path / "out") == []
    error = capsys.readouterr().err
    assert "1 file gave 4 documents, all of one text" in error
    assert "--eval-fraction 0 (none held out)" in error
