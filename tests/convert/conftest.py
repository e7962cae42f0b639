"""The command in an empty directory, and golden models to give it."""

import pytest

from moejax.convert.command import main
from tests.hf.golden import cases_of, golden_folder


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs the command. Returns the exit code and the lines of stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = main(list(map(str, words)))
        return code, capsys.readouterr().err.splitlines()

    return run


@pytest.fixture
def done(command):
    """Runs the command, which must succeed. Returns the lines of stderr."""

    def run(*words):
        code, lines = command(*words)
        assert code == 0, lines
        return lines

    return run


@pytest.fixture
def failed(command):
    """Runs the command, which must refuse its input. Returns the only line."""

    def run(*words):
        code, lines = command(*words)
        assert (code, len(lines)) == (2, 1), lines
        return lines[0]

    return run


@pytest.fixture
def model(tmp_path):
    """Writes a golden model's folder `model`, with a tokenizer's files beside the weights."""

    def write(family="mixtral", name="even, llama3 positions", files=2):
        folder = golden_folder(tmp_path / "model", cases_of(family)[name], files)
        (folder / "tokenizer.json").write_text('{"a tokenizer": 1}')
        (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
        (folder / "modeling_evil.py").write_text("raise SystemExit")
        return folder

    return write
