"""What launch/processes.py passes on of how processes ended, also through launch/local."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moejax.errors import STOPPED
from tests.launch.modules import module, wait_for

ROOT = Path(__file__).parents[2]
processes = module("processes")
group = sys.modules["group"]


def words_of(folder, script, *flags):
    """A launcher's command, which runs a shell script as two processes."""
    command = [ROOT / "launch" / "local", *flags, "--logs", folder, "--", "sh", "-c", script]
    return [sys.executable, *map(str, command)]


def local(folder, script, *flags):
    """Returns a launcher's exit code and its output."""
    words = words_of(folder, script, *flags)
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
        ((1, 124), 124),
        ((124, -9), -9),
        ((124, 5), 5),
        ((5, -6), 5),  # JAX ends by SIGABRT who loses process 0
        ((124, -6), 124),
        ((1, -6), -6),
        ((0, -6), -6),
    ],
)
def test_of_several_codes_the_one_that_says_most_is_passed_on(codes, code):
    assert group.failure_of(codes) == code


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((0, None), None),
        ((3, None), None),  # who has stopped as asked does not end who is about to
        ((3, 0), 3),
        ((1, None), 1),  # who waits for it would wait for ever
        ((0, 0), 0),
    ],
)
def test_a_host_has_ended_once_a_process_failed_or_all_have_ended(codes, code):
    some = group.Group(SimpleNamespace(), SimpleNamespace())
    polls = [SimpleNamespace(poll=lambda code=code: code) for code in codes]
    some._started += [SimpleNamespace(process=one) for one in polls]
    assert some.code == code


@pytest.mark.slow
def test_a_failure_is_seen_behind_a_process_that_runs(tmp_path):
    script = "test $MOEJAX_PROCESS = 0 && exec sleep 100; exit 7"
    code, out = local(tmp_path, script)  # gives up after a minute
    assert code == 7, out


@pytest.mark.exhaustive
def test_who_stopped_as_asked_does_not_hurry_the_others(tmp_path):
    assert group.STOPPED == STOPPED
    # Process 0 may be longer at its end than a failure of the others would let it be.
    seconds = group.PATIENCE_SECONDS + 1
    script = f"test $MOEJAX_PROCESS = 0 && sleep {seconds}; echo out of $MOEJAX_PROCESS; exit 3"
    code, out = local(tmp_path, script)
    assert code == 3, out
    assert "[p0] out of 0" in out


@pytest.mark.parametrize("said", ["the reason", ""])
def test_who_failed_first_is_said_last_with_its_last_lines(tmp_path, said):
    words = f"echo {said};" if said else ""
    script = f"if test $MOEJAX_PROCESS = 1; then {words} kill -9 $$; fi; sleep 0.5; exit 1"
    code, out = local(tmp_path, script)
    assert code == 137
    head = "launcher: p1 failed first: ended by SIGKILL; then p0 ended with 1 (a fault). p1 said "
    wanted = [f"{head}last:", f"    {said}"] if said else [f"{head}nothing."]
    assert out[out.index("launcher: ") :].splitlines() == wanted


linux = pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="reads who listens from Linux"
)


ONCE = "echo start >> {file}; test $(wc -l < {file}) -ge {starts} || exit {code}"


def restarted(folder, script, restarts):
    """Runs a script as one process that may be started again."""
    return local(folder, script, "--processes", 1, "--restarts", restarts)


@pytest.mark.parametrize("code", [1, 6, 41, 124])
def test_what_may_pass_is_started_again(tmp_path, code):
    script = ONCE.format(file=tmp_path / "starts", starts=2, code=code)
    ended, out = restarted(tmp_path, script, 2)
    assert ended == 0, out
    assert f"restart 1 of 2 in 1 s: ended with {code} (" in out


@pytest.mark.parametrize("code", [2, 3, 4, 5, 130])
def test_what_would_not_pass_is_not_started_again(tmp_path, code):
    script = ONCE.format(file=tmp_path / "starts", starts=2, code=code)
    assert restarted(tmp_path, script, 2)[0] == code
    assert (tmp_path / "starts").read_text() == "start\n"


