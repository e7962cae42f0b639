"""The tables and sentences about plans: order, ties, and what does not fit."""

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from moejax.config.fields import change, fields
from moejax.plan.price.cost import SimulatedStep, Totals
from moejax.plan.price.routing import ExpertLoad
from moejax.plan.report import tables
from moejax.plan.report.tables import (
    AXES,
    mesh_text,
    print_ranked,
    print_why,
    small_products,
    speed_text,
)
from moejax.plan.search.search import SearchResult
from moejax.plan.trace.schedule import Op
from tests.cases import small_config
from tests.plan.clusters import GIB, cluster


def pretend(seconds, gib=1.0, mesh=(1, 8, 1, 1), **values):
    """A priced plan of chosen time and memory, without a trace."""
    names = ("mesh.replica", "mesh.fsdp", "mesh.expert", "mesh.tensor")
    cfg = change(small_config(), dict(zip(names, mesh, strict=True)) | values)
    main = SimpleNamespace(
        totals=SimpleNamespace(computed={"experts": seconds}, exposed={}), seconds=seconds
    )
    peak = SimpleNamespace(bytes=gib * GIB)
    one = SimpleNamespace(cfg=cfg, parts=((1.0, main),), seconds=seconds, peak=peak, main=main)
    return SimpleNamespace(**vars(one), host_bytes=0, node_bytes=0)


def shown(ranked, **rules):
    result = SearchResult(ranked, 9, 5, 1, 8 * 0.95 * GIB, 1.0, rules=rules)
    text = StringIO()
    console = Console(file=text, width=150)
    print_ranked(result, cluster(), console)
    print_why(result, console)
    return text.getvalue()


def test_every_part_of_a_mesh_has_words_on_the_page():
    """Or its row would be empty."""
    page = (Path(tables.__file__).parent / "page.js").read_text("utf-8")
    axes, layouts = re.findall(r"const (?:axes|layouts) = \{(.*?)\n  \};", page, re.DOTALL)
    named = set(re.findall(r'^    "?([a-z ]+)"?: ', layouts, re.MULTILINE))
    assert set(re.findall(r"^    (\w+): \(n\)", axes, re.MULTILINE)) == set(AXES)
    for choice in fields()["mesh.activations"].choices:
        assert choice in named
    for choice in fields()["mesh.expert_weights"].choices:
        assert f"experts {choice}" in named
    assert mesh_text(small_config()) in named


def test_devices_that_share_sequences_are_told_with_their_exchange():
    cfg = change(small_config(), {"mesh.context": 4, "mesh.context_exchange": "ring"})
    assert "4 devices share a sequence, keys by ring" in tables.rest_parts(cfg)
    assert not any("share" in part for part in tables.rest_parts(small_config()))


def test_a_tie_says_by_which_rule_it_was_broken():
    text = shown([pretend(1.0001), pretend(1.0, **{"model.remat": "dots"})])
    assert "1 and 2 take equally long, within 0.2%" in text
    assert "as fast as the runner-up (fsdp 8, as here, but model.remat = dots), within 0.2%" in text
    assert "take equally long" not in shown([pretend(1.0), pretend(1.0001)])


def test_a_runner_up_on_the_same_mesh_is_told_apart():
    text = shown([pretend(1.0), pretend(1.5, **{"model.remat": "full"})])
    assert "1.50 x as fast as the runner-up (fsdp 8, as here, but model.remat = full)" in text


def test_plans_that_differ_by_pieces_only_are_one_row():
    pieces = [pretend(1.001 + i / 1e4, **{"train.reduction_bytes": 2**20 + i}) for i in range(3)]
    text = shown([pretend(1.0), *pieces, pretend(1.3, mesh=(8, 1, 1, 1))])
    assert "pieces of" not in text.split("where the step goes")[0].split("meshes estimated")[0]
    assert "3 plans are not shown" in text
    assert "│ 5 " in text
    slower = pretend(1.1, **{"train.reduction_bytes": 2**20})
    assert "pieces of 1 MiB" in shown([pretend(1.0), slower])


def test_a_rule_that_does_not_fit_is_not_compared():
    text = shown([pretend(1.0)], EP=pretend(0.93, gib=700.0, mesh=(8, 1, 1, 1)))
    assert "rule of thumb EP (replica 8) does not fit: it needs 700.0 GiB of a device, 7.6" in text
    assert "0.93" not in text
    assert "700.00!" in text
    assert "No rule of thumb fits." in text


