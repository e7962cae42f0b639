"""The train command that plans for itself, in one process and in several."""

import json

import pytest

from tests.integration.runs import REPOSITORY, records, run

CONFIG = """
run_dir: RUN
model: {vocab_size: 264, width: 16, num_layers: 1, num_heads: 4, num_kv_heads: 4, head_width: 4}
moe: {num_experts: 4, expert_hidden: 8, capacity_factor: 1.25}
mesh: {simulated_devices: 4}
data: {source: tokens, train_files: [TRAIN], sequence_length: 32}
optimizer: {warmup_steps: 2}
train: {num_steps: 12, batch_sequences: 8, log_every: 1, sample_tokens: 0}
plan: {seconds: 1}
checkpoint: {save_every: 6, keep: 2}
"""
LOCAL = (REPOSITORY / "launch" / "local", "--processes", 2, "--devices", 2)


@pytest.mark.exhaustive
def test_a_run_without_a_mesh_plans_and_holds_its_steps_against_it(place):
    code, out, err = run(place)
    assert code == 0, err
    assert "predicted on measured" in out
    run_dir = place / "straight"
    plan = json.loads((run_dir / "plan.json").read_text())
    sizes = [plan["settings"][f"mesh.{axis}"] for axis in ("replica", "fsdp", "expert", "tensor")]
    assert sizes[0] * sizes[1] * sizes[2] * sizes[3] == plan["devices"] == 4
    config = json.loads((run_dir / "config.json").read_text())
    assert config["mesh"]["replica"] == sizes[0]
    ratios = {event["step"]: event["ratio"] for event in records(run_dir, "predicted")}
    tokens = 8 * 32  # of a step
    measured = {e["step"]: tokens / e["tokens_per_second"] for e in records(run_dir, "step")}
    assert len(ratios) >= 10
    assert ratios == pytest.approx(
        {step: seconds / plan["predicted"]["seconds"] for step, seconds in measured.items()}
    )
    load_LE = json.loads((run_dir / "routing.json").read_text())["load"]
    assert [len(layer) for layer in load_LE] == [4]


@pytest.mark.exhaustive
def test_two_processes_plan_as_one_and_a_resumed_run_keeps_the_plan(place):
    run_dir = place / "two"
    words = [f"--config.run_dir={run_dir}"]
    code, out, err = run(place, *words, "--config.train.num_steps=6", launcher=LOCAL)
    assert code == 0, err + out
    plan = (run_dir / "plan.json").read_text()
    code, out, err = run(place, *words, launcher=LOCAL)
    assert code == 0, err + out
    assert "resuming at step 6" in out
    assert "measuring" not in out
    assert (run_dir / "plan.json").read_text() == plan
