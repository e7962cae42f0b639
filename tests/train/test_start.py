"""What a run goes on from: which checkpoint is chosen, and what of it is kept."""

import dataclasses
import errno
import io
import json
import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from moejax.checkpoint import disk_space
from moejax.checkpoint import writer as checkpoint
from moejax.checkpoint.compatible import describe_run
from moejax.checkpoint.find import Saved, newest
from moejax.checkpoint.manifest import MANIFEST, read_manifest, stored_bytes, write_manifest
from moejax.checkpoint.restore import quarantine_wrong_steps, resume
from moejax.checkpoint.writer import Checkpoints
from moejax.config.load import to_dict
from moejax.config.schema import CheckpointConfig, TrainConfig
from moejax.errors import InputError, StorageFullError
from moejax.runtime.processes import ALONE
from moejax.train import start
from moejax.train.inputs import Inputs
from moejax.train.loop import open_checkpoints
from moejax.train.records.metrics import Records
from moejax.train.start import (
    check_disk,
    check_keep,
    check_same_config,
    choose_checkpoint,
    claim,
    finished_message,
)
from tests.annotations import without_annotations
from tests.cases import drawn_state, on_nodes, small_config, step_for
from tests.threads import everywhere
from tests.train.running import stream

LAST = {"event": "final_eval", "step": 20, "nats_per_token": 0.75, "bits_per_byte": 1.2345}
NO_DATA = {"train": [], "held_out": []}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of steps 1 and 2, and the trainer that they are of."""
    directory = tmp_path_factory.mktemp("written") / "checkpoints"
    train_step = step_for(dataclasses.replace(small_config(), run_dir="run"))
    state = drawn_state(train_step)
    writer = Checkpoints(directory, keep=3)
    for step in (1, 2):
        writer.save(
            step, state._replace(step=state.step + step), {"config": to_dict(train_step.cfg)}
        )
    writer.close()
    return directory, train_step


@pytest.fixture
def run(written, tmp_path, monkeypatch):
    """A run directory with a copy of them: its config, its trainer, its checkpoints."""
    monkeypatch.chdir(tmp_path)
    return written[1].cfg, written[1], shutil.copytree(written[0], tmp_path / "run/checkpoints")


def pretend(path, step):
    """Makes a step another one: its name and its manifest, digest and all, but not its state."""
    facts = {"step": step, "config": read_manifest(path)["config"]}
    (path / MANIFEST).unlink()
    write_manifest(path, facts)
    path.rename(path.with_name(str(step)))


def test_a_state_of_another_step_is_set_aside_for_the_one_before(run):
    cfg, train_step, steps = run
    choose = partial(choose_checkpoint, cfg, NO_DATA, ALONE)
    saved, _, notes = choose()
    assert (saved.step, notes) == (2, [])
    assert quarantine_wrong_steps(saved, train_step, choose, ALONE) == (saved, [])
    pretend(steps / "2", 9)
    saved, _, notes = choose()
    assert (saved.step, notes) == (9, []), "name, manifest and files agree"
    saved, notes = quarantine_wrong_steps(saved, train_step, choose, ALONE)
    assert saved.step == 1
    assert notes == ["checkpoint 9 set aside as 9.corrupt: its state is of step 2"]
    pretend(steps / "1", 8)
    saved, _, _ = choose()
    with pytest.raises(InputError, match=r"no whole checkpoint in .*8\.corrupt.*9\.corrupt"):
        quarantine_wrong_steps(saved, train_step, choose, ALONE)


@pytest.fixture(scope="module")
def remembering(tmp_path_factory):
    """A checkpoint of a run on two nodes of four devices, whose codecs have something to send."""
    directory = tmp_path_factory.mktemp("remembering") / "checkpoints"
    train_step = step_for(on_nodes())
    state = drawn_state(train_step)
    kept = jax.tree.map(jnp.ones_like, state.reduction)
    assert jax.tree.leaves(kept)
    writer = Checkpoints(directory, keep=1)
    writer.save(0, state._replace(reduction=kept), describe_run(train_step, NO_DATA))
    writer.close()
    return directory


def resumed(directory, cfg):
    """The first state of a run that goes on from the checkpoint, and what it printed."""
    train_step, out = step_for(cfg), io.StringIO()
    saved, _ = newest(directory, "full")
    console = Console(file=out, width=200)
    choose = partial(newest, directory, "full")
    found = resume(train_step, saved, choose, ALONE, console, console.print)
    return found.state, train_step, out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("written_as", ["format 2", "format 1"])
@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 4},  # the same axes: fsdp crosses nodes now, and shapes differ
        {"weights": "whole"},  # all shapes are the same, of other weights
        {"codec": "int4+feedback"},
        {"codec": "none"},
        {"mesh": (4, 1, 1, 2)},
    ],
    ids=str,
)
def test_what_codecs_kept_for_another_reduction_is_dropped(
    remembering, tmp_path, change, written_as
):
    directory = shutil.copytree(remembering, tmp_path / "checkpoints")
    if written_as == "format 1":
        forget_newer_facts(directory / "0")
    state, train_step, said = resumed(directory, on_nodes(**change))
    assert "codecs' state is dropped" in said
    kept = state.reduction
    assert jax.tree.map(jnp.shape, kept) == jax.tree.map(jnp.shape, train_step.abstract.reduction)
    assert not any(np.any(x) for x in jax.tree.leaves(kept))


@pytest.mark.slow
def test_what_codecs_kept_goes_on_where_nothing_changed_for_them(remembering, tmp_path):
    directory = shutil.copytree(remembering, tmp_path / "checkpoints")
    for _ in range(2):
        state, _, said = resumed(directory, on_nodes(route="merge"))
        assert "dropped" not in said
        assert all(np.all(x == 1) for x in jax.tree.leaves(state.reduction))
        forget_newer_facts(directory / "0")


def forget_newer_facts(path):
    """Leaves of a manifest what the first format had."""
    old = ("step", "config", "mesh", "files")
    known = {name: value for name, value in read_manifest(path).items() if name in old}
    (path / MANIFEST).write_text(json.dumps({"format_version": 1, **known}))


def said(folder, *records, step=20, held_out=True):
    """What is said of a run of 20 steps with such records."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    cfg = dataclasses.replace(small_config(), run_dir=str(folder), train=TrainConfig(num_steps=20))
    inputs = object.__new__(Inputs)
    inputs.held_out = stream(30) if held_out else None
    return finished_message(cfg, inputs, Saved(step, folder / "checkpoints" / str(step), {}))


