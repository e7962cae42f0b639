"""Runs of the train command in processes of their own, and what they leave behind."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from moejax.checkpoint.find import newest
from moejax.checkpoint.writer import restore_state
from moejax.config.load import load_config
from moejax.data.prepare import command as prepare
from moejax.data.prepare.documents import Document
from moejax.data.tokenizer import ByteTokenizer
from tests.cases import step_for

REPOSITORY = Path(__file__).parents[2]


def describe(steps, capacity=16, sample=2, **mesh):
    """A config for `write_config`: a small MoE on simulated devices, saved every ten steps.

    Args:
      capacity: with 16 no bucket overflows, so the step has no overflow rounds to compile.
      sample: tokens; 0 compiles no sampling.
    """
    axes = ", ".join(f"{name}: {size}" for name, size in mesh.items())
    return f"""
run_dir: RUN
model: {{vocab_size: 264, width: 16, num_layers: 1, num_heads: 4, num_kv_heads: 2, head_width: 4}}
moe: {{num_experts: 4, expert_hidden: 8, capacity_factor: {capacity}}}
mesh: {{{axes}, expert: 2, tensor: 2}}
data: {{source: tokens, train_files: [TRAIN], eval_files: [EVAL], sequence_length: 32}}
optimizer: {{warmup_steps: 2}}
train:
  num_steps: {steps}
  batch_sequences: 8
  log_every: 1
  eval_every: 20
  eval_batches: 1
  sample_tokens: {sample}
checkpoint: {{save_every: 10, keep: 2}}
"""


def write_tokens(path):
    """Writes a file of byte tokens as `moejax prepare` does."""
    writer = prepare.BinWriter(path, ByteTokenizer(), "bytes")
    for number in range(100):
        writer.add(Document(f"document {number} " * (number % 7 + 1), ""), ByteTokenizer())
    writer.finish()
    return path


def write_config(folder, text, run_dir):
    """Writes a config beside its token files; the text says RUN, TRAIN and EVAL for their paths."""
    text = text.replace("RUN", str(run_dir))
    for name in ("train", "eval"):
        text = text.replace(name.upper(), str(write_tokens(folder / f"{name}.bin")))
    (folder / "config.yaml").write_text(text)
    return folder


def environment(**variables):
    """The variables of a command, whose simulated devices are those of its config."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return kept | {
        "PYTHONPATH": str(REPOSITORY),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "COLUMNS": "120",
        # The tests' cache of compiled programs serves runs too; see conftest for what is ignored.
        "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry",
        **variables,
    }


def evaluation(place, *words):
    """What `moejax eval --json` says."""
    command = [sys.executable, "-m", "moejax", "eval", "--json", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=place, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def begin(place, *words, launcher=(), program=("moejax.train",), **variables):
    """Starts the command.

    Args:
      launcher: what starts the processes of the program, with its flags; () for one process.
      program: module and flags in the place of the train command.
    """
    env = environment(**variables)
    command = [sys.executable, "-m", *program, "--config", place / "config.yaml", *words]
    if launcher:
        command = [sys.executable, *launcher, "--logs", place / "logs", "--", *command]
    command, pipe = [str(word) for word in command], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, cwd=place)


def run(place, *words, **how):
    """Runs the command to its end, as `begin` does. Returns exit code, stdout and stderr."""
    process = begin(place, *words, **how)
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


def run_until(place, step, number, *words, member=None, **how):
    """Runs the command, sends a signal once it has shown `step`, and returns as `run` does.

    Args:
      member: which process of the program gets the signal; None: the one that was started.
    """
    process, lines = begin(place, *words, **how), []
    for line in process.stdout:
        lines.append(line)
        if f"step {step}/" in line:
            os.kill(process.pid if member is None else find_member(process.pid, member), number)
            break
    out, err = process.communicate(timeout=900)
    return process.returncode, "".join(lines) + out, err


def find_member(launcher, index):
    """The id of a process of the program that a launcher has started."""
    found = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True)
    for pid in found.stdout.split():
        if f"MOEJAX_PROCESS={index}\0" in Path(f"/proc/{pid}/environ").read_text():
            return int(pid)
    raise AssertionError(f"no process {index} below {launcher}")


def records(run_dir, event=None):
    """The lines of metrics.jsonl, of one event if named."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if event in (None, line["event"])]


def final_state(run_dir, part=lambda state: state):
    """Every array of the newest checkpoint, restored onto this process's devices.

    Args:
      part: takes the state, and returns what is wanted of it.
    """
    saved, notes = newest(run_dir / "checkpoints", "full")
    assert notes == []
    cfg = load_config(run_dir / "config.json")
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, simulated_devices=None))
    state = restore_state(saved, step_for(cfg).abstract)
    return saved.step, [np.asarray(x) for x in jax.tree.leaves(part(state))]


def assert_same_end(one, other):
    """Two runs ended at the same step with the same bits."""
    (step, wanted), (other_step, got) = final_state(one), final_state(other)
    assert step == other_step
    assert [x.tobytes() for x in got] == [x.tobytes() for x in wanted]
