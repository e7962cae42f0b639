"""Held-out files: never trained on, by whatever path, and of the same tokenizer."""

import pytest

from moejax.config.schema import DataConfig
from moejax.data import sidecar
from moejax.data.sources import open_sources
from moejax.errors import InputError
from tests.data.test_tokens import _change, _write


def test_held_out_files_that_are_trained_on_are_refused(tmp_path):
    _write(tmp_path, "bin", ["text"], name="a")
    path = _write(tmp_path, "bin", ["text"], name="b")
    data = DataConfig(
        source="tokens", train_files=(str(tmp_path / "*.bin"),), eval_files=(str(path),)
    )
    with pytest.raises(InputError, match=r"b\.bin is in data\.train_files and in data\.eval"):
        open_sources(data, model_vocab=264)


@pytest.mark.parametrize("way", ["symbolic link", "relative path", "folder"])
def test_held_out_files_are_known_by_any_path(tmp_path, monkeypatch, way):
    """The same text under another name would pass for held out."""
    path = _write(tmp_path, "bin", ["text"])
    monkeypatch.chdir(tmp_path)
    other = {"relative path": "a.bin", "folder": f"{tmp_path}/down/../a.bin"}.get(way, "b.bin")
    (tmp_path / "down").mkdir()
    if way == "symbolic link":
        (tmp_path / "b.bin").symlink_to(path)
        sidecar.sidecar_of(tmp_path / "b.bin").symlink_to(sidecar.sidecar_of(path))
    for train, held_out in ((str(path), other), (other, str(path))):
        data = DataConfig(source="tokens", train_files=(train,), eval_files=(held_out,))
        with pytest.raises(InputError, match=r"is in data\.train_files and in data\.eval_files"):
            open_sources(data, model_vocab=264)


def test_held_out_files_of_another_tokenizer_are_refused(tmp_path):
    train, held_out = (_write(tmp_path, "bin", ["text"], name=name) for name in "ab")
    _change(held_out, vocab_size=260)
    data = DataConfig(source="tokens", train_files=(str(train),), eval_files=(str(held_out),))
    with pytest.raises(InputError, match="disagree"):
        open_sources(data, model_vocab=264)
