"""Copies of checkpoints at a second place: memory, a directory, servers of S3 and of GCS."""

import contextlib
import dataclasses
import importlib.util
import shutil
import socket
import subprocess
import sys
import time
import uuid

import jax.numpy as jnp
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from moejax.checkpoint.find import newest
from moejax.checkpoint.manifest import MANIFEST, finished_steps
from moejax.checkpoint.remote import Copies
from moejax.checkpoint.writer import Checkpoints
from moejax.config.load import to_dict
from moejax.config.schema import CheckpointConfig
from moejax.errors import InputError
from moejax.runtime.processes import ALONE
from moejax.step.state import TrainState
from moejax.train.start import choose_checkpoint, open_copies
from tests.cases import drawn_state, small_config, step_for
from tests.checkpoint.test_manifest import write_step
from tests.threads import everywhere
from tests.train.test_start import NO_DATA


@contextlib.contextmanager
def serving(*words):
    """Runs a module as a server on a free port of this machine, whose number is its last word."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, "-m", *words, str(port)], **quiet)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait()


def needs(*modules):
    if not all(map(importlib.util.find_spec, modules)):
        pytest.skip("needs the packages that `make stores` installs")


@pytest.fixture(scope="module")
def s3():
    """The address of a bucket of a server of the package moto."""
    needs("moto", "s3fs")
    with serving("moto.server", "-p") as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket"


@pytest.fixture(scope="module")
def gs():
    """The address of a bucket of a server of the package gcp-storage-emulator."""
    needs("gcp_storage_emulator", "gcsfs")
    words = ("start", "--in-memory", "--default-bucket=bucket", "--host=127.0.0.1", "--port")
    command = ("gcp_storage_emulator", *words)
    with serving(*command) as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        yield "gs://bucket"


@pytest.fixture(params=["memory", "directory", "s3", "gs"])
def place(request, tmp_path):
    if request.param in ("s3", "gs"):
        return f"{request.getfixturevalue(request.param)}/{uuid.uuid4()}/run"
    return f"memory://{uuid.uuid4()}/run" if request.param == "memory" else str(tmp_path / "second")


@pytest.fixture
def own(tmp_path):
    """A run's checkpoints: three small steps."""
    for step in (10, 20, 30):
        write_step(tmp_path / "own", step)
    return tmp_path / "own"


def spoil(copies, name):
    copies._files.pipe_file(f"{copies._root}/{name}", b"weights of 31")


def test_copies_come_back_as_they_were(place, own, tmp_path):
    copies = Copies(place, keep=2)
    assert copies.copy_missing(own) == [30, 20, 10]
    assert copies.steps() == [30, 20]
    assert copies.copy_missing(own) == [10], "what was removed there for its age comes last"
    notes = copies.fetch_newer(tmp_path / "new", None)
    assert notes == [f"checkpoint 30 fetched from {place}"]
    assert newest(tmp_path / "new", "full")[0].step == 30
    assert copies.fetch_newer(tmp_path / "new", 30) == []


def test_a_damaged_copy_is_passed_over_and_left_where_it_is(place, own, tmp_path):
    copies = Copies(place, keep=3)
    copies.copy_missing(own)
    spoil(copies, "30/weights/data")
    damaged, fetched = copies.fetch_newer(tmp_path / "new", None)
    assert damaged.startswith(f"copy {place}/30 is damaged: weights/data has digest ")
    assert fetched == f"checkpoint 20 fetched from {place}"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["20"]
    assert copies.steps() == [30, 20, 10]
    for step in (10, 20):
        copies._files.rm_file(f"{copies._root}/{step}/counters/data")
    with pytest.raises(
        InputError, match=r"no whole copy in .*30 is .*20 is .*counters/data is miss"
    ):
        copies.fetch_newer(tmp_path / "other", None)
    assert copies.fetch_newer(tmp_path / "other", 25)[0].startswith("copy ")


def test_a_copy_without_a_manifest_was_never_finished(place, own, tmp_path):
    copies = Copies(place, keep=3)
    copies.copy_missing(own)
    copies._files.rm_file(f"{copies._root}/30/{MANIFEST}")
    assert copies.steps() == [20, 10]
    assert copies.fetch_newer(tmp_path / "new", None) == [f"checkpoint 20 fetched from {place}"]
    assert copies.copy_missing(own) == [30]


def test_a_step_that_was_repeated_is_copied_again(place, own):
    copies = Copies(place, keep=3)
    copies.copy_missing(own)
    shutil.rmtree(own / "30")
    write_step(own, 30, jax="another")
    assert copies.copy_missing(own) == [30]
    assert copies.copy_missing(own) == []


