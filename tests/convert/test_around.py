"""`moejax hf export --around`: a text model goes back into the model of images it came from."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.hf.golden import cases_of
from tests.hf.random_models import draw_all, write_folder
from tests.hf.test_text import around, gemma_around, longer

# Whole models are traced, whose layers have tests.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")

VISION = {"model.visual.merger.norm.weight": (4,), "mtp.fc.weight": (4, 8)}


def case_of(family, even=True):
    return next(case for name, case in cases_of(family).items() if ("even" in name) == even)


def released(place, family="qwen3_5_moe_text", files=2, **changes):
    """A folder as it is released: the text model's tensors under longer names, and others."""
    case = case_of(family)
    tensors = {longer(name): x for name, x in draw_all(case["tensors"]).items()}
    if family == "gemma4_text":
        others = {"model.vision_tower.patch_embedder.input_proj.weight": (4, 8)}
        config = gemma_around(case["config"])
    else:
        others, config = VISION, around(case["config"], **changes)
    # As files have them: in half the bytes, which an export in float32 must not touch.
    drawn = {name: x.astype(np.float16) for name, x in draw_all(others).items()}
    return write_folder(place, config, tensors | drawn, files)


def tensors_of(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "gemma4_text"])
def test_import_then_export_around_gives_all_tensors_back(done, tmp_path, family):
    folder = released(tmp_path / "released", family)
    (folder / "preprocessor_config.json").write_text('{"size": 5}')
    (folder / "processing_evil.py").write_text("raise SystemExit")
    done("import", folder, "--out", "imported")
    lines = done("export", "imported", "--out", "out", "--dtype", "float32", "--around", "released")
    assert "copied from released" in lines[-1]
    got, wanted = tensors_of(tmp_path / "out"), tensors_of(folder)
    assert set(got) == set(wanted)
    for name, x in wanted.items():
        assert (got[name].dtype, got[name].tobytes()) == (x.dtype, x.tobytes()), name
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(wanted)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in wanted.values())
    config = json.loads((tmp_path / "out/config.json").read_text())
    before = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == "float32"
    assert {key: config[key] for key in before if key != "text_config"} == {
        key: x for key, x in before.items() if key != "text_config"
    }
    assert config["text_config"]["hidden_size"] == before["text_config"]["hidden_size"]
    assert (tmp_path / "out/preprocessor_config.json").read_text() == '{"size": 5}'
    assert not list((tmp_path / "out").glob("*.py"))
    done("import", "out", "--out", "again")


@pytest.mark.parametrize(
    ("changes", "words", "fragment"),
    [
        ({}, ("--adapter",), "`--around` has no effect on adapters alone"),
        ({"model_type": "gemma4", "architectures": None}, (), "has model_type 'gemma4'"),
        ({"quantization_config": {"quant_method": "fp8"}}, (), "is quantised, and an export"),
        ({"vocab_size": 999}, (), "another model: its text model has `vocab_size` = 999"),
    ],
)
def test_another_folder_is_refused(failed, done, tmp_path, changes, words, fragment):
    folder = released(tmp_path / "released")
    done("import", folder, "--out", "imported")
    config = json.loads((folder / "config.json").read_text())
    where = config["text_config"] if "vocab_size" in changes else config
    where.update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    line = failed("export", "imported", "--out", "out", "--around", "released", *words)
    assert fragment in line
    assert not (tmp_path / "out").exists()


def test_a_family_without_a_model_of_images_is_refused(failed, done, model):
    done("import", model(), "--out", "imported")
    line = failed("export", "imported", "--out", "out", "--around", "model")
    assert "has no effect on mixtral" in line
