"""Bucket sizes: enough for any routing, small for a balanced one."""

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from moejax.config import MeshConfig, MoEConfig
from moejax.dims import build_layout
from moejax.moe.layer import bucket_sizes, expert_capacity


@given(
    tokens=st.integers(1, 5000),
    peers=st.sampled_from([1, 2, 4, 8]),
    per_peer=st.integers(1, 16),
    k=st.integers(1, 8),
)
def test_the_last_bucket_holds_any_routing_and_the_first_holds_a_balanced_one(
    tokens, peers, per_peer, k
):
    E = peers * per_peer
    moe = MoEConfig(num_experts=E, experts_per_token=min(k, E))
    sizes = bucket_sizes(moe, build_layout(MeshConfig(expert=peers)), tokens=tokens)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == tokens * min(moe.experts_per_token, per_peer)
    assert sizes[0] * peers >= tokens * moe.experts_per_token
    smallest = 1.25 * tokens * moe.experts_per_token / peers + 1
    assert sizes[0] <= 2 * smallest
    assert all(b >= 2 * a for a, b in itertools.pairwise(sizes))


@given(tokens=st.integers(1, 5000), factor=st.sampled_from([0.5, 1.0, 1.25, 8.0]))
def test_a_capacity_bucket_holds_every_experts_capacity(tokens, factor):
    moe = MoEConfig(num_experts=8, experts_per_token=2, capacity_factor=factor)
    layout = build_layout(MeshConfig(expert=4))
    (size,) = bucket_sizes(moe, layout, tokens=tokens)
    capacity = expert_capacity(moe, tokens=tokens)
    assert size == min(2 * capacity, 2 * tokens)
    assert expert_capacity(dataclasses.replace(moe, capacity_factor=None), tokens=tokens) is None
