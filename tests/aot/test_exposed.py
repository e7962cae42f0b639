"""Which traffic counts as exposed, and the codecs that are named for it."""

from dataclasses import replace

import pytest

from moejax.aot.command import compress_exposed, hidden_shares, traffic_of
from moejax.aot.compiled import CompiledCollective
from moejax.config.schema import MeshConfig
from moejax.layout.layout import build_layout

# Two nodes of four: replica across, fsdp and expert inside.
LAYOUT = build_layout(MeshConfig(replica=2, fsdp=2, expert=2, nodes=2))
# Experts across both nodes.
WIDE = build_layout(MeshConfig(expert=8, nodes=2))


def exchange(kind, *axes, hides=False, backward=False, dtype="bfloat16", size=100, calls=1):
    return CompiledCollective(kind, axes, dtype, size, calls, hides, hides, backward, "x")


@pytest.mark.parametrize(
    ("one", "layout", "kind"),
    [
        (exchange("all_to_all", "expert_slow", "expert_fast"), WIDE, "tokens"),
        (exchange("all_to_all", "expert_slow", backward=True), WIDE, "tokens_backward"),
        (exchange("all_to_all", "expert_slow", dtype="uint8"), WIDE, None),
        (exchange("all_to_all", "expert_fast"), WIDE, None),
        (exchange("all_reduce", "replica", backward=True), LAYOUT, "gradients"),
        (exchange("all_reduce", "replica"), LAYOUT, None),
        (exchange("reduce_scatter", "expert_slow", backward=True), WIDE, "gradients"),
        (exchange("all_gather", "expert_slow"), WIDE, "weights"),
        (exchange("all_gather", "fsdp"), LAYOUT, None),
    ],
)
def test_traffic_across_nodes_belongs_to_a_class(one, layout, kind):
    assert traffic_of(one, layout) == kind


def test_only_what_is_exposed_is_compressed():
    tokens = exchange("all_to_all", "expert_slow", hides=True, size=300)
    found = [
        tokens,
        replace(tokens, hides=False, bytes=100),
        exchange("reduce_scatter", "expert_slow", backward=True),
        exchange("all_gather", "expert_slow"),
    ]
    shares = hidden_shares(found, WIDE)
    assert shares == {"tokens": 0.75, "gradients": 0.0, "weights": 0.0}
    assert compress_exposed(found, WIDE, "hybrid") == {
        "preset": "none",
        "dense_gradient": "int8+feedback",
        "expert_gradient": "int8+feedback",
    }
    waited = [replace(one, hides=False) for one in found]
    assert compress_exposed(waited, WIDE, "hybrid").keys() >= {"dispatch", "combine"}
    assert compress_exposed(found, WIDE, "strong")["weights"] == "int8"