def test_a_finished_run_says_where_it_ended_and_how_good_it_is(tmp_path):
    # A later evaluation counts; a killed run leaves half a line.
    text = said(tmp_path, LAST | {"bits_per_byte": 9.0}, LAST, '{"time": 1.5, "ev')
    assert text.startswith(f"done before: step 20 of 20 is in {tmp_path / 'checkpoints' / '20'}; ")
    assert "held-out (all): 1.234 bits per byte, 0.7500 nats per token" in text
    assert "Raise train.num_steps" in text
    assert "nan bits per byte" in said(tmp_path, LAST | {"bits_per_byte": None})
    assert "bits per byte" not in said(tmp_path, {**LAST, "step": 10}, held_out=False)


def test_a_run_with_steps_or_its_last_evaluation_left_is_not_done(tmp_path):
    assert said(tmp_path, LAST, step=19) is None
    for records in ((), (LAST | {"step": 10},), (LAST | {"event": "eval"},)):
        assert said(tmp_path, *records) is None


def disk(monkeypatch, free):
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))


def test_a_run_whose_checkpoint_does_not_fit_the_disk_is_refused(tmp_path, monkeypatch):
    train_step = step_for(small_config())
    state = train_step.abstract
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    disk(monkeypatch, needed - 1)
    with pytest.raises(StorageFullError, match=f"step 20.*{needed:,}. No step was saved before"):
        check_disk(train_step, None, tmp_path / "checkpoints", ALONE)
    disk(monkeypatch, 4 * needed - 1)  # three are kept, and the fourth is written first
    told = check_disk(train_step, None, tmp_path / "checkpoints", ALONE)
    assert "4 checkpoints more take about" in told[0]
    disk(monkeypatch, 4 * needed)
    assert check_disk(train_step, None, tmp_path / "checkpoints", ALONE) == []


def test_a_resumed_run_needs_room_for_one_like_its_newest(run, monkeypatch):
    cfg, train_step, steps = run
    saved, _, _ = choose_checkpoint(cfg, NO_DATA, ALONE)
    needed = stored_bytes(saved.manifest)
    disk(monkeypatch, needed - 1)
    with pytest.raises(StorageFullError, match="Step 2 is safe"):
        check_disk(train_step, saved, steps, ALONE)
    disk(monkeypatch, 2 * needed)  # of four, two are there
    assert check_disk(train_step, saved, steps, ALONE) == []
    disk(monkeypatch, 0)
    assert check_disk(train_step, saved._replace(step=cfg.train.num_steps), steps, ALONE) == []


