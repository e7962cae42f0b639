"""launch/ssh through a real sshd: two hosts, which are two addresses of this machine."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.modules import module, wait_for
from tests.launch.sshd import HOSTS, needs_sshd, serving

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "launch" / "ssh"


launcher = module("ssh")
free_port = module("statuses").free_port


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """The flags that lead to both hosts."""
    with serving(tmp_path_factory.mktemp("sshd")) as options:
        yield ["--hosts", ",".join(HOSTS), *options]


def begin(folder, *arguments):
    words = [sys.executable, LAUNCHER, "--logs", folder / "logs", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen([*map(str, words)], stdout=pipe, stderr=pipe, text=True, cwd=folder)


def launch(folder, *arguments):
    """Returns the launcher's exit code, output and errors."""
    process = begin(folder, *arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def running(marker):
    """Processes with these words in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker in path.read_text(errors="replace").replace("\0", " "):
                found.append(int(path.parent.name))
    return found


@needs_sshd
def test_each_host_runs_the_command_in_its_place(flags, tmp_path):
    script = 'echo "$MOEJAX_PROCESS of $MOEJAX_PROCESSES at $MOEJAX_COORDINATOR, $PWD: $1"; exit 3'
    words = "two words; * $HOME ' \" \\"
    code, out, err = launch(tmp_path, *flags, "--", "sh", "-c", script, "sh", words)
    assert code == 3, err
    for number, host in enumerate(HOSTS):
        line = rf"\[{host}\] {number} of 2 at {HOSTS[0]}:2\d{{4}}, {tmp_path}: {re.escape(words)}\n"
        assert re.search(line, out), out
        assert f"{number} of 2" in (tmp_path / "logs" / f"{host}.log").read_text()


@needs_sshd
@pytest.mark.exhaustive
def test_several_processes_a_host_are_numbered_host_by_host(flags, tmp_path):
    script = "echo $MOEJAX_PROCESS: $JAX_NUM_CPU_DEVICES at $MOEJAX_COORDINATOR"
    counts = ["--processes_a_host", 2, "--devices", 3, "--coordinator_port", 1234]
    code, out, err = launch(tmp_path, *flags, *counts, "--", "sh", "-c", script)
    assert code == 0, err
    names = [f"{host}-{number}" for host in HOSTS for number in range(2)]
    said = [f"[{name}] {n}: 3 at {HOSTS[0]}:1234" for n, name in enumerate(names)]
    assert sorted(out.splitlines()) == said


UP = "trap 'touch asked$MOEJAX_PROCESS; exit 3' {}; sleep {} & echo up; while :; do sleep 0.1; done"


@needs_sshd
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), signal.SIGTERM]
)
def test_a_signal_is_passed_on_to_all(flags, tmp_path, number):
    marker = f"{300 + os.getpid() / 1e6:.6f}"
    script = UP.format(number.name.removeprefix("SIG"), marker)
    process = begin(tmp_path, *flags, "--", "sh", "-c", script)
    wait_until_up(tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 3, out + err
    assert (tmp_path / "asked0").exists()
    assert (tmp_path / "asked1").exists()
    assert running(f"sleep {marker}") == [], "what the command left behind is ended too"


@needs_sshd
@pytest.mark.parametrize(
    "killed", ["the launcher", pytest.param("a connection", marks=pytest.mark.exhaustive)]
)
def test_who_loses_the_launcher_stops_and_can_save(flags, tmp_path, killed):
    marker = f"{400 + os.getpid() / 1e6:.6f}"
    process = begin(tmp_path, *flags, "--", "sh", "-c", UP.format("TERM", marker))
    wait_until_up(tmp_path)
    assert len(running(f"sleep {marker}")) >= 2
    if killed == "the launcher":
        process.kill()
    else:  # the ssh of host 1; the shell there has the same words
        ours = [pid for pid in running(f"-- {HOSTS[1]}") if is_ssh(pid)]
        os.kill(min(ours), signal.SIGKILL)
        wait_for(lambda: (tmp_path / "asked1").exists())
        process.send_signal(signal.SIGTERM)  # host 0 would be given a while
    out, _ = process.communicate(timeout=60)
    wait_for(lambda: (tmp_path / "asked0").exists() and (tmp_path / "asked1").exists())
    wait_for(lambda: running(f"sleep {marker}") == [])
    if killed == "a connection":
        assert process.returncode not in (0, 3), out


def is_ssh(pid):
    return Path(f"/proc/{pid}/comm").read_text() == "ssh\n"


def wait_until_up(folder):
    logs = [folder / "logs" / f"{host}.log" for host in HOSTS]
    wait_for(lambda: all(log.exists() and "up" in log.read_text() for log in logs))


@needs_sshd
@pytest.mark.parametrize(
    ("extra", "program", "message"),
    [
        (["--directory", "/nowhere"], "true", f"{HOSTS[1]}: no directory /nowhere"),
        pytest.param(
            ["--ssh_option=HostKeyAlias=other"],
            "true",
            "Host key verification failed",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_hosts_that_cannot_run_it_are_told_in_one_line(flags, tmp_path, extra, program, message):
    code, out, err = launch(tmp_path, *flags, *extra, "--", program)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


@needs_sshd
def test_a_dry_run_shows_lines_that_a_shell_can_run(flags, tmp_path):
    script = 'echo "$MOEJAX_PROCESS of $MOEJAX_PROCESSES" > "ran$MOEJAX_PROCESS"'
    code, out, err = launch(tmp_path, *flags, "--dry_run", "--", "sh", "-c", script)
    assert code == 0, err
    assert list(tmp_path.iterdir()) == []
    for number, host in enumerate(HOSTS):
        line = out.splitlines()[number]
        assert line.startswith(f"[{host}] ssh ")
        subprocess.run(line.partition("] ")[2], shell=True, check=True, timeout=30)
        assert (tmp_path / f"ran{number}").read_text() == f"{number} of 2\n"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no hosts."),
        (["--hosts", "a", "--host_file", "f"], "no hosts."),
        (["--hosts", "a,,b"], "host is ``"),
        (["--hosts=-oProxyCommand=touch${IFS}pwned"], "host is `-oProxy"),
        (["--hosts", "a;b"], "host is `a;b`"),
        (["--hosts", "a,b,a"], "host `a` stands there twice"),
        (["--host_file", "nofile"], "--host_file is nofile, which cannot be read"),
        (["--hosts", "localhost,b"], "the first host is localhost"),
        (["--hosts", "a", "--processes_a_host", "0"], "--processes_a_host is 0"),
        (["--hosts", "a", "--port", "70000"], "--port is 70000"),
        (["--hosts", "a", "--ssh_option", "BatchMode"], "--ssh_option is `BatchMode`"),
        (["--hosts", "a", "--elastic", "--dry_run"], "--elastic starts a supervisor a host"),
        (["--hosts", "a", "--ssh_option", "Nonsense=1"], "ssh refuses host `a` or an option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", ["ssh", *flags, "--", "true"])
    assert launcher.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"ssh: error: {message}")
    assert len(err.splitlines()) == 1


def test_a_machine_without_ssh_is_told(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["ssh", "--hosts", "a", "--", "true"])
    assert launcher.main() == 2
    assert capsys.readouterr().err.startswith("ssh: error: no program `ssh`.")


@pytest.mark.slow
@needs_sshd
def test_supervisors_outlive_the_loss_of_a_host(tmp_path, flags):
    script = "echo $MOEJAX_PROCESS of $MOEJAX_PROCESSES; test $MOEJAX_PROCESSES = 1 || sleep 100"
    command = ["--elastic", "--supervisor_port", free_port(HOSTS[0]), "--", "sh", "-c", script]
    process = begin(tmp_path, *flags, *command)
    logs = [tmp_path / "logs" / f"{name}.supervisor.log" for name in HOSTS]
    wait_for(lambda: all(log.exists() and "of 2" in log.read_text() for log in logs))
    (supervisor,) = [
        pid
        for pid in running(f"--me {HOSTS[1]}")
        if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1].endswith(b"launch/host")
    ]
    os.kill(supervisor, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert "generation 2 on hosts 0: host 1 does not answer" in out
    assert "0 of 1" in out
