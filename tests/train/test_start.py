import dataclasses
import json

import pytest

from moejax.config import TrainConfig
from moejax.train.checkpoint import Saved
from moejax.train.inputs import Inputs
from moejax.train.start import said_done
from tests.cases import small_config
from tests.train.running import stream

LAST = {"event": "final_eval", "step": 20, "nats_per_token": 0.75, "bits_per_byte": 1.2345}


def said(folder, *records, step=20, held_out=True):
    """What is said of a run of 20 steps with such records."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    cfg = dataclasses.replace(small_config(), run_dir=str(folder), train=TrainConfig(num_steps=20))
    inputs = object.__new__(Inputs)
    inputs.held_out = stream(30) if held_out else None
    return said_done(cfg, inputs, Saved(step, folder / "checkpoints" / str(step), {}))


def test_a_finished_run_says_where_it_ended_and_how_good_it_is(tmp_path):
    # A later evaluation counts; a killed run leaves half a line.
    text = said(tmp_path, LAST | {"bits_per_byte": 9.0}, LAST, '{"time": 1.5, "ev')
    assert text.startswith(f"done before: step 20 of 20 is in {tmp_path / 'checkpoints' / '20'}; ")
    assert "held-out (all): 1.234 bits per byte, 0.7500 nats per token" in text
    assert "Raise train.num_steps" in text
    assert "nan bits per byte" in said(tmp_path, LAST | {"bits_per_byte": None})
    assert "bits per byte" not in said(tmp_path, {**LAST, "step": 10}, held_out=False)


@pytest.mark.parametrize("records", [(), (LAST | {"step": 10},), (LAST | {"event": "eval"},)])
def test_a_run_that_was_ended_in_its_last_evaluation_has_that_left(tmp_path, records):
    assert said(tmp_path, *records) is None


def test_a_run_with_steps_left_is_not_done(tmp_path):
    assert said(tmp_path, LAST, step=19) is None
