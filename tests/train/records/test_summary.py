"""A model that does not fit its devices, and a step that waits for its weights, are told."""

import dataclasses
import functools
import io

import jax
import pytest
from rich.console import Console

from moejax.config.fields import change
from moejax.errors import InputError
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.model.count import Counts
from moejax.plan.cluster.topology import Host
from moejax.runtime.processes import ALONE
from moejax.step.train_step import build_step
from moejax.train.records.summary import (
    Summary,
    check_hosts,
    check_memory,
    gather_note,
    host_warnings,
    memory_warnings,
    print_summary,
    summarize,
)
from tests.cases import small_config, step_for
from tests.plan.clusters import cluster

DEVICES = 8  # that the tests simulate


def with_memory(monkeypatch, size):
    monkeypatch.setattr("moejax.runtime.memory.machine_memory", lambda: size * DEVICES)


@pytest.mark.parametrize(
    ("gradients", "held"),
    [(True, "weights, optimizer state and gradients"), (False, "weights")],  # an evaluation
)
def test_what_a_device_holds_must_fit_its_share(monkeypatch, gradients, held):
    train_step = step_for(small_config((1, 1, 2, 2)))
    train_step = train_step if gradients else train_step.of_weights()
    given = train_step.argument_bytes()
    needed = sum(given.values()) + given["weights"] * gradients
    assert (given["optimizer"] > 0) == gradients
    with_memory(monkeypatch, needed)
    assert check_memory(train_step, ALONE, gradients=gradients) == needed
    with_memory(monkeypatch, needed - 1)
    with pytest.raises(InputError, match=f"the model does not fit.* of {held}, and has"):
        check_memory(train_step, ALONE, gradients=gradients)


def test_a_host_must_hold_moments_and_copies_of_the_state_together(monkeypatch):
    """A host has eight devices, which are simulated and so take of the same memory."""
    cfg = change(small_config((1, 2, 2, 2)), {"memory.optimizer": "host"})
    cfg = change(cfg, {"checkpoint.memory_every": 5})
    train_step = step_for(cfg)
    given, moments = train_step.argument_bytes(), train_step.host_bytes()
    everywhere = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(train_step.abstract))
    held = DEVICES * (sum(given.values()) + given["weights"] + moments)
    summary = Summary(Counts(1, 1, 1, 1, 1), {}, {"step": 1}, 1, [], moments)

    def check(memory):
        monkeypatch.setattr("moejax.train.records.summary.machine_memory", lambda: memory)
        check_hosts(train_step, summary, ALONE)

    check(held + 2 * everywhere)
    with pytest.raises(InputError, match=r"memory of hosts is too small.*copies of the state"):
        check(held + 2 * everywhere - 1)
    there = dataclasses.replace(cluster(inside=8, nodes=1), host=Host(1e9, 1e9, held))
    (said,) = host_warnings(train_step, summary, there)
    assert f"has {held / 2**10:.1f} KiB" in said
    assert host_warnings(train_step, summary, cluster()) == []
    kept = step_for(small_config((1, 2, 2, 2)))
    check_hosts(kept, dataclasses.replace(summary, host_bytes=0), ALONE)  # nothing there


def test_the_least_device_of_all_processes_counts(monkeypatch):
    train_step = step_for(small_config())
    with_memory(monkeypatch, 2**30)
    two = ALONE  # of which the second is on the same machine, and has half the room
    monkeypatch.setattr(type(two), "gather", lambda _, x: [x, x // 2 if isinstance(x, int) else x])
    assert check_memory(train_step, two) == 2**30 // 2 // 2


def test_an_estimate_above_the_room_is_a_warning():
    peaks = {"step": 3 * 2**30, "evaluation": 2**20}
    summary = Summary(Counts(1, 1, 1, 1, 1), {}, peaks, 1, [])
    assert memory_warnings(summary, 3 * 2**30) == []
    (said,) = memory_warnings(summary, 2 * 2**30)
    assert "peak memory (step) is about 3.0 GiB" in said
    assert "has 2.0 GiB" in said


@functools.cache
def summarized(**settings):
    """The small model on two nodes of four that share its weights."""
    values = {"mesh.nodes": 2, "mesh.fsdp": 8, "model.vocab_size": 264}
    settings = {name.replace("__", "."): value for name, value in settings.items()}
    cfg = change(small_config(train={"batch_sequences": 32}), values | settings)
    step = build_step(cfg, build_abstract_mesh(build_layout(cfg.mesh)), "cpu")
    return step, summarize(step)


def note(topology=None, **settings):
    """Returns the note about it; a setting has `__` for its dot."""
    return gather_note(*summarized(**settings), topology)


def test_gathers_that_take_longer_than_products_are_told():
    text = note(train__micro_batches=4)
    assert text is not None
    assert text.startswith("the step is bound by its gathers: ")
    assert "400 TFLOP/s and 50 GB/s" in text
    assert "\n" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"mesh__nodes": 1},
        # Copies on both nodes, shards inside.
        {"mesh__replica": 2, "mesh__fsdp": 4},
    ],
)
def test_gathers_inside_a_node_are_no_reason(settings):
    assert note(train__micro_batches=4, **settings) is None


def test_the_links_of_a_named_cluster_count():
    fast = dataclasses.replace(cluster(slow=1e12, startup=1e-9), name="quick")
    assert note(fast) is None
    text = note(cluster(slow=1e4))
    assert text is not None
    assert "(test)" in text


def test_forced_routing_is_told_before_the_start():
    def shown(**settings):
        step, summary = summarized(**settings)
        screen = io.StringIO()
        print_summary(summary, step, Console(file=screen, width=200))
        return screen.getvalue()

    (row,) = [
        line for line in shown(moe__router__forced="balanced").split("\n") if "FORCED" in line
    ]
    assert "balanced: experts do not follow scores" in row
    assert "FORCED" not in shown()
