"""Hosts are lost, leave and come back, and the run goes on with what is there."""

import json
import re
import shutil
import signal
import sys

import pytest

from tests.faults.hosts import on_this_machine
from tests.integration.runs import REPOSITORY, assert_same_end, run, write_config

pytestmark = pytest.mark.slow
MANY = 100_000  # steps: the run does not end by itself
TEXT = """
run_dir: RUN
model: {vocab_size: 264, width: 16, num_layers: 1, num_heads: 4, num_kv_heads: 2, head_width: 4}
moe: {num_experts: 4, expert_hidden: 8, capacity_factor: 16}
plan: {mode: hand}
mesh: {replica: null}
data: {source: tokens, train_files: [TRAIN], eval_files: [EVAL], sequence_length: 32}
optimizer: {warmup_steps: 2}
train:
  num_steps: STEPS
  batch_sequences: 12
  log_every: 1
  eval_every: null
  sample_tokens: 0
checkpoint: {save_every: 100, keep: 3, memory_every: 5, memory_dir: MEMORY}
watchdog: {silent_s: 6, step_s: 30}
"""


def place(folder, steps=MANY):
    """Writes the config of a run that keeps its state in memory."""
    text = TEXT.replace("MEMORY", str(folder / "memory")).replace("STEPS", str(steps))
    return write_config(folder, text, folder / "run")


def command(folder):
    return [sys.executable, "-m", "moejax.train", "--config", folder / "config.yaml"]


@pytest.mark.faults
def test_hosts_leave_come_back_fail_and_are_lost(tmp_path):
    folder = place(tmp_path)
    with on_this_machine(folder, 3, command(folder)) as hosts:
        for number in range(3):
            hosts.start(number)
        hosts.wait_for_step(30)

        hosts.leave(2)
        left = hosts.wait_for("host 2 leaves")
        hosts.next_step(hosts.wait_for("hosts change: host 2 leaves"))
        assert "ended with 1" not in hosts.text(left), "in the process, not by a restart"

        hosts.start(2)
        changed = hosts.wait_for("hosts change: host 2 joins", left)
        hosts.next_step(changed)
        hosts.wait_for_more(15)  # so that a copy in memory is newer than what was saved

        hosts.signal(1, signal.SIGKILL)
        killed = hosts.wait_for("host 1 ended by SIGKILL", changed)
        resumed = hosts.wait_for("resuming at step", killed)
        assert "from the memory of hosts" in hosts.lines[resumed][2]
        hosts.next_step(resumed)

        hosts.lose(0)
        lost = hosts.wait_for("host 0 does not answer", killed)
        hosts.next_step(lost)
        hosts.leave(1)
        hosts.leave(2)
        codes = hosts.end()
    assert codes == {1: 3, 2: 3}


@pytest.mark.faults
def test_the_end_is_that_of_a_run_that_was_started_again_by_hand(tmp_path):
    steps = 150
    folder = place(tmp_path, steps)
    with on_this_machine(folder, 3, command(folder)) as hosts:
        for number in range(3):
            hosts.start(number)
        hosts.wait_for_step(30)
        hosts.leave(1)
        at = hosts.wait_for(r"step (\d+)  hosts change")
        left = int(re.search(r"step (\d+)  hosts change", hosts.lines[at][2])[1])
        assert hosts.end() == {0: 0, 1: 3, 2: 0}
    run_dir, by_hand = folder / "run", folder / "by_hand"
    shutil.copytree(run_dir / "checkpoints" / str(left), by_hand / "checkpoints" / str(left))
    launcher = (REPOSITORY / "launch" / "local", "--processes", 2, "--devices", 1)
    code, out, err = run(folder, f"--config.run_dir={by_hand}", launcher=launcher)
    assert code == 0, out + err
    assert_same_end(run_dir, by_hand)
    assert losses(run_dir)[left:] == losses(by_hand)


def losses(run_dir):
    """The loss of every step that was recorded, in order."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] in ("step", "first_step")]
