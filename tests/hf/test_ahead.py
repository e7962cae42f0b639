"""The layer for multi-token prediction in files: left out by rule, or taken and given back."""

from dataclasses import replace

import numpy as np
import pytest

from moejax.config.schema import MeshConfig
from moejax.errors import InputError
from moejax.hf.config import config_of
from moejax.hf.families import family_of
from moejax.hf.load import load, plan_load
from moejax.hf.reader import Folder
from moejax.step.state import flat
from tests.cases import step_for
from tests.hf.golden import ahead_folder, cases_of, run_config
from tests.hf.random_models import draw_all, write_folder
from tests.hf.test_writer import assert_same_tensors, export_arrays, read_all


@pytest.fixture(autouse=True, scope="module")
def annotations(unchecked_annotations):
    """Leaves annotations unchecked: whole models are traced, whose layers have tests."""


@pytest.fixture
def folder(tmp_path):
    """A model whose files have a layer that predicts ahead."""
    return ahead_folder(tmp_path / "in")


def plan_with(opened, ahead, mesh=None):
    cfg = run_config(opened, mesh or MeshConfig(), sequences=8, length=8)
    step = step_for(replace(cfg, model=replace(cfg.model, predict_ahead=ahead)))
    shapes = (step.abstract.params, step.abstract.router_bias)
    return step, plan_load(opened, step.model, *shapes)


def test_the_layer_is_left_out_by_rule(folder):
    with Folder(folder) as opened:
        _, plan = plan_with(opened, 0)
    ((reason, names),) = plan.left_out.items()
    assert "model.predict_ahead" in reason
    assert {name.split(".")[2] for name in names} == {"2"}
    assert "model.layers.2.eh_proj.weight" in names


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(fsdp=2, expert=2, tensor=2)])
def test_the_layer_is_taken_and_given_back(folder, tmp_path, mesh):
    with Folder(folder) as opened:
        step, plan = plan_with(opened, 1, mesh)
        arrays = flat(load(plan, opened, step.abstract.params))
        arrays |= flat(load(plan, opened, step.abstract.router_bias))
        table = family_of(opened.config)
        config = table.write(step.cfg, opened.config)
    assert config["num_nextn_predict_layers"] == 1
    assert list(plan.left_out) == ["copies of the embedding and the head"]
    join = read_all(folder)["model.layers.2.eh_proj.weight"]
    held = np.asarray(arrays["predict_ahead.w_join"])
    np.testing.assert_array_equal(np.concatenate([held[0], held[1]]).T, join)
    export_arrays(tmp_path / "out", table, step, arrays, "float32")
    assert_same_tensors(read_all(tmp_path / "out"), read_all(folder))


def test_a_model_without_the_layer_cannot_predict_ahead(tmp_path):
    case = cases_of("deepseek_v3")["even, groups, yarn"]
    folder = write_folder(tmp_path, case["config"], draw_all(case["tensors"]))
    with (
        Folder(folder) as opened,
        pytest.raises(InputError, match=r"`model\.predict_ahead` is 1, .*model\.layers\.2\."),
    ):
        plan_with(opened, 1)


def test_whether_to_predict_ahead_is_no_matter_of_the_folder(folder):
    with Folder(folder) as opened:
        assert config_of(opened).model.predict_ahead == 0
