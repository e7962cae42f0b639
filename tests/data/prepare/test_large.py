"""Large documents: memory that does not grow, and what is told where it must."""

import os
import subprocess
import sys

import pytest
import tokenizers

from moejax.data.prepare import command as prepare
from moejax.data.prepare import documents, split
from tests.data.prepare.test_command import FORMATS, _inputs, _open, _run


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("format", FORMATS)
def test_memory_does_not_grow_with_a_text_file(tmp_path, format):
    program = (
        "import sys\n"
        "from moejax.data.prepare.command import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        # `ru_maxrss` would count the process that started this one too.
        "said = open('/proc/self/status').read()\n"
        "print(said.partition('VmHWM:')[2].split()[0])\n"
    )
    peaks = []
    for pieces in (1, 48):
        text = tmp_path / f"{pieces}.txt"
        text.write_bytes(b"some words. \r\n  " * (pieces * documents.PIECE // 16))
        out = (f"--out={tmp_path}/{pieces}", f"--format={format}", "--eval-fraction=0")
        command = [sys.executable, "-c", program, str(text), *out]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) << 10)
        found = _open(tmp_path / str(pieces), format, splits=("train",)).train
        assert found.num_tokens == text.stat().st_size + 2
    # Of a piece there are, at most at one time: bytes, text (4 a character), bytes again, ids of 1
    # and of 2 bytes, those of the records before and after they are joined. Two pieces at once.
    assert peaks[1] - peaks[0] < 2 * (1 + 4 + 1 + 1 + 3 * 2) * documents.PIECE


def test_a_file_that_changes_between_its_digest_and_its_text_is_refused(
    tmp_path, capsys, monkeypatch
):
    file = tmp_path / "x.txt"
    file.write_text("before")

    def change_after(document):
        found = documents.rank_of(document)
        file.write_text("behind")
        return found

    monkeypatch.setattr(split, "rank_of", change_after)
    assert _run(file, "--out", tmp_path / "out" / "x", "--eval-fraction", "0.5") == 2
    assert "a file was changed" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("normalizer", ["Lowercase", "NFC"])
def test_a_large_document_that_must_be_encoded_whole_is_told(
    tmp_path, capsys, monkeypatch, normalizer
):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1}, "<eos>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.normalizer = getattr(tokenizers.normalizers, normalizer)()
    made.save(str(tmp_path / "t.json"))
    monkeypatch.setattr(prepare, "LARGE_BYTES", 4)
    files = _inputs(tmp_path, "text", ["aaa", "aaaa", "aaaaa"])
    command = (*files, "--out", tmp_path / "x", "--tokenizer", tmp_path / "t.json")
    assert _run(*command, "--eos", "1", "--eval-fraction", "0") == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "encoded whole" in line]
    assert len(told) == (normalizer == "Lowercase")
    assert all("001.txt" in line for line in told)
