"""A run of several processes samples from itself: all get the same, which is what one gets."""

import json

import numpy as np
import pytest

from tests.integration.runs import REPOSITORY, records, run, write_config

LOCAL = (REPOSITORY / "launch" / "local", "--processes", 2, "--devices", 2)
PROGRAM = ("tests.serve.sampling_run",)
# Stages are across the two processes, experts inside each.
CONFIG = """
run_dir: RUN
model: {vocab_size: 264, width: 16, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_width: 4}
moe: {num_experts: 4, expert_hidden: 8, capacity_factor: 16}
mesh: {simulated_devices: 4, MESH}
data: {source: tokens, train_files: [TRAIN], eval_files: [EVAL], sequence_length: 32}
optimizer: {warmup_steps: 0}
train: {num_steps: 4, batch_sequences: 8, micro_batches: 2, log_every: 1, sample_tokens: 0}
checkpoint: {save_every: 10, keep: 2}
"""
MESHES = {
    "stages": "stage: 2, expert: 2",
    "experts": "expert: 4",
    "tensor": "tensor: 2, expert: 2",
}


@pytest.mark.parametrize(
    "name",
    ["stages", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("experts", "tensor"))],
)
def test_two_processes_sample_what_one_does(tmp_path, name):
    place = write_config(tmp_path, CONFIG.replace("MESH", MESHES[name]), tmp_path / "two")
    code, out, err = run(place, launcher=LOCAL, program=PROGRAM)
    assert code == 0, out + err
    first, second = (json.loads((place / f"two/{n}.json").read_text()) for n in range(2))
    assert first == second
    assert first[-1]["after"] == first[-1]["read"]
    one = f"--config.run_dir={place / 'one'}"
    code, _, err = run(place, one, program=PROGRAM)
    assert code == 0, err
    alone = json.loads((place / "one/0.json").read_text())
    assert [seen["step"] for seen in first[:-1]] == [2, 4]
    for own, others in zip(alone, first, strict=True):
        assert own.keys() == others.keys()
        for name in own.keys() & {"step", "ids", "experts"}:
            assert own[name] == others[name]
        for name in own.keys() & {"logprobs", "score", "logits", "after", "read"}:
            # Gloo adds in another order, and steps carry the last bits on.
            np.testing.assert_allclose(
                np.ravel(own[name]), np.ravel(others[name]), rtol=0, atol=1e-4
            )
    losses = [[line["loss"] for line in records(place / n, "step")] for n in ("one", "two")]
    np.testing.assert_allclose(*losses, rtol=1e-4)
