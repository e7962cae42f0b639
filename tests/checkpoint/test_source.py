"""Runs that begin with a folder of weights: compared with the config before a device is touched."""

import json

import jax
import numpy as np
import pytest

from moejax.checkpoint.source import FolderSource, find_source, keep_origin, take_weights
from moejax.config.fields import change
from moejax.config.load import save_json
from moejax.errors import InputError
from moejax.hf.config import config_of
from moejax.hf.files import is_folder_of_weights
from moejax.hf.reader import Folder
from moejax.train.__main__ import main
from tests.cases import step_for
from tests.hf.golden import cases_of, golden_folder, run_config

CASE = cases_of("olmoe")["top 3"]


@pytest.fixture
def folder(tmp_path):
    return golden_folder(tmp_path / "model", CASE)


@pytest.fixture
def config(folder, tmp_path):
    """Writes a config file that begins with the folder."""

    def write(**changes):
        with Folder(folder) as opened:
            cfg = change(config_of(opened), {"checkpoint.init_from": str(folder), **changes})
        save_json(cfg, tmp_path / "config.json")
        return cfg

    return write


def test_a_folder_is_told_from_a_run(folder, tmp_path):
    assert is_folder_of_weights(folder)
    assert not is_folder_of_weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"run_dir": "runs/a"}))
    assert not is_folder_of_weights(tmp_path)


def test_the_weights_of_a_folder_take_the_place_of_drawn_ones(folder, config, tmp_path):
    source = find_source(config(), "full")
    assert isinstance(source, FolderSource)
    assert source.path == folder
    with Folder(folder) as opened:
        cfg = run_config(config_of(opened), config().mesh, (8, 8))
    step = step_for(cfg)
    drawn = step.init()
    state = take_weights(source, drawn, step.abstract)
    assert all(x.is_deleted() for x in jax.tree.leaves(drawn.params))
    scale = np.asarray(state.params["norm"]["scale"])
    with Folder(folder) as opened:
        np.testing.assert_array_equal(scale, opened.read("model.norm.weight", ((0, len(scale)),)))
    keep_origin(source, tmp_path / "run")
    assert (tmp_path / "run" / "hf" / "config.json").read_text() == (
        folder / "config.json"
    ).read_text()


def test_no_source_keeps_nothing(config, tmp_path):
    assert find_source(config(**{"checkpoint.init_from": None}), "full") is None
    keep_origin(None, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_that_differs_is_refused_with_the_difference(config):
    with pytest.raises(InputError) as raised:
        find_source(config(**{"model.norm_epsilon": 1e-6, "train.seed": 3}), "full")
    assert "model.norm_epsilon: 1e-05 -> 1e-06" in str(raised.value)
    assert "moejax hf import" in str(raised.value)
    assert "train.seed" not in str(raised.value)


def test_settings_of_training_may_differ(config):
    changes = {"model.dtype": "bfloat16", "moe.router.balance_loss": 0.5, "model.remat": "full"}
    assert find_source(config(**changes), "full") is not None


def test_a_dry_run_looks_at_the_folder(folder, config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config(**{"data.sequence_length": 16, "model.num_layers": 3})
    assert main(["--config", "config.json", "--dry_run"]) == 2
    assert "model.num_layers: 2 -> 3" in capsys.readouterr().err
    config()
    (folder / "model.safetensors").write_bytes(b"short")
    assert main(["--config", "config.json", "--dry_run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no whole safetensors file" in line
