"""A step in micro-batches, compiled: what copies send each other, and the memory it takes."""

import functools
from dataclasses import replace

import pytest

from moejax.aot.compiled import CompiledText
from moejax.plan.price.candidate import price, trace_config
from moejax.plan.price.routing import read_expert_load
from moejax.plan.trace.reader import collectives
from tests.cases import CERTAIN, small_config, step_for
from tests.plan.clusters import cluster

pytestmark = pytest.mark.usefixtures("unchecked_annotations", "compiled_anew")

PARTS = (1, 4)
MESH = (2, 2, 2, 1)


def config(parts):
    """Copies of a model whose weights are sharded too, large enough for its memory to count."""
    return small_config(
        MESH,
        model={"width": 128, "num_layers": 2, "mlp_hidden": 256, "moe_every": 2},
        moe=CERTAIN | {"expert_hidden": 128},
        train={"micro_batches": parts, "batch_sequences": 32},
    )


@functools.cache
def compiled(parts):
    train_step = step_for(config(parts))
    lowered = train_step.step.lower(train_step.abstract, train_step.abstract_batch())
    return train_step, lowered.compile()


def over_copies(parts):
    """Kind, dtype, bytes and calls in a step of each array that copies reduce."""
    train_step, program = compiled(parts)
    text = CompiledText(program.as_text(), dict(train_step.layout.sizes))
    return sorted(
        (one.kind, one.dtype, one.bytes, one.calls)
        for one in text.exchanges()
        if one.axes == ("replica",) and one.kind in ("all_reduce", "reduce_scatter")
    )


@pytest.mark.exhaustive
def test_the_compiled_step_reduces_over_copies_as_often_with_micro_batches():
    whole, cut = map(over_copies, PARTS)
    assert cut == whole
    assert sum(calls for *_, calls in whole) >= 7, "each weight meets its copies"


@pytest.mark.exhaustive
def test_loops_are_counted_as_often_as_they_run():
    """Else four micro-batches would look like two: the loop's body, and the last one."""
    counts = []
    for parts in PARTS:
        train_step, program = compiled(parts)
        text = CompiledText(program.as_text(), dict(train_step.layout.sizes))
        tokens = [one for one in text.exchanges() if one.kind == "all_to_all"]
        counts.append(sum(one.calls for one in tokens))
    assert counts[1] == 4 * counts[0] > 0


@pytest.mark.slow
def test_the_planner_prices_what_copies_send_once_a_step():
    found = []
    for parts in PARTS:
        cfg = config(parts)
        cfg = replace(cfg, mesh=replace(cfg.mesh, nodes=2))
        traced = trace_config(cfg, "cpu")
        calls = collectives(traced.jaxpr.jaxpr)
        across = [one for one in calls if one.axes == ("replica",)]
        priced = price(traced, cluster(inside=4, nodes=2), read_expert_load("balanced", 8))
        sent, seconds = priced.main.totals.bytes_sent, priced.main.totals.sent
        across_nodes = [key for key in sent if key[0] != "host" and "gradient" in key[1]]
        links = {key: (sent[key], seconds[key]) for key in across_nodes}
        found.append((sum(one.bytes * one.calls for one in across), links))
    assert found[0][0] > 0
    assert found[0][1]
    assert found[0][0] == found[1][0]
    for key, (sent, seconds) in found[0][1].items():
        assert found[1][1][key] == (pytest.approx(sent), pytest.approx(seconds))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_predicted_peak_of_micro_batches_is_what_the_compiler_says_within_a_tenth():
    said = compiled(4)[1].memory_analysis()
    traced = trace_config(config(4), "cpu")
    found = traced.peak(traced.schedule())
    assert found.arguments == pytest.approx(said.argument_size_in_bytes, rel=0.01)
    whole = said.argument_size_in_bytes + said.temp_size_in_bytes
    assert found.bytes == pytest.approx(whole, rel=0.1)
