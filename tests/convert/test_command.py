"""`moejax hf import` and `export`, from folder to folder, with a run in between."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax.checkpoint.find import locate
from moejax.config.fields import fields, get_value
from moejax.config.load import load_config
from moejax.config.schema import Config
from moejax.convert.importing import config_for, config_text, free_run_dir
from moejax.hf.reader import Folder
from moejax.train.__main__ import main as train
from tests.hf.golden import cases_of
from tests.hf.random_models import draw_all
from tests.integration.runs import write_tokens


def tensors_of(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same_tensors(folder, wanted):
    found = tensors_of(folder)
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_a_model_of_one_expert_a_token_is_imported_and_its_training_refused(
    done, model, tmp_path, capsys
):
    """Where the weight of the only expert is one, as Mixtral's code makes it."""
    folder = model()
    config = json.loads((folder / "config.json").read_text())
    config["num_experts_per_tok"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    lines = done("import", folder, "--out", "imported")
    (note,) = [line for line in lines if line.startswith("note: ")]
    assert "--config.moe.router.renormalize=false" in note
    cfg = load_config("imported/config.json")
    assert (cfg.moe.experts_per_token, cfg.moe.router.renormalize) == (1, True)
    capsys.readouterr()
    assert train(["--config", "imported/config.json", "--dry_run"]) == 2
    said = capsys.readouterr()
    assert "router no gradient" in said.out + said.err


@pytest.mark.exhaustive
def test_import_then_export_gives_the_folder_back(done, model, tmp_path):
    folder = model()
    settings = json.loads((folder / "config.json").read_text())
    code = {"auto_map": {"AutoConfig": "configuration.Config"}}  # a file that is not copied
    (folder / "config.json").write_text(json.dumps(settings | code))
    assert_same_tensors(folder, draw_all(cases_of("mixtral")["even, llama3 positions"]["tensors"]))
    (tmp_path / "imported").mkdir()  # an empty folder takes the output
    lines = done("import", folder, "--out", "imported")
    assert {path.name for path in (tmp_path / "imported").iterdir()} == {"0", "config.json", "hf"}
    assert any("40,440 parameters" in line for line in lines)
    assert any("--tokenizer imported/hf/tokenizer.json" in line for line in lines)
    lines = done("export", "imported", "--out", "exported", "--dtype", "float32")
    assert_same_tensors(tmp_path / "exported", tensors_of(folder))
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    given = dict(settings)
    assert config.pop("torch_dtype") == given.pop("dtype") == "float32"
    rope = given.pop("rope_parameters")
    assert config.pop("rope_theta") == rope.pop("rope_theta")
    scaling = config.pop("rope_scaling")
    assert scaling.pop("type") == rope["rope_type"]
    assert scaling == rope
    given.pop("transformers_version")
    assert config == given
    names = {path.name for path in (tmp_path / "exported").iterdir()}
    small = {"config.json", "generation_config.json", "tokenizer.json"}
    assert names == {"model.safetensors", *small}
    assert list(tmp_path.glob("*.partial")) == []
    # Weights may be stored in two bytes, which an export writes unasked.
    done("import", folder, "--out", "narrow", "--dtype", "bfloat16")
    for name in ("imported", "narrow"):
        done("export", name, "--out", f"{name}-out")
    wide, narrow = (tensors_of(tmp_path / f"{name}-out") for name in ("imported", "narrow"))
    assert all(values.tobytes() == narrow[name].tobytes() for name, values in wide.items())


def test_the_written_config_is_the_model_and_how_to_train_it(done, model, tmp_path):
    words = ["--config.train.num_steps=70", "--config.run_dir=elsewhere"]
    words += ["--config.moe.router.z_loss=0.25"]
    done("import", model(), "--out", "imported", *words)
    cfg = load_config(tmp_path / "imported" / "config.json")
    assert (cfg.run_dir, cfg.train.num_steps, cfg.moe.router.z_loss) == ("elsewhere", 70, 0.25)
    assert (cfg.model.num_heads, cfg.model.rope.scaling) == (12, "llama3")
    named = json.loads((tmp_path / "imported" / "config.json").read_text())
    assert set(named["model"]) >= {"norm_epsilon", "sliding_window", "qk_norm"}
    saved = locate(cfg.checkpoint.init_from, "full")
    assert (saved.step, saved.path.name) == (0, "0")


def test_a_written_config_says_all_of_the_model_and_of_training_what_is_not_usual():
    """A later version may have other defaults, and the weights remain of this model."""
    cfg = dataclasses.replace(Config(), run_dir="runs/own")
    written = json.loads(config_text(cfg))
    names = {f"{group}." for group in written if group != "run_dir"}
    assert names == {"model.", "moe."}
    assert written["run_dir"] == "runs/own"
    whole = {n for n in fields() if n.startswith(("model.", "moe."))}
    assert {n for n in whole if value_at(written, n) == get_value(cfg, n)} == whole


def value_at(nested, name):
    """The value at a dotted name of nested objects."""
    for part in name.split("."):
        nested = nested[part]
    return tuple(nested) if isinstance(nested, list) else nested


@pytest.mark.parametrize(("positions", "length"), [(131_072, 2048), (64, 64)])
def test_training_begins_with_sequences_that_the_model_has_but_no_long_ones(
    model, tmp_path, positions, length
):
    path = model() / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": positions}
    path.write_text(json.dumps(config))
    with Folder(path.parent) as folder:
        assert config_for(folder, tmp_path / "out", ()).data.sequence_length == length


def test_training_of_an_import_is_set_for_weights_that_are_trained_already(
    model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with Folder(model()) as folder:
        cfg = config_for(folder, tmp_path / "books", ("train.num_steps=7",))
        length = folder.config["max_position_embeddings"]
    wanted = {
        "run_dir": "runs/books",
        "checkpoint.init_from": str(tmp_path / "books"),
        "model.dtype": "float32",
        "optimizer.learning_rate": 1e-5,
        "data.sequence_length": length,
        "data.source": "tokens",
        "data.train_files": ("data/books.train.bin",),
        "data.eval_files": ("data/books.eval.bin",),
        "train.num_steps": 7,
    }
    assert {name: get_value(cfg, name) for name in wanted} == wanted
    usual = Config()
    groups = ("optimizer.", "data.", "train.", "checkpoint.", "mesh.")
    others = [n for n in fields() if n.startswith(groups) and n not in wanted]
    assert all(get_value(cfg, name) == get_value(usual, name) for name in others)


def one_step(tokens, run_dir, **more):
    """Flags of a run of one step at a learning rate of zero, with eight sequences."""
    overrides = {
        "data.source": "tokens",
        "data.train_files": tokens,
        "data.eval_files": "",
        "data.sequence_length": 16,
        "optimizer.learning_rate": 0,
        "optimizer.warmup_steps": 0,
        "train.batch_sequences": 8,
        "train.num_steps": 1,
        "train.sample_tokens": 0,
        "plan": "hand",
        "run_dir": run_dir,
        **more,
    }
    return [f"--config.{name}={value}" for name, value in overrides.items()]


@pytest.fixture
def run_on(tmp_path):
    """Trains one step at a learning rate of zero on what a config begins with."""

    def run(config, *words):
        tokens = write_tokens(tmp_path / "tokens.bin")
        flags = one_step(tokens, tmp_path / "run", **{"mesh.replica": 8})
        return train(["--config", str(config), *flags, *words])

    return run


def test_a_run_begins_with_imported_weights_and_is_exported(done, model, run_on, tmp_path):
    folder = model("olmoe", "top 3")
    done("import", folder, "--out", "imported")
    assert run_on(tmp_path / "imported" / "config.json") == 0
    assert json.loads((tmp_path / "run" / "hf" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    for file in tmp_path.glob("tokens.bin*"):
        file.unlink()  # the run keeps what says how text became tokens
    lines = done("export", "run", "--out", "out", "--dtype", "float32", "--step", 1)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (256, 256)
    assert "exported step 1" in lines[-1]
    # At a learning rate of zero the weights are those that came.
    assert_same_tensors(tmp_path / "out", tensors_of(folder))
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not list((tmp_path / "run").rglob("*.py"))
    # So does a run that begins with the folder itself.
    shutil.rmtree(tmp_path / "run")
    direct = f"--config.init_from={folder}"  # short for checkpoint.init_from
    assert run_on(tmp_path / "imported" / "config.json", direct) == 0
    done("export", "run", "--out", "direct", "--dtype", "float32")
    assert_same_tensors(tmp_path / "direct", tensors_of(folder))


def test_a_config_without_an_origin_finds_its_family(command, model, tmp_path, done):
    """As of a run that began with drawn weights."""
    tokens = write_tokens(tmp_path / "text.bin")  # of bytes, which 256 ends
    words = (f"--config.data.train_files={tokens}", "--out", "imported")
    done("import", model("mixtral", "window, top 1"), *words)
    for path in (tmp_path / "imported" / "hf").iterdir():
        path.unlink()
    lines = done("export", "imported", "--out", "out")
    assert "as mixtral" in lines[-1]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == ("mixtral", 9)
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 256)
    assert (tmp_path / "out" / "tokenizer.json").is_file(), "of bytes"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 256
    tokens.unlink()
    done("export", "imported", "--out", "later")
    config = json.loads((tmp_path / "later" / "config.json").read_text())
    assert config["eos_token_id"] is None, "no id is better than that of another vocabulary"
    code, lines = command("export", "imported", "--out", "other", "--family", "olmoe")
    assert code == 2
    assert "olmoe does not hold this model" in lines[0]
    assert not (tmp_path / "other").exists()


def test_an_import_takes_no_run_directory_of_another_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert free_run_dir("books") == "runs/books"
    for taken in ("runs/books", "runs/books_2"):
        (tmp_path / taken).mkdir(parents=True)
    assert free_run_dir("books") == "runs/books_3"
