"""Runs that train adapters, by the command: dry run, base, stop and resume."""

import pytest

from moejax.config.load import load_config
from tests.integration.runs import assert_same_end, describe, records, run, write_config

pytestmark = pytest.mark.slow

BASE = describe(4, sample=0, simulated_devices=4).replace("save_every: 10", "save_every: null")
WORDS = ("lora.rank=2", "optimizer.schedule=constant", "optimizer.learning_rate=0.01")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a config, its data, and a base of four steps."""
    folder = tmp_path_factory.mktemp("adapters")
    place = write_config(folder, BASE, folder / "base")
    code, _, err = run(place)
    assert code == 0, err
    return place


def lora(place, name, *words):
    settings = (f"run_dir={place / name}", f"checkpoint.init_from={place / 'base'}", *WORDS, *words)
    return run(place, *(f"--config.{word}" for word in settings))


@pytest.mark.exhaustive
def test_a_run_of_adapters_learns_and_resumes_to_the_same_bits(place):
    code, out, err = lora(place, "straight", "train.num_steps=8")
    assert code == 0, err
    assert "frozen weights from" in out
    losses = [record["loss"] for record in records(place / "straight", "step")]
    assert losses[-1] < losses[0]
    assert records(place / "straight", "final_eval")
    for steps in (3, 8):
        code, out, err = lora(place, "resumed", f"train.num_steps={steps}")
        assert code == 0, err
    assert "resuming at step 3" in out
    assert_same_end(place / "straight", place / "resumed")
    assert load_config(place / "resumed" / "config.json").lora.rank == 2


def test_a_dry_run_shows_what_is_frozen(place):
    code, out, err = run(
        place,
        "--dry_run",
        *(f"--config.{word}" for word in WORDS),
        f"--config.checkpoint.init_from={place / 'base'}",
        f"--config.run_dir={place / 'new'}",
        "--config.lora.base_dtype=bfloat16",
    )
    assert code == 0, err
    assert "frozen weights (bfloat16), a device" in out
    assert "parameters are trained, of rank 2" in out
