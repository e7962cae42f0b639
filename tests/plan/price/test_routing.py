"""Skew as an input: shares, the fullest bucket, rounds."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from moejax.errors import InputError
from moejax.layout.layout import build_layout
from moejax.layout.route import build_route
from moejax.moe.sizes import usual_sizes
from moejax.plan.price.routing import (
    ExpertLoad,
    bucket_fills,
    busiest_device,
    fullest,
    read_expert_load,
    tokens_of,
)
from tests.cases import small_config

EVEN = read_expert_load("balanced", 8)


def of(cfg):
    layout = build_layout(cfg.mesh)
    return build_route(cfg.route, layout), layout


def fills(cfg, load):
    route, layout = of(cfg)
    return bucket_fills(load, cfg, layout, route)


def big(mesh=(1, 1, 8, 1), **changes):
    return small_config(mesh, train={"batch_sequences": 1024}, **changes)


def test_a_balanced_router_fills_what_headroom_leaves():
    ((share, found),) = fills(big(), read_expert_load("balanced", 8))
    assert share == 1
    assert found.rounds == 0
    assert 0.8 <= found.filled <= 0.9  # 1 / 1.25, and what draws differ by


def test_devices_that_share_cores_are_as_busy_as_their_mean():
    """Device 0 gets twice what each other of eight does: its four get 5/36 of all rows each."""
    cfg, share_E = big(), (2 / 9,) + (1 / 9,) * 7
    route, layout = of(cfg)
    load = ExpertLoad("by hand", (share_E,))
    room = usual_sizes(route, layout, cfg.moe, tokens=2048).expert_rows
    ((_, alone),) = bucket_fills(load, cfg, layout, route)
    ((_, found),) = bucket_fills(load, cfg, layout, route, sharing=4.2)
    assert alone.filled == 1
    assert found.filled == pytest.approx(8 * 2048 * 2 * 5 / 36 / room, rel=0.01)
    assert found.rounds == alone.rounds  # a bucket is a device's own


def test_skew_overflows_and_goes_in_rounds():
    ((_, found),) = fills(big(), read_expert_load("zipf:1.5", 8))
    assert found.rounds > 1
    assert found.filled_in_rounds <= 1


def test_small_buckets_overflow_by_chance_as_often_as_draws_do():
    """Of 64 rows a bucket 80 fit, and one in 64 buckets has more, mostly. Of 512, 640 fit."""
    cfg = small_config((1, 1, 8, 1), train={"batch_sequences": 128})
    assert usual_sizes(*of(cfg), cfg.moe, tokens=256).rows == (80,)
    rng, often = np.random.default_rng(0), 0
    for _ in range(1000):
        draws = rng.random((8 * 256, 8)).argsort(axis=1)[:, :2].reshape(8, -1)
        often += max(np.bincount(own, minlength=8).max() for own in draws) > 80
    chance = sum(share for share, fill in fills(cfg, EVEN) if fill.rounds)
    assert 0.3 < often / 1000 < 0.7
    assert chance == pytest.approx(often / 1000, abs=0.07)
    assert [fill.rounds for _, fill in fills(big(), EVEN)] == [0]


def test_what_overflows_alone_goes_in_rounds():
    """Twice the balanced rows for one device: 0.75 of a bucket, in rounds of a quarter."""
    share_E = (2 / 9,) + (1 / 9,) * 7
    ((_, found),) = fills(big(), ExpertLoad("by hand", (share_E,)))
    # 2048 tokens: 910 rows, and 90 more in the fullest of eight; 640 fit, and 160 in a round.
    assert found.rounds == 3
    assert found.filled == 1


def test_a_capacity_never_overflows_and_its_fullest_device_does_no_more():
    cfg = big(moe={"capacity_factor": 1.25})
    ((_, skewed),) = fills(cfg, read_expert_load("zipf:2", 8))
    ((_, even),) = fills(cfg, read_expert_load("balanced", 8))
    assert skewed.rounds == even.rounds == 0
    assert even.filled <= skewed.filled <= 1


def test_a_second_hop_hears_all_senders_of_the_first():
    """Each node gets half of all rows, and in each one device gets twice what the others do."""
    cfg = big()
    cfg = dataclasses.replace(cfg, route="two_level", mesh=dataclasses.replace(cfg.mesh, nodes=2))
    layout = build_layout(cfg.mesh)
    route = build_route(cfg.route, layout)
    share_E = tuple(n / 10 for n in (2, 1, 1, 1, 2, 1, 1, 1))
    rows_E = [2048 * 2 * share for share in share_E]  # of one device: its tokens, K = 2
    between, inside = usual_sizes(route, layout, cfg.moe, tokens=2048).rows
    assert fullest([sum(rows_E[:4])], 64) < between
    assert fullest([rows_E[0]], 64) < inside < 2 * rows_E[0]
    ((_, found),) = fills(cfg, ExpertLoad("by hand", (share_E,)))
    assert found.rounds > 1
    ((_, even),) = fills(cfg, read_expert_load("balanced", 8))
    assert even.rounds == 0


@pytest.mark.parametrize("route", ["merge", "two_level_merge"])
def test_a_merged_bucket_holds_each_token_at_most_once(route):
    """All experts of a token or nearly: drawn counts would exceed the tokens, which cannot be."""
    cfg = small_config((1, 1, 8, 1), moe={"experts_per_token": 8}, train={"batch_sequences": 16})
    cfg = dataclasses.replace(cfg, route=route, mesh=dataclasses.replace(cfg.mesh, nodes=2))
    layout = build_layout(cfg.mesh)
    tokens = tokens_of(cfg, layout, build_route(route, layout))
    slots = usual_sizes(build_route(route, layout), layout, cfg.moe, tokens=tokens).rows
    assert fullest([tokens], 64) > slots[0] >= tokens  # draws alone would say that it overflows
    ((_, found),) = fills(cfg, read_expert_load("balanced", 8))
    assert found.rounds == 0


def test_a_micro_batch_is_all_that_is_routed_at_one_time():
    """Fewer rows differ more: a part of a batch fills buckets as a batch of its size does."""
    whole, parts, half = (
        small_config((1, 1, 8, 1), train={"batch_sequences": batch, "micro_batches": count})
        for batch, count in ((64, 1), (64, 2), (32, 1))
    )
    layout = build_layout(whole.mesh)
    route = build_route(whole.route, layout)
    tokens = [tokens_of(cfg, layout, route) for cfg in (whole, parts, half)]
    assert tokens == [128, 64, 64]  # 64 sequences of 16 tokens, over eight devices
    assert fills(parts, EVEN) == fills(half, EVEN) != fills(whole, EVEN)


def test_layers_differ(tmp_path):
    path = tmp_path / "routing.json"
    path.write_text(json.dumps({"load": [[1] * 8, [93, 1, 1, 1, 1, 1, 1, 1]]}))
    found = fills(big(), read_expert_load(str(path), 8))
    assert sorted(share for share, _ in found) == [0.5, 0.5]
    assert sorted(one.rounds > 0 for _, one in found) == [False, True]


def test_zipf_is_in_proportion_to_powers_of_rank():
    share_E = sorted(read_expert_load("zipf:1", 16).share_LE[0], reverse=True)
    np.testing.assert_allclose(np.array(share_E) / share_E[0], 1 / np.arange(1, 17))
    assert abs(sum(share_E) - 1) < 1e-12


def test_popular_experts_are_not_neighbours():
    share_E = read_expert_load("zipf:1", 64).share_LE[0]
    top = sorted(range(64), key=lambda e: -share_E[e])[:4]
    assert min(abs(a - b) for a in top for b in top if a != b) > 8


def test_the_fullest_of_many_draws_is_what_sampling_finds():
    rng = np.random.default_rng(0)
    mean, buckets = 400.0, 64
    found = np.median([rng.poisson(mean, buckets).max() for _ in range(200)])
    assert abs(fullest([mean], buckets) - found) < 0.06 * found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zipf:-1", "power must be 0 or more"),
        ("zipf:x", "power must be 0 or more"),
        ("nowhere.json", "cannot be read"),
        ("routing.json", r"\[3\] experts, the model has 8"),
    ],
)
def test_what_is_no_routing_is_refused(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("routing.json").write_text(json.dumps({"load": [[1, 2, 3]]}))
    with pytest.raises(InputError, match=said):
        read_expert_load(text, 8)


def test_copies_take_half_of_a_hot_expert_off_the_busiest_device():
    """Two devices of four experts: 0.75 and 0.25 of the choices; 0.25 of expert 0 move."""
    load = ExpertLoad("hot", ((0.6, 0.05, 0.05, 0.05, 0.1, 0.05, 0.05, 0.05),))
    cfg = big((1, 1, 2, 1))
    assert busiest_device(load, cfg) == pytest.approx(1.5)
    copied = dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, slots=1))
    assert busiest_device(load, copied) == pytest.approx(1.0, abs=0.01)
    ((_, plain),) = fills(cfg, load)
    ((_, evened),) = fills(copied, load)
    assert plain.rounds > 0
    assert evened.rounds == 0
