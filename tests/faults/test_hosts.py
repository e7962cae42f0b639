"""Hosts are lost, leave and come back, and the run goes on with what is there."""

import signal
import sys

import pytest

from tests.faults.hosts import on_this_machine
from tests.integration.runs import (
    write_config,
)

pytestmark = pytest.mark.slow
STEPS = 400
TEXT = f"""
run_dir: RUN
model: {{vocab_size: 264, width: 16, num_layers: 1, num_heads: 4, num_kv_heads: 2, head_width: 4}}
moe: {{num_experts: 4, expert_hidden: 8, capacity_factor: 16}}
plan: {{mode: hand}}
mesh: {{replica: null}}
data: {{source: tokens, train_files: [TRAIN], eval_files: [EVAL], sequence_length: 32}}
optimizer: {{warmup_steps: 2}}
train:
  num_steps: {STEPS}
  batch_sequences: 12
  log_every: 1
  eval_every: null
  sample_tokens: 0
checkpoint: {{save_every: 20, keep: 3}}
watchdog: {{silent_s: 6, step_s: 30}}
"""


def place(folder, steps=STEPS):
    return write_config(folder, TEXT.replace(f"num_steps: {STEPS}", f"num_steps: {steps}"), "run")


def command(folder):
    return [sys.executable, "-m", "moejax.train", "--config", folder / "config.yaml"]


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

        hosts.signal(1, signal.SIGKILL)
        killed = hosts.wait_for("host 1 ended by SIGKILL", changed)
        hosts.next_step(killed)

        hosts.lose(0)
        lost = hosts.wait_for("host 0 does not answer", killed)
        hosts.next_step(lost)
        hosts.leave(1)
        hosts.leave(2)
        codes = hosts.end()
    assert codes == {1: 3, 2: 3}
