"""Training on a real Slurm of two nodes, and through a real sshd: stopped, killed, and gone on.

Both are on this machine. `make cluster` runs these; test_slurm.py and test_ssh.py hold the rest.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moejax.checkpoint.manifest import finished_steps
from tests.integration.runs import assert_same_end, describe, environment, records, write_config
from tests.launch import slurm_cluster, sshd
from tests.launch.modules import wait_for

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
STEPS = 12
# Some 230 MB with the optimizer's moments, so that a save takes long enough to be met.
LARGE = "width: 128, num_layers: 2"
CONFIG = (
    describe(STEPS, sample=0, simulated_devices=4)
    .replace("width: 16, num_layers: 1", LARGE, 1)
    .replace("head_width: 4", "head_width: 32")
    .replace("num_experts: 4, expert_hidden: 8", "num_experts: 16, expert_hidden: 1536")
    .replace("eval_every: 20", "eval_every: none")
    .replace("save_every: 10", "save_every: 4")
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a config."""
    folder = tmp_path_factory.mktemp("train")
    return write_config(folder, CONFIG, folder / "straight")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster.running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def training(place, run_dir):
    config = ["--config", place / "config.yaml", f"--config.run_dir={run_dir}"]
    return [sys.executable, "-m", "moejax.train", *config]


def submit(slurm, place, run_dir):
    script = ROOT / "launch" / "slurm.sbatch"
    return slurm.submit(script, *training(place, run_dir), environment=environment())


def log_of(slurm, job):
    return (slurm.folder / f"moejax-{job}.log").read_text()


def saving(run_dir):
    """Whether a checkpoint is being written, and one is finished."""
    folder = run_dir / "checkpoints"
    if not folder.exists():
        return False
    finished = finished_steps(folder)
    return len(finished) > 0 and any(
        path.is_dir() and path.name not in set(map(str, finished)) for path in folder.iterdir()
    )


@pytest.fixture(scope="module")
def straight(slurm, place):
    """The run directory of a job that nobody disturbed, and its log."""
    job = submit(slurm, place, place / "straight")
    assert slurm.wait(job, "COMPLETED", "FAILED", seconds=300) == "COMPLETED", log_of(slurm, job)
    return place / "straight", log_of(slurm, job)


@slurm_cluster.needs_slurm
def test_a_job_of_two_nodes_trains(straight):
    run_dir, log = straight
    assert "2 processes, coordinator node1:2" in log
    assert f"0: step {STEPS}/{STEPS}" in log
    assert f"1: step {STEPS}/{STEPS}" not in log
    assert [r["step"] for r in records(run_dir, "saved")] == list(range(4, STEPS + 1, 4))


@slurm_cluster.needs_slurm
def test_tasks_of_a_bare_srun_do_not_train_alone(slurm, place):
    script = slurm.folder / "bare.sh"
    command = " ".join(map(str, training(place, place / "bare")))
    script.write_text(f"#!/bin/sh\nsrun {command}\n")
    job = slurm.submit("--nodes=2", "--ntasks-per-node=1", script, environment=environment())
    assert slurm.wait(job, "COMPLETED", "FAILED") == "FAILED"
    assert slurm.field(job, "ExitCode") == "2:0"
    said = (slurm.folder / f"slurm-{job}.out").read_text()
    assert "each of 2 processes would run alone. srun has started them" in said
    assert not (place / "bare" / "metrics.jsonl").exists()


@slurm_cluster.needs_slurm
@pytest.mark.parametrize("how", ["asked", "at once"])
def test_a_job_that_is_cancelled_while_it_saves_goes_on(slurm, place, straight, how):
    """By a plain `scancel`, which leaves 30 seconds to stop, or by a signal that ends processes."""
    run_dir = place / f"cancelled-{how.replace(' ', '-')}"
    job = submit(slurm, place, run_dir)
    wait_for(lambda: saving(run_dir), 120)
    slurm.command("scancel", *(["--signal=ABRT"] if how == "at once" else []), job)
    slurm.wait(job, "CANCELLED" if how == "asked" else "FAILED")
    left = finished_steps(run_dir / "checkpoints")
    assert 0 < max(left) < STEPS, "the run was over"
    if how == "asked":
        assert records(run_dir)[-1]["event"] == "stopped"
    else:
        assert saving(run_dir), "the save was over"
    assert slurm.field(job, "Restarts") == "0"
    again = submit(slurm, place, run_dir)
    assert slurm.wait(again, "COMPLETED", "FAILED", seconds=300) == "COMPLETED", log_of(
        slurm, again
    )
    assert f"resuming at step {max(left)} from" in log_of(slurm, again)
    assert_same_end(straight[0], run_dir)


@slurm_cluster.needs_slurm
def test_a_job_that_made_room_goes_on_by_itself(slurm, place, straight):
    run_dir = place / "preempted"
    job = submit(slurm, place, run_dir)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and records(run_dir, "step"), 120)
    short = slurm.folder / "urgent.sh"
    short.write_text("#!/bin/sh\nsleep 3\n")
    urgent = slurm.submit("--partition=urgent", "--nodes=2", "--exclusive", short)
    slurm.wait(job, "PENDING")
    assert "another job needs the nodes" in log_of(slurm, job)
    assert records(run_dir)[-1]["event"] == "stopped"
    slurm.wait(urgent, "COMPLETED")
    # Slurm itself lets two minutes pass before it starts a job again.
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert slurm.wait(job, "COMPLETED", "FAILED", seconds=300) == "COMPLETED", log_of(slurm, job)
    assert slurm.field(job, "Restarts") == "1"
    assert "resuming at step" in log_of(slurm, job)
    assert_same_end(straight[0], run_dir)


@sshd.needs_sshd
@slurm_cluster.needs_slurm
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_by_ssh_that_lost_its_launcher_goes_on(tmp_path, place, straight, number):
    """Killed, it tells nobody, and processes on the hosts save and stop all the same."""
    run_dir = place / f"ssh-{number.name}"
    kept = {name: v for name, v in environment().items() if name in ("PYTHONPATH", "XLA_FLAGS")}
    told = ["env", *(f"{name}={value}" for name, value in kept.items())]
    with sshd.serving(tmp_path) as options:
        words = [ROOT / "launch" / "ssh", "--hosts", ",".join(sshd.HOSTS), *options]
        words += ["--logs", tmp_path, "--", *told, *training(place, run_dir)]
        command = [sys.executable, *map(str, words)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(lambda: (run_dir / "metrics.jsonl").exists() and records(run_dir, "step"), 120)
        process.send_signal(number)
        assert process.wait(timeout=60) == (3 if number == signal.SIGTERM else -9)
        wait_for(lambda: records(run_dir)[-1]["event"] == "stopped", 120)
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming at step" in done.stdout
    assert_same_end(straight[0], run_dir)
