import math
from dataclasses import replace

import jax
import pytest

from moejax.config.schema import Config, OuterConfig
from moejax.plan.price.candidate import price, trace_config
from moejax.plan.price.routing import read_expert_load
from moejax.plan.trace.schedule import walk
from tests.cases import CERTAIN, small_config
from tests.plan.clusters import cluster

BALANCED = read_expert_load("balanced", 8)


def config(route: str) -> Config:
    cfg = small_config((1, 1, 8, 1), model={"scan_layers": True}, train={"batch_sequences": 512})
    return replace(cfg, mesh=replace(cfg.mesh, nodes=2), route=route)


@pytest.mark.parametrize(
    "shared",
    [
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ({}, {"context": 4})),
        {"context": 4, "context_exchange": "ring"},
    ],
)
def test_attention_to_documents_is_priced_by_the_pairs_inside_them(shared):
    """Scores and values of pairs that see each other: a quarter of them, more by whole blocks."""
    cfg = small_config((1, 1, 4, 1), train={"batch_sequences": 4})
    cfg = replace(
        cfg,
        mesh=replace(cfg.mesh, context_stripe=256 if shared else 512, **shared),
        data=replace(cfg.data, sequence_length=2048),
    )

    def flops(documents):
        traced = trace_config(cfg, "gpu", BALANCED, documents=documents)
        ops = walk(traced.schedule())
        return sum(times * op.flops for op, times in ops if op.scope == "attention")

    assert 0.25 <= flops(0.25) / flops(1.0) < 0.6


@pytest.mark.exhaustive
@pytest.mark.parametrize("route", ["split", "merge"])
def test_a_load_that_overflows_nothing_is_priced_the_same_without_a_trace_of_rounds(route):
    every, lean = (trace_config(config(route), "cpu", load) for load in (None, BALANCED))
    assert every.train_step.spec.rounds
    assert not lean.train_step.spec.rounds
    assert every.schedule(rounds=2) != every.schedule()  # this config has rounds to leave out
    assert lean.schedule() == every.schedule()
    assert lean.evaluation_peak() == every.evaluation_peak()


def test_a_step_without_rounds_is_priced_for_no_load_that_overflows():
    lean = trace_config(config("split"), "cpu", BALANCED)
    with pytest.raises(ValueError, match="without overflow rounds"):
        lean.schedule(rounds=1)


def test_what_sites_send_is_counted_and_hidden_behind_the_step():
    """Two sites of four devices: half of each shard crosses in a step, instead of all gradients."""
    cfg = small_config((2, 1, 4, 1), moe=CERTAIN, train={"batch_sequences": 256})
    cfg = replace(cfg, mesh=replace(cfg.mesh, nodes=2))
    outer = replace(cfg, outer=OuterConfig(every=2, codec="none"))
    found, plain = (
        price(trace_config(one, "cpu", BALANCED), cluster(slow=1e6), BALANCED)
        for one in (outer, cfg)
    )
    sent, shapes = found.main.totals.bytes_sent, found.traced.train_step.abstract.params
    shard = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(shapes))
    logged = 200  # bytes, at most
    assert 4 * shard / 2 <= sent["network", "outer"] <= 4 * shard / 2 + 4 * 32 + logged
    assert {name for stream, name in sent if stream == "network"} == {"outer"}
    computed = sum(found.main.totals.computed.values())
    assert found.main.totals.sent["network", "outer"] < computed
    assert found.main.totals.exposed["outer"] < 0.01 * computed
    waits = plain.main.totals.exposed
    gradients = waits["dense_gradient"] + waits["expert_gradient"]
    assert gradients > 10 * found.main.totals.exposed["outer"]
    assert found.seconds < plain.seconds


def test_sites_that_send_all_at_once_wait_in_one_step_of_a_period():
    """In one step of four each device waits for the shard of the other site; the mean counts it."""
    cfg = small_config((2, 1, 4, 1), moe=CERTAIN, train={"batch_sequences": 64})
    cfg = replace(cfg, mesh=replace(cfg.mesh, nodes=2))
    cfg = replace(cfg, outer=OuterConfig(every=4, codec="none", order="all"))
    topology = cluster(slow=1e6)
    found = price(trace_config(cfg, "cpu", BALANCED), topology, BALANCED)
    (ordinary, usual), (seldom, burst) = found.parts
    assert (ordinary, seldom) == (0.75, 0.25)
    assert found.seconds == pytest.approx(0.75 * usual.seconds + 0.25 * burst.seconds)
    assert found.main is usual
    shapes = found.traced.train_step.abstract.params
    shard = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(shapes))
    sent = burst.totals.bytes_sent["network", "outer"] - usual.totals.bytes_sent["network", "outer"]
    assert 4 * shard <= sent <= 4 * shard + 4 * 32  # of a ring of two: all of the other site's
    waited = burst.totals.exposed["outer"] - usual.totals.exposed["outer"]
    # Some of what the program computes may run beside it.
    assert 0.9 * sent / 1e6 <= waited <= 1.05 * sent / 1e6
    each = replace(cfg, outer=OuterConfig(every=1, codec="none", order="all"))
    only = price(trace_config(each, "cpu", BALANCED), topology, BALANCED)
    assert [share for share, _ in only.parts] == [1.0]
    assert only.seconds == pytest.approx(burst.seconds)
