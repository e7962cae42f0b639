import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moejax.errors import InputError, StorageFullError
from moejax.runtime.event_log import EventLog, RunLock

HOLD = """
import pathlib, sys
from moejax.runtime.event_log import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_every_line_is_json_and_is_there_at_once(tmp_path):
    ledger = EventLog(tmp_path / "metrics.jsonl")
    ledger.write("step", step=1, loss=float("inf"), text="line\nbreak")
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    ledger.close()
    found = json.loads(line)
    assert found.pop("time") > 0
    assert found == {"event": "step", "step": 1, "loss": None, "text": "line\nbreak"}


def test_a_full_disk_is_told_apart():
    ledger = EventLog(Path("/dev/full"))
    with pytest.raises(StorageFullError, match=r"no space left.*/dev/full"):
        ledger.write("step", step=1)
    with pytest.raises(StorageFullError):  # what is left in its buffer
        ledger.close()


def test_half_a_line_of_a_full_disk_or_a_kill_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for left in ("", "\n", '{"event": "whole"}\n', '{"event": "whole"}\n{"time": 1.5, "ev'):
        path.write_text(left)
        ledger = EventLog(path)
        ledger.write("next")
        ledger.close()
        lines = [json.loads(line) for line in path.read_text().splitlines() if line]
        assert [line["event"] for line in lines] == ["whole"] * ("whole" in left) + ["next"]


def test_a_directory_has_one_owner_who_is_named(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(InputError, match=f"in use.*process {os.getpid()} on"):
        RunLock(tmp_path)
    lock.close()
    RunLock(tmp_path).close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_told_as_in_use(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(InputError, match=f"cannot be locked.*{os.strerror(number)}.*flock"):
        RunLock(tmp_path)


def test_a_killed_process_leaves_no_lock(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=f"process {holder.pid} on"):
            RunLock(tmp_path)
        holder.kill()
    RunLock(tmp_path).close()
