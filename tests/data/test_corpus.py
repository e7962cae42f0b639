import gzip
import math
import sysconfig
from pathlib import Path

import pytest

from moejax.data import corpus
from moejax.errors import InputError


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library, read in place of this Python's own."""

    def write(files: dict[str, bytes]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(text)
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        return corpus.documents.__wrapped__()

    return write


def _named(held_out: bool, count: int) -> list[str]:
    names = (f"module_{i}.py" for i in range(10_000))
    return [name for name in names if corpus.is_held_out_file(name) == held_out][:count]


def test_text_of_this_python_is_python_and_large():
    train, held_out = corpus.documents()
    assert sum(map(len, train + held_out)) > 5_000_000
    assert all(text.decode() for text in train + held_out)
    assert 0.01 < len(held_out) / len(train + held_out) < 0.1
    assert not set(train) & set(held_out)
    assert (Path(sysconfig.get_path("stdlib")) / "dataclasses.py").read_bytes() in train + held_out


def test_a_file_is_held_out_by_its_name_alone(library):
    kept, trained = _named(True, 2), _named(False, 3)
    first = library({name: name.encode() for name in kept + trained})
    assert set(first[1]) == {name.encode() for name in kept}
    assert list(first[0]) == sorted(name.encode() for name in trained)
    more = library({name: name.encode() for name in _named(False, 20)})
    assert more[1] == first[1]


def test_the_split_stays_the_same_between_versions():
    """Bits per byte are compared between releases: the held-out text must be the same."""
    names = [f"module_{i}.py" for i in range(100)]
    assert [name for name in names if corpus.is_held_out_file(name)] == [
        "module_14.py",
        "module_42.py",
        "module_69.py",
        "module_75.py",
        "module_76.py",
    ]


LEFT_OUT = ("test", "ctypes/test", "unittest/tests", "idlelib/idle_test", "site-packages/package")
LEFT_OUT += ("dist-packages", "__pycache__", "config-3.13-x86_64")


def test_what_is_no_text_of_the_library_is_left_out(library):
    left_out = {f"{folder}/a.py": folder.encode() for folder in LEFT_OUT}
    left_out |= {"notes.txt": b"notes", "_sysconfigdata__linux.py": b"of this machine"}
    a, b, c, d = _named(False, 4)
    broken, copy = {a: b"\xff\xfe", b: b""}, {d: b"text"}
    found = library(left_out | broken | copy | {c: b"text", _named(True, 1)[0]: b"other"})
    assert found == ((b"text",), (b"other",))


def test_a_python_without_its_source_is_refused(library):
    with pytest.raises(InputError, match=r"data\.source"):
        library({"readme.txt": b"no python here"})


def test_baselines_measure_the_held_out_text(monkeypatch):
    text = b"abab" * 500
    monkeypatch.setattr(corpus, "documents", lambda: ((b"ab" * 1000,), (text[:800], text[800:])))
    bits = corpus.baselines()
    # Two bytes, equally frequent: one bit each, but for one count added to each of 256 bytes.
    assert bits.pop("a unigram model") == pytest.approx(-math.log2(1001 / 2256), rel=1e-12)
    assert bits["gzip -9"] == 8 * len(gzip.compress(text, 9)) / len(text)
    assert 0 < bits["gzip -9"] < 0.2
    assert 0 < bits["xz -9"] < 0.5
