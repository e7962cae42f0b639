"""The command `python -m moejax.plan`: its refusals, and a plan for a file."""

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from moejax.config.checks import check
from moejax.config.checks.planned import pinned
from moejax.config.fields import get_value
from moejax.config.load import split_overrides
from moejax.plan.cluster.file import known_clusters, load_topology, write_topology
from moejax.plan.command import config_to_plan, main, parser, print_cluster, print_clusters
from moejax.plan.search.file import load_plan
from tests.plan.clusters import GIB, cluster
from tests.plan.others.plans import KNOWN, PUBLISHED

SMALL = PUBLISHED["Qwen3-30B-A3B"] | {"num_hidden_layers": 2, "vocab_size": 1024}
COMMON = ["--config", "configs/tiny.py", "--traces", "3"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--topology", "h200"], "needs --config FILE"),
        (["--config", "configs/tiny.py"], "no topology.*h200:2.*--clusters lists"),
        (["--print_topology"], "Add --topology h200:2"),
        (["--clusters", "h300"], "Did you mean h200"),
        ([*COMMON, "--topology", "nowhere"], "nowhere"),
        ([*COMMON, "--topology", "h200", "--free", "model.width"], "which no plan chooses"),
        ([*COMMON, "--topology", "h200", "--out", "plan.txt"], r"ends in \.json"),
        ([*COMMON, "--topology", "h200", "--routing", "uneven"], "cannot be read"),
        ([*COMMON, "--topology", "h200", "--config.mesh.nodes=5"], "--topology h200 has 2"),
        ([*COMMON, "--topology", "h200", "--seconds", "nan"], "--seconds is nan"),
        ([*COMMON, "--topology", "h200", "--seconds", "-5"], "--seconds is -5"),
        ([*COMMON, "--topology", "h200", "--traces", "1"], "--traces is 1"),
        ([*COMMON, "--topology", "h200", "--top", "0"], "--top is 0"),
        ([*COMMON, "--topology", "h200", "--out", "/proc/none/plan.json"], "cannot be written"),
        ([*COMMON, "--topology", "h200", "--report", "/proc/plan.html"], "cannot be written"),
        (["--topology", "h200", "--hf", "/nowhere"], "has no config.json"),
        ([*COMMON, "--topology", "h200", "--hf", "model"], "two models"),
        ([*COMMON, "--topology", "tpu_v5p", "--as", "megatron"], "trains on GPUs"),
        ([*COMMON, "--topology", "h200", "--as", "maxtext", "--config.lora.rank=4"], "lora"),
    ],
)
def test_the_command_refuses_in_one_line(words, said, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(err)


CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))
LONG = "mesh,route,route_chunks,route_chunks_backward,train,model.remat"


def asked(*words):
    """Returns the config of a search and the lines about it, for the words of a command line."""
    rest, overrides = split_overrides(words)
    args = parser().parse_args(rest)
    return config_to_plan(args, overrides, load_topology(args.topology))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("cluster", ["h200:16", "dgx_a100:4", "tpu_v5p:1"])
def test_a_search_chooses_all_that_a_shipped_config_holds_for_its_cluster(path, cluster):
    """`mesh.nodes` 16 was refused on other clusters, and the mesh of 128 H100s stayed."""
    words = ["--config", str(path), "--topology", cluster]
    cfg, notes = asked(*words)
    check(cfg)
    assert pinned(cfg) == frozenset()
    assert (cfg.mesh.expert, cfg.mesh.fsdp, cfg.mesh.stage) == (1, 1, 1)
    assert (cfg.model.remat, cfg.train.micro_batches) == ("none", 1)
    assert cfg == asked(*words, "--free", LONG)[0]
    assert notes[0].startswith("free, although the config file sets it: ")
    assert "mesh.expert = " in notes[0] or "mesh.fsdp = " in notes[0]
    assert not any(note.startswith("pinned") for note in notes)


QWEN = ("--config", "configs/qwen3_235b_a22b.py", "--topology", "h200:4")


