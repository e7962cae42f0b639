"""When the planner lets devices share sequences."""

import dataclasses
import json
from pathlib import Path

import pytest

from moejax.config.fields import change, get_value
from moejax.config.load import load_config
from moejax.config.schema import LinearConfig
from moejax.plan.search import space
from moejax.plan.search.estimate import Estimate
from tests.plan.clusters import GIB, cluster, limits_of, to_plan
from tests.plan.search.test_search import found_for

ROOT = Path(__file__).parents[3]
MESH = dict.fromkeys(space.MESH, 1)


def long(rows, length, **changes):
    cfg = to_plan(rows, moe={"capacity_factor": 1.25}, **changes)
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sequence_length=length))


def ways(cfg, **mesh):
    found = space.sharing(cfg, limits_of(cfg, cluster()), MESH | mesh)
    return [(way["mesh.context"], way.get("mesh.context_stripe")) for way in found]


@pytest.mark.parametrize(
    ("rows", "length", "fsdp", "expert", "wanted"),
    [
        (8, 1_024, 2, 4, [(1, None)]),  # enough rows, short
        (2, 1_024, 2, 4, [(4, 128)]),  # the devices of a node
        (1, 1_024, 2, 4, [(8, 64)]),
        (2, 32_768, 8, 1, [(4, 512), (8, 512)]),  # an axis is cut where a node ends
        (8, 32_768, 2, 4, [(1, None), (4, 512), (8, 512)]),
        (3, 1_024, 2, 4, [(8, 64)]),  # three rows, all of each device's
        (1, 1_000, 8, 1, []),  # pairs of stripes do not divide
    ],
)
def test_as_few_devices_share_as_need_be(rows, length, fsdp, expert, wanted):
    cfg = long(rows, length)
    found = ways(cfg, **{"mesh.fsdp": fsdp, "mesh.expert": expert})
    assert found == wanted


def test_a_stripe_has_eight_windows_where_it_can():
    cfg = long(1, 32_768, model={"sliding_window": 128})
    assert ways(cfg, **{"mesh.fsdp": 8}) == [(8, 1_024)]


def test_rings_and_other_numbers_of_devices_are_tried_and_nothing_that_is_pinned():
    limits = limits_of(long(8, 32_768), cluster())
    settings = {"mesh.fsdp": 2, "mesh.expert": 4, "mesh.context": 4}
    cfg = space.resolve(change(long(8, 32_768), settings), limits)

    def tried(cfg, limits):
        both = space.key_exchanges(cfg, limits)
        return [(one.mesh.context, one.mesh.context_exchange) for one in both]

    assert tried(cfg, limits) == [(4, "ring"), (1, "gather"), (8, "gather")]
    pinned = frozenset({"mesh.context", "mesh.context_exchange"})
    assert tried(cfg, dataclasses.replace(limits, pinned=pinned)) == []
    assert tried(change(cfg, {"mesh.context": 1}), limits) == []


def test_the_config_of_a_million_positions_is_the_plan_of_its_page():
    plan = json.loads((ROOT / "benchmarks/results/plan_1m.json").read_text())
    cfg = load_config(str(ROOT / "configs/qwen3_30b_a3b_1m.py"))
    kept = {name: get_value(cfg, name) for name in plan["settings"]}
    # Left open there: what other axes leave, and the nodes that a run finds.
    assert kept.pop("mesh.replica") in (None, plan["settings"].pop("mesh.replica"))
    assert kept == plan["settings"]


def test_what_is_pinned_stays():
    cfg = change(long(1, 1_024), {"mesh.context": 8, "mesh.context_stripe": 32})
    assert ways(cfg, **{"mesh.fsdp": 8}) == [(8, None)]
    meshes = list(space.meshes(cfg, limits_of(cfg, cluster())))
    assert {(one.mesh.context, one.mesh.context_stripe) for one in meshes} == {(8, 32)}


def test_every_rule_of_thumb_shares_where_sequences_are_few():
    cfg = long(2, 1_024)
    found = space.rules(cfg, limits_of(cfg, cluster()))
    assert {name: one.mesh.context for name, one in found.items()} == {
        "FSDP": 4, "HSDP": 4, "EP+FSDP": 4, "EP+DP": 4, "EP": 4, "TP+FSDP": 1,
    }  # fmt: skip


def test_an_estimate_counts_what_shared_sequences_move():
    cfg = change(long(1, 8_192), {"mesh.fsdp": 8, "mesh.context": 8})
    one, topology = space.resolve(cfg, limits_of(cfg, cluster())), cluster(slow=1e5)
    assert one is not None
    fast, slow = (Estimate(one, t).seconds() for t in (cluster(), topology))
    heads = one.model.num_kv_heads * 2 * one.model.head_width
    # Across two nodes a device receives a quarter of half the keys, twice, and returns gradients.
    moved = 3 * 8_192 / 2 / 4 * heads * 4 * (1 / 1e5 - 1 / 1e7)
    weights = Estimate(one, topology)._weights() - Estimate(one, cluster())._weights()
    tables = Estimate(one, topology)._tables() - Estimate(one, cluster())._tables()
    assert slow - fast == pytest.approx(moved + weights + tables, rel=0.05)


def test_an_estimate_counts_effects_and_states_of_linear_attention():
    """In each second block; two stripes of a device, four heads of 32 x 32 channels, float32.

    Four heads fill eight devices up.
    """
    model = {"num_layers": 4, "full_attention_every": 2, "linear": LinearConfig("gated_delta")}
    settings = {"mesh.fsdp": 8, "mesh.context": 8, "mesh.context_stripe": 512}
    cfg = change(long(1, 8_192, model=model), settings)
    one = space.resolve(cfg, limits_of(cfg, cluster()))
    assert one is not None
    estimate = Estimate(one, cluster(slow=1e5))
    sent = 2 * 8 * (32 * 32 + 2 * 32 * 32) * 4
    once = estimate._cost("all_to_all", sent, estimate.layout.context)
    assert estimate._states_moved() == pytest.approx(2 * once / 2)
    assert estimate._full_blocks() == 0.5


@pytest.mark.slow
def test_hosts_share_a_sequence_rather_than_cut_matrices():
    cfg = long(1, 2_048, model={"num_kv_heads": 8, "num_heads": 8})
    names = ("mesh.fsdp", "mesh.tensor", "mesh.context", "mesh.context_stripe")
    found = found_for(cfg, cluster(inside=2, slow=1e6), *names)
    assert found.ranked[0].cfg.mesh.context > 1
    alone = {
        plan.cfg.mesh.tensor: plan.seconds for plan in found.ranked if plan.cfg.mesh.context == 1
    }
    assert alone[4] > 1.5 * found.ranked[0].seconds


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "shares"), [(8, False), (0.07, True)])
def test_devices_share_where_a_whole_sequence_fits_none_although_there_is_one_for_each(gib, shares):
    """A micro-batch of two sequences over eight devices needs less than one sequence a device."""
    cfg = long(8, 16_384, model={"width": 64})
    names = "mesh.fsdp", "mesh.context", "mesh.context_stripe", "train.micro_batches"
    found = found_for(cfg, cluster(memory=int(gib * GIB), fast=1e10, slow=1e9), *names)
    assert (found.ranked[0].cfg.mesh.context > 1) == shares
