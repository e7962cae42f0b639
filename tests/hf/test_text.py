"""Text models inside models of images and texts: what is read, left out and refused."""

import json
import re

import numpy as np
import pytest

from moejax.errors import InputError
from moejax.hf.config import config_of
from moejax.hf.families import family_of
from moejax.hf.origin import read_config
from moejax.hf.reader import Folder
from moejax.hf.text import read_text_config
from moejax.step.state import flat
from tests.hf.golden import cases_of, golden_folder, import_weights
from tests.hf.random_models import draw_all, write_folder

# Whole models are traced, whose layers have tests.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")

CASES = cases_of("qwen3_5_moe_text")
ODD, EVEN = CASES
AROUND = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 5,
    "vision_config": {"depth": 1},
    "transformers_version": "5.23.0",
}
OTHERS = {"model.visual.merger.norm.weight": (4,), "mtp.fc.weight": (4, 8)}


def around(text, **changes):
    """The `config.json` of a model of images and texts, with that of a text model inside."""
    inside = {key: x for key, x in text.items() if key != "architectures"}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    return {**AROUND, **tied, "text_config": inside, **changes}


def longer(name):
    """The name of a text model's tensor there."""
    return name.replace("model.", "model.language_model.", 1)


def write_around(place, case, **changes):
    tensors = {longer(name): x for name, x in draw_all(case["tensors"]).items()}
    return write_folder(place, around(case["config"], **changes), tensors | draw_all(OTHERS))


def gemma_around(text):
    """The `config.json` of a Gemma 4 of images, which ties by default."""
    inside = {k: x for k, x in text.items() if k not in ("architectures", "tie_word_embeddings")}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "tie_word_embeddings": True,
        "text_config": inside,
        "vision_config": {"hidden_size": 16},
        "audio_config": None,
        "image_token_id": 5,
        "eoa_token_index": 6,
        "initializer_range": 0.02,
    }


def assert_same_weights(got, wanted):
    found, expected = flat(got.params), flat(wanted.params)
    assert list(found) == list(expected)
    for path, array in expected.items():
        assert np.asarray(found[path]).tobytes() == np.asarray(array).tobytes(), path


@pytest.mark.parametrize("config", ["around", "text"])
def test_the_text_model_is_read_and_images_are_named_as_left_out(tmp_path, config):
    """transformers saves a text model out of such a folder under the longer names, too."""
    case = CASES[ODD]
    wanted = import_weights(golden_folder(tmp_path / "text", case))
    path = write_around(tmp_path / "around", case)
    if config == "text":
        (path / "config.json").write_text(json.dumps(case["config"]))
    got = import_weights(path)
    assert_same_weights(got, wanted)
    assert got.train_step.cfg == wanted.train_step.cfg
    assert sorted(got.plan.left_out.values()) == [[name] for name in sorted(OTHERS)]
    assert any("the text model alone is read" in reason for reason in got.plan.left_out)


def test_the_text_model_of_gemma_is_read_without_images_and_sounds(tmp_path):
    case = next(case for name, case in cases_of("gemma4_text").items() if "even" in name)
    wanted = import_weights(golden_folder(tmp_path / "text", case))
    others = {"model.vision_tower.patch_embedder.input_proj.weight": (4, 8)}
    others |= {"model.embed_vision.embedding_projection.weight": (4, 4)}
    others |= {"model.audio_tower.layers.0.norm_out.weight": (4,)}
    tensors = {longer(name): x for name, x in draw_all(case["tensors"]).items()}
    path = write_folder(tmp_path / "a", gemma_around(case["config"]), tensors | draw_all(others))
    got = import_weights(path)
    assert_same_weights(got, wanted)
    assert got.train_step.cfg == wanted.train_step.cfg
    assert {n for names in got.plan.left_out.values() for n in names} == set(others)


@pytest.mark.parametrize("saved", [False, True])
def test_the_text_model_of_mistral_is_read_by_released_names_and_by_saved_ones(tmp_path, saved):
    """transformers puts another prefix before the names, and none before the head's."""
    case = next(case for name, case in cases_of("mistral4").items() if "even" not in name)
    others = ("vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight")
    tensors = draw_all(case["tensors"])
    named = {longer(name) if saved else f"language_model.{name}": x for name, x in tensors.items()}
    others = [f"model.{name}" if saved else name for name in others]
    inside = {key: x for key, x in case["config"].items() if key != "architectures"}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    config |= {"text_config": inside, "vision_config": {"depth": 1}, "vision_feature_layer": -1}
    config |= {"image_token_index": 10, "multimodal_projector_bias": False}
    config |= {"projector_hidden_act": "gelu", "spatial_merge_size": 2}
    path = write_folder(tmp_path / "around", config, named | draw_all(dict.fromkeys(others, (4,))))
    with Folder(path) as folder, Folder(golden_folder(tmp_path / "text", case)) as text:
        assert config_of(folder) == config_of(text)
        assert set(folder.weights) == {*text.weights, *others}
        pattern = family_of(folder.config).around.others
        assert all(re.fullmatch(pattern, name) for name in others)
        name = "model.layers.1.mlp.experts.down_proj"
        everything = ((0, 5), (0, 26), (0, 10))
        np.testing.assert_array_equal(folder.read(name, everything), text.read(name, everything))


def test_an_export_has_the_text_models_own_config(tmp_path):
    path = write_around(tmp_path, CASES[EVEN])
    base = read_config(path)
    with Folder(path) as folder:
        assert folder.config == base
        written = family_of(base).write(config_of(folder), base)
    assert written["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert written["model_type"] == "qwen3_5_moe_text"
    assert written["tie_word_embeddings"] is True
    assert not {"text_config", "vision_config", "image_token_id"} & set(written)


def test_what_stands_beside_the_text_model_counts_where_it_says_nothing(tmp_path):
    quantised = {"quant_method": "fp8"}
    keys = around(CASES[ODD]["config"], quantization_config=quantised, pad_token_id=7)
    assert keys["text_config"]["pad_token_id"] is None
    (tmp_path / "config.json").write_text(json.dumps(keys))
    found = read_text_config(tmp_path / "config.json")
    assert found["quantization_config"] == quantised
    assert (found["pad_token_id"], found["bos_token_id"]) == (7, 1)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"text_config": None}, "`text_config` is None. It must be an object"),
        ({"some_key": 1, "other": 2}, "`some_key`, `other`, whose meaning for qwen3_5_moe_text"),
        ({"tie_word_embeddings": True}, "keys disagree: `tie_word_embeddings` is True, and False"),
    ],
)
def test_what_is_not_known_around_it_is_refused(tmp_path, changes, fragment):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(around(CASES[ODD]["config"], **changes)))
    with pytest.raises(InputError) as raised:
        read_text_config(path)
    assert fragment in str(raised.value)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen3_5MoeForImages"]},
        {"text_config": {"model_type": "qwen3_5_text"}},
    ],
)
def test_another_model_is_of_no_family(tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps(around(CASES[ODD]["config"], **changes)))
    with pytest.raises(InputError, match="no family for `model_type`"):
        family_of(read_text_config(tmp_path / "config.json"))


def test_a_tensor_under_both_names_is_refused(tmp_path):
    case = CASES[EVEN]
    tensors = draw_all(case["tensors"])
    tensors |= {longer("model.norm.weight"): tensors["model.norm.weight"]}
    path = write_folder(tmp_path, case["config"], tensors)
    with pytest.raises(InputError, match=r"'model\.norm\.weight' is there twice"):
        Folder(path)
