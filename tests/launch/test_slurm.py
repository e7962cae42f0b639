"""launch/slurm.sbatch as Slurm runs it, with stand-ins for Slurm's own two commands.

test_clusters.py runs it on a real Slurm.
"""

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
case "$*" in
"show hostnames node[1-2]")
    echo localhost
    echo node2 ;;
"show job $SLURM_JOB_ID") echo "JobId=$SLURM_JOB_ID $STATE" ;;
"requeue $SLURM_JOB_ID") echo "put back" ;;
*) exit 1 ;;
esac
"""
# As `scontrol show job` of Slurm 22.05 has them, over several lines.
MADE_ROOM = """JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=2026-11-26T01:36:13 EndTime=2026-11-26T02:36:13 Deadline=N/A
   PreemptEligibleTime=2026-11-26T01:36:13 PreemptTime=2026-11-26T01:36:15"""
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
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
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


@pytest.mark.parametrize(
    ("code", "change", "back"),
    [
        (3, ("", ""), True),
        (0, ("", ""), False),  # it was finished just then
        (1, ("", ""), False),  # it did not stop as asked
        (3, ("RUNNING", "COMPLETING"), False),  # cancelled
        (3, ("Requeue=1", "Requeue=0"), False),
        (3, ("PreemptTime=2026-11-26T01:36:15", "PreemptTime=None"), False),  # its time is up
    ],
)
def test_a_job_that_made_room_goes_back_into_the_queue(slurm, code, change, back):
    environment = {**slurm, "STATE": MADE_ROOM.replace(*change)}
    got, out, _ = submit(environment, "sh", "-c", f"exit {code}")
    assert got == code
    assert ("put back" in out.splitlines()) == back


def test_a_dry_run_shows_what_each_task_would_run(slurm):
    words = [
        "sh",
        "-c",
        'echo "$MOEJAX_PROCESS of $MOEJAX_PROCESSES at $MOEJAX_COORDINATOR"; exit 3',
    ]
    code, out, _ = submit(slurm, "--dry_run", *words)
    assert code == 0
    (line,) = out.splitlines()
    variables, _, task = line.partition(" srun --kill-on-bad-exit=1 --cpu-bind=none --label ")
    done = subprocess.run(
        ["sh", "-c", f"{variables} {task}"],
        env={**slurm, "SLURM_PROCID": "1"},
        capture_output=True,
        text=True,
    )
    port = 20000 + os.getpid() % 10000
    assert (done.returncode, done.stdout) == (3, f"1 of 2 at localhost:{port}\n")
    outside = {name: value for name, value in slurm.items() if not name.startswith("SLURM")}
    _, shown, _ = submit(outside, "--dry_run", *words)
    assert shown.startswith("MOEJAX_COORDINATOR=FIRST_NODE:PORT MOEJAX_PROCESSES=TASKS srun ")
    assert shown.partition(" srun ")[2] == out.partition(" srun ")[2]


def test_a_signal_is_left_to_the_program(slurm):
    """Slurm sends it to every process of a task, the shell between included."""
    script = "trap 'exit 3' TERM; kill -TERM $PPID; kill -TERM $$; sleep 60"
    assert submit(slurm, "sh", "-c", script)[0] == 3


@pytest.mark.parametrize(
    ("without", "command", "message"),
    [
        ((), (), "no command"),
        ((), ("--dry_run",), "no command"),
        (("SLURM_JOB_ID",), ("true",), "no Slurm job"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(slurm, without, command, message):
    environment = {name: value for name, value in slurm.items() if name not in without}
    code, out, err = submit(environment, *command)
    assert (code, out) == (2, "")
    assert err.startswith("slurm: error: ")
    assert message in err
    assert len(err.splitlines()) == 1
