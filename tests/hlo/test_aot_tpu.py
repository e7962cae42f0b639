"""The train step compiled for described TPU slices of eight; minutes each: `make aot-tpu` only."""

import functools
import re
from pathlib import Path

import pytest

from moejax.aot.compiled import CompiledText
from moejax.aot.step import CONTROLS, build_described, described_config, lower_step, read_step
from moejax.aot.target import TARGETS
from moejax.aot.work import KernelReader
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
def program(name, control=None):
    """The train step, and its program compiled with other options."""
    cfg = load_config(CONFIG, [f"--config.{word}" for word in SETTINGS])
    train_step = build_described(described_config(cfg, TARGETS[name], 1), TARGETS[name])
    options = CONTROLS["tpu"].get(control, {})
    return train_step, lower_step(train_step).compile(compiler_options=options)


def compiled(name, control=None):
    return read_step(*program(name, control), 0.0)


def kernels(name):
    """Names of the Pallas kernels in the program, and the scopes that they are called in."""
    text = program(name)[1].as_text()
    return re.findall(
        r'custom_call_target="tpu_custom_call".*?op_name="[^"]*?(\w+)\)*/pallas_call',
        text.replace("\n", " "),
    )


@slices
def test_attention_is_the_splash_kernel_and_makes_no_mask(name):
    found = {kernel for kernel in kernels(name) if kernel.startswith("splash")}
    # One kernel for all gradients; documents are told.
    assert found == {"splash_mha_fwd_segmented_residuals", "splash_mha_dkv_segmented_no_residuals"}
    text = program(name)[1].as_text()
    length = program(name)[0].cfg.data.sequence_length
    assert f",{length},{length}]" not in text
    assert f"[{length},{length}]" not in text


@slices
def test_experts_are_kernels_of_groups_and_no_other_products(name):
    assert {kernel for kernel in kernels(name) if not kernel.startswith("splash")} == {
        "gmm",
        "tgmm",
    }
    train_step, done = program(name)
    text = CompiledText(done.as_text(), dict(train_step.layout.sizes))
    products = [kernel for kernel in KernelReader(text).kernels() if kernel.flops]
    of_experts = [kernel for kernel in products if ("experts", True) in kernel.flops]
    assert of_experts
    assert all(set(kernel.flops) == {("experts", True)} for kernel in of_experts)
    assert not any(("experts", False) in kernel.flops for kernel in products)


@slices
def test_little_more_is_executed_than_the_model_needs(name):
    """Recomputation, blocks beside the diagonal, and no expert's rows by another's matrix."""
    shares = compiled(name).executed()
    cfg = program(name)[0].cfg
    assert cfg.model.num_layers == 1
    assert shares["all"] < 1.3
    assert shares["attention"] < 2 * shares["projections"]


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
