"""The train step compiled for two nodes of described H200s: our kernels are in it, and on the wire
is what they made."""

import functools
import re
from collections import Counter

import jax
import pytest

from moejax.aot.step import build_described, described_config, lower_step
from moejax.aot.target import TARGETS
from moejax.config.load import load_config
from tests.hlo.described import CONFIGS, OPTIMIZE

pytestmark = [
    pytest.mark.aot,
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no Mosaic GPU"),
]
LAYERS = 2


@functools.cache
def train_step():
    words = [f"model.num_layers={LAYERS}", "mesh.expert=16", "train.batch_sequences=32"]
    words += ["train.micro_batches=1", "compression=strong", "kernels=required"]
    cfg = load_config(str(CONFIGS / "olmoe_1b_7b.py"), [f"--config.{word}" for word in words])
    return build_described(described_config(cfg, TARGETS["h200"], 2), TARGETS["h200"])


@functools.cache
def compiled():
    """Lines of the program, without the kernels' own code."""
    text = lower_step(train_step()).compile(compiler_options=OPTIMIZE).as_text()
    return re.sub(r"backend_config=\{kernel_hash.*", "", text).splitlines()


def test_every_kernel_is_in_the_step():
    names = "quantize_tile|sum_tile|permute_quantize_tile|combine_tile|multiply_tiles|sum_outer"
    calls = [line for line in compiled() if "mosaic_gpu" in line]
    found = Counter(name for line in calls for name in re.findall(f"/({names})/", line))
    assert set(found) == set(names.split("|"))
    # As routed, and in rounds: twice two weight gradients a layer, where layers are one loop.
    assert found["sum_outer"] % 4 == 0


def test_rows_of_tokens_meet_their_codecs_in_one_kernel_at_the_source():
    """And in two kernels' turn only at the experts' end, where rows have arrived or leave again."""
    calls = "\n".join(line for line in compiled() if "mosaic_gpu" in line)
    scopes = "(dispatch|combine|dispatch_backward|combine_backward)"
    found = set(re.findall(rf"{scopes}\)*/(?:jit\(\w+\)/)?(\w+_tile)/", calls))
    assert found == {
        ("dispatch", "permute_quantize_tile"),
        ("dispatch", "sum_tile"),
        ("combine", "quantize_tile"),
        ("combine", "combine_tile"),
        ("combine_backward", "permute_quantize_tile"),
        ("combine_backward", "sum_tile"),
        ("dispatch_backward", "quantize_tile"),
        ("dispatch_backward", "combine_tile"),
    }


def test_experts_are_multiplied_by_kernels_alone():
    """Neither XLA's dense form of ragged_dot nor any other product."""
    products = [
        line
        for line in compiled()
        if re.search(r" (ragged-dot|dot)\(|__cublas|__triton_gemm", line)
    ]
    assert products, "the router and attention have some"
    kernels = [line for line in compiled() if "/multiply_tiles/" in line]
    assert all(map(of_experts, kernels))
    assert not any(map(of_experts, products))


def of_experts(line):
    """Whether an instruction comes from what `moe.dispatch` calls so, in any pass."""
    return re.search(r'op_name="[^"]*\bexperts\b', line) is not None


def test_tokens_and_gradients_cross_nodes_as_bytes():
    exchanges = [line for line in compiled() if re.search(r" all-to-all(-start)?\(", line)]
    arrays = [
        found for line in exchanges for found in re.findall(r"\b([a-z]\w*)\[([\d,]+)\]", line)
    ]
    width = train_step().cfg.model.width
    numbers = {dims for dtype, dims in arrays if dtype == "f32"}
    assert all(dims.endswith(",1") for dims in numbers), "the gradient of a row's weight alone"
    assert {dtype for dtype, _ in arrays} <= {"u8", "u32", "f32"}
    rows = {dims for _, dims in arrays if dims.endswith(f",{width + width // 32}")}
    assert rows, "a row is its bytes, and four for the scale of each 128"
