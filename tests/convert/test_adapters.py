"""`moejax hf export` of runs with adapters: added to their weights, and alone."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax.comm.weights.adapters import AdaptedWeight, add_adapter, scaled
from moejax.config.schema import MeshConfig
from moejax.data.prepare import command as prepare
from moejax.hf.families import family_named
from moejax.hf.load import load, plan_load
from moejax.hf.model import describe_anywhere
from moejax.hf.reader import Folder
from moejax.step.state import flat
from tests.cases import some_of
from tests.hf.golden import FAMILIES, ahead_folder, cases_of, golden_folder
from tests.hf.lora_runs import write_run
from tests.hf.test_writer import read_all

CASES = {  # of each kind of attention and of experts' tensors one
    "mixtral": ("even, llama3 positions", MeshConfig(expert=2, tensor=2)),
    "deepseek_v3": ("even, groups, yarn", MeshConfig()),
    "gpt_oss": ("even", MeshConfig()),
}


def added(train_step, state):
    """All weights with their adapters, by JAX."""
    scale = train_step.spec.adapter_scale

    def of(letters, w, adapter):
        if adapter is None:
            return w.astype(jnp.float32)
        return add_adapter(AdaptedWeight(w, scaled(adapter, scale, "float32")), letters)

    return flat(jax.tree.map(of, train_step.model.frozen_dims, state.frozen, state.params))


def read_arrays(path, cfg):
    """The arrays of an exported folder, by path."""
    model, params, bias = describe_anywhere(cfg)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), params)
    with Folder(path) as folder:
        return flat(load(plan_load(folder, model, params, bias), folder, shapes))


@pytest.mark.parametrize("family", some_of(CASES, "deepseek_v3"))
def test_an_export_has_the_weights_that_the_run_computes_with(done, tmp_path, family):
    name, mesh = CASES[family]
    rounded = {"base_dtype": "bfloat16"} if family == "mixtral" else {}
    base = golden_folder(tmp_path / "base", cases_of(family)[name])
    train_step, state = write_run(tmp_path / "run", base, mesh, **rounded)
    lines = done("export", "run", "--out", "out", "--dtype", "float32")
    assert any("adapters added to" in line for line in lines)
    found = read_arrays(tmp_path / "out", train_step.cfg)
    wanted = added(train_step, state)
    assert set(found) == set(wanted)
    for path, values in wanted.items():
        np.testing.assert_allclose(found[path], values, rtol=1e-5, atol=1e-6, err_msg=path)
    base = read_arrays(tmp_path / "base", train_step.cfg)
    changed = [path for path in found if np.abs(found[path] - base[path]).max() > 0.01]
    assert len(changed) >= len(flat(state.params)) // 2, "adapters of nothing were added"


@pytest.mark.exhaustive
def test_adapters_alone_are_what_is_added(done, tmp_path):
    folder = golden_folder(tmp_path / "base", cases_of("mixtral")["even, llama3 positions"])
    write_run(tmp_path / "run", folder, MeshConfig(fsdp=2, tensor=2))
    done("export", "run", "--out", "out", "--dtype", "float32")
    done("export", "run", "--out", "adapter", "--adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    whole = load_file(tmp_path / "out" / "model.safetensors")
    base = load_file(tmp_path / "base" / "model.safetensors")
    queries = [name for name in base if name.endswith("q_proj.weight")]
    assert queries
    for name in queries:
        module = "base_model.model." + name.removesuffix(".weight")
        a, b = (factors[f"{module}.lora_{x}.weight"] for x in "AB")
        product = config["lora_alpha"] / config["r"] * b @ a
        np.testing.assert_allclose(whole[name], base[name] + product, rtol=1e-5, atol=1e-6)
    assert len(factors) == 2 * (len(config["target_modules"]) + len(config["target_parameters"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_name_a_layers_experts_as_one_tensor(family):
    names = [rule.theirs for rule in family_named(family).joined_experts]
    assert not any("{E}" in name for name in names)
    assert bool(names) == any(family_named(family).experts)


def test_adapters_of_experts_that_files_have_in_one_tensor_are_theirs(done, tmp_path):
    write_run(
        tmp_path / "run",
        golden_folder(tmp_path / "base", cases_of("mistral4")["even, yarn"]),
        MeshConfig(),
    )
    done("export", "run", "--out", "adapter", "--adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    base = load_file(tmp_path / "base/model.safetensors")
    named = [f"{name}.weight" for name in config["target_modules"]] + config["target_parameters"]
    assert sum("mlp.experts." in name for name in named) == 2 * 2  # layers
    assert set(named) <= set(base)


def test_a_chat_template_goes_with_adapters(done, tmp_path):
    folder = golden_folder(tmp_path / "base", cases_of("mixtral")["window, top 1"])
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    words = ["rows.jsonl", "--chat", "--chat-template", template, "--out", "t"]
    assert prepare.main([*map(str, words), "--eval-fraction", "0"]) == 0
    files = (str(tmp_path / "t.train.bin"),)
    write_run(tmp_path / "run", folder, MeshConfig(), train_files=files)
    done("export", "run", "--out", "adapter", "--adapter")
    assert (tmp_path / "adapter/chat_template.jinja").read_text() == template.read_text()
    assert (tmp_path / "adapter/tokenizer.json").is_file(), "of bytes"


def test_frozen_weights_that_moved_are_named(done, failed, tmp_path):
    folder = golden_folder(tmp_path / "base", cases_of("mixtral")["window, top 1"])
    write_run(tmp_path / "run", folder, MeshConfig())
    shutil.move(tmp_path / "base", tmp_path / "moved")
    line = failed("export", "run", "--out", "out")
    assert "Name them: --config.checkpoint.init_from=DIR" in line
    words = ("export", "run", "--out", "out", "--config.checkpoint.init_from=moved")
    done(*words)
    weights = load_file("moved/model.safetensors")
    weights["lm_head.weight"] += 1
    save_file(weights, "moved/model.safetensors", metadata={"format": "pt"})
    line = failed(*words[:3], "out2", words[-1])
    assert "base weights differ" in line
    assert not (tmp_path / "out2").exists()


def test_a_second_import_is_the_base_of_adapters_on_the_first(done, failed, tmp_path):
    folder = golden_folder(tmp_path / "base", cases_of("mixtral")["window, top 1"])
    imported = ("import", folder, "--out", "imported")
    done(*imported)
    write_run(tmp_path / "run", folder, MeshConfig(), weights=tmp_path / "imported")
    done("export", "run", "--out", "first")
    shutil.rmtree("imported")
    done(*imported)
    done("export", "run", "--out", "second")
    first, second = (load_file(f"{name}/model.safetensors") for name in ("first", "second"))
    assert {name: x.tobytes() for name, x in first.items()} == {
        name: x.tobytes() for name, x in second.items()
    }
    shutil.rmtree("imported")
    done(*imported, "--dtype", "bfloat16")
    line = failed("export", "run", "--out", "third")
    assert "base weights differ" in line


def test_adapters_on_an_import_and_of_multi_token_prediction(done, tmp_path):
    folder = ahead_folder(tmp_path / "base")
    words = ("import", folder, "--out", "imported", "--config.model.predict_ahead=1")
    done(*words)
    write_run(
        tmp_path / "run",
        folder,
        MeshConfig(),
        (8, 8),
        weights=tmp_path / "imported",
        predict_ahead=1,
    )
    done("export", "run", "--out", "out", "--dtype", "float32")
    base, whole = read_all(folder), read_all(tmp_path / "out")
    assert set(whole) == set(base)
    for layer in "12":  # the last one predicts ahead
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        assert np.abs(whole[name] - base[name]).max() > 0.01
    lines = done("export", "run", "--out", "adapter", "--adapter")
    assert any(
        "adapters of " in line and "left out those of multi-token prediction (" in line
        for line in lines
    )
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    # The base is a checkpoint, which peft cannot read: it is named by the folder that it is of.
    assert config["base_model_name_or_path"] == str(folder)
    assert not any("names no base" in line for line in lines)
    named = [*config["target_modules"], *config["target_parameters"]]
    assert {name.split(".")[2] for name in named} == {"0", "1"}
    shutil.rmtree(folder)
    lines = done("export", "run", "--out", "alone", "--adapter")
    assert any("It names no base" in line and "moejax hf export" in line for line in lines)
    config = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None


def test_what_has_no_effect_on_an_export_is_refused(done, failed, tmp_path, model):
    done("import", model(), "--out", "imported")
    for words, message in (
        (["--adapter"], "no adapters in"),
        (["--config.train.num_steps=3"], "`train.num_steps` has no effect"),
        (["--config.checkpoint.init_from=model"], "`checkpoint.init_from` has no effect"),
    ):
        line = failed("export", "imported", "--out", "out", *words)
        assert message in line
        assert not (tmp_path / "out").exists()
