"""Bad input to `moejax hf`: exit code 2, one line, and nothing half written."""

import json

import pytest
from safetensors.numpy import load_file

from moejax.checkpoint.manifest import write_manifest
from moejax.config.fields import change
from moejax.config.load import to_dict
from moejax.config.schema import Config
from moejax.convert import exporting, importing
from moejax.errors import InputError
from moejax.hf.families import family_named
from moejax.hf.families.family import from_settings
from tests.hf.golden import cases_of
from tests.hf.random_models import write_file

EXPERT = "model.layers.1.block_sparse_moe.experts.13.w1.weight"


@pytest.fixture
def refused(failed, tmp_path, monkeypatch):
    """Runs the command, which must say one line and leave nothing, before it reads weights."""

    def write_pieces(*_):
        pytest.fail("weights were read")

    def run(*words):
        with monkeypatch.context() as patched:
            patched.setattr(importing, "write_pieces", write_pieces)
            before = sorted(tmp_path.iterdir())
            line = failed(*words)
        assert line.startswith("moejax: error: ")
        assert sorted(tmp_path.iterdir()) == before
        return line

    return run


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


CONFIGS = [
    ({"model_type": "llama"}, ["no family for `model_type` 'llama'", "mixtral"]),
    ({"hidden_act": "gelu"}, ["config.json: `hidden_act` is 'gelu'", "'silu' only"]),
    ({"hidden_size": "absent"}, ["`hidden_size` is missing"]),
    ({"hidden_size": "24"}, ["model.width", "integer"]),
    ({"num_experts_per_tok": 25}, ["moe.experts_per_token", "25"]),
    ({"rope_parameters": {"rope_type": "longrope"}}, ["positions scale by 'longrope'"]),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5}},
        ["`mscale` is 0.5, `mscale_all_dim` is None"],
    ),
    ({"rope_parameters": {"rope_type": "linear"}}, ["`factor` of `rope_scaling` is None"]),
    ({"rope_parameters": {"mystery": 1}}, ["`rope_scaling` of kind default has `mystery`"]),
    ({"head_dim": 5}, ["head_width", "odd"]),
    ({"vocab_size": 95}, ["Expected (95, 24), found (96, 24)"]),
    ({"num_hidden_layers": 3}, ["model.layers.2.", "is missing"]),
]


@pytest.mark.parametrize(("changes", "fragments"), CONFIGS, ids=str)
def test_configs_that_cannot_be_computed_are_refused(refused, model, changes, fragments):
    folder = model()
    change_config(folder, **changes)
    line = refused("import", folder, "--out", "imported")
    for fragment in fragments:
        assert fragment in line


def test_an_import_keeps_the_model(refused, model):
    words = "--config.model.num_layers=1", "--config.model.norm_epsilon=1e-6"
    line = refused("import", model(), "--out", "imported", *words)
    assert "model.num_layers: 2 -> 1" in line
    assert "model.norm_epsilon: 1e-05 -> 1e-06" in line
    assert line.endswith("Leave these out; the written config may be changed later.")


def test_clipped_queries_are_refused(refused, model):
    folder = model("olmoe", "top 3")
    change_config(folder, clip_qkv=8.0)
    assert "`clip_qkv` is 8.0" in refused("import", folder, "--out", "imported")


def lose_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors[EXPERT]
    write_file(folder / "model.safetensors", tensors)


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (lose_a_tensor, [f"tensor {EXPERT} is missing", "(8, 24), found none"]),
        (truncate, ["ends at byte", "the file has"]),
        (pickled, ["weights are pickled", "pytorch_model.bin"]),
    ],
)
def test_weights_that_do_not_fit_are_refused(refused, model, change, fragments):
    folder = model(files=1)
    change(folder)
    line = refused("import", folder, "--out", "imported")
    for fragment in fragments:
        assert fragment in line


def test_words_that_name_nothing_or_no_new_folder_are_refused(refused, model, tmp_path):
    folder = model()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, said in (
        (["import", "nowhere", "--out", "imported"], "no folder of weights. nowhere"),
        (["import", folder, "--out", "imported", "--config.train.steps=1"], "train.steps"),
        (["import", folder, "--out", "full"], "output exists. --out full"),
        (["import", folder, "--out", "new[1]"], "--out new[1] cannot hold checkpoints"),
        (["import", folder, "--out", "."], "output has no name"),
        (["import", folder, "--out", "/proc/imported"], "cannot be written"),
        (["export", "imported", "--out", "full"], "output exists. --out full"),
        (["export", "nowhere", "--out", "exported"], "no finished checkpoint"),
    ):
        assert said in refused(*words)


def test_exports_of_what_is_not_there_or_damaged_are_refused(done, refused, model, tmp_path):
    done("import", model(), "--out", "imported")
    imported = tmp_path / "imported"
    line = refused("export", imported, "--out", "exported", "--step", 3)
    assert "no finished checkpoint" in line
    assert "imported/3" in line
    line = refused("export", imported, "--out", "exported", "--family", "bert")
    assert "no family 'bert'. Known: mixtral" in line
    files = [path for path in (imported / "0" / "weights").rglob("*") if path.is_file()]
    file = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    assert "checkpoint is damaged" in refused("export", imported, "--out", "exported")


def test_a_benchmark_with_forced_routing_is_not_exported(refused, tmp_path):
    path = tmp_path / "run/checkpoints/3"
    path.mkdir(parents=True)
    (path / "weights").write_text("a manifest lists files")
    cfg = change(Config(), {"moe.router.forced": "balanced"})
    write_manifest(path, {"step": 3, "config": to_dict(cfg)})
    line = refused("export", tmp_path / "run", "--out", "exported")
    assert "`moe.router.forced` = balanced" in line


def test_nothing_is_left_when_the_work_fails(command, model, tmp_path, monkeypatch, done):
    folder = model()

    def fail(*_, **__):
        raise OSError("the device is on fire")

    monkeypatch.setattr(importing, "read_bounds", fail)
    code, lines = command("import", folder, "--out", "imported")
    assert (code, lines[-1]) == (2, "moejax: error: the device is on fire")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    done("import", folder, "--out", "imported")
    monkeypatch.setattr(exporting, "write_weights", fail)
    assert command("export", "imported", "--out", "exported")[0] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"model", "imported"}


def test_what_a_killed_conversion_left_is_no_obstacle(done, model, tmp_path):
    (tmp_path / "imported.partial").mkdir()
    (tmp_path / "imported.partial" / "half").touch()
    done("import", model(), "--out", "imported")
    assert not (tmp_path / "imported.partial").exists()
    assert not (tmp_path / "imported" / "half").exists()


def test_too_little_room_is_said_before_anything_is_read(command, model, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    code, lines = command("import", model(), "--out", "imported")
    assert code == 5
    assert "1,000 bytes free" in lines[0]
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_links_out_of_the_folder_are_not_copied(refused, model, tmp_path):
    folder = model()
    (tmp_path / "secret").write_text("secret")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    line = refused("import", folder, "--out", "imported")
    assert "tokenizer.json is outside" in line


def test_a_family_that_cannot_hold_a_model_is_told_in_whole_sentences():
    case = cases_of("deepseek_v2")["even, groups, yarn"]["config"]
    cfg = from_settings(family_named("deepseek_v2").read(case))
    cfg = change(cfg, {"model.rope.mscale": 0.0, "model.rope.mscale_all_dim": 0.0})
    for family in ("deepseek_v2", None):
        with pytest.raises(InputError) as raised:
            exporting.choose_family(cfg, {}, family)
        assert "Both must be numbers above 0" in str(raised.value)
        assert ".." not in str(raised.value)
