"""The layer for multi-token prediction in files: left out by rule, or taken and given back."""

import json

import numpy as np
import pytest

from moejax.config.schema import MeshConfig
from moejax.errors import InputError
from moejax.hf.config import config_of
from moejax.hf.families import family_of
from moejax.hf.reader import Folder
from moejax.step.state import flat
from tests.hf.golden import ahead_folder, cases_of, golden_folder, import_weights
from tests.hf.random_models import draw_all, write_folder
from tests.hf.test_writer import assert_same_tensors, export_arrays, read_all

# Whole models are traced, whose layers have tests.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")


@pytest.fixture
def folder(tmp_path):
    """A model whose files have a layer that predicts ahead."""
    return ahead_folder(tmp_path / "in")


def test_the_layer_is_left_out_by_rule(folder):
    ((reason, names),) = import_weights(folder).plan.left_out.items()
    assert "model.predict_ahead" in reason
    assert {name.split(".")[2] for name in names} == {"2"}
    assert "model.layers.2.eh_proj.weight" in names


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("deepseek_v3", MeshConfig()),
        ("deepseek_v3", MeshConfig(fsdp=2, expert=2, tensor=2)),
        ("glm4_moe_lite", MeshConfig()),
        pytest.param("deepseek_v32", MeshConfig(), marks=pytest.mark.exhaustive),
        ("glm_moe_dsa", MeshConfig()),
    ],
)
def test_the_layer_is_taken_and_given_back(tmp_path, family, mesh):
    folder = ahead_folder(tmp_path / "in", family)
    step, plan, params, router_bias = import_weights(folder, mesh, predict_ahead=1)
    arrays = flat(params) | flat(router_bias)
    given = json.loads((folder / "config.json").read_text())
    table = family_of(given)
    assert table.write(step.cfg, given)["num_nextn_predict_layers"] == 1
    assert list(plan.left_out) == ["copies of the embedding and the head"]
    join = read_all(folder)["model.layers.2.eh_proj.weight"]
    held = np.asarray(arrays["predict_ahead.w_join"])
    np.testing.assert_array_equal(np.concatenate([held[0], held[1]]).T, join)
    export_arrays(tmp_path / "out", table, step, arrays, "float32")
    assert_same_tensors(read_all(tmp_path / "out"), read_all(folder))


def test_a_model_without_the_layer_cannot_predict_ahead(tmp_path):
    folder = golden_folder(tmp_path, cases_of("deepseek_v3")["even, groups, yarn"])
    with pytest.raises(InputError, match=r"`model\.predict_ahead` is 1, .*model\.layers\.2\."):
        import_weights(folder, predict_ahead=1)


def test_whether_to_predict_ahead_is_no_matter_of_the_folder(folder):
    with Folder(folder) as opened:
        assert config_of(opened).model.predict_ahead == 0


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("ernie4_5_moe", ("mtp_block.0.input_layernorm", "mtp_emb_norm.0", "mtp_linear_proj.0")),
        ("hy_v3", ("layers.4.eh_proj", "layers.4.final_layernorm", "layers.4.mlp.router.gate")),
    ],
)
def test_layers_in_a_form_of_their_own_are_left_out(tmp_path, family, names):
    (case,) = (case for name, case in cases_of(family).items() if name.startswith("even"))
    more = {f"model.{name}.weight": (3,) for name in names}
    config = {**case["config"], "num_nextn_predict_layers": 1}
    folder = write_folder(tmp_path, config, draw_all({**case["tensors"], **more}))
    ((reason, found),) = import_weights(folder).plan.left_out.items()
    assert "model.predict_ahead" in reason
    assert set(found) == set(more)
    with pytest.raises(InputError, match=r"no tensor of this family holds .*predict_ahead"):
        import_weights(folder, predict_ahead=1)
