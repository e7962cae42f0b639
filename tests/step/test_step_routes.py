"""The step on every route and reduction, one by one; each case is held to the path that it names.

test_step_together has several at once, and runs by default.
"""

import dataclasses
import functools
from itertools import product

import jax
import numpy as np
import pytest

from tests.cases import (
    CERTAIN,
    assert_close,
    one_device_state,
    part_of,
    place,
    random_batch,
    small_config,
    spread,
    step_for,
)
from tests.step.against_oracle import TERMS, check_against_oracle, only

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

# route, mesh, nodes, chunks forward and backward, K; each of the last three differs somewhere.
ROUTES = [
    ("duplicate", (1, 1, 4, 2), 1, (2, 2), 2),
    ("duplicate", (1, 1, 2, 4), 1, (1, 1), 8),
    ("split", (1, 1, 4, 2), 1, (2, 2), 1),
    ("split", (1, 2, 2, 2), 1, (3, 4), 2),
    ("split", (1, 1, 8, 1), 1, (6, 1), 2),
    ("split", (1, 1, 2, 4), 1, (10, 10), 8),
    ("merge", (1, 1, 8, 1), 1, (1, 1), 8),
    ("merge", (1, 1, 2, 4), 1, (4, 6), 2),
    ("two_level", (1, 1, 8, 1), 2, (3, 3), 2),
    ("two_level", (2, 1, 4, 1), 4, (1, 1), 8),
    ("two_level_merge", (1, 1, 8, 1), 2, (1, 1), 2),
    ("two_level_merge", (1, 1, 8, 1), 4, (2, 3), 8),
    ("two_level_merge", (1, 1, 4, 2), 2, (4, 4), 2),
]


def routed(cfg, route, nodes, chunks, **mesh):
    """The config with another route."""
    return dataclasses.replace(
        cfg,
        route=route,
        route_chunks=chunks[0],
        route_chunks_backward=chunks[1],
        mesh=dataclasses.replace(cfg.mesh, nodes=nodes, **mesh),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("route", "mesh", "nodes", "chunks", "k"), ROUTES)
def test_every_route_gives_the_oracles_loss_and_gradients(route, mesh, nodes, chunks, k):
    check_route(route, mesh, nodes, chunks, k, path="certain")


# Without a capacity buckets of 16 or 32 tokens overflow here, or just do not.
DROPLESS = [
    ("duplicate", (2, 1, 2, 2), 1, (1, 2), 8, "usual"),
    ("split", (1, 2, 2, 2), 1, (3, 4), 2, "usual"),
    ("merge", (1, 1, 2, 4), 1, (4, 6), 2, "rounds"),
    ("two_level", (2, 1, 4, 1), 4, (1, 1), 8, "usual"),
    ("two_level_merge", (1, 1, 8, 1), 4, (2, 3), 8, "rounds"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("route", "mesh", "nodes", "chunks", "k", "path"), DROPLESS)
def test_routes_without_a_capacity_take_the_path_that_holds_all(
    route, mesh, nodes, chunks, k, path
):
    check_route(route, mesh, nodes, chunks, k, path=path)


def check_route(route, mesh, nodes, chunks, k, *, path):
    # Expert 0 is chosen by nobody; 16 experts are more than any axis here has devices.
    moe = {"num_experts": 16, "experts_per_token": k, "implementation": "reference"}
    if path == "certain":
        moe |= CERTAIN
    cfg = routed(small_config(mesh, moe=moe), route, nodes, chunks)
    parts = check_against_oracle(cfg, bias=((0, -10.0),), path=path)
    assert int(parts.load_LE[0, 0]) == 0


# Gradients cross nodes where weights are gathered, where they are copied, or both; the axis that
# does lies across nodes whole, or is split; and the rest of it lies inside.
REDUCTIONS = [
    ((8, 1, 1, 1), 4, "hidden"),
    ((1, 8, 1, 1), 2, "hidden"),
    ((4, 1, 2, 1), 2, "hidden"),
    ((2, 4, 1, 1), 4, "hidden"),
    ((2, 2, 2, 1), 8, "hidden"),
    ((1, 2, 2, 2), 4, "folded"),
    ((2, 1, 2, 2), 4, "whole"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "nodes", "weights"), REDUCTIONS)
def test_gradients_that_cross_nodes_are_reduced_by_hops(mesh, nodes, weights):
    moe = {"num_experts": 16, "implementation": "reference", **CERTAIN}
    cfg = small_config(mesh, expert_weights=weights, moe=moe)
    check_against_oracle(routed(cfg, "split", nodes, (1, 1)), path="certain")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("route", "weights", "activations"),
    part_of(
        [
            ("split", "whole"),
            ("merge", "folded"),
            ("two_level_merge", "folded"),
            ("merge", "whole"),
        ],
        ["sequence", "replicated"],
    ),
)
def test_routes_with_other_expert_layouts(route, weights, activations):
    moe = {"num_experts": 16, "implementation": "reference", **CERTAIN}
    cfg = small_config((1, 1, 4, 2), activations=activations, expert_weights=weights, moe=moe)
    check_against_oracle(routed(cfg, route, 2, (2, 2)), path="certain")


NOT_IN_THE_ORACLE = [
    {"activations": "replicated"},
    {"router": {"jitter": 0.2}, "model": {"remat": "collectives"}},
    {"train": {"micro_batches": 2}, "router": {"balance_over": "sequence"}},
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("route", "number"),
    list(product(["duplicate", "merge", "two_level_merge"], range(3))),
)
def test_routes_give_the_split_routes_gradients(route, number):
    """With what the oracle has not: jitter, micro-batches, replicated activations."""
    cfg = small_config((1, 1, 4, 2), moe=CERTAIN, **NOT_IN_THE_ORACLE[number])
    wanted = routed_gradients(routed(cfg, "split", 2, (1, 1)))
    assert_close(routed_gradients(routed(cfg, route, 2, (2, 2))), wanted, terms=TERMS)


@functools.cache  # all routes are compared with one
def routed_gradients(cfg):
    train_step = step_for(cfg)
    state = spread(one_device_state(cfg), train_step)
    with only("certain"):
        gradients, _ = train_step.gradients(state, place(train_step, random_batch(cfg)))
    return jax.tree.map(np.asarray, gradients)
