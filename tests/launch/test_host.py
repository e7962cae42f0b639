"""launch/host with real supervisors and small programs: what they agree on, and how they end."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.modules import is_gone, module, wait_for

HOST = Path(__file__).parents[2] / "launch" / "host"
launcher = module("host")
statuses = sys.modules["statuses"]


class Cluster:
    """Supervisors at ports of this machine, each with its output in a file."""

    def __init__(self, folder, count):
        self.folder = folder
        self.names = [f"127.0.0.1:{statuses.free_port('127.0.0.1')}" for _ in range(count)]
        self.running = {}

    def start(self, script, *flags, hosts=None):
        for number in range(len(self.names)) if hosts is None else hosts:
            words = [sys.executable, HOST, "--hosts", ",".join(self.names), "--me"]
            words += [self.names[number], "--logs", self.folder / "logs", *flags]
            words += ["--", "sh", "-c", script]
            out = self.path(number).open("ab")
            with out:
                self.running[number] = subprocess.Popen(
                    [*map(str, words)], stdout=out, stderr=subprocess.STDOUT, cwd=self.folder
                )

    def path(self, number):
        return self.folder / f"out{number}"

    def text(self):
        paths = [self.path(number) for number in range(len(self.names))]
        return "".join(path.read_text() for path in paths if path.exists())

    def wait_for(self, pattern):
        wait_for(lambda: re.search(pattern, self.text()), told=self.text)

    def end(self):
        return [self.running[number].wait(timeout=60) for number in sorted(self.running)]


@pytest.fixture
def cluster(tmp_path):
    made = []

    def make(count):
        made.append(Cluster(tmp_path, count))
        return made[-1]

    yield make
    for process in [process for one in made for process in one.running.values()]:
        process.kill()
        process.wait()


def test_processes_get_their_places_and_the_run_ends_with_them(cluster):
    hosts = cluster(2)
    shown = "echo $MOEJAX_PROCESS of $MOEJAX_PROCESSES on $MOEJAX_HOST at $MOEJAX_COORDINATOR"
    hosts.start(shown, "--processes_a_host", "2")
    assert hosts.end() == [0, 0]
    found = re.findall(r"(\d) of 4 on (h\d) at (\S+)", hosts.text())
    assert sorted(found)[0][:2] == ("0", "h0")
    assert {pair[:2] for pair in found} == {("0", "h0"), ("1", "h0"), ("2", "h1"), ("3", "h1")}
    assert len({address for *_, address in found}) == 1


def test_bad_input_ends_all_hosts_at_once(cluster):
    hosts = cluster(2)
    hosts.start("test $MOEJAX_PROCESS = 0 && exec sleep 100; exit 2")
    assert hosts.end() == [2, 2]
    assert "all hosts end with 2: host 1 ended with 2" in hosts.text()


@pytest.mark.slow
def test_a_failure_starts_all_again_and_too_many_end_the_run_with_the_last_words(cluster):
    hosts = cluster(2)
    script = "test $MOEJAX_PROCESS = 0 && exec sleep 100; echo the reason; kill -9 $$"
    hosts.start(script, "--restarts", "1")
    assert hosts.end() == [7, 7]
    text = hosts.text()
    assert "generation 2 on hosts 0, 1: host 1 ended with 137" in text
    assert "all hosts end with 7: gave up after 1 restarts" in text
    said = text[text.index("failed first") :].splitlines()
    assert said[0] == "failed first and said last:"
    assert said[1] == "    the reason"


@pytest.mark.slow
def test_a_host_that_is_lost_is_left_out_and_leaves_nothing_behind(cluster):
    hosts = cluster(3)
    hosts.start(
        "echo $MOEJAX_PROCESSES processes, $$; test $MOEJAX_PROCESSES = 2 || exec sleep 100"
    )
    hosts.wait_for(r"(?s)(3 processes.*){3}")
    pid = int(re.search(r"3 processes, (\d+)", hosts.path(2).read_text())[1])
    hosts.running[2].kill()
    assert hosts.end() == [0, 0, -signal.SIGKILL]
    assert "generation 2 on hosts 0, 1: host 2 does not answer" in hosts.text()
    assert is_gone(pid)


# A program that does as a run does: it saves when a change is proposed, and goes on in its place.
PROGRAM = """
import json, os, pathlib, sys, time
path = pathlib.Path(os.environ["MOEJAX_ASSIGNMENT"])
now = json.loads(path.read_text())
print("begins as", now["process"], "of", now["processes"], flush=True)
while now["processes"] != int(sys.argv[1]):
    found = json.loads(path.read_text())
    if found["generation"] > now["generation"]:
        if found["process"] is None:
            sys.exit(3)
        path.with_suffix(".waits").write_text(str(found["generation"]))
        if found["coordinator"]:
            now = found
            print("goes on as", now["process"], "of", now["processes"], flush=True)
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_host_that_leaves_and_one_that_comes_change_the_running_processes(cluster, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    hosts = cluster(3)
    script = f"exec {sys.executable} {tmp_path / 'program.py'} 2"
    hosts.start(script, "--gather_s", "2", hosts=(0, 1, 2))
    hosts.wait_for(r"(?s)(begins as \d of 3.*){3}")
    time.sleep(launcher.Supervisor.__init__.__globals__["LOST_S"] + 1)  # a change waits so long
    hosts.running[1].send_signal(signal.SIGTERM)
    assert hosts.end() == [0, 3, 0]
    text = hosts.text()
    assert "generation 2 on hosts 0, 2: host 1 leaves" in text
    assert sorted(re.findall(r"goes on as (\d) of 2", text)) == ["0", "1"]
    assert text.count("begins") == 3


@pytest.mark.slow
def test_a_stranger_learns_the_state_and_changes_nothing(cluster):
    hosts = cluster(1)
    hosts.start("echo begun; sleep 3")
    hosts.wait_for("begun")
    time.sleep(0.3)  # the status follows
    host, port = hosts.names[0].split(":")
    for said in (b"", b'{"assignment": {"generation": 9}}\n'):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(said)
            assert b'"generation": 1' in stranger.recv(1 << 16)
    with socket.create_connection((host, int(port))) as silent:
        assert hosts.end() == [0]
        silent.close()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--hosts", "a,b", "--me", "c"], "this host is `c`"),
        (["--hosts", "a,a", "--me", "a"], "name every host once"),
        (["--hosts", "", "--me", "a"], "name every host once"),
        (["--hosts", "a:99999,b", "--me", "b"], "a port below 65536"),
        (["--hosts", "a,b", "--me", "a", "--min_hosts", "3"], "--min_hosts is 3"),
        (["--hosts", "a,b", "--me", "a", "--restarts", "-1"], "--restarts is -1"),
        (["--hosts", "192.0.2.1,b", "--me", "192.0.2.1"], "cannot listen at 192.0.2.1"),
    ],
)
def test_bad_flags_are_one_line(tmp_path, flags, said):
    words = [sys.executable, str(HOST), *flags, "--logs", str(tmp_path), "--", "true"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
