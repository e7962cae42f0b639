"""What moejax prepare reads: directories, compressed files, standard input, broken rows."""

import gzip
import io
import json
import sys
from types import SimpleNamespace

import pyarrow
import pytest

from moejax.data.prepare import command as prepare
from moejax.data.prepare.inputs import find_inputs, kind_of, open_bytes
from moejax.errors import InputError
from tests.data.prepare.test_command import texts_of

TEXTS = [f"text {i} of several, caf\u00e9\n" * (i % 5 + 1) for i in range(30)]


def run(*arguments):
    return prepare.main([str(argument) for argument in arguments])


def compressed(path, raw):
    """Writes bytes as the ending of a path asks."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(raw))
    elif path.suffix == ".zst":
        # Two frames, as `cat a.zst b.zst` makes.
        half = len(raw) // 2
        with path.open("wb") as file:
            for part in (raw[:half], raw[half:]):
                frame = pyarrow.BufferOutputStream()
                with pyarrow.CompressedOutputStream(frame, "zstd") as opened:
                    opened.write(part)
                file.write(frame.getvalue())
    else:
        path.write_bytes(raw)
    return path


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.mark.parametrize(
    ("ending", "mark"), [("", b"\xef\xbb\xbf"), (".gz", b""), (".zst", b"\xef\xbb\xbf")]
)
def test_compressed_files_and_marked_ones_give_the_same_documents(tmp_path, ending, mark):
    compressed(tmp_path / f"a.jsonl{ending}", mark + jsonl(TEXTS))
    compressed(tmp_path / f"b.txt{ending}", mark + TEXTS[0].encode())
    out = tmp_path / "out"
    assert run(tmp_path, "--out", out, "--eval-fraction", 0) == 0
    assert texts_of(out) == [*TEXTS, TEXTS[0]]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_that_ends_early_is_refused(tmp_path, capsys, ending):
    path = compressed(tmp_path / f"a.jsonl{ending}", jsonl(TEXTS * 50))
    path.write_bytes(path.read_bytes()[:-9])
    status = run(path, "--out", tmp_path / "out", "--eval-fraction", 0)
    assert status == 2
    assert "damaged" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_of_a_directory_what_can_be_read_is_taken_in_order(tmp_path):
    for name in ("b/two.md", "a/one.TXT", "three.ndjson.gz", "picture.png", ".hidden.txt"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = find_inputs([str(tmp_path / "in")], tmp_path)
    assert [path.name for path in found.paths] == ["one.TXT", "two.md", "three.ndjson.gz"]
    assert [kind_of(path) for path in found.paths] == ["text", "text", "jsonl"]
    assert found.num_left_out == 2
    with pytest.raises(InputError, match="named twice"):
        find_inputs([str(tmp_path / "in"), str(tmp_path / "in" / "b" / "two.md")], tmp_path)


def test_a_directory_with_nothing_to_read_is_refused(tmp_path):
    (tmp_path / "picture.png").touch()
    with pytest.raises(InputError, match=r"holds 1 files, none with an ending of \.txt"):
        find_inputs([str(tmp_path)], tmp_path)


@pytest.mark.parametrize("format", ["text", "jsonl"])
def test_standard_input_is_read(tmp_path, monkeypatch, capsys, format):
    raw = "".join(TEXTS).encode() if format == "text" else jsonl(TEXTS)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(raw)))
    out = tmp_path / "out"
    assert run("-", "--stdin-format", format, "--out", out, "--eval-fraction", 0) == 0
    assert "".join(texts_of(out)) == "".join(TEXTS)
    (tmp_path / "a.txt").write_text("text")
    assert run(tmp_path / "a.txt", "--stdin-format", format, "--out", tmp_path / "other") == 2
    assert "`--stdin-format` has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_the_end_of_a_lone_text_file_is_held_out_from_the_start_of_a_line(tmp_path, capsys, ending):
    text = "".join(f"line {i}\n" for i in range(1000))
    compressed(tmp_path / f"a.txt{ending}", text.encode())
    out = tmp_path / "out"
    assert run(tmp_path / f"a.txt{ending}", "--out", out, "--eval-fraction", 0.1) == 0
    (train,), (held_out,) = texts_of(out), texts_of(out, "eval")
    assert train + held_out == text
    assert train.endswith("\n")
    assert 0.09 < len(held_out) / len(text) <= 0.1
    for raw, said in ((b"one line only", "1 document. "), (b"caf\xe9", "0 documents and 1 broken")):
        compressed(tmp_path / f"a.txt{ending}", raw)
        assert run(tmp_path / f"a.txt{ending}", "--out", tmp_path / "x", "--skip-bad") == 2
        assert f"1 file gave {said}" in capsys.readouterr().err


def test_rows_without_text_are_named_or_counted(tmp_path, capsys):
    rows = [{"text": "a"}, {"text": None}, {"other": 1}, {"text": 7}, {"text": "b"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = (path, "--out", tmp_path / "out", "--eval-fraction", 0)
    assert run(*given) == 2
    said = capsys.readouterr().err
    assert "line 2: field 'text' is null" in said
    assert "--skip-bad" in said
    assert run(*given, "--skip-bad") == 0
    assert "left out: 3 broken rows. The first: " in capsys.readouterr().err
    assert texts_of(tmp_path / "out") == ["a", "b"]


def test_bytes_are_read_as_they_are(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf\xef\xbb\xbfab")
    with open_bytes(path) as opened:
        assert opened.read() == b"\xef\xbb\xbfab"  # one mark alone is a mark


def test_files_that_are_not_utf_8_can_be_left_out_and_empty_ones_are_told(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, raw in {
        "a.txt": b"one",
        "b.txt": b"caf\xe9",
        "c.txt": b"half a character \xc3",
        "d.txt": b"",
        "e.jsonl": b"\n",
        "f.jsonl": b'{"text": "two"}\n{"text": "\xff"}\n',
    }.items():
        (folder / name).write_bytes(raw)
    command = (folder, "--out", tmp_path / "out/x", "--eval-fraction", 0)
    assert run(*command) == 2
    assert "b.txt, byte 3: 0xe9" in capsys.readouterr().err
    assert run(*command, "--skip-bad") == 0
    assert texts_of(tmp_path / "out/x") == ["one", "two"]
    said = capsys.readouterr().err
    left_out = "left out: 1 broken row and 2 broken files. The first: text is not UTF-8."
    assert f"{left_out} {folder}" in said
    assert f"files without text: 2. The first: {folder / 'd.txt'}" in said


def test_directories_are_searched_for_other_endings_too(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.py", "b.PY", "c.txt", "d.rs", ".e.py", "f"):
        (folder / name).write_text(name)
    compressed(folder / "g.py.gz", b"g.py.gz")
    command = (folder, "--out", tmp_path / "x", "--eval-fraction", 0, "--overwrite")
    assert run(*command, "--ending", ".py") == 0
    assert texts_of(tmp_path / "x") == ["a.py", "b.PY", "c.txt", "g.py.gz"]
    assert "files left out, for their endings: 3" in capsys.readouterr().err
    assert run(*command, "--ending", ".py", "--ending", ".rs") == 0
    assert "d.rs" in texts_of(tmp_path / "x")


def test_an_ending_that_is_none_or_has_no_directory_is_refused(tmp_path):
    for ending, said in (("py", "Got 'py'"), (".jsonl", "by their format"), (".GZ", "by their")):
        with pytest.raises(InputError, match=said):
            find_inputs([str(tmp_path)], tmp_path, endings=[ending])
    (tmp_path / "a.py").write_text("a")
    with pytest.raises(InputError, match=r"`--ending` has no effect\. Got '\.py'"):
        find_inputs([str(tmp_path / "a.py")], tmp_path, endings=[".py"])
    with pytest.raises(InputError, match=r"--ending \.py, or the file itself"):
        find_inputs([str(tmp_path)], tmp_path)
