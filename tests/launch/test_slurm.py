"""launch/slurm.sbatch as Slurm runs it, with stand-ins for Slurm's own two commands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "launch" / "slurm.sbatch"
EXCHANGE = ROOT / "tests" / "launch" / "exchange_once.py"

# Every node of the job is this machine.
SCONTROL = """#!/bin/sh
test "$1 $2 $3" = "show hostnames node[1-2]" || exit 1
echo localhost
echo node2
"""
# Starts one process a task, as srun does, and fails when one of them fails.
SRUN = """#!/bin/bash
echo "srun got $1 $2 $3"
shift 3
SLURM_PROCID=0 "$@" & zero=$!
SLURM_PROCID=1 "$@" & one=$!
# As --kill-on-bad-exit says.
for task in $zero $one; do
    wait -n || { code=$?; kill -9 $zero $one 2>/dev/null; exit $code; }
done
"""


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job of two nodes."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    kept = {name: v for name, v in os.environ.items() if not re.match("XLA|SLURM|MOEJAX", name)}
    return {
        **kept,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }


def submit(environment, *command):
    words = ["bash", SBATCH, *map(str, command)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_tasks_of_a_job_are_one_program(slurm):
    code, out, err = submit(slurm, sys.executable, EXCHANGE, 1024)
    assert code == 0, out + err
    assert f"2 processes, coordinator localhost:{20000 + os.getpid() % 10000}" in out
    assert "srun got --kill-on-bad-exit=1 --cpu-bind=none --label" in out
    assert sorted(re.findall(r"process (\d): 4 devices exchanged", out)) == ["0", "1"]


def test_words_of_the_command_stay_whole(slurm):
    script = 'echo "task $MOEJAX_PROCESS of $MOEJAX_PROCESSES: $1"'
    code, out, err = submit(slurm, "sh", "-c", script, "sh", "two words; * $HOME")
    assert code == 0, err
    said = [line for line in out.splitlines() if line.startswith("task")]
    assert sorted(said) == [f"task {n} of 2: two words; * $HOME" for n in range(2)]


@pytest.mark.parametrize("code", [0, 2, 3])
def test_the_exit_code_is_that_of_the_job(slurm, code):
    assert submit(slurm, "sh", "-c", f"exit {code}")[0] == code


def test_who_stopped_as_asked_does_not_end_the_others(slurm, tmp_path):
    script = f"test $MOEJAX_PROCESS = 0 && sleep 2; echo ended > {tmp_path}/$MOEJAX_PROCESS; exit 3"
    assert submit(slurm, "sh", "-c", script)[0] == 3
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


def test_a_signal_is_left_to_the_program(slurm):
    """Slurm sends it to every process of a task, the shell between included."""
    script = "trap 'exit 3' TERM; kill -TERM $PPID; kill -TERM $$; sleep 60"
    assert submit(slurm, "sh", "-c", script)[0] == 3


@pytest.mark.parametrize(
    ("without", "command", "message"),
    [((), (), "no command"), (("SLURM_JOB_ID",), ("true",), "no Slurm job")],
)
def test_bad_input_is_one_line_and_exit_code_2(slurm, without, command, message):
    environment = {name: value for name, value in slurm.items() if name not in without}
    code, out, err = submit(environment, *command)
    assert (code, out) == (2, "")
    assert err.startswith("slurm: error: ")
    assert message in err
    assert len(err.splitlines()) == 1
