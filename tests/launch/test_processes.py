"""What launch/processes.py passes on of how processes ended, also through launch/local."""

import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moejax.errors import STOPPED

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("processes", ROOT / "launch" / "processes.py")
processes = importlib.util.module_from_spec(_spec)
sys.modules["processes"] = processes  # where its dataclass looks itself up
_spec.loader.exec_module(processes)


def local(folder, script):
    """Runs a shell script as two processes. Returns the launcher's exit code and its output."""
    command = [ROOT / "launch" / "local", "--processes", 2, "--logs", folder, "--", "sh", "-c"]
    words = [sys.executable, *map(str, command), script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 2", 2), ("kill -9 $$", 137), ("kill -15 $$", 143), ("exit 3", 3)],
)
def test_how_processes_ended_is_passed_on(tmp_path, script, code):
    assert local(tmp_path, script)[0] == code


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((0, 0), 0),
        ((None, 5), 5),
        ((1, 5), 5),  # who loses a peer ends with 1
        ((1, -9, 5), -9),
        ((3, 0), 3),
        ((3, 1), 1),
    ],
)
def test_of_several_codes_the_one_that_says_most_is_passed_on(codes, code):
    assert processes._failure([SimpleNamespace(returncode=one) for one in codes]) == code


def test_a_failure_is_seen_behind_a_process_that_runs(tmp_path):
    script = "test $MOEJAX_PROCESS = 0 && exec sleep 100; exit 7"
    code, out = local(tmp_path, script)  # gives up after a minute
    assert code == 7, out


def test_who_stopped_as_asked_does_not_hurry_the_others(tmp_path):
    assert processes.STOPPED == STOPPED
    # Process 0 may be longer at its end than a failure of the others would let it be.
    seconds = processes.PATIENCE_SECONDS + 1
    script = f"test $MOEJAX_PROCESS = 0 && sleep {seconds}; echo out of $MOEJAX_PROCESS; exit 3"
    code, out = local(tmp_path, script)
    assert code == 3, out
    assert "[p0] out of 0" in out


def test_a_dry_run_shows_lines_that_a_shell_can_run(tmp_path):
    script = 'echo "$MOEJAX_PROCESS of $MOEJAX_PROCESSES: $JAX_NUM_CPU_DEVICES"'
    words = ["--dry_run", "--devices", "3", "--logs", str(tmp_path / "logs"), "--", "sh", "-c"]
    command = [sys.executable, ROOT / "launch" / "local", *words, script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not (tmp_path / "logs").exists()
    for number, line in enumerate(done.stdout.splitlines()):
        name, _, shown = line.partition(" ")
        assert name == f"[p{number}]"
        assert subprocess.check_output(shown, shell=True, text=True) == f"{number} of 2: 3\n"
    assert number == 1


def test_logs_that_cannot_be_kept_are_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    code, said = local(tmp_path / "file", "exit 0")
    assert (code, said.count("\n")) == (2, 1)
    assert "where output cannot be kept" in said


def listening(folder, coordinator=None):
    """The addresses at which process 0 of two listens for the other one."""
    script = shlex.join([sys.executable, str(ROOT / "tests" / "launch" / "listen.py")])
    if coordinator is not None:
        script = f"MOEJAX_COORDINATOR={shlex.quote(coordinator)} {script}"
    words = [ROOT / "launch" / "local", "--devices", 1, "--logs", folder, "--", "sh", "-c", script]
    kept = {name: value for name, value in os.environ.items() if not re.match("XLA|MOEJAX", name)}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.search("listens at (.*)", done.stdout)[1].split()


linux = pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="reads who listens from Linux"
)


@linux
def test_on_one_machine_nobody_else_reaches_the_coordinator(tmp_path):
    assert listening(tmp_path) == ["127.0.0.1"]


@linux
@pytest.mark.slow
def test_process_0_listens_at_the_address_that_it_was_given(tmp_path):
    """One that is neither the default nor the machine's other ones."""
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    assert listening(tmp_path, f"127.0.0.2:{port}") == ["127.0.0.2"]
