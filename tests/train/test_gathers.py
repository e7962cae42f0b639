"""Whether a dry run says that a step waits for its weights."""

import dataclasses
import functools

import pytest

from moejax.config.fields import change
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.step.train_step import build_step
from moejax.train.records.summary import gather_note, summarize
from tests.cases import small_config
from tests.plan.clusters import cluster


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