@pytest.mark.parametrize(
    ("words", "names", "said"),
    [
        (
            ["--config.mesh.expert=8", "--config.mesh.tensor=1", "--free", "mesh"],
            {"mesh.expert": 8, "mesh.tensor": 1},
            "pinned: mesh.expert = 8, mesh.tensor = 1 (command line)",
        ),
        (
            ["--config.plan.keep=route_chunks,model.remat", "--config.mesh.expert=8"],
            {"mesh.expert": 8, "route_chunks": 2, "model.remat": "full"},
            "pinned: mesh.expert = 8 (command line), "
            "route_chunks = 2, model.remat = full (config file)",
        ),
    ],
)
def test_what_the_command_line_sets_stays_and_is_told(words, names, said):
    cfg, notes = asked(*QWEN, *words)
    assert pinned(cfg) == names.keys()
    assert {name: get_value(cfg, name) for name in names} == names
    assert notes[-1] == said


@pytest.mark.parametrize(("devices", "said"), [("h200:1", "none"), ("mine", "4"), ("same", None)])
def test_a_plan_for_other_devices_than_the_config_simulates_says_so(devices, said, tmp_path):
    """`launcher and config differ` came after the plan was made and shipped."""
    if devices != "h200:1":
        there = cluster(inside=4 if devices == "mine" else 8, nodes=1)
        devices = str(tmp_path / "topology.json")
        write_topology(there, Path(devices))
    notes = asked("--config", "configs/tiny.py", "--topology", devices)[1]
    last = [note for note in notes if note.startswith("note:")]
    wanted = [f"--config.mesh.simulated_devices={said}."] if said else []
    assert [note.split()[-1] for note in last] == wanted


def test_codecs_of_a_file_stay_and_are_told(tmp_path):
    settings = {"compression": {"dispatch": "int8"}, "mesh": {"expert": 4}}
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    words = ["--config", str(tmp_path / "mine.json"), "--topology", "h200:2"]
    cfg, notes = asked(*words)
    assert (cfg.compression.dispatch, cfg.mesh.expert) == ("int8", 1)
    assert notes[-1] == "pinned: compression.dispatch = int8 (config file)"
    assert asked(*words, "--free", "compression")[0].compression.dispatch != "int8"


def test_a_file_that_asks_for_a_plan_pins_what_it_sets(tmp_path):
    settings = {"plan": {"mode": "auto"}, "mesh": {"tensor": 2}}
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    words = ["--config", str(tmp_path / "mine.json"), "--topology", "h200:2"]
    assert asked(*words) == (asked(*words)[0], ["pinned: mesh.tensor = 2 (config file)"])
    assert pinned(asked(*words, "--free", "mesh")[0]) == frozenset()


def test_a_printed_topology_is_read_back_unchanged(tmp_path, capsys):
    assert main(["--topology", "h200:4", "--print_topology"]) == 0
    (tmp_path / "mine.json").write_text(capsys.readouterr().out)
    assert load_topology(str(tmp_path / "mine.json")) == load_topology("h200:4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [
        "megatron",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("maxtext", "torchtitan")),
    ],
)
def test_a_published_model_is_planned_for_another_trainer(trainer, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    words = ["--hf", str(tmp_path), "--topology", "h200:1", "--traces", "2", "--as", trainer]
    assert main([*words, "--config.train.batch_sequences=16"]) == 0
    out = capsys.readouterr().out
    for part in ("so these are assumed:", "how to go on", "cannot express of this plan:"):
        assert part in out
    assert "what the prediction assumes:" in out
    assert f"({KNOWN[trainer]['package']})" in out


@pytest.mark.slow
def test_the_command_plans_for_a_file(tmp_path, capsys):
    write_topology(cluster(memory=GIB), tmp_path / "topology.json")
    words = [*COMMON, "--topology", str(tmp_path / "topology.json"), "--fewer"]
    words += ["--config.model.num_layers=1", "--config.mesh.tensor=2", "--top", "2"]
    assert main([*words, "--traces", "2", "--out", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert "x as fast as" in out
    nodes = [line.split(":")[0] for line in out.splitlines() if re.match(r"\d+ nodes?:", line)]
    assert nodes == ["1 node", "2 nodes"]
    assert load_plan(tmp_path / "plan.json").devices == 8


def shown(show, *words):
    text = StringIO()
    show(*words, Console(file=text, width=80))
    return text.getvalue()


def test_every_cluster_is_one_short_line_without_its_sources():
    lines = shown(print_clusters).splitlines()
    assert max(map(len, lines)) <= 80
    for name in known_clusters():
        assert sum(line.startswith(f"{name} ") for line in lines) == 1
    assert "data sheet" not in "".join(lines)


def test_one_cluster_tells_its_sources():
    text = shown(print_cluster, "h200:4")
    assert "h200:4: 4 x 8 NVIDIA H200" in text
    assert "source: H200 data sheet" in text
