"""Steps for described GPUs whose attention is tokamax's: sixteen share a sequence; gpt-oss."""

import re
import subprocess
import sys

import pytest

from moejax.aot.step import lower_step, overlapped_share
from moejax.kernels.attention.tokamax import INSTALLED
from moejax.plan.price.candidate import trace_config
from tests.hlo.described import OPTIMIZE, compiled_step, described_step

pytestmark = [
    pytest.mark.aot,
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.skipif(not INSTALLED, reason="tokamax needs Python 3.12"),
]
LAYERS, DEVICES, LENGTH = 48, 16, 131_072
SHARED = (f"mesh.fsdp={DEVICES}", "mesh.expert=1", f"mesh.context={DEVICES}")
SHARED += ("model.remat=full", "moe.capacity_factor=1.25")
SHARED += (f"data.sequence_length={LENGTH}", "train.batch_sequences=1")
KEYS_AND_VALUES = 2 * 4 * 128 * 2  # bytes of a position: four heads, 128 wide, bfloat16
exchanges = pytest.mark.parametrize(
    "exchange", ["ring", pytest.param("gather", marks=pytest.mark.exhaustive)]
)


def settings_of(exchange):
    return "qwen3_30b_a3b.py", 2, (*SHARED, f"mesh.context_exchange={exchange}")


@pytest.mark.exhaustive
def test_keys_along_a_ring_leave_while_others_are_attended_to():
    hops = [one for one in compiled_step(*settings_of("ring")).exchanges if one.kind == "ppermute"]
    # A device passes on along the chain of its node, or to the next node: two collectives.
    forward = [one for one in hops if not one.backward]
    assert {one.bytes for one in forward} == {LENGTH // DEVICES * KEYS_AND_VALUES}
    assert sum(one.calls for one in forward) == 2 * LAYERS * (DEVICES - 1)
    assert overlapped_share(forward) == 1
    assert overlapped_share(hops) >= 0.9


@exchanges
def test_memory_of_shared_sequences_is_known_before_the_first_step(exchange):
    step, train_step = compiled_step(*settings_of(exchange)), described_step(*settings_of(exchange))
    read = trace_config(train_step.cfg, "gpu")
    predicted = read.peak(read.schedule())
    assert predicted.arguments == pytest.approx(step.argument_bytes, rel=0.01)
    assert predicted.bytes == pytest.approx(step.peak_bytes, rel=0.1)


def attention_of_gpt_oss(kind):
    """The compiled step of two layers, at a length whose mask would be 32 GiB."""
    settings = ("model.num_layers=2", f"data.sequence_length={LENGTH}", "train.batch_sequences=8")
    lowered = lower_step(described_step("gpt_oss_20b.py", 1, settings, kind))
    return lowered.compile(compiler_options=OPTIMIZE).as_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["h200", "b200"])
def test_attention_of_gpt_oss_is_a_kernel_forward_and_backward(kind):
    """Sinks, windows and documents. Mosaic compiles for one kind of GPU in a process."""
    program = f"from tests.hlo.test_context import *; print(attention_of_gpt_oss('{kind}'))"
    text = subprocess.check_output([sys.executable, "-c", program], text=True)
    calls = "\n".join(line for line in text.splitlines() if "mosaic_gpu" in line)
    passes = re.findall(r'op_name="[^"]*/attention/jit\((attention_[a-z]+)', calls)
    # Layers with and without a window: forward, once more for backward, and two kernels backward.
    assert sorted(passes) == ["attention_backward"] * 4 + ["attention_forward"] * 4
    products = [line for line in text.splitlines() if re.search(r"__cublas|__triton_gemm", line)]
    assert not any(re.search(r"/attention/jit\(attention_", line) for line in products)
