"""An import a piece at a time: which pieces there are, and the digest of their numbers."""

import errno
import os
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax.checkpoint import arrays as stored
from moejax.checkpoint.arrays import NewArray, PieceWriter, StoredWeights
from moejax.checkpoint.manifest import digest_of_pieces, read_manifest, weights_digest
from moejax.config.load import load_config
from moejax.convert.importing import new_arrays, write_pieces
from moejax.hf import in_flight
from moejax.runtime.processes import ALONE
from tests.convert.test_command import assert_same_tensors, tensors_of
from tests.hf.random_models import write_file

BLOCK = "params.groups.0.blocks.0."


def test_pieces_hold_each_number_once(monkeypatch):
    monkeypatch.setattr(stored, "PIECE_BYTES", 100)
    array, seen = NewArray(f"{BLOCK}mlp.w_in", (3, 7, 2, 5), "float32"), np.zeros((3, 7, 2, 5))
    for part in array.parts():
        assert seen[tuple(slice(*bounds) for bounds in part)].size * 4 <= 100
        seen[tuple(slice(*bounds) for bounds in part)] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("family", "name"), [("deepseek_v3", "even, groups, yarn"), ("gpt_oss", "even")]
)
def test_small_pieces_in_many_files_are_the_same_weights(
    done, model, tmp_path, monkeypatch, family, name
):
    folder = model(family, name)
    monkeypatch.setattr(stored, "PIECE_BYTES", 1000)
    monkeypatch.setattr(stored, "FILE_BYTES", 20_000)
    done("import", folder, "--out", "imported")
    files = (tmp_path / "imported" / "0" / "weights" / "ocdbt.process_0" / "d").iterdir()
    assert sum(file.stat().st_size > 15_000 for file in files) >= 5
    done("export", "imported", "--out", "exported", "--dtype", "float32")
    assert_same_tensors(tmp_path / "exported", tensors_of(folder))


def test_pieces_in_flight_hold_no_more_than_the_limit(tmp_path, monkeypatch):
    """Each counts twice: while it is read, as many bytes of its tensors are held."""
    array, lock, reading, most = NewArray("table", (8, 32), "float32"), threading.Lock(), [], []
    monkeypatch.setattr(stored, "PIECE_BYTES", 128)
    monkeypatch.setattr(in_flight, "LIMIT_BYTES", 4 * 128)

    def read(part, dtype):
        with lock:
            reading.append(part)
            most.append(len(reading))
        time.sleep(0.02)
        with lock:
            reading.remove(part)
        return np.zeros([stop - start for start, stop in part], dtype)

    write_pieces({array: read}, tmp_path / "item", ALONE)
    assert len(most) == 8
    assert max(most) == 2


def digest_of(tmp_path, name):
    return weights_digest(read_manifest(tmp_path / name / "0"))


@pytest.mark.exhaustive
def test_a_second_import_has_the_digest_of_the_first(done, model, tmp_path):
    """Which tells runs with adapters whether their frozen weights are the same."""
    folder = model()
    for name in ("first", "second"):
        done("import", folder, "--out", name)
    first, second = (read_manifest(tmp_path / name / "0") for name in ("first", "second"))
    assert first["files"] != second["files"], "their names are drawn"
    assert weights_digest(first) == weights_digest(second)
    done("import", folder, "--out", "narrow", "--dtype", "bfloat16")
    assert digest_of(tmp_path, "narrow") != weights_digest(first)
    path = sorted(folder.glob("*.safetensors"))[-1]
    tensors = load_file(path)
    last = next(reversed(tensors))
    tensors[last] = tensors[last].copy()
    tensors[last].reshape(-1)[-1] += 1
    write_file(path, tensors)
    done("import", folder, "--out", "changed")
    assert digest_of(tmp_path, "changed") != weights_digest(first)


def test_the_digest_is_that_of_the_numbers_in_the_checkpoint(done, model, tmp_path):
    done("import", model(), "--out", "imported")
    weights, sums = StoredWeights(tmp_path / "imported" / "0"), []
    cfg = load_config(tmp_path / "imported" / "config.json")
    for path, array in new_arrays(cfg, "float32").items():
        values = weights.read(path)
        assert (values.shape, values.dtype) == (array.shape, np.float32)
        for part in array.parts():
            sums.append(array.digest(part, values[tuple(slice(*bounds) for bounds in part)]))
    assert digest_of_pieces(sums) == digest_of(tmp_path, "imported")
    assert digest_of_pieces(reversed(sums)) == digest_of_pieces(sums)


def test_a_full_disk_is_one_line_and_leaves_nothing(command, model, tmp_path, monkeypatch):
    def full(*_):
        raise ValueError(f"RESOURCE_EXHAUSTED: {os.strerror(errno.ENOSPC)}")

    folder = model()
    with monkeypatch.context() as patched:
        patched.setattr(PieceWriter, "write", full)
        code, lines = command("import", folder, "--out", "imported")
    assert code == 5
    assert len([line for line in lines if "no space left for the checkpoint" in line]) == 1
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "imported.partial").exists()
