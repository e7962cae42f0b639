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
from moejax.serve.samples import Sample, write_routing
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
    ("run_dir=exp[lr=1e-3]",): ["run_dir", "cannot hold checkpoints"],
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


def refused_without_a_run_directory(command, tokens, words, fragments):
    refused(command(*words), *fragments)
    assert not (tokens / "run").exists()


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("data.source=tokens", "data.train_files=b*.bin"), ["b*.bin", "none"]),
        (("data.source=tokens", "data.train_files=a.rec"), ["array_record"]),
        ((*BIN, "data.eval_files=a.bin"), ["held-out text is trained on"]),
        ((*BIN, "data.sequence_length=100000"), ["too little data", "100000"]),
        ((*BIN, "data.repeat=false", "train.num_steps=500"), ["500 steps", "sequences"]),
    ],
)
def test_data_that_does_not_fit_the_run_is_refused(command, tokens, words, fragments):
    refused_without_a_run_directory(command, tokens, words, fragments)


@pytest.mark.parametrize(
    ("name", "damage", "fragments"),
    [
        ("a.bin", lambda old: old + b"x", ["a.bin", "1 bytes beyond whole tokens"]),
        ("a.bin", lambda old: old[:-2] + b"\x2c\x01", ["a.bin, token", "id 300", "257"]),
        ("a.rec", lambda old: old[: len(old) // 2], ["a.rec", "ArrayRecord is damaged"]),
    ],
)
def test_data_that_is_damaged_is_refused(command, tokens, name, damage, fragments):
    (tokens / name).write_bytes(damage((tokens / name).read_bytes()))
    words = BIN if name == "a.bin" else RECORDS
    refused_without_a_run_directory(command, tokens, words, fragments)


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ((), ["a.npz has experts of a layer: 4, the model 8"]),
        (("moe.num_experts=4",), ["layers with experts: [0, 2]", "[0, 1, 2, 3]"]),
        (("model.moe_every=none",), ["`data.source` is routing", "no experts"]),
    ],
)
def test_recorded_routing_of_another_model_is_refused(command, tmp_path, words, fragments):
    sample = Sample([1], [2, 3], expert_TLK=np.tile(np.int16([0, 1]), (3, 2, 1)))
    write_routing(str(tmp_path / "a.npz"), [sample], layers=[0, 2], num_experts=4)
    words = ("data.source=routing", "data.train_files=a.npz", *words)
    refused_without_a_run_directory(command, tmp_path, words, fragments)


@pytest.mark.parametrize(
    ("fields", "fragments"),
    [
        (None, ["no sidecar", "a.bin.json"]),
        ({"vocab_size": 5000}, ["5000", "264"]),
        ({"tokenizer": "t.json", "tokenizer_sha256": "0" * 64}, ["t.json"]),
    ],
)
def test_a_sidecar_that_is_lost_or_does_not_fit_is_refused(command, tokens, fields, fragments):
    file = sidecar.sidecar_of(tokens / "a.bin")
    if fields is None:
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    refused_without_a_run_directory(command, tokens, BIN, fragments)


def write_step(directory, step, cfg=None, version=None, **facts):
    """A finished step as far as anything but its arrays is concerned."""
    path = directory / str(step)
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"weights")
    facts |= {"step": step, "config": to_dict(cfg or Config())}
    manifest.write_manifest(path, facts, **({} if version is None else {"version": version}))
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
    write_step(tokens / "run" / "checkpoints", 10, cfg, data=open_inputs(cfg).content)
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


@pytest.mark.parametrize(("name", "why"), [("weights", ""), (manifest.MANIFEST, ": manifest")])
def test_damaged_checkpoints_are_refused_with_what_was_found(command, steps, name, why):
    for step in (10, 20):
        (steps / str(step) / name).write_bytes(b"wEights")
    found = [f"{step}.corrupt{why}" for step in (20, 10)]
    refused(command(), "no whole checkpoint", *found, "run_dir")


def test_a_newer_checkpoint_asks_for_an_upgrade(command, tmp_path):
    write_step(tmp_path / "run" / "checkpoints", 10, version=4)
    refused(command(), "format 4", "Upgrade moejax")


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
