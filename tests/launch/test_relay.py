"""launch/relay.py between a launcher and a program that reaches another host."""

import signal
import subprocess
import sys
import time

import pytest

from tests.launch.modules import LAUNCH


@pytest.fixture
def begin():
    """Runs a shell script through the relay; returns that once the script has said `up`."""
    begun = []

    def begin(script):
        words = [sys.executable, LAUNCH / "relay.py", "sh", "-c", f"echo up; {script}"]
        begun.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert begun[-1].stdout.readline() == "up\n"
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        with process:  # closes what leads to it
            pass


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_is_a_line_for_the_other_host(begin, name):
    process = begin("read line; echo $line; exit 4")
    time.sleep(0.3)  # it looks several times whether the launcher is there
    process.send_signal(signal.Signals[name])
    assert process.stdout.read() == f"{name}\n"
    assert process.wait(timeout=30) == 4


def test_when_the_launcher_is_gone_the_other_host_is_told_by_the_end_of_its_input(begin, tmp_path):
    process = begin(f"cat > {tmp_path / 'read'}; exit 5")
    process.stdout.close()
    assert process.wait(timeout=30) == 5
    assert (tmp_path / "read").read_text() == ""


@pytest.mark.parametrize(
    ("code", "passed_on"), [(5, 5), (130, 130), (137, -9), (134, -6), (255, 1)]
)
def test_what_ssh_ends_with_is_a_signal_again_or_a_lost_connection(code, passed_on):
    words = [sys.executable, LAUNCH / "relay.py", "sh", "-c", f"exit {code}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.returncode == passed_on
    assert ("connection failed or was lost" in done.stdout) == (code == 255)