def test_the_gain_is_over_the_best_rule_of_thumb_with_and_without_codecs():
    """8.01 x of a layout that nobody takes over slow links, and 1.16 x of plain FSDP."""
    rules = {"FSDP": pretend(1.16, mesh=(2, 4, 1, 1)), "EP": pretend(8.01, mesh=(1, 1, 8, 1))}
    text = " ".join(shown([pretend(1.0)], **rules).split())
    assert "The plan is 1.16 x as fast as the best rule of thumb, FSDP. Rules" in text
    assert "1.16 x as fast as the rule of thumb FSDP (replica 2, fsdp 4)" in text
    assert "EP: experts spread over all devices" in text
    assert "the rule of thumb EP" not in text
    coded = pretend(0.5, **{"compression.dispatch": "int8"})
    text = " ".join(shown([coded, pretend(1.0)], **rules).split())
    assert "2.32 x as fast as the best rule of thumb, FSDP; without codecs 1.16 x." in text


def test_a_rule_of_thumb_may_win():
    best = pretend(1.0)
    text = " ".join(shown([best, pretend(1.5, mesh=(8, 1, 1, 1))], FSDP=best).split())
    assert "The plan is itself a rule of thumb, FSDP: no other is faster." in text
    assert "1 FSDP" in text


def test_a_preset_without_codecs_is_called_no_codec():
    ours, coded = pretend(1.0), pretend(1.5, **{"compression.dispatch": "int8"})
    assert "as here, but compression.dispatch = no codec)" in shown([coded, ours])
    assert "as here, but compression.dispatch = int8)" in shown([ours, coded])
    preset = pretend(1.5, **{"compression.preset": "hybrid"})
    assert tables.different_text(preset.cfg, coded.cfg) == "fsdp 8, as here, but " + (
        f"compression.dispatch = {tables.PRESETS['hybrid']['dispatch']}"
    )


def test_speed_is_told_as_tokens_and_as_a_share_of_the_fastest_product(monkeypatch):
    plan, there = pretend(0.5), cluster()
    monkeypatch.setattr(tables, "model_flops", lambda plan: 10**9)
    tokens = plan.cfg.train.batch_sequences * plan.cfg.data.sequence_length / 0.5
    share = tokens * 1e9 / there.devices / max(rate for _, rate in there.device.products["float32"])
    text = speed_text(plan, there)
    assert text.startswith(f"{tokens:,.0f} tokens/s; ")
    assert f" {share:.0%} of its fastest float32 matrix product" in text


def simulated(*ops, inside=None):
    timeline = SimpleNamespace(seconds=1.0)
    return SimulatedStep(timeline, Totals(), ops, tuple(0.0 for _ in ops), inside or {})


def product(flops):
    return Op("product", "router", flops=flops, bytes=1, dtype="float32")


def plan_of(simulated):
    return SimpleNamespace(parts=((1.0, simulated),), seconds=1.0)


def test_a_table_of_one_large_product_is_doubted():
    """Someone gave one size of 1e12 FLOPs, and a router took 51 seconds."""
    device = replace(cluster().device, products={"float32": ((1e12, 15e12),)})
    loop = simulated(product(1e6), inside={0: (simulated(product(1e6)), 8)})
    text = small_products(plan_of(loop), device)
    assert text is not None
    assert "53% of the step" in text  # eight trips of 1e12 / 15e12 seconds
    assert "float32 begin at 1e+12 FLOPs" in text
    assert small_products(plan_of(simulated(product(1e6))), device) is None  # 7 % of the step
    assert small_products(plan_of(loop), cluster().device) is None


def test_the_gain_of_copies_is_told_or_why_there_are_none():
    """Two devices of experts, of which one gets 0.8 of the choices: 1.6 x the mean."""
    load = ExpertLoad("hot", ((0.65, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05),))
    plain, copied = pretend(2.0, mesh=(1, 1, 2, 1)), pretend(1.0, mesh=(1, 1, 2, 1))
    copied.cfg = change(copied.cfg, {"moe.slots": 1})

    def told(*ranked, load=load):
        return tables.copies_text(SearchResult([*ranked], 9, 5, 1, 8 * GIB, 1.0), load)

    assert told(plain, load=ExpertLoad("even", ((1 / 8,) * 8,))) is None
    assert "gets 1.60 x the mean choices. No plan with copies" in told(plain)
    assert told(copied, plain).endswith("The plan is 2.00 x as fast as the best without.")
    slow = SimpleNamespace(**{**vars(copied), "seconds": 3.0})
    said = told(plain, slow)
    assert "Copies in 1 slot a device, on their mesh: 1.00 x." in said
    assert said.endswith("The step would take 1.50 x as long: to send them costs more.")