@pytest.mark.parametrize("protocol", [("s3", "s3a"), ("gs", "gcs"), "abfs"])
def test_no_bucket_is_made_in_an_object_store(monkeypatch, protocol):
    class Store(MemoryFileSystem):
        def makedirs(self, path, exist_ok=False):
            raise AssertionError(f"a bucket would be made: {path}")

    Store.protocol = protocol
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda place: (Store(), "/bucket/run"))
    assert Copies("store://bucket/run", keep=2).steps() == []


def test_a_bucket_that_is_not_there_is_refused_at_the_start(s3):
    with pytest.raises(InputError, match=r"cannot be reached\. s3://absent/run: "):
        Copies("s3://absent/run", keep=2)


@pytest.mark.parametrize("place", ["nothing://bucket/run", "s3://"])
def test_a_place_that_is_none_is_one_line(place):
    with pytest.raises(InputError, match=r"`checkpoint\.copy_to` cannot be reached") as error:
        Copies(place, keep=2)
    assert "\n" not in str(error.value)


def test_a_copy_that_fails_is_told_and_ends_nothing(own):
    told = []
    copies = Copies(f"memory://{uuid.uuid4()}", keep=2)
    (own / "30" / "weights" / "data").unlink()
    copies.start(own)
    copies.finished(lambda *what: told.append(what), wait=True)
    assert len(told) == 1
    assert told[0][0] == []
    assert told[0][1].startswith("FileNotFoundError")
    write_step(own.with_name("again"), 30)
    copies.close(own.with_name("again"), lambda *what: told.append(what))
    assert told[1:] == [([30], None)]


@pytest.fixture
def run(tmp_path):
    """A run that saved steps 1 and 2, with copies, and its config."""
    place = f"memory://{uuid.uuid4()}/run"
    cfg = dataclasses.replace(
        small_config(),
        run_dir=str(tmp_path / "run"),
        checkpoint=CheckpointConfig(copy_to=place, keep=2),
    )
    train_step, told = step_for(cfg), []
    writer = Checkpoints(
        tmp_path / "run" / "checkpoints",
        keep=2,
        copies=open_copies(cfg, ALONE),
        copied=lambda steps, error: told.append((steps, error)),
    )
    for step in (1, 2):
        writer.save(step, drawn_state(train_step), {"config": to_dict(cfg)})
    writer.close()
    assert sorted(step for steps, _ in told for step in steps) == [1, 2]
    return cfg, tmp_path / "run" / "checkpoints"


def test_a_step_is_copied_once_it_is_whole_and_not_only_at_the_end(tmp_path):
    weights = {"w": jnp.ones(4)}
    state = TrainState(jnp.int32(1), jnp.int32(0), weights, weights, weights, {})
    copies = Copies(f"memory://{uuid.uuid4()}/run", keep=1)
    writer = Checkpoints(tmp_path, keep=1, copies=copies)
    writer.save(1, state, {})
    writer.wait()
    copies.finished(lambda steps, error: None, wait=True)
    assert copies.steps() == [1]
    writer.close()


def test_a_run_whose_directory_is_lost_goes_on_from_its_copies(run):
    cfg, directory = run
    shutil.rmtree(directory)
    copies = open_copies(cfg, ALONE)
    saved, _, notes = choose_checkpoint(cfg, NO_DATA, ALONE, copies)
    assert (saved.step, saved.path) == (2, directory / "2")
    assert notes == [f"checkpoint 2 fetched from {cfg.checkpoint.copy_to}"]


def test_a_run_whose_checkpoints_are_all_damaged_goes_on_from_its_copies(run):
    cfg, directory = run
    for step in finished_steps(directory):
        (directory / str(step) / MANIFEST).write_text("{")

    def choose(processes):
        saved, _, notes = choose_checkpoint(cfg, NO_DATA, processes, open_copies(cfg, processes))
        return saved.step, notes

    one, other = everywhere(2, choose)
    assert one == other
    assert one[0] == 2
    assert "no whole checkpoint" in one[1][0]
    assert "fetched from" in one[1][1]


def test_a_run_without_copies_there_is_a_new_one(tmp_path):
    place = f"memory://{uuid.uuid4()}/run"
    cfg = dataclasses.replace(
        small_config(), run_dir=str(tmp_path), checkpoint=CheckpointConfig(copy_to=place)
    )
    assert choose_checkpoint(cfg, NO_DATA, ALONE, open_copies(cfg, ALONE)) == (None, None, [])
