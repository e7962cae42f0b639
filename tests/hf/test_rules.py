"""Rules: the tensors of every golden model, and each parameter held exactly once."""

import numpy as np
import pytest

from moejax.config.fields import change
from moejax.errors import InputError
from moejax.hf.config import config_of
from moejax.hf.families import family_of
from moejax.hf.load import parameters_of, without_rule
from moejax.hf.model import describe_anywhere
from moejax.hf.reader import Folder
from moejax.hf.rules import Rule, tensors_of
from tests.hf.golden import all_cases, cases_of, golden_folder

# Whole models are traced, whose layers have tests.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")


@pytest.fixture
def model(tmp_path):
    """Makes the family, the parameters and the model's settings of a golden case."""

    def build(family, name, **values):
        with Folder(golden_folder(tmp_path, cases_of(family)[name])) as folder:
            cfg = change(config_of(folder), {f"model.{key}": x for key, x in values.items()})
            described = describe_anywhere(cfg)
            table = family_of(folder.config)
        parameters = parameters_of(*described)
        zeros = without_rule(table, parameters)
        return table, {p: x for p, x in parameters.items() if p not in zeros}, cfg.model

    return build


@pytest.mark.parametrize(("family", "name"), all_cases())
def test_tensors_have_the_names_and_shapes_that_transformers_writes(model, family, name):
    table, parameters, cfg = model(family, name)
    tensors = tensors_of((*table.rules, *table.experts[0]), parameters, cfg)
    found = {tensor.name: list(tensor.shape) for tensor in tensors}
    wanted = dict(cases_of(family)[name]["tensors"])
    if cases_of(family)[name]["config"]["tie_word_embeddings"]:
        wanted.pop("lm_head.weight", None)
    assert found == wanted
    once = {(t.name, t.rows and (t.rows.first, t.rows.count)) for t in tensors}
    assert len(once) == len(tensors), "a name is there twice"


def test_dense_mlps_of_kimi_linear_have_the_names_that_transformers_saves_too(model):
    table, parameters, cfg = model("kimi_linear", "even, groups")
    released, saved = (
        {tensor.name for tensor in tensors_of((*table.rules, *form), parameters, cfg)}
        for form in table.experts[:2]
    )
    assert saved == {name.replace(".mlp.", ".block_sparse_moe.") for name in released}
    dense = "model.layers.0.block_sparse_moe."
    assert saved - released == {f"{dense}{name}_proj.weight" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(("family", "name"), all_cases())
def test_every_form_of_experts_holds_each_number_once(model, family, name):
    table, parameters, cfg = model(family, name)
    for form in table.experts:
        filled = {path: np.zeros(p.shape, int) for path, p in parameters.items()}
        for tensor in tensors_of((*table.rules, *form), parameters, cfg):
            place = filled[tensor.path]
            place = place if tensor.repeat is None else place[tensor.repeat]
            box = {letter: (0, size) for letter, size in tensor.view.size.items()}
            once = np.zeros(place.shape, int)
            tensor.fill(once, box, lambda r: np.ones([b - a for a, b in r], int))
            place += once
        assert all((count == 1).all() for count in filled.values())


def test_layers_before_pipeline_stages_have_the_same_names(model):
    """They are a group of their own in a checkpoint, which files of weights do not know."""
    found = []
    for before in (0, 1):
        case = ("deepseek_v3", "even, groups, yarn")
        table, parameters, cfg = model(*case, num_layers=4, layers_before_stages=before)
        tensors = tensors_of((*table.rules, *table.experts[0]), parameters, cfg)
        found.append({tensor.name: tensor.view.shape for tensor in tensors})
        stacks = {path.split(".")[1] for path in parameters if path.startswith("groups.")}
        assert len(stacks) == 2 + before
    assert found[0] == found[1]


def test_layers_are_in_the_order_of_their_numbers(model):
    table, parameters, cfg = model("qwen3_moe", "every second block dense, yarn")
    tensors = tensors_of((*table.rules, *table.experts[0]), parameters, cfg)
    layers = [int(t.name.split(".")[2]) for t in tensors if t.name.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert set(layers) == {0, 1, 2, 3}


def test_a_parameter_without_a_rule_is_refused(model):
    table, parameters, cfg = model("mixtral", "window, top 1")
    rules = [rule for rule in table.rules if rule.ours != "attention.w_q"]
    with pytest.raises(
        InputError, match=r"holds the parameter groups\.0\.blocks\.0\.attention\.w_q"
    ):
        tensors_of((*rules, *table.experts[0]), parameters, cfg)


def test_half_a_rule_is_refused(model):
    table, parameters, cfg = model("mixtral", "window, top 1")
    half = [rule for rule in table.experts[0] if rule.at != (("U", 1),)]
    said = r"family hold [0-9,]+ of the [0-9,]+ numbers of groups.*w_in"
    with pytest.raises(InputError, match=said):
        tensors_of((*table.rules, *half), parameters, cfg)


def test_a_rule_names_the_letters_of_its_parameter(model):
    table, parameters, cfg = model("mixtral", "window, top 1")
    wrong = Rule("norm.scale", "model.norm.weight", "D V")
    rules = [rule for rule in table.rules if rule.ours != "norm.scale"]
    with pytest.raises(ValueError, match="letters"):
        tensors_of((*rules, wrong, *table.experts[0]), parameters, cfg)
