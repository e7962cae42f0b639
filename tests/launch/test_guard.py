"""What launch/guard.py says of a host, and how it ends a command that it runs there."""

import json
import platform
import signal
import subprocess
import sys
import time

import jax
import pytest

from moejax.version import __version__
from tests.launch.modules import LAUNCH, is_gone, module, wait_for

TEXT = (LAUNCH / "guard.py").read_text()
# Some commands are not asked again and again.
HURRIED = TEXT.replace("GRACE_SECONDS = 60", "GRACE_SECONDS = 0.5")


@pytest.fixture
def begin():
    """Runs a shell script under the guard; returns that once the script has said `up`."""
    begun = []

    def begin(script, text=TEXT, before=""):
        words = [sys.executable, "-I", "-c", text, "run", "sh", "-c", script]
        words = ["sh", "-c", f'{before}\nexec "$@"', "sh", *words]
        pipe = subprocess.PIPE
        begun.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True))
        assert begun[-1].stdout.readline() == "up\n"
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        with process:  # closes what leads to it
            pass


WAITING = "while :; do sleep 0.05; done"


def test_a_host_says_what_it_would_run_and_whether_it_knows_a_name(capsys):
    guard = module("guard")
    own = {"Python": platform.python_version(), "moejax": __version__, "JAX": jax.__version__}
    assert guard.check("localhost") == 0
    assert json.loads(capsys.readouterr().out) == {**own, "unknown": None}
    assert guard.check("no-such.invalid") == 0
    said = json.loads(capsys.readouterr().out)
    assert said.pop("unknown")
    assert said == own


def test_of_a_python_without_packages_there_is_none():
    words = [sys.executable, "-I", "-S", "-c", TEXT, "check", "localhost"]
    said = json.loads(subprocess.check_output(words, text=True))
    assert (said["moejax"], said["JAX"]) == ("none", "none")


@pytest.mark.parametrize(("ending", "code"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", 137)])
def test_how_the_command_ended_is_passed_on(begin, ending, code):
    process = begin(f"echo up; echo more; {ending}")
    assert process.stdout.read() == "more\n"
    assert process.wait(timeout=30) == code


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_that_is_asked_for_reaches_the_command(begin, name):
    asked = f"trap 'exit 3' {name.removeprefix('SIG')}; echo up; {WAITING}"
    process = begin(asked, before="trap '' INT TERM")  # else it would be ignored there
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    assert process.wait(timeout=30) == 3


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_of_the_host_itself_reaches_the_command(begin, number):
    process = begin(f"trap 'exit 4' HUP INT TERM; echo up; {WAITING}")
    process.send_signal(number)
    assert process.wait(timeout=30) == 4


def test_when_the_launcher_is_gone_the_command_is_asked_to_stop_and_then_killed(begin):
    process = begin(f"trap 'exit 3' TERM; echo up; {WAITING}")
    process.stdin.close()
    assert process.wait(timeout=30) == 3
    process = begin(f"trap '' TERM; echo up; {WAITING}", HURRIED)
    began = time.monotonic()
    process.stdin.close()
    assert process.wait(timeout=30) == 137
    assert time.monotonic() - began > 0.4, "it had a while to save"


def test_what_the_command_left_behind_ends_with_it(begin):
    process = begin("sleep 300 & echo up; echo $!; exit 0")
    left = process.stdout.readline().strip()
    assert process.wait(timeout=30) == 0
    wait_for(lambda: is_gone(left))


def test_a_command_runs_on_when_nobody_reads_what_it_says(begin, tmp_path):
    done = tmp_path / "done"
    process = begin(f"echo up; sleep 0.2; seq 20000; touch {done}; exit 0")
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert done.exists()