def test_a_program_that_fails_again_and_again_is_given_up(tmp_path):
    script = ONCE.format(file=tmp_path / "starts", starts=9, code=1)
    code, out = restarted(tmp_path, f"echo try; {script}", 1)
    assert code == processes.CRASH_LOOP
    assert "gave up after 1 restarts" in out
    assert (tmp_path / "starts").read_text() == "start\n" * 2
    assert (tmp_path / "p0.log").read_text() == "try\n" * 2  # the log keeps both


def begin(folder, script):
    """Begins a launcher of two processes; returns it once both have written to their logs."""
    words = words_of(folder, script)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    logs = [folder / f"p{n}.log" for n in (0, 1)]
    wait_for(lambda: all(log.exists() and log.read_text() for log in logs))
    return process


@linux
def test_a_launcher_that_is_killed_takes_its_processes_with_it(tmp_path):
    marker = f"sleep {400 + os.getpid() / 1e6:.6f}"
    process = begin(tmp_path, f"echo up; {marker}")
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: subprocess.run(["pgrep", "-f", marker], capture_output=True).returncode, 5)


def test_the_third_interrupt_kills_what_ignores_them(tmp_path):
    process = begin(tmp_path, "trap : INT; echo up; while true; do sleep 0.1; done")
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    process.communicate(timeout=10)
    assert process.returncode == 137


def test_an_interrupt_ends_the_wait_for_who_does_not_stop(tmp_path):
    loop = "while true; do sleep 0.1; done"
    script = f"trap : INT; echo up; test $MOEJAX_PROCESS = 1 && sleep 0.3 && exit 7; {loop}"
    process = begin(tmp_path, script)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 7


def test_a_dry_run_shows_lines_that_a_shell_can_run(tmp_path):
    script = 'echo "$MOEJAX_PROCESS of $MOEJAX_PROCESSES: $JAX_NUM_CPU_DEVICES"'
    code, out = local(tmp_path / "logs", script, "--dry_run", "--devices", 3)
    assert code == 0
    assert not (tmp_path / "logs").exists()
    for number, line in enumerate(out.splitlines()):
        name, _, shown = line.partition(" ")
        assert name == f"[p{number}]"
        assert subprocess.check_output(shown, shell=True, text=True) == f"{number} of 2: 3\n"
    assert number == 1


def test_logs_that_cannot_be_kept_are_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    code, said = local(tmp_path / "file", "exit 0")
    assert (code, said.count("\n")) == (2, 1)
    assert "where output cannot be kept" in said


def test_logs_of_a_live_launcher_are_left_alone(tmp_path):
    process = begin(tmp_path, "echo up; sleep 2; echo down")
    code, said = local(tmp_path, "echo second")
    assert (code, said.count("\n")) == (2, 1), said
    assert "where another launcher keeps output now" in said
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert [(tmp_path / f"p{n}.log").read_text() for n in (0, 1)] == ["up\ndown\n"] * 2
    assert local(tmp_path, "echo next")[0] == 0


