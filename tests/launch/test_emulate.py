"""The emulated cluster: real namespaces, shaped links and counters; what it leaves behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.modules import wait_for

ROOT = Path(__file__).parents[2]
EMULATE = ROOT / "launch" / "emulate"
LACKING = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
LACKING += [] if os.geteuid() == 0 else ["root"]
needs_namespaces = pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)}")


def begin(*arguments, **options):
    """Starts the launcher. The processes choose their devices, so ours must not reach them."""
    environment = {name: v for name, v in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(
        [sys.executable, EMULATE, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        **options,
    )


def emulate(*arguments):
    """Returns the launcher's exit code and output."""
    process = begin(*arguments)
    output = process.communicate(timeout=900)[0]
    return process.returncode, output


def namespaces_of(pid):
    """Namespaces, and files for them, that a launcher has made."""
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in shown.stdout.splitlines()]
    files = [path.name for path in Path("/etc/netns").glob("*")]
    return [name for name in names + files if name.startswith(f"moejax-{pid}-")]


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("hosts", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_bytes_and_rate_of_an_exchange(tmp_path, hosts):
    per_host, size = 2, 2**16
    command = [sys.executable, ROOT / "tests" / "launch" / "exchange_once.py", size]
    flags = ["--hosts", hosts, "--devices-per-host", per_host, "--link", "20mbit"]
    code, output = emulate(*flags, "--logs", tmp_path, "--", *command)
    assert code == 0, output
    payload = per_host * per_host * (hosts - 1) * size * 4
    counted = [int(n.replace(",", "")) for n in re.findall(r"sent ([\d,]+) bytes", output)]
    assert len(counted) == hosts
    for sent in counted:
        # Headers of 66 bytes in packets of 1500, acknowledgements, JAX's own messages.
        assert payload < sent < 1.1 * payload + 100_000
    seconds = [float(s) for s in re.findall(r"exchanged in ([\d.]+) s", output)]
    assert len(seconds) == hosts
    # Nothing is faster than its link; the bucket and the queues may hold the last 200 KB.
    assert min(seconds) > (payload - 200_000) * 8 / 20e6
    for host in range(hosts):
        assert "exchanged in" in (tmp_path / f"h{host}.log").read_text()


@needs_namespaces
@pytest.mark.slow
def test_the_fast_link_holds_what_stays_inside_a_host(tmp_path):
    per_host, size = 2, 2**16
    command = [sys.executable, ROOT / "tests" / "launch" / "gather_inside.py", size]
    flags = ["--devices-per-host", per_host, "--link", "1gbit", "--fast-link", "20mbit"]
    code, output = emulate(*flags, "--logs", tmp_path, "--", *command)
    assert code == 0, output
    seconds = [float(s) for s in re.findall(r"gathered in ([\d.]+) s", output)]
    assert len(seconds) == 2
    payload = per_host * (per_host - 1) * size * 4
    # The bucket and the queue may hold the last 320 KB; four gathers of it crossed no host's link.
    assert min(seconds) > (payload - 320_000) * 8 / 20e6
    counted = [int(n.replace(",", "")) for n in re.findall(r"sent ([\d,]+) bytes", output)]
    assert max(counted) < payload


@needs_namespaces
def test_hosts_are_apart_and_nothing_is_left(tmp_path):
    script = "hostname; cat /etc/hosts; echo place $MOEJAX_PROCESS of $MOEJAX_PROCESSES"
    process = begin("--hosts", 2, "--logs", tmp_path, "--", "sh", "-c", script)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    for host in range(2):
        assert f"[h{host}] moejax-{process.pid}-h{host}\n" in output
        assert f"[h{host}] place {host} of 2" in output
    assert namespaces_of(process.pid) == []


@pytest.mark.parametrize("hosts", [2, 64])
def test_hosts_have_cores_of_their_own(tmp_path, hosts):
    script = "import os; print('cores', *os.sched_getaffinity(0))"
    flags = ["--unshaped", "--own-cores", "--hosts", hosts, "--logs", tmp_path]
    code, output = emulate(*flags, "--", sys.executable, "-c", script)
    assert code == 0, output
    found = [line.split()[2:] for line in output.splitlines() if "] cores" in line]
    assert len(found) == hosts
    assert all(found), output
    there = len(os.sched_getaffinity(0))
    used = [core for cores in found for core in cores]
    assert len(set(used)) == min(len(used), there)  # shared only by hosts that are more than cores
    assert max(map(used.count, used)) == -(-hosts // there)


@needs_namespaces
def test_an_interrupt_stops_and_removes_everything(tmp_path):
    process = begin("--hosts", 2, "--logs", tmp_path, "--", "sh", "-c", "echo up; sleep 300")
    wait_for(lambda: (tmp_path / "h1.log").exists() and (tmp_path / "h1.log").read_text())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert namespaces_of(process.pid) == []


@needs_namespaces
@pytest.mark.parametrize("remover", ["runs", "is killed too"])
def test_a_launcher_that_is_killed_leaves_nothing(tmp_path, remover):
    marker = f"sleep {300 + os.getpid() / 1e6:.6f}"
    process = begin("--hosts", 2, "--logs", tmp_path, "--", "sh", "-c", f"echo up; {marker}")
    wait_for(lambda: (tmp_path / "h1.log").exists() and (tmp_path / "h1.log").read_text())
    if remover == "is killed too":
        subprocess.run(["pkill", "-9", "-f", f"namespaces.py moejax-{process.pid}-h0"], check=True)
    process.kill()
    process.communicate(timeout=60)
    if remover == "is killed too":
        assert namespaces_of(process.pid), "nobody was there to clean up"
        assert emulate("--hosts", 1, "--logs", tmp_path, "--", "true")[0] == 0
    wait_for(lambda: namespaces_of(process.pid) == [])
    assert subprocess.run(["pgrep", "-f", marker], capture_output=True).returncode == 1


def test_unshaped_needs_nothing(tmp_path):
    script = "echo place $MOEJAX_PROCESS, $JAX_NUM_CPU_DEVICES devices"
    flags = ["--unshaped", "--hosts", 2, "--devices-per-host", 3, "--logs", tmp_path]
    code, output = emulate(*flags, "--", "sh", "-c", script)
    assert code == 0
    assert {"[h0] place 0, 3 devices", "[h1] place 1, 3 devices"} <= set(output.splitlines())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no command"),
        (["--hosts", "0", "--", "true"], "--hosts is 0"),
        (["--link", "200", "--", "true"], "rate is `200`"),
        (["--link", "0mbit", "--", "true"], "rate is `0mbit`"),
        (["--unshaped", "--link", "1gbit", "--", "true"], "no links to shape"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, message):
    code, output = emulate(*flags)
    assert code == 2
    assert message in output
    assert len(output.splitlines()) == 1


# Host 0 answers each byte of host 1, which takes the time of several.
ANSWERS = """
import os, socket, time
if os.environ["MOEJAX_PROCESS"] == "0":
    link, _ = socket.create_server(("10.77.0.1", 5555)).accept()
    while link.recv(1):
        link.sendall(b".")
else:
    for _ in range(100):
        try:
            link = socket.create_connection(("10.77.0.1", 5555))
            break
        except OSError:
            time.sleep(0.1)
    times = []
    for _ in range(3):
        began = time.monotonic()
        link.sendall(b".")
        link.recv(1)
        times.append(time.monotonic() - began)
    print("round trip:", min(times))
"""


@needs_namespaces
@pytest.mark.slow
def test_a_delay_is_that_of_each_way(tmp_path):
    command = (sys.executable, "-c", ANSWERS)
    flags = ("--hosts", 2, "--devices-per-host", 1, "--link", "20mbit", "--delay", "60ms")
    process = begin(*flags, "--logs", tmp_path, "--", *command)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    found = re.search(r"round trip: ([\d.]+)", output)
    assert found is not None, output
    assert 0.12 <= float(found[1]) < 0.25
    assert namespaces_of(process.pid) == []


def test_a_wrong_delay_is_refused():
    for delay, text in (("50", "50ms"), ("2h", "50ms"), ("0ms", "50ms"), ("61s", "up to 60 s")):
        code, output = emulate("--delay", delay, "--", "true")
        assert code == 2, output
        assert f"delay is `{delay}`" in output
        assert text in output
    code, output = emulate("--unshaped", "--delay", "1ms", "--", "true")
    assert code == 2
    assert "--unshaped has no links" in output
