"""Which checkpoint is evaluated, under which config. No device is touched."""

import dataclasses
import shutil

import pytest

from moejax.checkpoint.find import Saved
from moejax.checkpoint.manifest import write_manifest
from moejax.config.checks import check
from moejax.config.fields import change, get_value
from moejax.config.load import to_dict
from moejax.config.schema import CompressionConfig, Config, DataConfig, MeshConfig, PlanConfig
from moejax.errors import InputError
from moejax.evaluate.checkpoint import (
    Chosen,
    choose,
    evaluation_config,
    on_all_devices,
    tokenizer_beside_weights,
)
from moejax.runtime.processes import ALONE
from tests.cases import on_nodes, small_config

# A config that passes the checks of a command: those of other tests have settings without effect.
CHECKED = {"vocab_size": 264, "mlp_hidden": 384}


def write_step(folder, step, cfg=None, **facts):
    """A finished checkpoint without arrays."""
    path = folder / str(step)
    path.mkdir(parents=True)
    (path / "file").write_text("content")
    config = {} if cfg is None else {"config": to_dict(cfg)}
    write_manifest(path, {"step": step, **config, **facts})
    return path


@pytest.fixture
def run(tmp_path):
    cfg = small_config((1, 2, 2, 1), model=CHECKED)
    cfg = dataclasses.replace(cfg, plan=PlanConfig(mode="hand"))
    for step in (5, 10):
        write_step(tmp_path / "run/checkpoints", step, cfg)
    return tmp_path / "run"


def test_the_newest_checkpoint_is_chosen_from_a_run_an_import_or_by_name(run):
    assert choose(str(run), None, [], ALONE).saved.step == 10
    assert choose(str(run), 5, [], ALONE).saved.step == 5
    assert choose(str(run / "checkpoints/5"), None, [], ALONE).saved.step == 5
    shutil.move(run / "checkpoints", run.with_name("imported"))
    assert choose(str(run.with_name("imported")), None, [], ALONE).saved.step == 10


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_is(run):
    (run / "checkpoints/10/file").write_text("Content")
    before = sorted(path.name for path in run.rglob("*"))
    chosen = choose(str(run), None, [], ALONE)
    assert chosen.saved.step == 5
    assert len(chosen.notes) == 1
    assert "checkpoints/10 is damaged: file has digest" in chosen.notes[0]
    assert choose(str(run), None, ["checkpoint.verify=size"], ALONE).saved.step == 10
    with pytest.raises(InputError, match=r"no whole checkpoint. .*10 is damaged"):
        choose(str(run), 10, [], ALONE)
    assert sorted(path.name for path in run.rglob("*")) == before


@pytest.mark.parametrize(
    ("step", "overrides", "said"),
    [
        (7, [], "no checkpoint of step 7. .* has steps 10, 5"),
        (None, ["train.num_steps=3"], r"`train\.num_steps` has no effect"),
        (None, ["plan=auto"], r"`plan\.mode` has no effect"),
        (None, ["compression=hybrid"], "has no effect"),
        (None, ["model.width=64"], r"`model\.width` is fixed by the weights. Got 64, .* has 32"),
        (None, ["mesh.fsdp=3"], "not divisible"),
        (None, ["mesh.shape=3"], "unknown field"),
    ],
)
def test_what_does_not_fit_is_refused(run, step, overrides, said):
    with pytest.raises(InputError, match=said):
        choose(str(run), step, overrides, ALONE)


def test_what_an_evaluation_reads_may_be_set(tmp_path):
    data = DataConfig("tokens", ("train.bin",), ("eval.bin",))
    cfg = dataclasses.replace(small_config(model=CHECKED), data=data, plan=PlanConfig(mode="hand"))
    write_step(tmp_path, 3, cfg)
    given = {
        "data.eval_files": ("b.bin",),
        "data.sequence_length": 8,
        "data.isolate_documents": False,
        "train.batch_sequences": 16,
        "train.micro_batches": 2,
        "model.dtype": "bfloat16",
        "moe.capacity_factor": 3.0,
    }
    usual = choose(str(tmp_path), None, [], ALONE).cfg
    assert all(get_value(usual, name) != value for name, value in given.items())
    texts = [f"{name}={value}" for name, value in {**given, "data.eval_files": "b.bin"}.items()]
    found = choose(str(tmp_path), None, texts, ALONE).cfg
    assert {name: get_value(found, name) for name in given} == given


