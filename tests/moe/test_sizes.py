"""Bucket sizes: enough for a balanced router, and known when they are enough for any."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from moejax.config.schema import MeshConfig, MoEConfig
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.layout.route import ROUTES, build_route
from moejax.moe.sizes import expert_capacity, needed, usual_sizes

LAYOUT = build_layout(MeshConfig(expert=8, nodes=2))


@given(
    name=st.sampled_from(sorted(ROUTES)),
    tokens=st.integers(1, 3000),
    per_peer=st.integers(1, 8),
    k=st.integers(1, 8),
    chunks=st.integers(1, 4),
    headroom=st.sampled_from([1.0, 1.25, 2.0]),
)
def test_usual_sizes_hold_a_balanced_routing(name, tokens, per_peer, k, chunks, headroom):
    moe = MoEConfig(num_experts=8 * per_peer, experts_per_token=k, headroom=headroom)
    route = build_route(name, LAYOUT, chunks=chunks)
    sizes = usual_sizes(route, LAYOUT, moe, tokens=tokens)
    assert sizes.expert_rows * route.parts >= tokens * k
    # Every token in every round-robin routing: each device sends each other as many.
    assert sizes.rows[0] * chunks * route.exchanges[0].peers(LAYOUT) >= tokens
    if not route.merges and len(sizes.rows) == 1:
        assert sizes.rows[0] <= np.ceil(np.ceil(headroom * tokens * k / 8) / chunks)


@given(tokens=st.integers(1, 5000), factor=st.sampled_from([0.5, 1.0, 1.25, 8.0]))
def test_a_capacity_bounds_every_bucket(tokens, factor):
    moe = MoEConfig(num_experts=8, experts_per_token=2, capacity_factor=factor)
    layout = build_layout(MeshConfig(expert=4))
    capacity = expert_capacity(moe, tokens=tokens)
    sizes = usual_sizes(build_route("split", layout), layout, moe, tokens=tokens)
    assert sizes.rows == (min(2 * capacity, 2 * tokens),)
    assert sizes.certain


def test_a_capacity_counts_for_each_device_that_fills_a_bucket():
    """A device of each node fills each bucket of the second hop, to capacity if need be."""
    moe = MoEConfig(num_experts=16, experts_per_token=2, capacity_factor=1.0)
    sizes = usual_sizes(build_route("two_level", LAYOUT), LAYOUT, moe, tokens=16)
    # Two choices of 16 tokens among 16 experts: capacity 2. A node has 8 experts, a device 2.
    assert sizes.rows == (2 * 8, 2 * 2 * 2)
    assert sizes.certain


@pytest.mark.parametrize(
    ("tokens", "factor", "capacity"), [(8, 1.0, 2), (9, 1.0, 3), (10, 1.0, 3), (2, 0.5, 1)]
)
def test_a_fractional_capacity_is_rounded_up(tokens, factor, capacity):
    """Rounded down, a balanced router would lose choices, and one of few tokens all of them."""
    moe = MoEConfig(num_experts=8, experts_per_token=2, capacity_factor=factor)
    assert expert_capacity(moe, tokens=tokens) == capacity


def send_all(routing: str, devices: int, tokens: int, E: int, K: int) -> np.ndarray:
    """Experts of every token: drawn, or the same K for all."""
    rng = np.random.default_rng(0)
    if routing == "drawn":
        return np.stack([rng.permutation(E)[:K] for _ in range(devices * tokens)])
    return np.tile(np.arange(E)[-K:], (devices * tokens, 1))


@pytest.mark.parametrize("routing", ["drawn", "crowded"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", ["split", "merge", "two_level", "two_level_merge"])
def test_what_a_routing_needs_is_the_fullest_bucket(name, chunks, routing):
    """Counted again in NumPy, bucket by bucket, from the tokens of all devices."""
    E, K, tokens = 16, 3, 10
    route = build_route(name, LAYOUT, chunks=chunks)
    expert_AK = send_all(routing, 8, tokens, E, K)
    mapped = jax.shard_map(
        lambda e: needed(e, route, LAYOUT, num_experts=E)[None],
        mesh=build_mesh(LAYOUT, jax.devices()[:8]),
        in_specs=P(LAYOUT.mesh_axes),
        out_specs=P(LAYOUT.mesh_axes),
        check_vma=False,
    )
    got = np.asarray(jax.jit(mapped)(jnp.asarray(expert_AK, jnp.int32)))
    assert np.all(got == got[0]), "all devices agree"
    np.testing.assert_array_equal(got[0], count(expert_AK, route, tokens, E))


def count(expert_AK, route, tokens, E):
    """The rows that each stage of a route needs, walking tokens one by one."""
    sizes = [hop.peers(LAYOUT) for hop in route.exchanges]
    # What a device holds: (part, experts to visit) of each row; its part is dealt at the source.
    held = {
        d: [(None, list(e)) for e in expert_AK[d * tokens : (d + 1) * tokens]] for d in range(8)
    }
    needs, passed = [], 1
    for size in sizes:
        passed *= size
        behind, stride = E // passed, 8 // passed
        arrived = {d: [] for d in range(8)}
        fullest = 0
        for d, rows in held.items():
            full = {}
            for part, experts in rows:
                groups = [[e] for e in experts]
                if route.merges:
                    groups = [
                        [e for e in experts if e // behind == p]
                        for p in dict.fromkeys(e // behind for e in experts)
                    ]
                for group in groups:
                    peer = group[0] // behind
                    now = part
                    if now is None:
                        dealt = sum(full.get((i, peer), 0) for i in range(route.parts))
                        now = dealt % route.parts
                    full[now, peer] = full.get((now, peer), 0) + 1
                    # The peer along this hop's axes; the axes not yet passed stay as they are.
                    target = peer * stride + d % stride
                    arrived[target].append((now, group))
            fullest = max([fullest, *full.values()])
        needs.append(fullest)
        held = arrived
    if route.merges:
        work = [
            sum(len(group) for now, group in rows if now == part)
            for rows in held.values()
            for part in range(route.parts)
        ]
        needs.append(max(work))
    return needs


def test_experts_compute_rows_of_all_tensor_ranks_that_gather_them():
    """Where rows merge and a rank has a part of the hidden width, both ranks' rows go to each."""
    layout = build_layout(MeshConfig(expert=4, tensor=2))
    route, (E, K, tokens) = build_route("merge", layout), (16, 2, 3)
    crowded_AK = np.tile([E - 2, E - 1], (8 * tokens, 1))  # all choose two experts of one device
    mapped = jax.shard_map(
        lambda e: needed(e, route, layout, num_experts=E)[None],
        mesh=build_mesh(layout, jax.devices()[:8]),
        in_specs=P(layout.mesh_axes),
        out_specs=P(layout.mesh_axes),
        check_vma=False,
    )
    got = np.asarray(jax.jit(mapped)(jnp.asarray(crowded_AK, jnp.int32)))
    # A bucket holds the tokens of its sender, merged; the experts both choices of all eight's.
    assert got.tolist() == [[tokens, 8 * tokens * K]] * 8
