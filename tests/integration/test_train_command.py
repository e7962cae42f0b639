"""The command `python -m moejax.train`: whole runs in processes of their own."""

import dataclasses
import shutil
import signal

import jax
import numpy as np
import pytest

from moejax.checkpoint.find import newest
from moejax.checkpoint.manifest import finished_steps, read_manifest
from moejax.checkpoint.writer import restore_state
from moejax.config.load import load_config
from moejax.errors import STOPPED
from tests.cases import step_for
from tests.checkpoint.test_restore import rewrite
from tests.integration.runs import (
    REPOSITORY,
    assert_same_end,
    describe,
    evaluation,
    records,
    run,
    run_until,
)
from tests.runtime.test_jax_settings import HOSTILE

STEPS = 40
CONFIG = describe(STEPS, capacity="null", simulated_devices=8, replica="null")


@pytest.mark.slow
def test_a_run_leaves_config_metrics_events_and_the_newest_checkpoints(place, straight):
    run_dir, out = straight
    assert load_config(run_dir / "config.json").mesh.replica == 2, "what was resolved is kept"
    assert [r["step"] for r in records(run_dir, "step")] == list(range(2, STEPS + 1))
    assert [r["step"] for r in records(run_dir, "save")] == list(range(10, STEPS + 1, 10))
    assert [r["step"] for r in records(run_dir, "saved")] == list(range(10, STEPS + 1, 10))
    assert [r["step"] for r in records(run_dir, "eval")] == [20]
    losses = [r["loss"] for r in records(run_dir, "step")]
    assert losses[-1] < losses[0]
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert sorted(finished_steps(run_dir / "checkpoints")) == [STEPS - 10, STEPS]
    kept = read_manifest(run_dir / "checkpoints" / str(STEPS))
    assert [len(kept["data"][name]) for name in ("train", "held_out")] == [1, 1]
    assert (kept["data_position"], kept["reduction"]) == (STEPS, None)
    assert f"step {STEPS}/{STEPS}" in out
    assert f"step {STEPS}  held-out (all):" in out
    assert "dropped 0" in out


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(place, straight):
    run_dir = place / "killed"
    # Any step will do after the second save began, because the first is finished by then.
    step = np.random.default_rng().integers(22, 32)
    code, out, err = run_until(place, step, signal.SIGKILL, f"--config.run_dir={run_dir}")
    assert code == -signal.SIGKILL, err
    last = records(run_dir)[-1]["step"]
    assert step <= last < STEPS, "the signal came too late to prove anything"
    code, out, err = run(place, f"--config.run_dir={run_dir}")
    assert code == 0, err
    assert "resuming at step" in out
    assert_same_end(straight[0], run_dir)


# As of a user whom a container's passwd file does not know.
NOBODY = """
import os, pwd
os.environ.pop("HOME", None)
def getpwuid(uid):
    raise KeyError(uid)
pwd.getpwuid = getpwuid
"""


@pytest.mark.exhaustive
def test_the_environment_changes_no_bit_of_a_run_that_is_saved_stopped_and_goes_on(place, straight):
    """JAX's variables, set for another program, and no home directory."""
    (place / "sitecustomize.py").write_text(NOBODY)
    variables = HOSTILE | {"PYTHONPATH": f"{place}:{REPOSITORY}"}
    words = [f"--config.run_dir={place / 'hostile'}"]
    code, out, err = run_until(place, 24, signal.SIGINT, *words, **variables)
    assert code == STOPPED, err
    last = records(place / "hostile")[-1]
    assert 24 <= last["step"] < STEPS, "the signal came too late to prove anything"
    assert last["event"] == "stopped"
    assert f"stopped at step {last['step']}; run the same command to go on" in out
    assert max(finished_steps(place / "hostile" / "checkpoints")) == last["step"]
    code, out, err = run(place, *words, **variables)
    assert code == 0, err
    assert "resuming at step" in out
    assert "Traceback" not in err
    assert_same_end(straight[0], place / "hostile")
    kept = read_manifest(place / "hostile" / "checkpoints" / str(STEPS))
    assert kept["jax_settings"]["jax_enable_x64"] is False
    assert kept["jax_settings"]["jax_default_prng_impl"] == "threefry2x32"


@pytest.mark.slow
def test_a_finished_run_says_so_at_once_and_starts_no_device(place, straight):
    run_dir, first = straight
    before = records(run_dir)
    (held_out,) = [line for line in first.splitlines() if "held-out (all)" in line]
    # Starting the TPU that it is told to use would fail.
    words = ["--config.mesh.simulated_devices=none", "--config.mesh.platform=tpu"]
    code, out, err = run(place, *words, "--config.mesh.replica=2")
    assert code == 0, err
    assert (
        f"done before: step {STEPS} of {STEPS} is in {run_dir / 'checkpoints' / str(STEPS)}" in out
    )
    assert held_out.partition(": ")[2] in out
    assert records(run_dir) == before


