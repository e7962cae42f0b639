"""What each route asks the network for: counted in the traced program, forward and backward."""

import dataclasses
from collections import Counter

import jax
import pytest

from moejax.config.schema import CompressionConfig
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.layout.route import build_route
from moejax.plan.trace.reader import collectives
from moejax.runtime.patches import described_gpu
from moejax.step.train_step import build_step
from tests.cases import part_of, small_config, step_for

# route, mesh, nodes, expert weights
CASES = [
    ("duplicate", (1, 1, 2, 4), 1, "hidden"),
    ("split", (1, 1, 2, 4), 1, "hidden"),
    ("split", (1, 1, 2, 4), 1, "whole"),
    ("split", (1, 1, 2, 4), 1, "folded"),
    ("merge", (1, 1, 4, 2), 1, "hidden"),
    ("two_level", (1, 1, 4, 2), 2, "hidden"),
    ("two_level_merge", (1, 1, 4, 2), 2, "folded"),
]


# A plain route, and a merging one over two hops; the others are for `make test-all CASES=every`.
USUAL = [("split", (1, 1, 4, 2), 1, "hidden"), ("two_level_merge", (1, 1, 4, 2), 2, "whole")]


def rare(case):
    return pytest.param(*case, marks=pytest.mark.exhaustive)


def routed(route, mesh, nodes, weights, *, chunks=(1, 1), remat="none", **moe):
    cfg = small_config(mesh, expert_weights=weights, model={"remat": remat}, moe=moe)
    return dataclasses.replace(
        cfg,
        route=route,
        route_chunks=chunks[0],
        route_chunks_backward=chunks[1],
        mesh=dataclasses.replace(cfg.mesh, nodes=nodes),
    )


def census(cfg):
    train_step = step_for(cfg)
    traced = train_step.gradients.trace(train_step.abstract, train_step.abstract_batch())
    return train_step, collectives(traced.jaxpr.jaxpr)


def rows_sent(found):
    """The collectives that carry rows to experts and back; choices are integers."""
    return [one for one in found if one.kind == "all_to_all" and one.dtype == "float32"]


def calls(found):
    total = Counter()
    for one in found:
        total[one.kind, one.axes, one.dtype] += one.calls
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "mesh", "nodes", "weights", "chunks"),
    part_of(CASES, [(2, 3), (4, 4), (1, 1)], parts=3),
)
def test_rows_take_every_hop_out_and_home_once_a_chunk_in_each_direction(
    route, mesh, nodes, weights, chunks
):
    train_step, found = census(routed(route, mesh, nodes, weights, chunks=chunks))
    built = build_route(route, train_step.layout, chunks=chunks[0], chunks_backward=chunks[1])
    sent = rows_sent(found)
    assert {one.axes for one in sent} == {hop.axes for hop in built.exchanges}
    for hop in built.exchanges:
        mine = [one.calls for one in sent if one.axes == hop.axes]
        # If rows merge, weights go along with them and their gradients come back. If not, what
        # these gradients are found from comes back once, for all chunks.
        arrays, together = (2, 0) if built.merges else (1, 1)
        assert sum(mine) == (arrays + 1) * (chunks[0] + chunks[1]) + together


def test_each_tensor_rank_sends_its_share_of_what_duplicate_sends():
    total = {}
    for route in ("duplicate", "split"):
        _, found = census(routed(route, (1, 1, 2, 4), 1, "hidden", capacity_factor=2.0))
        total[route] = sum(one.bytes * one.calls for one in rows_sent(found))
    assert total["duplicate"] == 4 * total["split"]


def test_the_gradient_of_a_gather_is_a_reduce_scatter():
    """What split adds over folded experts: rows gathered and scattered, in both directions."""
    counts = {}
    for weights in ("hidden", "whole"):
        _, found = census(routed("split", (1, 1, 2, 4), 1, weights))
        counts[weights] = calls(found)
    more = counts["hidden"] - counts["whole"]
    tensor = ("tensor",)
    # Forward: rows out, results back. Backward: results' gradients out, rows' gradients back.
    assert more["all_gather", tensor, "float32"] == 2
    # The third: one number a row, for the gradient of the router's weights.
    assert more["reduce_scatter", tensor, "float32"] == 3
    assert more["all_reduce", tensor, "float32"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "mesh", "nodes", "weights", "capacity"), part_of(CASES, [None, 2.0], parts=4)
)
def test_no_route_communicates_again_to_recompute(route, mesh, nodes, weights, capacity):
    found = {}
    for remat in ("none", "collectives"):
        cfg = routed(route, mesh, nodes, weights, chunks=(2, 2), remat=remat)
        cfg = dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, capacity_factor=capacity))
        found[remat] = calls(census(cfg)[1])
    assert found["collectives"] == found["none"]


def test_choices_travel_in_one_byte():
    _, found = census(routed("two_level_merge", (1, 1, 4, 2), 2, "folded"))
    choices = [one for one in found if one.kind == "all_to_all" and one not in rows_sent(found)]
    assert {one.dtype for one in choices} == {"uint8"}
    assert len(choices) == 2


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no Mosaic GPU")
@pytest.mark.parametrize(
    ("route", "mesh", "nodes", "weights"), [USUAL[1], *map(rare, [USUAL[0], *CASES])]
)
def test_kernels_that_quantise_rows_as_they_move_change_no_exchange(route, mesh, nodes, weights):
    """Classes, axes, dtypes and bytes are those of operations in turn."""
    cfg = routed(route, mesh, nodes if nodes > 1 else mesh[2], weights, chunks=(2, 3))
    cfg = dataclasses.replace(
        cfg,
        model=dataclasses.replace(cfg.model, width=256, head_width=64, dtype="bfloat16"),
        compression=CompressionConfig(preset="strong", block=32),
    )
    abstract, found = build_abstract_mesh(build_layout(cfg.mesh)), {}
    for platform in ("cpu", "gpu"):
        train_step = build_step(cfg, abstract, platform)
        with described_gpu():
            program = train_step.gradients.trace(
                train_step.abstract, train_step.abstract_batch()
            ).jaxpr
        found[platform] = Counter()
        for one in collectives(program.jaxpr):
            if one.kind == "all_to_all":
                found[platform][one.traffic, one.axes, one.dtype, one.bytes] += one.calls
        text, gpu = str(program), platform == "gpu"
        assert ("permute_quantize_tile" in text) == gpu
        assert ("combine_tile" in text) == gpu
    assert found["gpu"] == found["cpu"]
