"""The small files beside weights."""

import pytest

from moejax.errors import InputError
from moejax.hf import origin
from moejax.hf.origin import copy_small_files, origin_of, read_config, small_files


@pytest.fixture
def folder(tmp_path):
    """A folder with small files, and with what is none."""
    (tmp_path / "in").mkdir()
    for name in ("config.json", "tokenizer.json", "vocab.json", "code.py", "model.safetensors"):
        (tmp_path / "in" / name).write_text("{}")
    return tmp_path / "in"


def test_small_files_are_copied_and_nothing_else(folder, tmp_path):
    assert sorted(small_files(folder)) == ["config.json", "tokenizer.json", "vocab.json"]
    copy_small_files(folder, tmp_path / "deep/all")
    copy_small_files(folder, tmp_path / "rest", config=False)
    found = [sorted(p.name for p in (tmp_path / x).iterdir()) for x in ("deep/all", "rest")]
    assert found == [["config.json", "tokenizer.json", "vocab.json"], found[0][1:]]


def test_a_large_one_is_refused(folder, monkeypatch):
    monkeypatch.setattr(origin, "MAX_BYTES", 10)
    (folder / "vocab.json").write_text("x" * 10)
    assert "vocab.json" in small_files(folder)
    (folder / "vocab.json").write_text("x" * 11)
    with pytest.raises(InputError, match=r"vocab\.json has 11 bytes.*at most 10"):
        small_files(folder)


def test_they_are_beside_an_imports_checkpoint_and_above_those_of_a_run(tmp_path):
    steps = tmp_path / "imported/0", tmp_path / "run/checkpoints/5"
    assert [origin_of(step) for step in steps] == [None, None]
    assert read_config(None) == {}
    for place in ("imported/hf", "run/hf"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text('{"vocab_size": 3}')
        assert read_config(tmp_path / place) == {"vocab_size": 3}
    assert [origin_of(step) for step in steps] == [tmp_path / "imported/hf", tmp_path / "run/hf"]
