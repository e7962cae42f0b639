"""Bad input to `moejax train`: exit code 2 and one line, before any device is touched."""

import json
import subprocess
import sys

import numpy as np
import pytest

from moejax.checkpoint import manifest
from moejax.config.load import load_config, to_dict
from moejax.config.schema import Config
from moejax.data import sidecar
from moejax.data.prepare import command as prepare
from moejax.data.prepare.documents import Document
from moejax.data.tokenizer import ByteTokenizer
from moejax.errors import InputError
from moejax.runtime.event_log import RunLock
from moejax.train import planning
from moejax.train.__main__ import main
from moejax.train.inputs import open_inputs


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty directory. Returns exit code and the lines of stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("run_dir: run\n")

    def start(_):
        pytest.fail("a device was touched")

    monkeypatch.setattr(planning, "start", start)

    def run(*words, config="config.yaml"):
        code = main(["--config", config, *(f"--config.{word}" for word in words)])
        return code, capsys.readouterr().err.splitlines()

    return run


def refused(result, *fragments):
    code, lines = result
    assert code == 2
    assert len(lines) == 1, lines
    assert lines[0].startswith("moejax: error: ")
    for fragment in fragments:
        assert fragment in lines[0]


CONFIGS = {
    ("model.num_expert=4",): ["model.num_expert"],
    ("mesh.experts=2",): ["mesh.experts", "mesh.expert"],
    ("train.num_steps=abc",): ["train.num_steps", "integer", "abc"],
    ("train.num_steps=1.5",): ["train.num_steps", "integer", "1.5"],
    ("moe.num_experts=-3",): ["moe.num_experts", "-3"],
    ("moe.experts_per_token=0",): ["moe.experts_per_token", "0"],
    ("moe.experts_per_token=9",): ["moe.experts_per_token", "9", "moe.num_experts", "8"],
    ("moe.capacity_factor=0",): ["moe.capacity_factor"],
    ("optimizer.learning_rate=-1",): ["optimizer.learning_rate", "-1"],
    ("optimizer.learning_rate=nan",): ["optimizer.learning_rate", "nan"],
    ("mesh.simulated_devices=8", "mesh.expert=8", "mesh.tensor=2"): ["needs 16", "found 8"],
    ("mesh.expert=8", "moe.num_experts=6"): ["6 experts", "expert axis of 8", "1, 2, 3, 6"],
    ("mesh.tensor=3",): ["mesh.tensor", "3", "model."],
    ("mesh.expert=4", "train.batch_sequences=6"): ["train.batch_sequences", "6"],
    ("model.vocab_size=200",): ["model.vocab_size", "200", "257"],
    ("lora.rank=4", "lora.targets=attention.w_x"): ["attention.w_x", "fits no matrix"],
    ("lora.rank=4",): ["lora.rank", "checkpoint.init_from"],
    ("data.train_files=a.bin",): ["data.train_files", "no effect"],
    ("data.source=tokens",): ["data.train_files", "empty"],
    ("run_dir=",): ["run_dir"],
}


@pytest.mark.parametrize("words", CONFIGS, ids=" ".join)
def test_settings_that_are_wrong_are_refused(command, tmp_path, words):
    refused(command(*words), *CONFIGS[words])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"]


FILES = {
    "absent.yaml": (None, ["absent.yaml", "does not exist"]),
    "config.toml": ("a = 1", [".toml"]),
    "empty.py": ("", ["get_config"]),
    "number.py": ("def get_config():\n    return 3\n", ["int", "ConfigDict"]),
    "raises.py": ("def get_config():\n    return 1 / 0\n", ["line 2", "ZeroDivisionError"]),
    "tag.yaml": ("train: !!python/object/apply:os.getcwd []", ["line 1", "!!python"]),
    "syntax.yaml": ("train:\n  seed: [1\n", ["line"]),
    "syntax.json": ('{"train": }', ["line 1"]),
    "unknown.yaml": ("train:\n  step: 3\n", ["line 2", "train.step"]),
}