def test_a_run_keeps_a_checkpoint_to_fall_back_to():
    cfg = small_config()
    check_keep(dataclasses.replace(cfg, checkpoint=CheckpointConfig(keep=2)))
    with pytest.raises(InputError, match=r"`checkpoint\.keep` is 1\. .* at least 2 .* Set 2 or"):
        check_keep(dataclasses.replace(cfg, checkpoint=CheckpointConfig(keep=1)))


def test_a_save_that_fails_is_in_the_metrics_under_its_step(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "commit", fail)
    records = Records(tmp_path)
    cfg = dataclasses.replace(small_config(), run_dir=str(tmp_path))
    writer = open_checkpoints(cfg, ALONE, records, Console(quiet=True))
    writer.save(7, drawn_state(step_for(cfg)), {})
    with pytest.raises(StorageFullError) as error:
        writer.wait()
    writer.close()
    records.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["event"], line["step"], line["text"]) for line in lines] == [
        ("save_failed", 7, str(error.value))
    ]


def test_processes_that_were_started_with_other_settings_are_told_which():
    def check(processes):
        cfg = small_config(train={"seed": 3 + (processes.index == 1), "num_steps": 7})
        try:
            check_same_config(cfg, processes)
        except InputError as error:
            return str(error)
        return None

    first, second = everywhere(2, check)
    assert "different configs. 1 and 0 differ: train.seed: 4 and 3. " in first
    assert "different configs. 0 and 1 differ: train.seed: 3 and 4. " in second
    assert everywhere(2, lambda each: check_same_config(small_config(), each)) == [None, None]


def test_a_run_directory_is_waited_for_as_long_as_was_said(tmp_path):
    held = claim(tmp_path / "new" / "run")
    began = time.monotonic()
    with pytest.raises(InputError, match="run directory is in use"):
        claim(tmp_path / "new" / "run")
    assert time.monotonic() - began < 0.5 + 0.2
    with pytest.raises(InputError, match="run directory is in use"):
        claim(tmp_path / "new" / "run", 0.5)
    assert time.monotonic() - began >= 0.5
    timer = threading.Timer(0.3, held.close)
    timer.start()
    claim(tmp_path / "new" / "run", 20).close()
    timer.join()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"run directory cannot be written. .*Not a directory"):
        claim(tmp_path / "file" / "run")


SOURCE, FOLDER = Saved(7, Path("there"), {}), SimpleNamespace(path=Path("model"))


@pytest.mark.parametrize(
    ("lora", "resumed", "source", "said", "given"),
    [
        (False, None, None, "", "drawn"),
        (False, None, SOURCE, "weights from there (step 7)\n", "drawn, weights of there"),
        (False, None, FOLDER, "weights from model\n", "drawn, weights of model"),
        (False, "resumed", None, "", "resumed"),
        (False, "resumed", SOURCE, "", "resumed"),
        (True, None, SOURCE, "frozen weights from there (step 7)\n", "first of weights, bias"),
        (True, "resumed", SOURCE, "frozen weights from there (step 7)\n", "resumed on weights"),
    ],
)
def test_a_run_begins_with_what_it_resumes_else_with_weights_it_was_given_else_with_drawn_ones(
    monkeypatch, lora, resumed, source, said, given
):
    monkeypatch.setattr(start, "read_weights", lambda *_: ("weights", "bias"))
    monkeypatch.setattr(
        start, "take_weights", lambda source, state, *_: f"{state}, weights of {source.path}"
    )
    train_step = SimpleNamespace(
        abstract=SimpleNamespace(frozen={} if lora else None),
        at_sites=lambda state: state,
        init=lambda: "drawn",
        first_state=lambda params, bias: f"first of {params}, {bias}",
    )
    shown = io.StringIO()
    before = resumed
    if resumed and lora:
        before = SimpleNamespace(_replace=lambda frozen: f"resumed on {frozen}")
    with without_annotations():
        found = start.initial_state(train_step, before, source, Console(file=shown, width=200))
    assert (found, shown.getvalue()) == (given, said)
