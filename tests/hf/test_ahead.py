"""The layer for multi-token prediction in files: left out by rule, or taken and given back."""

import json
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from moejax.config.schema import MeshConfig
from moejax.errors import InputError
from moejax.hf.config import config_of
from moejax.hf.families import family_of
from moejax.hf.reader import Folder
from moejax.hf.rules import AHEAD, stacks_of
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


class Module(NamedTuple):
    """A module for multi-token prediction, as vLLM names and joins its tensors.

    Attributes:
      case: first word of the golden model's name.
      layers: the layers that are like its block: of attention, of the MLP or experts.
      parts: names that the block's tensors begin with, and those of these layers.
      own: norms of the embedding and of the hidden state, the projection of both, the last norm.
      left_out: modules after the first, which are not read.
    """

    case: str
    layers: tuple[int, int]
    parts: dict[str, str]
    own: tuple[str, str, str, str]
    left_out: tuple[str, ...] = ()


def deepseek_names(first: str, last: str = "") -> tuple[str, str, str, str]:
    """The names of a module's own tensors that began with DeepSeek-V3's."""
    return f"{first}enorm", f"{first}hnorm", f"{first}eh_proj", f"{last or first}final_layernorm"


QWEN = Module(
    "one",
    (0, 0),
    {"mtp.layers.0.": "model.layers.0."},
    ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
)
MODULES = {
    "qwen3_next": QWEN,
    "qwen3_5_moe_text": QWEN,
    "mimo_v2_flash": Module(
        "even,",
        (1, 0),
        {
            "model.mtp.layers.0.self_attn.": "model.layers.1.self_attn.",
            "model.mtp.layers.0.input_layernorm.": "model.layers.1.input_layernorm.",
            "model.mtp.layers.0.pre_mlp_layernorm.": "model.layers.0.post_attention_layernorm.",
            "model.mtp.layers.0.mlp.": "model.layers.0.mlp.",
        },
        deepseek_names("model.mtp.layers.0."),
        ("model.mtp.layers.1.eh_proj.weight",),
    ),
    "hy_v3": Module(
        "even,",
        (3, 3),
        {"model.layers.4.": "model.layers.3."},
        deepseek_names("model.layers.4."),
    ),
    "nemotron_h": Module(
        "odd,",
        (2, 1),
        {"mtp.layers.0.": "backbone.layers.2.", "mtp.layers.1.": "backbone.layers.1."},
        deepseek_names("mtp.layers.0.", "mtp.layers.1."),
    ),
}


def module_folder(place, family: str, *, joined=False):
    """Writes a model with a module whose block has the numbers of layers; returns all tensors.

    Args:
      joined: the module's experts are one tensor, and those of layers are not.
    """
    module = MODULES[family]
    (case,) = (c for name, c in cases_of(family).items() if name.startswith(module.case))
    D, tensors = case["config"]["hidden_size"], draw_all(case["tensors"])
    for after, before in module.parts.items():
        of = {name: x for name, x in tensors.items() if name.startswith(before)}
        block = {name.replace(before, after, 1): x for name, x in of.items()}
        tensors |= join_experts(block) if joined else block
    shapes = {
        f"{name}.weight": (D, 2 * D) if "proj" in name or "fc" in name[-2:] else (D,)
        for name in module.own
    }
    tensors |= draw_all(shapes)
    left_out = draw_all({name: (D, 2 * D) for name in module.left_out})
    config = {**case["config"], family_of(case["config"]).ahead or "use_cache": 1}
    return write_folder(place, config, tensors | left_out, files=2), tensors


def join_experts(block):
    """The tensors of a block, with those of its experts as one for both products."""
    experts = [name for name in block if ".experts." in name]
    begin = experts[0].split("experts.")[0] + "experts."
    count = 1 + max(int(name.removeprefix(begin).split(".")[0]) for name in experts)
    of = {
        kind: np.stack([block[f"{begin}{e}.{kind}_proj.weight"] for e in range(count)])
        for kind in ("gate", "up", "down")
    }
    rest = {name: x for name, x in block.items() if name not in experts}
    both = np.concatenate([of["gate"], of["up"]], axis=1)
    return rest | {f"{begin}gate_up_proj": both, f"{begin}down_proj": of["down"]}


