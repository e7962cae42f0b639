"""Real processes on two hosts of one machine: a host vanishes, and the run goes on from memory.

A host is a name in MOEJAX_HOST here, and vanishes with its processes and its folder.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.integration.runs import (
    REPOSITORY,
    assert_same_end,
    begin,
    describe,
    environment,
    find_member,
    records,
    run,
    write_config,
)

STEPS, EVERY = 30, 4
CONFIG = describe(STEPS, sample=0, simulated_devices=4)
WORDS = ["--config.train.eval_every=none", "--config.checkpoint.save_every=none"]
ON_HOSTS = ("sh", "-c", 'MOEJAX_HOST=host-$MOEJAX_PROCESS exec "$0" "$@"')


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    return write_config(folder, CONFIG, folder / "straight")


@pytest.fixture(scope="module")
def straight(place):
    """An undisturbed run, without copies in memory."""
    done = finish(place, "straight")
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "straight"


def command(place, name, *words):
    """A run of two processes, each on a host of its own."""
    launcher = [sys.executable, str(REPOSITORY / "launch" / "local"), "--processes", "2"]
    launcher += ["--devices", "2", "--logs", str(place / "logs"), "--", *ON_HOSTS]
    program = [sys.executable, "-m", "moejax.train", "--config", str(place / "config.yaml")]
    return [*launcher, *program, f"--config.run_dir={place / name}", *WORDS, *words]


def in_memory(place, name):
    folder = place / f"{name}-memory"
    return (f"--config.checkpoint.memory_every={EVERY}", f"--config.checkpoint.memory_dir={folder}")


def finish(place, name, *words):
    return subprocess.run(
        command(place, name, *words),
        env=environment(),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=240,
    )


def killed(place, name, *words, step=22, member=1):
    """Starts a run, kills a process once a step is shown, and returns the folders of the hosts."""
    process = subprocess.Popen(
        command(place, name, *in_memory(place, name), *words),
        env=environment(),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if f"step {step}/" in line:
            os.kill(find_member(process.pid, member), signal.SIGKILL)
            break
    out, _ = process.communicate(timeout=240)
    assert process.returncode not in (0, None), "".join(lines) + out
    (folder,) = (place / f"{name}-memory").iterdir()
    return [folder / "host-0", folder / "host-1"]


def step_of(slot):
    """The step in a slot, by its record."""
    return json.loads(slot.with_suffix(".json").read_text())["step"]


def newest(host):
    """The newest step that a host holds with the copy of its neighbour."""
    steps = [step_of(path) for path in host.glob("*.json")]
    return max(step for step in steps if steps.count(step) == 2)


def assert_resumed_at(step, out):
    assert re.findall(r"resuming at step (\d+) from the memory of hosts", out) == [str(step)]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_vanishes_and_the_run_ends_with_the_same_bits(place, straight, gone):
    name = f"gone-{gone}"
    hosts = killed(place, name)
    step = newest(hosts[1 - gone])
    assert step >= 22 - 2 * EVERY
    shutil.rmtree(hosts[gone])
    done = finish(place, name, *in_memory(place, name))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_resumed_at(step, done.stdout)
    assert_same_end(straight, place / name)
    assert list((place / f"{name}-memory").iterdir()) == []  # the end leaves nothing
    saved = [record["step"] for record in records(place / name, "memory_saved")]
    assert saved[-1] == STEPS // EVERY * EVERY


@pytest.mark.slow
@pytest.mark.faults
def test_fewer_processes_go_on_another_mesh(place, straight, monkeypatch):
    hosts = killed(place, "fewer")
    step = newest(hosts[1])
    shutil.rmtree(hosts[0])
    words = [f"--config.run_dir={place / 'fewer'}", *WORDS, *in_memory(place, "fewer")]
    words += ["--config.mesh.expert=4", "--config.mesh.tensor=1"]
    code, out, err = run(place, *words, MOEJAX_HOST="host-1")
    assert code == 0, out + err
    assert_resumed_at(step, out)
    assert "setting changed since the checkpoint: mesh.expert: 2 -> 4" in out
    # Another mesh adds in another order; see test_several_processes.
    wanted = {r["step"]: r["loss"] for r in records(straight, "step")}
    got = {r["step"]: r["loss"] for r in records(place / "fewer", "step")}
    assert sorted(got)[-1] == STEPS
    np.testing.assert_allclose(
        [got[s] for s in sorted(got)], [wanted[s] for s in sorted(got)], rtol=1e-4, atol=0
    )


@pytest.mark.slow
@pytest.mark.faults
def test_more_processes_fetch_from_the_host_that_is_left(place, straight):
    """The run begins on one host, and goes on with a second one that holds nothing."""
    words = [f"--config.run_dir={place / 'more'}", *WORDS, *in_memory(place, "more")]
    process = begin(place, *words, MOEJAX_HOST="host-1")
    for line in process.stdout:
        if "step 22/" in line:
            process.kill()
            break
    process.communicate(timeout=240)
    (folder,) = (place / "more-memory").iterdir()
    step = max(map(step_of, (folder / "host-1").glob("*.json")))
    done = finish(place, "more", *in_memory(place, "more"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_resumed_at(step, done.stdout)
    wanted = [r["loss"] for r in records(straight, "step")][-5:]
    got = [r["loss"] for r in records(place / "more", "step")][-5:]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.faults
def test_a_flipped_bit_is_said_and_the_copy_of_the_neighbour_is_taken(place, straight):
    hosts = killed(place, "flipped")
    step = newest(hosts[0])
    (slot,) = (path for path in hosts[0].glob("0-?.json") if step_of(path) == step)
    slot = slot.with_suffix(".slot")
    data = bytearray(slot.read_bytes())
    data[1000] ^= 8
    slot.write_bytes(bytes(data))
    done = finish(place, "flipped", *in_memory(place, "flipped"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"copy in memory {slot.with_suffix('')} removed: it has digest" in done.stdout
    assert_resumed_at(step, done.stdout)
    assert_same_end(straight, place / "flipped")


@pytest.mark.slow
@pytest.mark.faults
def test_where_both_hosts_vanish_the_checkpoint_on_disk_is_taken(place, straight):
    words = ["--config.checkpoint.save_every=10"]
    hosts = killed(place, "both", *words)
    for host in hosts:
        shutil.rmtree(host)
    done = finish(place, "both", *in_memory(place, "both"), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"resuming at step (10|20) from \S+/checkpoints", done.stdout)
    assert_same_end(straight, place / "both")


@pytest.mark.slow
@pytest.mark.faults
def test_a_stop_leaves_nothing_in_memory(place):
    """It has saved to disk, so the next start needs no copy."""
    process = subprocess.Popen(
        command(place, "stopped", *in_memory(place, "stopped")),
        env=environment(),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        if "step 15/" in line:
            process.send_signal(signal.SIGTERM)
            break
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 3, out
    assert list((place / "stopped-memory").iterdir()) == []
