"""A run ends before the memory of a host is full, and says what it could not take."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from moejax.config.fields import change
from moejax.errors import HostAllocationError, HostMemoryError
from moejax.runtime.memory import POOL
from moejax.runtime.processes import ALONE
from moejax.train.memory import headroom
from moejax.train.memory.headroom import Headroom, Needed, least_left, naming_failed_allocation
from moejax.train.steps import run_steps
from tests.cases import small_config, step_for
from tests.train.running import initial_state

MIB, GIB = 2**20, 2**30
HOST = {"memory.optimizer": "host"}


@pytest.mark.parametrize(
    ("whole", "least"),
    [
        (2048 * GIB, 2048 * GIB // 100),
        (51200 * MIB, 512 * MIB),
        (20 * GIB, 512 * MIB),
        (4000 * MIB, 200 * MIB),  # a twentieth
    ],
)
def test_a_run_ends_with_a_hundredth_left_but_no_less_than_512_mib(whole, least):
    assert least_left(whole) == least


class ThreeProcesses:
    """The first of three processes, of which two are on one host; each answers as `others` say."""

    index = 0

    def __init__(self, others):
        self.others = others

    def hosts(self):
        return ["a", "a", "b"]

    def gather(self, value):
        return [value, *self.others]


def found(monkeypatch, left, others, whole=100 * GIB):
    """The decision for a save of this process that takes 4 GiB, 3 of them of devices."""
    monkeypatch.setattr(headroom, "memory_left", lambda: left)
    monkeypatch.setattr(headroom, "machine_memory", lambda: whole)
    room = Headroom(Needed(4 * GIB, 3 * GIB), ThreeProcesses(others))
    return room.must_wait(lambda: "Step 7 is safe")


def test_a_save_must_fit_beside_the_next_step_or_the_step_waits(monkeypatch):
    """Two processes of host a take 9 GiB, 7 of them at once; 1 GiB of 100 is not touched."""
    far = [4 * GIB, 3 * GIB, 50 * GIB, 100 * GIB]

    def second(left):
        return [5 * GIB, 4 * GIB, left, 100 * GIB]

    assert not found(monkeypatch, 10 * GIB, [second(11 * GIB), far])
    assert found(monkeypatch, 10 * GIB - 1, [second(11 * GIB), far])
    assert found(monkeypatch, 11 * GIB, [second(7 * GIB), far])
    with pytest.raises(HostMemoryError, match=r"^no memory .* a has 7.0 GiB left of 100.0 GiB, a "):
        found(monkeypatch, 7 * GIB - 1, [second(11 * GIB), far])
    with pytest.raises(HostMemoryError, match=r"b has 1.0 GiB left .* 3.0 GiB\. Step 7 is safe\."):
        found(monkeypatch, 50 * GIB, [second(50 * GIB), [4 * GIB, 3 * GIB, GIB, 100 * GIB]])


def test_a_save_writes_each_shard_once_and_copies_what_is_on_devices():
    step = step_for(change(small_config((1, 2, 2, 2)), HOST))
    arrays = jax.tree.leaves(step.abstract)
    everything = sum(x.size * x.dtype.itemsize for x in arrays)
    on_host = sum(
        x.size * x.dtype.itemsize for x in arrays if x.sharding.memory_kind == "pinned_host"
    )
    assert 0 < on_host < everything
    assert headroom.needed_of(step) == (everything, 0)  # a CPU's arrays are the host's
    of_gpus = dataclasses.replace(step, platform="gpu")
    assert headroom.needed_of(of_gpus) == (everything, everything - on_host)


@pytest.fixture
def looking(training, monkeypatch):
    """A run whose host has 1 GiB, and 100 MiB left at its first look, then what is in `left`."""

    def build(left, **train):
        settings = {"num_steps": 9, "eval_every": None, "log_every": 2, **train}
        run, _ = training(change(small_config(train=settings), HOST))
        monkeypatch.setattr(headroom, "machine_memory", lambda: GIB)
        monkeypatch.setattr(headroom, "memory_left", lambda: left.pop(0) if left else GIB)
        run.headroom = Headroom(Needed(0, 0), ALONE)
        return run

    return build


def test_a_run_saves_and_ends_where_too_little_is_left(looking, tmp_path):
    """Looks at steps 2, 4 and 6; 51.2 MiB of 1 GiB are the least."""
    run = looking([60 * MIB, 52 * MIB, 51 * MIB])
    with pytest.raises(HostMemoryError, match=r"almost full.* has 51.0 MiB left of 1.0 GiB.*") as e:
        run_steps(run, initial_state())
    assert "Step 6 is saved." in str(e.value)
    assert "memory.optimizer" in str(e.value)
    assert e.value.code == 2
    assert run.checkpoints.steps == [6]
    run.records.close()
    assert '"event": "memory_full", "step": 6' in (tmp_path / "metrics.jsonl").read_text()


def test_a_run_that_is_at_its_end_ends_as_ever(looking):
    run = looking([GIB, 0], log_every=8, num_steps=9)
    _, stopped = run_steps(run, initial_state())
    assert not stopped
    assert run.checkpoints.steps == [9]


LOCKED = """
import resource
from types import SimpleNamespace
from moejax.runtime.processes import ALONE
from moejax.train.memory.headroom import lock_warnings
hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
for platform, size in (("cpu", 2**20), ("gpu", 0), ("gpu", 8192), ("gpu", 16384)):
    print(lock_warnings(SimpleNamespace(platform=platform), size, ALONE))
"""


def test_a_limit_on_locked_memory_is_told_before_the_run():
    """A process of eight devices, which may lock 64 KiB."""
    done = subprocess.run(
        [sys.executable, "-c", LOCKED], capture_output=True, text=True, check=True, timeout=300
    )
    *none, said = done.stdout.splitlines()
    assert none == ["[]"] * 3
    assert "may lock 64.0 KiB of memory (ulimit -l), and the run pins 128.0 KiB there" in said
    assert "ulimit -l unlimited" in said


HOST_ERRORS = [
    "RESOURCE_EXHAUSTED: Out of host memory while trying to allocate 15200000000 bytes.",
    "INTERNAL: failed to alloc 2147483648 bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
    "INTERNAL: could not allocate pinned host memory of size: 17179869184",
]
OTHERS = [
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3199993600 bytes.\non host",
    "UNAVAILABLE: the host closed the connection",
]


def fail(text, **settings):
    cfg = change(small_config(), settings)
    with naming_failed_allocation(SimpleNamespace(cfg=cfg)):
        raise jax.errors.JaxRuntimeError(text)


@pytest.mark.parametrize("text", HOST_ERRORS)
def test_memory_of_the_host_that_was_not_there_is_named(monkeypatch, text):
    monkeypatch.setattr(headroom.resource, "getrlimit", lambda _: (8 * MIB, 8 * MIB))
    monkeypatch.setenv(POOL, "200")
    with pytest.raises(HostAllocationError) as caught:
        fail(f"{text}\nmore", **HOST)
    said = str(caught.value)
    assert text in said
    assert "may lock 8.0 MiB (ulimit -l), and XLA takes at most 200 GiB" in said
    assert "set memory.optimizer, memory.experts and memory.residuals to device" in said
    assert caught.value.code == 2
    assert "\n" not in said


@pytest.mark.parametrize("text", OTHERS)
def test_other_errors_stay(text):
    with pytest.raises(jax.errors.JaxRuntimeError):
        fail(text, **HOST)


def test_a_run_without_arrays_there_is_told_nothing_of_them():
    with pytest.raises(jax.errors.JaxRuntimeError):
        fail(HOST_ERRORS[0])