def of_layer(arrays, model, layer: int) -> dict[str, np.ndarray]:
    """The parameters of a layer by their paths in its block."""
    found = {}
    for stack, layers in stacks_of(model).items():
        if layer in layers and stack.startswith("groups."):
            for path, values in arrays.items():
                if path.startswith(stack):
                    found[path.removeprefix(stack)] = np.asarray(values)[layers.index(layer)]
    return found


@pytest.mark.parametrize("family", MODULES)
def test_a_module_with_names_of_its_own_is_taken_and_given_back(tmp_path, family):
    """transformers leaves these modules out: names and order are those that vLLM reads."""
    module = MODULES[family]
    folder, tensors = module_folder(tmp_path / "in", family)
    step, plan, params, router_bias = import_weights(folder, predict_ahead=1)
    arrays = flat(params) | flat(router_bias)
    assert [name for names in plan.left_out.values() for name in names] == list(module.left_out)
    names = "embedding_norm.scale", "hidden_norm.scale", "w_join", "norm.scale"
    embedding, hidden, join, last = (np.asarray(arrays[f"predict_ahead.{n}"]) for n in names)
    wanted = [tensors[f"{name}.weight"] for name in module.own]
    for found, given in zip((embedding, hidden, last), (*wanted[:2], wanted[3]), strict=True):
        np.testing.assert_array_equal(found, given)
    # The first half of the projection's columns meets the embedding.
    np.testing.assert_array_equal(np.concatenate(list(join)).T, wanted[2])
    attends, feeds = (of_layer(arrays, step.cfg.model, layer) for layer in module.layers)
    block = {
        path.removeprefix(AHEAD): np.asarray(x)[0]
        for path, x in arrays.items()
        if path.startswith(AHEAD)
    }
    wanted = {p: x for p, x in attends.items() if p.startswith("attention")}
    wanted |= {p: x for p, x in feeds.items() if not p.startswith("attention")}
    assert block.keys() == wanted.keys()
    for path, values in wanted.items():
        np.testing.assert_array_equal(block[path], values)
    table = family_of(json.loads((folder / "config.json").read_text()))
    export_arrays(tmp_path / "out", table, step, arrays, "float32")
    left = {name: x for name, x in read_all(folder).items() if name not in module.left_out}
    assert_same_tensors(read_all(tmp_path / "out"), left)
    assert table.write(step.cfg, {}).get(table.ahead, 1) == 1


def test_experts_of_the_module_may_be_joined_where_those_of_layers_are_not(tmp_path):
    apart, _ = module_folder(tmp_path / "apart", "qwen3_5_moe_text")
    joined, _ = module_folder(tmp_path / "joined", "qwen3_5_moe_text", joined=True)
    wanted, found = (flat(import_weights(f, predict_ahead=1).params) for f in (apart, joined))
    for path, values in wanted.items():
        np.testing.assert_array_equal(found[path], values)


def test_a_model_with_another_block_ahead_has_no_key_for_it(tmp_path):
    folder, _ = module_folder(tmp_path, "qwen3_next")
    step = import_weights(folder, predict_ahead=1).train_step
    model = replace(step.cfg.model, ahead_block=("full", "dense"))
    table = family_of(json.loads((folder / "config.json").read_text()))
    with pytest.raises(InputError, match=r"no key for `model\.ahead_block`"):
        table.write(replace(step.cfg, model=model), {})


@pytest.mark.parametrize(
    ("family", "names"),
    [("ernie4_5_moe", ("mtp_block.0.input_layernorm", "mtp_emb_norm.0", "mtp_linear_proj.0"))],
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
