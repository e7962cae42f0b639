"""Runs that train on texts with recorded experts, by the command: record, train, resume, score."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.integration.runs import (
    assert_same_end,
    describe,
    environment,
    evaluation,
    records,
    run,
    write_config,
)

pytestmark = pytest.mark.slow

BASE = describe(4, sample=2, simulated_devices=4).replace("save_every: 10", "save_every: null")
NO_EVALUATION = ("data.eval_files=", "train.eval_every=100", "train.eval_batches=16")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a base of four steps, and the routing of texts that it wrote."""
    folder = tmp_path_factory.mktemp("routing")
    place = write_config(folder, BASE, folder / "base")
    assert run(place)[0] == 0
    (place / "prompts.txt").write_text("document 1\ndocument 22\ndoc\nment\n" * 3)
    words = ("--run", "base", "--prompts", "prompts.txt", "--tokens", "30", "--temperature", "1")
    command = [sys.executable, "-m", "moejax", "generate", *words, "--routing", "samples.npz"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=place, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return place


def train(place, name, *words):
    settings = (
        f"run_dir={place / name}",
        f"checkpoint.init_from={place / 'base'}",
        "data.source=routing",
        "data.train_files=samples.npz",
        "data.sequence_length=16",
        "optimizer.learning_rate=1e-12",
        "optimizer.schedule=constant",
        *words,
    )
    return run(place, *(f"--config.{word}" for word in settings))


@pytest.mark.exhaustive
def test_a_run_sends_tokens_to_recorded_experts_and_resumes_to_the_same_bits(place):
    code, out, err = train(place, "straight", "train.num_steps=6")
    assert code == 0, err
    assert records(place / "straight", "final_eval")
    last = records(place / "straight", "step")[-1]
    assert last["loss"] > 0
    # The weights are still those that wrote the texts, which are cut into shorter sequences.
    assert 0.5 < last["routing_agreement"] <= 1
    for steps in (3, 6):
        code, out, err = train(place, "resumed", f"train.num_steps={steps}")
        assert code == 0, err
    assert "resuming at step 3" in out
    assert_same_end(place / "straight", place / "resumed")
    assert evaluation(place, "--run", place / "straight")["nats_per_token"] > 0


def test_a_run_without_held_out_files_has_no_tokenizer_and_shows_no_sample(place):
    code, out, err = train(place, "alone", "train.num_steps=2", *NO_EVALUATION)
    assert code == 0, err
    assert "nothing was held out" in out
    assert "sample" not in out


def test_all_tokens_of_a_file_go_where_it_says(place):
    with np.load(place / "samples.npz") as file:
        arrays = dict(file)
    recorded = arrays["expert_TLK"] >= 0
    arrays["expert_TLK"] = np.where(recorded, np.int16([3, 1]), arrays["expert_TLK"])
    np.savez(place / "moved.npz", **arrays)
    words = ("train.num_steps=2", "data.train_files=moved.npz")
    code, _, err = train(place, "moved", *words)
    assert code == 0, err
    text = (place / "moved" / "routing.json").read_text()
    ((zero, one, two, three),) = json.loads(text)["load"]
    # But for the last tokens of texts.
    assert one + three > 9 * (zero + two)
