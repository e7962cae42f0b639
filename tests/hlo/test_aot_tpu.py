"""The train step compiled for described TPU slices of eight; minutes each: `make aot-tpu` only."""

import functools
from pathlib import Path

import pytest

from moejax.aot.step import CONTROLS, build_described, compile_step, described_config
from moejax.aot.target import TARGETS
from moejax.config.load import load_config

CONFIG = str(Path(__file__).parents[2] / "configs/olmoe_1b_7b.py")
CHUNKS = 4
SETTINGS = [
    "model.num_layers=1",
    "train.batch_sequences=8",
    "train.micro_batches=1",
    f"route_chunks={CHUNKS}",
]
slices = pytest.mark.parametrize("name", ["v5p", "v6e"])
pytestmark = [pytest.mark.aot_tpu, pytest.mark.usefixtures("compiled_anew")]


@functools.cache
def compiled(name, control=None):
    cfg = load_config(CONFIG, [f"--config.{word}" for word in SETTINGS])
    train_step = build_described(described_config(cfg, TARGETS[name], 1), TARGETS[name])
    return compile_step(train_step, CONTROLS["tpu"].get(control, {}))


@slices
def test_exchanges_travel_while_experts_work(name):
    step = compiled(name)
    for backward in (False, True):
        assert len(step.token_exchanges(backward=backward)) > 0
        # Half of them: dispatch is hidden, and some of the combine is waited for.
        assert step.hidden_share(backward=backward) >= 0.5


@slices
def test_memory_is_known_before_the_first_step(name):
    step = compiled(name)
    assert step.argument_bytes < step.peak_bytes < TARGETS[name].memory_bytes


@slices
def test_tokens_travel_on_the_expert_axis_in_the_dtype_of_compute(name):
    exchanges = compiled(name).token_exchanges()
    assert {one.axes for one in exchanges} == {("expert",)}
    assert {one.dtype for one in exchanges} == {"bfloat16"}


def test_control_by_default_nothing_travels_while_experts_work():
    step = compiled("v6e", "XLA's default")
    assert len(step.token_exchanges()) > 0
    assert step.hidden_share() == 0
