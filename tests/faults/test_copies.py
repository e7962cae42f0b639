"""A host vanishes, and the run goes on from the memory of those that are left.

A host is a name in MOEJAX_HOST here, and vanishes with its processes and its folder.
"""

import os
import random
import re
import shutil
import signal

import pytest

from tests.faults.copies import EVERY, ON_HOSTS, settings, step_of
from tests.faults.damage import spoil
from tests.faults.lab import STEPS, TRAIN, send
from tests.faults.takeover import OTHERS, check_losses
from tests.integration.runs import assert_same_end, records

pytestmark = [pytest.mark.slow, pytest.mark.faults]
ONE = OTHERS["one process"].launcher
ON_HOST_1 = ("env", "MOEJAX_HOST=host-1", *TRAIN)


def killed(lab, name, *words):
    """Kills a process of a run after step 22. Returns the folders of the two hosts."""
    words = (*settings(lab, name), *words)
    trial = lab.trial(name, 22, send(signal.SIGKILL, 1), ON_HOSTS, words=words, restarts=0)
    assert trial.code != 0, trial.out
    (folder,) = (lab.folder / f"{name}-memory").iterdir()
    return [folder / "host-0", folder / "host-1"]


def newest(host):
    """The newest step that a host holds with the copy of its neighbour."""
    steps = [step_of(path) for path in host.glob("*.json")]
    return max(step for step in steps if steps.count(step) == 2)


def goes_on(lab, name, step, *words, wrapped=ON_HOSTS, **options):
    """Goes on with a run from a step in memory to its end. Returns what it said."""
    done = lab.run(name, wrapped, words=(*settings(lab, name), *words), **options)
    assert done.returncode == 0, done.stdout
    found = re.findall(r"resuming at step (\d+) from the memory of hosts", done.stdout)
    assert found == ([] if step is None else [str(step)]), done.stdout
    return done.stdout


@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_vanishes_and_the_run_ends_with_the_same_bits(lab, gone):
    name = f"gone-{gone}"
    hosts = killed(lab, name)
    step = newest(hosts[1 - gone])
    assert step >= 22 - 2 * EVERY
    shutil.rmtree(hosts[gone])
    goes_on(lab, name, step)
    assert_same_end(lab.folder / "straight", lab.folder / name)
    assert list((lab.folder / f"{name}-memory").iterdir()) == []  # the end leaves nothing
    saved = [record["step"] for record in records(lab.folder / name, "memory_saved")]
    assert saved[-1] == STEPS // EVERY * EVERY


def test_fewer_processes_go_on_another_mesh(lab):
    hosts = killed(lab, "fewer")
    step = newest(hosts[1])
    shutil.rmtree(hosts[0])
    mesh = ("--config.mesh.expert=4", "--config.mesh.tensor=1")
    said = goes_on(lab, "fewer", step, *mesh, wrapped=ON_HOST_1, launcher=ONE)
    assert "setting changed since the checkpoint: mesh.expert: 2 -> 4" in said
    check_losses(lab, "fewer")


def test_more_processes_fetch_from_the_host_that_is_left(lab):
    """The run begins on one host, and goes on with a second one that holds nothing."""
    kill, words = send(signal.SIGKILL, 0), settings(lab, "more")
    lab.trial("more", 22, kill, ON_HOST_1, ONE, words, restarts=0)
    (folder,) = (lab.folder / "more-memory").iterdir()
    step = max(map(step_of, (folder / "host-1").glob("*.json")))
    goes_on(lab, "more", step)
    check_losses(lab, "more")


def test_a_flipped_bit_is_said_and_the_copy_of_the_neighbour_is_taken(lab):
    host, _ = killed(lab, "flipped")
    step = newest(host)
    (record,) = (path for path in host.glob("0-?.json") if step_of(path) == step)
    slot = record.with_suffix(".slot")
    spoil(slot, "flip", random.Random(0))
    said = goes_on(lab, "flipped", step)
    assert f"copy in memory {slot.with_suffix('')} removed: it has digest" in said
    assert_same_end(lab.folder / "straight", lab.folder / "flipped")


def test_where_both_hosts_vanish_the_checkpoint_on_disk_is_taken(lab):
    words = "--config.checkpoint.save_every=10"
    for host in killed(lab, "both", words):
        shutil.rmtree(host)
    said = goes_on(lab, "both", None, words)
    assert re.search(r"resuming at step (10|20) from \S+/checkpoints", said)
    assert_same_end(lab.folder / "straight", lab.folder / "both")


def test_a_stop_leaves_nothing_in_memory(lab):
    """It has saved to disk, so the next start needs no copy."""
    trial = lab.trial(
        "stopped",
        15,
        lambda launcher: os.kill(launcher, signal.SIGTERM),
        ON_HOSTS,
        words=settings(lab, "stopped"),
        restarts=0,
    )
    assert trial.code == 3, trial.out
    assert list((lab.folder / "stopped-memory").iterdir()) == []
