"""Collectives of the step: the traced census, and the compiled program, on several meshes."""

import re
from collections import Counter

import pytest

from moejax.plan.trace.reader import collectives
from tests.cases import small_config, step_for

# XLA's name of each collective of comm.wire.
HLO = {
    "all-reduce": ("all_reduce", "all_max"),
    "all-gather": ("all_gather",),
    "reduce-scatter": ("reduce_scatter",),
    "all-to-all": ("all_to_all",),
}


def census(cfg):
    train_step = step_for(cfg)
    traced = train_step.gradients.trace(train_step.abstract, train_step.abstract_batch())
    return collectives(traced.jaxpr.jaxpr), traced


def by_kind(found):
    total = Counter()
    for one in found:
        total[one.kind] += one.calls
    return total


def capacity_case(mesh, **changes):
    # Capacity mode has one bucket size, so the program has no branches to tell apart.
    return small_config(mesh, moe={"capacity_factor": 2.0}, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [(1, 1, 8, 1), (1, 2, 2, 2), pytest.param((2, 1, 2, 2), marks=pytest.mark.exhaustive)]
)
def test_the_compiled_program_has_the_collectives_of_the_traced_one(mesh):
    found, traced = census(capacity_case(mesh, model={"scan_layers": False}))
    text = traced.lower().compile().as_text()
    compiled = Counter()
    for name in re.findall(r"\s(all-reduce|all-gather|reduce-scatter|all-to-all)\(", text):
        compiled[name] += 1
    counted = by_kind(found)
    for name, kinds in HLO.items():
        wanted = sum(counted[kind] for kind in kinds)
        if name == "all-reduce":
            # XLA joins small all-reduces of the same devices into one.
            assert 0 < compiled[name] <= wanted
        else:
            assert compiled[name] == wanted, name


def test_tokens_cross_the_expert_axis_four_times_a_layer_and_in_the_compute_dtype():
    """Dispatch and combine, forward and backward; one more carries which expert a row visits."""
    cfg = capacity_case((1, 1, 8, 1), model={"num_layers": 3, "dtype": "bfloat16"})
    found, _ = census(cfg)
    moved = [one for one in found if one.kind == "all_to_all"]
    tokens = [one for one in moved if one.dtype == "bfloat16"]
    assert sum(one.calls for one in tokens) == 4 * 3
    assert {one.axes for one in moved} == {("expert",)}
    # 8 peers, 16 tokens a device, top 2 of 8 experts, capacity factor 2: 8 rows to each expert.
    assert {one.bytes for one in tokens} == {8 * 8 * 32 * 2}
    choices = [one for one in moved if one.dtype == "uint8"]
    assert [(one.calls, one.bytes) for one in choices] == [(3, 8 * 8)]


def test_a_mesh_of_one_communicates_nothing():
    assert census(small_config())[0] == []


@pytest.mark.parametrize("activations", ["sequence", "replicated"])
def test_the_tensor_axis_sends_no_duplicates(activations):
    """Each tensor rank sends its own tokens, whatever blocks exchange between them."""
    found, _ = census(capacity_case((1, 1, 2, 4), activations=activations))
    sent = [one for one in found if one.kind == "all_to_all" and one.dtype == "float32"]
    tokens = 8 * 16 // 8
    rows = 2 * min(4 * 2 * tokens * 2 // 8, 2 * tokens)
    # One number of each row comes back for the gradient of the router's weights.
    assert Counter(one.bytes for one in sent) == {rows * 32 * 4: 4, rows * 4: 1}


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["token_collectives", "attention", "experts"])
def test_token_collectives_are_kept_while_weights_are_gathered_again(remat):
    none, _ = census(capacity_case((1, 2, 2, 2)))
    kept, _ = census(capacity_case((1, 2, 2, 2), model={"remat": remat}))
    assert by_kind(kept)["all_to_all"] == by_kind(none)["all_to_all"]
    assert by_kind(kept)["all_gather"] > by_kind(none)["all_gather"]


def test_gradients_are_reduced_in_the_dtype_that_is_asked_for():
    for dtype in ("float32", "bfloat16"):
        cfg = capacity_case(
            (1, 8, 1, 1), model={"dtype": "bfloat16"}, train={"gradient_dtype": dtype}
        )
        found, _ = census(cfg)
        scattered = {one.dtype for one in found if one.kind == "reduce_scatter"}
        assert scattered == {dtype}
        # Weights are gathered in the compute dtype, but for the router, which stays float32.
        gathered = Counter(one.dtype for one in found if one.kind == "all_gather")
        assert gathered["float32"] == 1
        assert gathered["bfloat16"] > 4


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 8, 1, 1), (1, 1, 8, 1)])
def test_a_weights_gradient_costs_one_reduce_scatter_of_its_size(mesh):
    cfg = capacity_case(mesh)
    found, _ = census(cfg)
    model, moe = cfg.model, cfg.moe
    E, D, F, V = moe.num_experts, model.width, moe.expert_hidden, model.vocab_size
    attention = 4 * D * model.num_heads * model.head_width
    dense = attention + V * D + D * E
    # The tied embedding enters once, for lookup and projection together.
    experts = 3 * E * D * F if mesh[1] > 1 else 0
    scattered = sum(one.bytes * one.calls for one in found if one.kind == "reduce_scatter")
    assert scattered == 4 * (dense + experts)