@pytest.mark.parametrize("name", FILES)
def test_a_config_file_that_is_wrong_is_refused_with_its_place(command, tmp_path, name):
    content, fragments = FILES[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    refused(command(config=name), *fragments)


def test_a_run_without_config_is_refused(capsys):
    code = main([])
    lines = capsys.readouterr().err.splitlines()
    refused((code, lines), "--config tiny")


def write_tokens(path, kind, text="some text "):
    writer = kind(path, ByteTokenizer(), "bytes")
    for number in range(40):
        writer.add(Document(text * number, ""), ByteTokenizer())
    writer.finish()


@pytest.fixture
def tokens(tmp_path):
    """Token files a.bin and a.rec in the working directory; returns its path."""
    write_tokens(tmp_path / "a.bin", prepare.BinWriter)
    write_tokens(tmp_path / "a.rec", prepare.ArrayRecordWriter)
    return tmp_path


BIN = ("data.source=tokens", "data.train_files=a.bin")
RECORDS = ("data.source=array_record", "data.train_files=a.rec")


def change_sidecar(path, **fields):
    file = sidecar.sidecar_of(path)
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def add_a_byte(folder):
    with (folder / "a.bin").open("ab") as out:
        out.write(b"x")


def put_an_id_outside(folder):
    ids = np.fromfile(folder / "a.bin", "<u2")
    ids[-1] = 300
    ids.tofile(folder / "a.bin")


def cut_the_records(folder):
    data = (folder / "a.rec").read_bytes()
    (folder / "a.rec").write_bytes(data[: len(data) // 2])


def lose_the_sidecar(folder):
    sidecar.sidecar_of(folder / "a.bin").unlink()


def raise_the_vocabulary(folder):
    change_sidecar(folder / "a.bin", vocab_size=5000)


def name_a_lost_tokenizer(folder):
    change_sidecar(folder / "a.bin", tokenizer="t.json", tokenizer_sha256="0" * 64)


def nothing(folder):
    del folder


DATA = [
    (nothing, ("data.source=tokens", "data.train_files=b*.bin"), ["b*.bin", "none"]),
    (nothing, ("data.source=tokens", "data.train_files=a.rec"), ["array_record"]),
    (nothing, (*BIN, "data.eval_files=a.bin"), ["held-out text is trained on"]),
    (nothing, (*BIN, "data.sequence_length=100000"), ["too little data", "100000"]),
    (nothing, (*BIN, "data.repeat=false", "train.num_steps=500"), ["500 steps", "sequences"]),
    (add_a_byte, BIN, ["a.bin", "1 bytes beyond whole tokens"]),
    (put_an_id_outside, BIN, ["a.bin, token", "id 300", "257"]),
    (lose_the_sidecar, BIN, ["no sidecar", "a.bin.json"]),
    (raise_the_vocabulary, BIN, ["5000", "264"]),
    (name_a_lost_tokenizer, BIN, ["t.json"]),
    (cut_the_records, RECORDS, ["a.rec", "ArrayRecord is damaged"]),
]


@pytest.mark.parametrize(("damage", "words", "fragments"), DATA)
def test_data_that_is_wrong_is_refused_before_a_run_directory_is_made(
    command, tokens, damage, words, fragments
):
    damage(tokens)
    refused(command(*words), *fragments)
    assert not (tokens / "run").exists()


def write_step(directory, step, **version):
    """A finished step as far as anything but its arrays is concerned."""
    path = directory / str(step)
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"weights")
    facts = {"step": step, "config": to_dict(Config())}
    manifest.write_manifest(path, facts, **version)
    return path


@pytest.fixture
def steps(tmp_path):
    """The directory of the run's checkpoints, with steps 10 and 20."""
    for step in (10, 20):
        write_step(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run" / "checkpoints"


def test_a_changed_config_is_refused_with_the_difference(command, steps):
    result = command("model.width=64", "train.seed=1")
    refused(result, "model.width: 128 -> 64", "train.seed: 0 -> 1", "run_dir")
    assert not (steps.parent / "config.json").exists()


GLOB = ("data.source=tokens", "data.train_files=a*.bin")


@pytest.fixture
def trained(tokens):
    """A run on the token file a.bin, with a checkpoint that knows it."""
    cfg = load_config(tokens / "config.yaml", [f"--config.{word}" for word in GLOB])
    path = tokens / "run" / "checkpoints" / "10"
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"weights")
    facts = {"config": to_dict(cfg), "data": open_inputs(cfg).content}
    manifest.write_manifest(path, {"step": 10, **facts})
    return tokens


def test_other_data_under_the_same_glob_is_refused_with_what_changed(command, trained):
    with pytest.raises(pytest.fail.Exception, match="a device was touched"):
        command(*GLOB)  # as it was
    write_tokens(trained / "ab.bin", prepare.BinWriter)
    refused(command(*GLOB), "data differs", "ab.bin is new", "checkpoint.allow_changed_data")
    with pytest.raises(pytest.fail.Exception, match="a device was touched"):
        command(*GLOB, "checkpoint.allow_changed_data=true")


def test_a_run_that_is_past_its_new_end_is_refused(command, steps):
    result = command("train.num_steps=19", "optimizer.warmup_steps=5")
    refused(result, "step 20", "train.num_steps is 19")


def test_damaged_checkpoints_are_refused_with_what_was_found(command, steps):
    for step in (10, 20):
        (steps / str(step) / "weights").write_bytes(b"wEights")
    refused(command(), "no whole checkpoint", "20.corrupt", "10.corrupt", "run_dir")


def test_a_newer_checkpoint_asks_for_an_upgrade(command, tmp_path):
    write_step(tmp_path / "run" / "checkpoints", 10, version=4)
    refused(command(), "format 4", "Upgrade moejax")


def test_damaged_manifests_are_refused_with_what_was_found(command, steps):
    for step in (10, 20):
        (steps / str(step) / manifest.MANIFEST).write_text("{")
    refused(command(), "no whole checkpoint", "20.corrupt: manifest", "10.corrupt: manifest")


@pytest.mark.parametrize("there", [None, "notes.txt", "3.orbax-checkpoint-tmp-0"])
def test_weights_that_are_not_there_are_refused_with_what_was_found(command, tmp_path, there):
    if there is not None:
        (tmp_path / "source" / there).mkdir(parents=True)
    result = command("checkpoint.init_from=source")
    refused(result, "no finished checkpoint at source", there or "nothing")


def test_weights_of_another_model_are_refused_with_the_difference(command, tmp_path):
    write_step(tmp_path / "source" / "checkpoints", 10)
    result = command("checkpoint.init_from=source", "model.width=64", "train.seed=1")
    refused(result, "model.width: 128 -> 64", "checkpoint.init_from")
    assert "train.seed" not in result[1][0]


def test_damaged_weights_are_refused(command, tmp_path):
    path = write_step(tmp_path / "source" / "checkpoints", 10)
    (path / "weights").write_bytes(b"short")
    refused(command("checkpoint.init_from=source"), "checkpoint is damaged", "weights has 5 bytes")


def test_a_run_directory_that_is_a_file_is_refused(command, tmp_path):
    (tmp_path / "run").touch()
    refused(command(), "run directory cannot be written")
    refused(command("run_dir=run/below"), "run directory cannot be written")


def test_a_run_directory_in_use_is_refused_with_its_owner(command, tmp_path):
    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run")
    refused(command(), "run directory is in use", "process ")
    lock.close()
    # Free again: the same command gets as far as the devices.
    with pytest.raises(pytest.fail.Exception, match="a device was touched"):
        command()


def test_debug_shows_where_an_error_was_raised(tmp_path):
    with pytest.raises(InputError, match=r"absent\.yaml"):
        main(["--config", str(tmp_path / "absent.yaml"), "--debug"])


def test_the_exit_code_reaches_the_shell():
    command = [sys.executable, "-m", "moejax", "train", "--config", "absent.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    refused((done.returncode, done.stderr.splitlines()), "absent.yaml")
    assert done.stdout == ""