def listening(folder, coordinator=None):
    """The addresses at which process 0 of two listens for the other one."""
    script = shlex.join([sys.executable, str(ROOT / "tests" / "launch" / "listen.py")])
    if coordinator is not None:
        script = f"MOEJAX_COORDINATOR={shlex.quote(coordinator)} {script}"
    kept = {name: value for name, value in os.environ.items() if not re.match("XLA|MOEJAX", name)}
    done = subprocess.run(
        words_of(folder, script, "--devices", 1),
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.search("listens at (.*)", done.stdout)[1].split()


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


def test_simulated_devices_have_large_pages_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    variables = processes.environment("localhost:1", 0, 1, 2)
    assert variables["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    variables = processes.environment("localhost:1", 0, 1, 2)
    assert variables["GLIBC_TUNABLES"] == "glibc.malloc.check=1"
    assert "GLIBC_TUNABLES" not in processes.environment("localhost:1", 0, 1, None)


def test_the_guard_knows_of_each_process_until_it_has_ended(tmp_path):
    told = []
    guard = SimpleNamespace(
        watch=lambda process: told.append(("watch", process.pid)),
        forget=lambda process: told.append(("forget", process.pid)),
    )
    some = group.Group(SimpleNamespace(), guard)
    some.start(group.Place("one"), ["sleep", "100"], {}, (tmp_path / "log").open("wb"))
    pid = some._started[0].process.pid
    assert told == [("watch", pid)]
    some.kill()
    assert told == [("watch", pid), ("forget", pid)]
    assert some.code == -signal.SIGKILL


@pytest.mark.parametrize("ended", [False, True])
def test_the_guard_ends_what_runs_unless_its_launcher_has_ended_by_itself(ended):
    """One process has ended before: its number may be another's, here that of one that stays."""
    one, other = (subprocess.Popen(["sleep", "100"], start_new_session=True) for _ in range(2))
    with one, other:
        told = f"{one.pid}\n{other.pid}\n-{other.pid}\n{'done' * ended}\n"
        words = [sys.executable, "-I", "-S", "-c", group.GUARD]
        subprocess.run(words, input=told, text=True, check=True, timeout=30)
        assert one.poll() is None if ended else one.wait(timeout=30) == -signal.SIGKILL
        assert other.poll() is None
        one.kill()
        other.kill()


def test_whoever_sleeps_before_a_restart_wakes_when_interrupted():
    interrupts = group.Interrupts()
    began = time.monotonic()
    interrupts.sleep(0.2)
    assert 0.2 <= time.monotonic() - began < 5
    interrupts.count = 1
    interrupts.sleep(100)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("words", "counts", "wrong"),
    [
        (["sh"], {"--processes": 1, "--devices": None}, None),
        (["sh"], {"--processes": 64}, None),
        ([], {}, "no command"),
        (["no-such"], {}, "no program `no-such`"),
        (["sh"], {"--processes": 0}, "--processes is 0"),
        (["sh"], {"--processes": 65}, "--processes is 65"),
        (["sh"], {"--processes": 2, "--devices": 65}, "--devices is 65"),
    ],
)
def test_a_command_and_counts_are_looked_at_before_anything_starts(words, counts, wrong):
    found = processes.problem(words, counts)
    assert found is None if wrong is None else found.startswith(wrong)


def test_an_interrupt_in_the_pause_before_a_restart_starts_nothing_again(monkeypatch):
    class Group:
        def __init__(self, interrupts, guard):
            pass

        def wait(self):
            return 1

    class Interrupts(group.Interrupts):
        def sleep(self, seconds):
            self.count = 1

    starts = []
    monkeypatch.setattr(processes, "Group", Group)
    monkeypatch.setattr(processes, "Interrupts", Interrupts)
    assert processes._run_and_restart(lambda group, later: starts.append(later), 4) == 1
    assert starts == [False]


def test_the_pause_before_a_restart_doubles_and_a_long_start_begins_anew(monkeypatch):
    """Each start lasts as long as its entry says, and ends with 1."""
    lasts, pauses, now = [1, 1, 1, 601, 1, 1, 1, 1], [], [0.0]

    class Group:
        def __init__(self, interrupts, guard):
            pass

        def wait(self):
            now[0] += lasts.pop(0)
            return 1

    class Interrupts(group.Interrupts):
        def sleep(self, seconds):
            pauses.append(seconds)

    again = []
    monkeypatch.setattr(processes, "Group", Group)
    monkeypatch.setattr(processes, "Interrupts", Interrupts)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    code = processes._run_and_restart(lambda group, later: again.append(later), 4)
    assert code == processes.CRASH_LOOP
    assert pauses == [1, 2, 4, 1, 2, 4, 8]
    assert again == [False, True, True, True, True, True, True, True]
    lasts, now = [1] * 9, [0.0]
    pauses.clear()
    assert processes._run_and_restart(lambda *_: None, 7) == processes.CRASH_LOOP
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
