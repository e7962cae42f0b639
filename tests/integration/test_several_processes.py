"""The train command as several processes of one program: started, stopped, killed, resumed."""

import os
import re
import signal

import numpy as np
import pytest

from moejax.checkpoint.manifest import finished_steps
from moejax.errors import STOPPED
from moejax.runtime.event_log import RunLock
from tests.integration.runs import (
    REPOSITORY,
    assert_same_end,
    describe,
    records,
    run,
    run_until,
)
from tests.launch.test_emulate import needs_namespaces

STEPS = 30
# The expert axis is across the two processes, the tensor axis inside each.
CONFIG = describe(STEPS, sample=0, simulated_devices=4)
LOCAL = (REPOSITORY / "launch" / "local", "--processes", 2)
EMULATE = (REPOSITORY / "launch" / "emulate", "--hosts", 2, "--devices-per-host", 2)


@pytest.fixture(scope="module")
def two(place):
    """The run directory and the output of an undisturbed run of two processes."""
    code, out, _ = run(place, launcher=(*LOCAL, "--devices", 2))
    assert code == 0, out
    return place / "straight", out


@pytest.mark.slow
def test_two_processes_train_as_one_does(place, two):
    code, _, err = run(place, f"--config.run_dir={place / 'one'}")
    assert code == 0, err
    for event in ("step", "eval", "final_eval"):
        one, several = records(place / "one", event), records(two[0], event)
        assert [r["step"] for r in one] == [r["step"] for r in several]
        name = "loss" if event == "step" else "nats_per_token"
        # Gloo adds the four devices' parts in another order: a few last bits in each sum, which
        # forty steps carry on. A wrong or missing part would be off by a hundredth or more.
        np.testing.assert_allclose(
            [r[name] for r in several], [r[name] for r in one], rtol=1e-4, atol=0
        )


@pytest.mark.slow
def test_process_0_alone_speaks_and_writes(two):
    run_dir, out = two
    assert f"[p0] step {STEPS}/{STEPS}" in out
    theirs = [line for line in out.splitlines() if line.startswith("[p1]")]
    # Gloo writes to its standard output too, and tears its lines.
    said = re.compile("step|loss|parameters|checkpoint|sample|bits")
    assert [line for line in theirs if said.search(line)] == []
    assert len(theirs) < 50
    assert [r["step"] for r in records(run_dir, "step")] == list(range(2, STEPS + 1))
    assert [r["step"] for r in records(run_dir, "saved")] == list(range(10, STEPS + 1, 10))
    assert sorted(finished_steps(run_dir / "checkpoints")) == [STEPS - 10, STEPS]
    assert len(list((run_dir / "tensorboard").iterdir())) == 1


@needs_namespaces
@pytest.mark.exhaustive
def test_an_emulated_cluster_trains_to_the_same_bits(place, two):
    flags = ("--link", "200mbit", "--fast-link", "5gbit")
    code, out, _ = run(place, f"--config.run_dir={place / 'emulated'}", launcher=(*EMULATE, *flags))
    assert code == 0, out
    assert_same_end(two[0], place / "emulated")


@needs_namespaces
@pytest.mark.exhaustive
def test_a_route_of_two_levels_trains_on_an_emulated_cluster(place):
    """Inside a host and across hosts are different hops here, over different links."""
    words = ["--config.mesh.expert=4", "--config.mesh.tensor=1", "--config.train.num_steps=4"]
    words += ["--config.route=two_level_merge", "--config.mesh.nodes=2"]
    words += ["--config.moe.capacity_factor=none"]  # with overflow rounds
    words += ["--config.train.eval_every=none", "--config.checkpoint.save_every=none"]
    curves = []
    for name, launcher in (("apart", (*EMULATE, "--link", "200mbit")), ("together", ())):
        run_dir = place / f"two-level-{name}"
        code, out, err = run(place, f"--config.run_dir={run_dir}", *words, launcher=launcher)
        assert code == 0, out + err
        assert "two_level_merge" in out
        curves.append([r["loss"] for r in records(run_dir, "step")])
    assert len(curves[0]) == 3
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "member"),
    [  # a launcher that is killed ends nobody
        pytest.param(signal.SIGTERM, None, marks=pytest.mark.exhaustive),
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_bits(place, two, number, member):
    run_dir = place / f"{number.name}-{member}"
    words = [f"--config.run_dir={run_dir}"]
    code, out, _ = run_until(place, 15, number, *words, launcher=LOCAL, member=member)
    last = records(run_dir)[-1]
    assert 15 <= last["step"] < STEPS, "the signal came too late to prove anything"
    if number == signal.SIGTERM:
        assert code == STOPPED, out
        assert last["event"] == "stopped"
        assert max(finished_steps(run_dir / "checkpoints")) == last["step"]
    else:
        assert code != 0
        assert max(finished_steps(run_dir / "checkpoints")) == 10
    code, out, _ = run(place, *words, launcher=LOCAL)
    assert code == 0, out
    assert "[p0] resuming at step" in out
    assert_same_end(two[0], run_dir)


BAD = {
    ("--config.model.num_expert=4",): "model.num_expert",
    ("--config.mesh.simulated_devices=3", "--config.mesh.expert=3"): "3",
    ("--config.data.train_files=missing.bin",): "missing.bin",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", BAD, ids=lambda words: words[0])
def test_bad_input_ends_all_with_one_line_each(place, words):
    code, out, _ = run(place, *words, launcher=LOCAL)
    assert code == 2, out
    assert_one_line_each(out, BAD[words])


def assert_one_line_each(out, fragment):
    """Each process says the same, or only the first to find it."""
    lines = out.splitlines()
    assert 1 <= len(lines) <= 2, out
    assert len({line[:4] for line in lines}) == len(lines)
    for line in lines:
        assert line[4:].startswith(" moejax: error: ")
        assert fragment in line


@pytest.mark.exhaustive
def test_devices_of_launcher_and_config_must_agree(place):
    code, out, _ = run(place, launcher=(*LOCAL, "--devices", 3))
    assert code == 2, out
    assert_one_line_each(out, "2 processes of 3 devices were started, mesh.simulated_devices is 4")


@pytest.mark.slow
def test_a_directory_in_use_is_refused_by_all(place, tmp_path):
    lock = RunLock(tmp_path)
    try:
        code, out, _ = run(place, f"--config.run_dir={tmp_path}", launcher=LOCAL)
    finally:
        lock.close()
    assert code == 2, out
    assert len(out.splitlines()) == 2
    assert_one_line_each(out, f"process {os.getpid()} on")


DIFFERENT_SEEDS = """
import os, yaml
from ml_collections import ConfigDict

def get_config():
    config = ConfigDict(yaml.safe_load(open("{}")))
    config.train.seed = int(os.environ["MOEJAX_PROCESS"])
    return config
"""


@pytest.mark.slow
def test_processes_of_different_configs_are_refused(place, tmp_path):
    config = tmp_path / "differ.py"
    config.write_text(DIFFERENT_SEEDS.format(place / "config.yaml"))
    words = ["--config", str(config), f"--config.run_dir={tmp_path / 'run'}"]
    code, out, _ = run(place, *words, launcher=LOCAL)
    assert code == 2, out
    assert_one_line_each(out, "train.seed: ")
    assert not (tmp_path / "run").exists()
