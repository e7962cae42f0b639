"""What follows the backward pass, compiled for described H200s: reductions and the update.

All of Mixtral 8x7B, for what is summed over layers, and of OLMoE. Each is compiled once.
"""

import jax
import pytest

from moejax.aot.step import update_bytes
from tests.hlo.described import OPTIMIZE, compiled_step, described_step

GIB = 2**30

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("compiled_anew")]


@pytest.mark.parametrize("nodes", [2, pytest.param(32, marks=pytest.mark.exhaustive)])
def test_reductions_hide_behind_compute_and_never_travel_beside_an_exchange(nodes):
    words = (f"train.batch_sequences={2 * 8 * nodes}", "route_chunks=4", f"mesh.fsdp={nodes}")
    step = compiled_step("mixtral_8x7b.py", nodes, words)
    assert sum(one.calls * one.bytes for one in step.reductions()) > 20 * GIB
    # XLA hides the largest sum of a layer, and waits for those inside a node.
    assert step.hidden_reductions() >= 0.45
    assert step.reductions_beside_exchanges() == []


@pytest.mark.exhaustive
def test_muon_needs_a_layer_of_weights_beside_state_and_gradients_and_not_all_of_them():
    words = ("optimizer.name=muon", "train.batch_sequences=8", "data.sequence_length=512")
    # Blocked experts: what the gradients alone need is subtracted, and kernels change that.
    model = ("olmoe_1b_7b.py", 1, (*words, "moe.implementation=blocked"))
    train_step, step = described_step(*model), compiled_step(*model)
    layers = [x for x in jax.tree.leaves(train_step.abstract.params["groups"]) if x.ndim == 5]
    stacked = sum(4 * x.size // 8 for x in layers)  # of a device
    assert stacked > 1.5 * GIB
    assert update_bytes(train_step, step, OPTIMIZE) < stacked / 4