def test_a_benchmark_with_forced_routing_is_read_by_scores_and_told(tmp_path):
    cfg = change(small_config(model=CHECKED), {"moe.router.forced": "balanced"})
    cfg = dataclasses.replace(cfg, plan=PlanConfig(mode="hand"))
    write_step(tmp_path, 3, cfg)
    chosen = choose(str(tmp_path), None, [], ALONE)
    assert chosen.cfg.moe.router.forced == "none"
    (note,) = chosen.notes
    assert "`moe.router.forced` = balanced" in note
    with pytest.raises(InputError, match=r"`moe\.router\.forced` has no effect here"):
        choose(str(tmp_path), None, ["moe.router.forced=balanced"], ALONE)


def test_nothing_to_evaluate_is_told(tmp_path):
    with pytest.raises(InputError, match="no finished checkpoint"):
        choose(str(tmp_path / "nowhere"), None, [], ALONE)
    write_step(tmp_path, 3)
    with pytest.raises(InputError, match="has no config"):
        choose(str(tmp_path), None, [], ALONE)


def test_a_run_is_evaluated_on_its_own_mesh_without_codecs_and_plan():
    cfg = on_nodes()
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **CHECKED))
    planned = dataclasses.replace(cfg, plan=PlanConfig(mode="auto", seconds=3))
    found = evaluation_config(planned, {})
    assert found.mesh == cfg.mesh
    assert found.compression == CompressionConfig()
    assert found.plan == PlanConfig(mode="hand")
    check(found)


def test_a_named_axis_describes_the_whole_mesh():
    cfg = dataclasses.replace(on_nodes(), route="two_level", route_trim=True)
    found = evaluation_config(cfg, {"mesh.expert": 4, "route": "merge"})
    assert found.mesh == MeshConfig(None, expert=4)
    assert (found.route, found.route_trim) == ("merge", False)
    assert evaluation_config(cfg, {"train.micro_batches": 2}).mesh == cfg.mesh
    assert evaluation_config(cfg, {"mesh.platform": "cpu"}).mesh.fsdp == cfg.mesh.fsdp
    staged = change(cfg, {"mesh.stage": 2, "mesh.stage_slices": 2, "train.micro_batches": 2})
    assert evaluation_config(staged, {}).mesh == staged.mesh
    assert evaluation_config(staged, {"mesh.expert": 4}).mesh.stage_slices == 1


@pytest.mark.parametrize(
    ("devices", "experts", "width", "wanted"),
    [(8, 8, 32, (1, 1, 8)), (8, 4, 32, (1, 2, 4)), (8, 4, 36, (2, 1, 4)), (1, 8, 32, (1, 1, 1))],
)
def test_weights_without_a_mesh_are_spread_over_all_devices(devices, experts, width, wanted):
    cfg = small_config(model={"width": width}, moe={"num_experts": experts})
    mesh = on_all_devices(cfg, devices).mesh
    assert (mesh.replica, mesh.fsdp, mesh.expert) == wanted
    assert on_all_devices(small_config((2, 1, 1, 2)), devices).mesh.tensor == 2, "a mesh is kept"
    dense = small_config(model={"moe_every": None})
    assert on_all_devices(dense, 4).mesh == MeshConfig(1, fsdp=4)


def test_the_tokenizer_of_an_import_is_found(tmp_path):
    saved = Saved(0, tmp_path / "out/checkpoints/0", {})
    adapters = Saved(0, tmp_path / "run/checkpoints/0", {})
    chosen = Chosen(saved, Config(), [])
    assert tokenizer_beside_weights(chosen) is None
    for place in ("out/hf", "out/checkpoints/hf"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "tokenizer.json").touch()
        assert tokenizer_beside_weights(chosen) == tmp_path / place / "tokenizer.json"
    assert tokenizer_beside_weights(Chosen(adapters, Config(), [], saved)) is not None


def test_defaults_of_an_old_checkpoint_are_todays(tmp_path):
    path = write_step(tmp_path, 1, config={"model": {"width": 48}})
    found = choose(str(path), None, [], ALONE).cfg
    assert found == evaluation_config(
        dataclasses.replace(Config(), model=dataclasses.replace(Config().model, width=48)), {}
    )
