"""The train step compiled for described TPU slices of eight; minutes each: `make aot-tpu` only."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from moejax.aot.compiled import CompiledText
from moejax.aot.step import CONTROLS, build_described, described_config, lower_step, read_step
from moejax.aot.target import TARGETS, describe_devices
from moejax.aot.work import KernelReader
from moejax.config.load import load_config
from moejax.kernels.attention.ranged import Extent, Keys, ranged_attention

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
    # One kernel for all gradients; documents are told as labels.
    assert found == {"splash_mha_fwd_segmented_residuals", "splash_mha_dkv_segmented_no_residuals"}
    text = program(name)[1].as_text()
    length = program(name)[0].cfg.data.sequence_length
    assert f",{length},{length}]" not in text
    assert f"[{length},{length}]" not in text


@slices
@pytest.mark.parametrize(
    ("queries", "keys", "window", "run"),
    [(2**17, 2**17, 1024, None), (16384, 2**20, None, 8192), (4096, 16384, 1000, 512)],
)
def test_ranges_of_long_and_shared_sequences_are_taken(name, queries, keys, window, run):
    """Lists of the blocks to visit fit the memory for scalars."""
    place = SingleDeviceSharding(describe_devices(TARGETS[name], 1)[0])

    def total(q, k, v, first, last, sinks):
        pieces, extents = (Keys(k, v, first, last),), (Extent((0,), window, window, run=run),)
        form = {"scale": 0.1, "implementation": "splash", "sinks_H": sinks}
        return jnp.sum(ranged_attention(q, pieces, extents, **form).astype(jnp.float32))

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    ranges = [shape(1, queries, dtype=jnp.int32)] * 2
    arrays = shape(1, queries, 8, 128), *[shape(1, keys, 2, 128)] * 2
    gradients = jax.jit(jax.grad(total, (0, 1, 2, 5)))
    done = gradients.lower(*arrays, *ranges, shape(8, dtype=jnp.float32)).compile()
    passes = re.findall(r"/jit\((attention_[a-z]+)_\d+\)[^\"]*/pallas_call", done.as_text())
    assert sorted(set(passes)) == ["attention_backward", "attention_forward"]


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_devices_that_share_sequences_attend_by_the_kernel(exchange):
    words = ["mesh.fsdp=8", "mesh.expert=1", "mesh.context=8", "data.sequence_length=32768"]
    words += ["model.num_layers=1", "train.batch_sequences=1", "train.micro_batches=1"]
    words += ["moe.capacity_factor=1.25", f"mesh.context_exchange={exchange}"]
    cfg = load_config(CONFIG, [f"--config.{word}" for word in words])
    train_step = build_described(described_config(cfg, TARGETS["v6e"], 1), TARGETS["v6e"])
    text = lower_step(train_step).compile().as_text()
    passes = re.findall(r"/jit\((attention_[a-z]+)_\d+\)[^\"]*splash[^\"]*/pallas_call", text)
    assert set(passes) == {"attention_backward", "attention_forward"}


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