@pytest.mark.exhaustive
def test_a_run_with_swapped_experts_goes_back_one_checkpoint_and_saves_that_step_again(
    place, straight
):
    """Every file is as its manifest says: the numbers alone tell."""
    run_dir = place / "swapped"
    shutil.copytree(straight[0], run_dir)

    def swap(w):
        w[0, [1, 2]] = w[0, [2, 1]]

    keys = [f"params.groups.0.blocks.0.moe.{name}" for name in ("w_in", "w_out")]
    rewrite(run_dir / "checkpoints" / str(STEPS), swap, *keys)
    words = [f"--config.run_dir={run_dir}", f"--config.train.num_steps={STEPS + 1}"]
    code, out, err = run(place, *words)
    assert code == 0, err
    assert f"checkpoint {STEPS} set aside as {STEPS}.corrupt: its numbers are not those" in out
    assert "experts 1 and 2 of layer 0 (" in out
    assert f"resuming at step {STEPS - 10} from" in out
    assert [r["step"] for r in records(run_dir, "saved")][-2:] == [STEPS, STEPS + 1]
    notes = [r["text"] for r in records(run_dir, "note")]
    assert sum("are swapped" in text for text in notes) == 1
    assert sum("train.num_steps" in text for text in notes) == 1


@pytest.mark.exhaustive
def test_a_run_takes_its_first_weights_from_another(place, straight):
    run_dir = place / "second"
    words = [f"--config.run_dir={run_dir}", f"--config.checkpoint.init_from={straight[0]}"]
    words += ["--config.train.num_steps=4", "--config.optimizer.learning_rate=0"]
    code, out, err = run(place, *words)
    assert code == 0, err
    assert f"(step {STEPS})" in out
    weights = {}
    for name in (straight[0], run_dir):
        saved, _ = newest(name / "checkpoints", "full")
        cfg = load_config(name / "config.json")
        cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, simulated_devices=None))
        state = restore_state(saved, step_for(cfg).abstract)
        weights[name] = jax.tree.map(np.asarray, state.params)
        assert int(state.step) == saved.step
    # At a learning rate of zero the weights stay as they were taken over.
    jax.tree.map(np.testing.assert_array_equal, *weights.values())


@pytest.mark.slow
def test_a_dry_run_prints_sizes_and_wire_and_starts_no_accelerator(place):
    run_dir = place / "dry"
    # Starting the TPU that JAX is told to use would fail where there is none.
    words = ["--dry_run", f"--config.run_dir={run_dir}"]
    code, out, err = run(place, *words, JAX_PLATFORMS="tpu")
    assert code == 0, err
    # Embedding, attention, expert layer, router and norms of the config above, added by hand.
    V, D, E, F, H, G, C = 264, 16, 4, 8, 4, 2, 4
    total = V * D + 2 * D * H * C + 2 * D * G * C + E * 3 * D * F + D * E + 3 * D
    assert f"{total:,} total" in out
    assert "replica=2 x fsdp=1 x expert=2 x tensor=2" in out
    assert "all_to_all over expert" in out
    assert not run_dir.exists()


@pytest.mark.slow
def test_a_dry_run_for_a_gpu_needs_neither_gpu_nor_cudnn(place):
    # The smallest heads that cuDNN takes are eight wide.
    mesh = ["mesh.platform=gpu", "mesh.simulated_devices=none"]
    gpu = [*mesh, "model.dtype=bfloat16", "model.head_width=8"]
    code, out, err = run(place, "--dry_run", *(f"--config.{word}" for word in gpu))
    assert code == 0, err
    assert "all_to_all over expert" in out


@pytest.mark.slow
def test_hardware_that_is_absent_is_named(place, tmp_path):
    words = [f"--config.run_dir={tmp_path}", "--config.mesh.simulated_devices=none"]
    code, _, err = run(place, *words, "--config.mesh.platform=tpu", "--config.mesh.replica=2")
    assert code == 2
    line = err.splitlines()[-1]
    assert line.startswith("moejax: error: no tpu device.")
    assert "set mesh.platform=cpu" in line


@pytest.mark.slow
def test_an_evaluation_of_the_run_is_its_last_one_to_the_bit(place, straight):
    run_dir, _ = straight
    found = evaluation(place, "--run", run_dir)
    (last,) = records(run_dir, "final_eval")
    assert found["step"] == STEPS
    for name in ("nats_per_token", "bits_per_byte"):
        assert found[name] == last[name]
