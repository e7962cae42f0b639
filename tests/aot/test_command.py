"""The command without the compiler of a GPU; tests/hlo/test_aot.py has the rest."""

import dataclasses
from pathlib import Path

import jax
import pytest
from jax.experimental.topologies import TopologyDescription
from rich.console import Console

from moejax.aot.command import (
    compress_exposed,
    hidden_shares,
    main,
    print_compiled,
    to_json,
    traffic_of,
)
from moejax.aot.compiled import CompiledCollective
from moejax.aot.step import (
    CompiledStep,
    census,
    described_config,
    filled_share,
    model_flops,
    other_peaks,
)
from moejax.aot.target import TARGETS, describe_devices
from moejax.aot.work import Work
from moejax.config.checks import check
from moejax.config.load import load_config
from moejax.config.schema import MeshConfig
from moejax.errors import InputError
from moejax.layout.layout import build_layout
from moejax.model.count import count
from tests.cases import small_config, step_for

CONFIG = str(Path(__file__).parents[2] / "configs/olmoe_1b_7b.py")


def exchange(**changes):
    base = CompiledCollective(
        "all_to_all", ("expert",), "bfloat16", 64, 3, True, True, False, "start"
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config", CONFIG, "--nodes", "2"], r"needs 8 devices, found 16 \(gpu\)"),
        (["--config", CONFIG, "--nodes", "0"], "--nodes is 0"),
        (["--config", CONFIG, "--config.model.breadth=8"], "breadth"),
        (["--config", "nowhere.py"], "nowhere.py does not exist"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(words, said, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(err)


@pytest.mark.parametrize(("target", "extra"), [("h200", "aot"), ("v5p", "tpu")])
def test_a_compiler_that_is_not_installed_is_named(target, extra, monkeypatch):
    def absent(*_, **__):
        raise NotImplementedError("topology not implemented")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", absent)
    with pytest.raises(InputError, match=rf"no compiler for .*Install moejax\[{extra}\]"):
        describe_devices(TARGETS[target], 1)


def test_tools_that_the_compiler_would_die_without_are_asked_for_first(monkeypatch):
    found = TopologyDescription(jax.devices())
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", lambda **_: found)
    monkeypatch.setattr("moejax.aot.target.Path.exists", lambda _: False)
    monkeypatch.setattr("moejax.aot.target.shutil.which", lambda _: None)
    with pytest.raises(InputError, match=r"no ptxas and no libdevice.*Install moejax\[aot\]"):
        describe_devices(TARGETS["h200"], 1)


def test_the_described_cluster_stands_in_for_the_machine_of_the_config():
    cfg = load_config(CONFIG, ["mesh.replica=2", "mesh.simulated_devices=4"])
    with pytest.raises(InputError, match="needs 16 devices, found 4"):
        check(cfg)
    mesh = described_config(cfg, TARGETS["v6e"], 2).mesh
    assert (mesh.nodes, mesh.platform, mesh.simulated_devices) == (2, "tpu", None)


def compiled_step(exchanges):
    mesh, work = {"expert": 8, "fsdp": 2}, Work()
    return CompiledStep(mesh, ("fsdp",), {}, 1.0, 1, 1, 2, exchanges, [], work, model_flops=1.0)


def test_the_hidden_share_is_of_the_exchanges_that_carry_tokens():
    exchanges = [
        exchange(),
        exchange(hides=False, calls=1),
        exchange(hides=False, dtype="uint8"),
        exchange(hides=False, kind="all_gather"),
        exchange(hides=False, backward=True),
    ]
    step = compiled_step(exchanges)
    assert step.hidden_share(backward=False) == 0.75
    assert step.hidden_share(backward=True) == 0
    assert census(exchanges)["all_to_all", "expert", "bfloat16", "async"] == [7, 7 * 64, 3]
    assert len(to_json(step)["collectives"]) == len(census(exchanges))


def test_bytes_on_the_wire_are_those_of_rings():
    exchanges = [
        exchange(),
        exchange(kind="all_reduce", axes=("expert", "fsdp"), hides=False, calls=1),
        exchange(kind="ppermute", axes=("fsdp",), calls=1),
        exchange(kind="all_gather", axes=("?",), calls=1),
    ]
    step = compiled_step(exchanges)
    assert step.wire() == {
        ("all_gather", "?"): (64, 1),
        ("all_reduce", "expert, fsdp"): (2 * 64 * 15 / 16, 0),
        ("all_to_all", "expert"): (3 * 64 * 7 / 8, 1),
        ("ppermute", "fsdp"): (64, 1),
    }
    assert step.hidden_wire() == pytest.approx(296 / 416)
    assert len(to_json(step)["wire"]) == 4


def test_flops_executed_are_a_share_of_the_models():
    work = Work(flops={"experts": 3.0, "rest": 1.0}, most_flops={"experts": 4.0, "rest": 1.0})
    step = dataclasses.replace(compiled_step([]), work=work, model_flops=2.0)
    assert step.executed() == {"experts": 1.5, "rest": 0.5, "all": 2.0}
    assert step.executed(most=True)["all"] == 2.5
    assert to_json(step)["executed"]["all"] == 2.0
    console = Console(record=True, width=120)
    print_compiled(step, "a step", TARGETS["h200"], console)
    assert "2.00 (experts 1.50, rest 0.50); at whole buffers 2.50" in console.export_text()


@pytest.mark.parametrize(
    ("mesh", "share"),
    [((1, 1, 4, 1), 0.8), ((1, 4, 1, 1), 1.0)],  # a headroom of a quarter; every expert is here
)
def test_a_balanced_router_fills_what_the_headroom_leaves(mesh, share):
    train_step = step_for(small_config(mesh))
    assert filled_share(train_step) == pytest.approx(share, rel=0.05)


def test_model_flops_of_all_devices_are_those_of_the_batch():
    train_step = step_for(small_config())
    counts = count(train_step.cfg, train_step.parameter_sizes())
    tokens = train_step.batch_shape[0] * train_step.batch_shape[1]
    devices = train_step.layout.size(train_step.layout.mesh_axes)
    assert model_flops(train_step) * devices == counts.flops_per_token * tokens


def test_evaluation_and_sampling_count_beside_a_state_that_they_read_a_part_of():
    train_step = step_for(small_config())
    state = sum(train_step.argument_bytes().values())
    step = dataclasses.replace(compiled_step([]), argument_bytes=state)
    found = other_peaks(train_step, step)
    weights = train_step.argument_bytes()["weights"]
    assert all(state < size < state + 3 * weights for size in found.values())
    assert dataclasses.replace(step, other_peaks=found).max_bytes == max(found.values())


def test_reductions_are_sums_of_gradients_and_clash_on_a_link_that_an_exchange_uses():
    def gradient(**changes):
        base = {"kind": "reduce_scatter", "dtype": "float32", "bytes": 2048, "backward": True}
        return exchange(**(base | changes))

    fast = gradient(launch="fast", beside=("start",), hides=False)
    slow = gradient(launch="slow", axes=("fsdp",), beside=("start",), calls=1)
    others = [
        exchange(),
        gradient(backward=False),
        gradient(bytes=4),
        gradient(dtype="int32"),
        gradient(axes=("tensor",)),
        exchange(kind="all_gather", hides=False, bytes=32),
        exchange(kind="all_gather", bytes=96),
    ]
    step = compiled_step([fast, slow, *others])
    assert step.reductions() == [fast, slow]
    assert step.reductions_beside_exchanges() == [fast]
    assert step.hidden_reductions() == 0.25
    assert step.hidden_gathers() == 0.75


# Two nodes of four: replica across, fsdp and expert inside.
LAYOUT = build_layout(MeshConfig(replica=2, fsdp=2, expert=2, nodes=2))
# Experts across both nodes.
WIDE = build_layout(MeshConfig(expert=8, nodes=2))


def collective(kind, *axes, hides=False, backward=False, dtype="bfloat16", size=100, calls=1):
    return CompiledCollective(kind, axes, dtype, size, calls, hides, hides, backward, "x")


@pytest.mark.parametrize(
    ("one", "layout", "kind"),
    [
        (collective("all_to_all", "expert_slow", "expert_fast"), WIDE, "tokens"),
        (collective("all_to_all", "expert_slow", backward=True), WIDE, "tokens_backward"),
        (collective("all_to_all", "expert_slow", dtype="uint8"), WIDE, None),
        (collective("all_to_all", "expert_fast"), WIDE, None),
        (collective("all_reduce", "replica", backward=True), LAYOUT, "gradients"),
        (collective("all_reduce", "replica"), LAYOUT, None),
        (collective("reduce_scatter", "expert_slow", backward=True), WIDE, "gradients"),
        (collective("all_gather", "expert_slow"), WIDE, "weights"),
        (collective("all_gather", "fsdp"), LAYOUT, None),
    ],
)
def test_traffic_across_nodes_belongs_to_a_class(one, layout, kind):
    assert traffic_of(one, layout) == kind


def test_only_what_is_exposed_is_compressed():
    tokens = collective("all_to_all", "expert_slow", hides=True, size=300)
    found = [
        tokens,
        dataclasses.replace(tokens, hides=False, bytes=100),
        collective("reduce_scatter", "expert_slow", backward=True),
        collective("all_gather", "expert_slow"),
    ]
    shares = hidden_shares(found, WIDE)
    assert shares == {"tokens": 0.75, "gradients": 0.0, "weights": 0.0}
    assert compress_exposed(found, WIDE, "hybrid") == {
        "preset": "none",
        "dense_gradient": "int8+feedback",
        "expert_gradient": "int8+feedback",
    }
    waited = [dataclasses.replace(one, hides=False) for one in found]
    assert compress_exposed(waited, WIDE, "hybrid").keys() >= {"dispatch", "combine"}
    assert compress_exposed(found, WIDE, "strong")["weights"] == "int8"
