"""A full disk, a real one: a small tmpfs."""

import errno
import functools
import logging
import os
import shutil
import subprocess
import time
from types import SimpleNamespace

import pytest

from moejax.checkpoint import disk_space
from moejax.checkpoint import writer as checkpoint
from moejax.checkpoint.disk_space import check_disk_space, check_writable, is_of
from moejax.checkpoint.find import newest
from moejax.checkpoint.manifest import MANIFEST, finished_steps
from moejax.checkpoint.writer import Checkpoints
from moejax.errors import FULL, READ_ONLY, InputError, NotWritableError, StorageFullError
from moejax.runtime.processes import ALONE
from tests.cases import drawn_state, small_config, step_for
from tests.threads import everywhere

KIBIBYTES = 1024


@functools.cache
def state():
    return drawn_state(step_for(small_config()))


@pytest.fixture
def small_disk(tmp_path):
    """A file system that holds two checkpoints of the small model, and not a third."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={KIBIBYTES}k", "none", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def remount(disk, how):
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def fill(disk, leave=0):
    """Takes all of a disk but so many bytes."""
    (disk / "others").write_bytes(bytes(shutil.disk_usage(disk).free - leave))


def save_and_wait(writer, step):
    writer.save(step, state(), {"config": {}})
    return writer.wait()


def finished_soon(writer):
    """What the loop asks after each step, until the save under way has an end."""
    for _ in range(400):
        if (step := writer.finished()) is not None:
            return step
        time.sleep(0.05)
    raise AssertionError("the save has no end")


def telling(directory, **options):
    """A writer, and what it tells of saves that fail."""
    told = []
    return Checkpoints(directory, failed=lambda *what: told.append(what), **options), told


def test_a_save_into_a_full_disk_names_the_step_that_is_safe(small_disk, capfd, monkeypatch):
    """It is told as soon as the save fails, and not at the next one."""
    writer, told = telling(small_disk / "checkpoints", keep=3)
    assert save_and_wait(writer, 10) == 10
    fill(small_disk, leave=40 * 1024)
    # As if somebody else had filled it after the look.
    monkeypatch.setattr(checkpoint, "check_disk_space", lambda *_: None)
    writer.save(20, state(), {"config": {}})
    with pytest.raises(StorageFullError, match=r"checkpoint of step 20\..*Step 10 is safe") as full:
        finished_soon(writer)
    assert "\n" not in str(full.value)
    assert full.value.code == 5
    assert told == [(20, str(full.value))]
    writer.close()
    assert capfd.readouterr() == ("", "")
    # Orbax's threads have ended, so nothing of the failed save takes room any more.
    assert os.listdir(small_disk / "checkpoints") == ["10"]
    assert shutil.disk_usage(small_disk).free >= 36 * 1024
    saved, notes = newest(small_disk / "checkpoints", "full")
    assert (saved.step, notes) == (10, [])


def test_a_save_for_which_there_is_less_room_than_the_last_took_is_not_begun(small_disk):
    writer = Checkpoints(small_disk / "checkpoints", keep=3)
    assert save_and_wait(writer, 10) == 10
    fill(small_disk, leave=40 * 1024)
    words = r"step 20\. .*: 40,960 bytes are free, it takes about \d+,\d+\. Step 10 is safe"
    with pytest.raises(StorageFullError, match=words):
        writer.save(20, state(), {"config": {}})
    (small_disk / "others").unlink()
    assert save_and_wait(writer, 20) == 20
    writer.close()


def test_a_manifest_that_was_damaged_meanwhile_does_not_keep_the_run_from_saving(tmp_path):
    writer = Checkpoints(tmp_path, keep=2)
    assert save_and_wait(writer, 10) == 10
    (tmp_path / "10" / MANIFEST).write_text("{")
    assert save_and_wait(writer, 20) == 20
    writer.close()


def test_a_disk_that_becomes_read_only_ends_the_run_in_one_line(small_disk, capfd):
    writer, told = telling(small_disk / "checkpoints", keep=3)
    assert save_and_wait(writer, 10) == 10
    remount(small_disk, "ro")
    words = r"checkpoint of step 20 cannot be written\. .* Step 10 is safe\. Make it writable"
    with pytest.raises(NotWritableError, match=words) as error:
        writer.save(20, state(), {"config": {}})
    assert error.value.code == 5
    assert told == [(20, str(error.value))]
    writer.close()
    assert capfd.readouterr() == ("", "")
    with pytest.raises(
        InputError, match=r"checkpoints cannot be written\. .*Read-only file system"
    ):
        check_writable(small_disk / "checkpoints", ALONE)
    remount(small_disk, "rw")
    check_writable(small_disk / "checkpoints", ALONE)
    assert newest(small_disk / "checkpoints", "full")[0].step == 10
    assert os.listdir(small_disk / "checkpoints") == ["10"]


def test_every_process_refuses_a_place_that_one_cannot_write(tmp_path):
    (tmp_path / "checkpoints" / ".writable.1").mkdir(parents=True)
    one, other = everywhere(2, lambda p: check_writable(tmp_path / "checkpoints", p))
    assert isinstance(one, InputError)
    assert str(one) == str(other)
    assert "Is a directory" in str(one)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_what_cannot_be_written_is_one_line_and_code_5(tmp_path, monkeypatch, number):
    def fail(*_):
        raise ValueError(f"INTERNAL: Failed writing: {os.strerror(number)}")  # as tensorstore's

    monkeypatch.setattr(checkpoint, "commit", fail)
    writer = Checkpoints(tmp_path, keep=2)
    words = r"checkpoint of step 10.*No step was saved before"
    with pytest.raises(StorageFullError, match=words) as error:
        save_and_wait(writer, 10)
    writer.close()
    assert list(tmp_path.iterdir()) == []
    assert "\n" not in str(error.value)
    assert isinstance(error.value, NotWritableError) == (number in {errno.EROFS, errno.EACCES})


def test_a_full_disk_is_told_from_other_errors():
    for number in (errno.ENOSPC, errno.EDQUOT):
        assert is_of(OSError(number, os.strerror(number)), FULL)
    assert is_of(ValueError("RESOURCE_EXHAUSTED: Failed writing: No space left on device"), FULL)
    behind = RuntimeError("save failed")
    behind.__cause__ = OSError(errno.ENOSPC, "no")
    assert is_of(behind, FULL)
    met = RuntimeError("while cleaning up after it")
    met.__context__ = OSError(errno.ENOSPC, "no")
    assert is_of(met, FULL)
    assert not is_of(OSError(errno.EACCES, "Permission denied"), FULL)
    assert is_of(OSError(errno.EROFS, "Read-only file system"), READ_ONLY)
    assert not is_of(OSError(errno.ENOSPC, "No space left on device"), READ_ONLY)
    assert not is_of(ValueError("No space between words"), FULL)


@pytest.mark.parametrize(
    ("template", "arguments", "error", "shown"),
    [
        ("Checkpoint failed: %s", (f"{os.strerror(errno.ENOSPC)}: /a/b",), None, False),
        ("Checkpoint failed: %s", ("no such step",), None, True),
        ("Write failed", (), OSError(errno.EROFS, "read-only"), False),
        ("Write failed", (), FileNotFoundError("3.orbax-checkpoint-tmp/a"), False),
        ("Write failed", (), FileNotFoundError("3/a"), True),
    ],
)
def test_of_orbaxs_lines_those_about_a_full_disk_are_left_out(template, arguments, error, shown):
    how = (logging.ERROR, "file.py", 1, template, arguments, error and (type(error), error, None))
    assert disk_space.QUIET.filter(logging.LogRecord("absl", *how)) == shown


def test_all_processes_hear_what_the_first_sees(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: SimpleNamespace(free=9))
    assert everywhere(2, lambda processes: check_disk_space(tmp_path, 9, 1, processes)) == [9, 9]

    def refused(processes):
        with pytest.raises(StorageFullError, match="9 bytes are free") as error:
            check_disk_space(tmp_path, 10, 1, processes)
        return str(error.value)

    one, other = everywhere(2, refused)
    assert one == other
    assert "No step was saved before" in one
    assert finished_steps(tmp_path) == []
