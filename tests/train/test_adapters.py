"""A run that trains adapters: where its frozen weights come from, and what its checkpoints hold."""

import dataclasses
import io
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from moejax.checkpoint.compatible import describe_run
from moejax.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from moejax.checkpoint.restore import resume
from moejax.checkpoint.writer import Checkpoints
from moejax.config.load import to_dict
from moejax.config.schema import CheckpointConfig, LoraConfig
from moejax.errors import InputError
from moejax.runtime.processes import ALONE
from moejax.train.records.summary import summarize
from moejax.train.start import (
    base_of,
    check_has_base,
    check_paths,
    choose_checkpoint,
    initial_state,
)
from tests.cases import CERTAIN, place, random_batch, small_config, step_for

NO_DATA = {"train": [], "held_out": []}
LORA = LoraConfig(rank=2, base_dtype="bfloat16")


def small(mesh=(1, 1, 2, 2)):
    return small_config(mesh, moe=CERTAIN, router={"bias_update_rate": 0.01})


def write_base(folder, seed=0):
    """A checkpoint of step 5 whose selection biases are not zero."""
    cfg = dataclasses.replace(small(), train=dataclasses.replace(small().train, seed=seed))
    train_step = step_for(cfg)
    state = train_step.init()
    state = state._replace(router_bias=jax.tree.map(lambda x: x + 0.5, state.router_bias))
    writer = Checkpoints(folder / "checkpoints", keep=1)
    writer.save(5, state, {"config": to_dict(cfg)})
    writer.close()
    return jax.tree.map(np.asarray, state)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a base, and its weights."""
    folder = tmp_path_factory.mktemp("base")
    return folder, write_base(folder)


def settings(run_dir, source, mesh=(1, 1, 2, 2), **changes):
    checkpoint = CheckpointConfig(init_from=source and str(source))
    return dataclasses.replace(
        small(mesh), lora=LORA, checkpoint=checkpoint, run_dir=str(run_dir), **changes
    )


def start(cfg):
    """The first state of a run and what it printed, as `train` makes it."""
    choose = partial(choose_checkpoint, cfg, NO_DATA, ALONE)
    saved, source, _ = choose()
    train_step, out = step_for(cfg), io.StringIO()
    console = Console(file=out, width=200)
    resumed = resume(train_step, saved, choose, ALONE, console, console.print)
    state = initial_state(train_step, resumed and resumed.state, source, console)
    checkpoints = Checkpoints(path_of(cfg), keep=2)
    return state, train_step, checkpoints, base_of(cfg, source), out.getvalue()


def path_of(cfg):
    return Path(cfg.run_dir) / "checkpoints"


def bits(tree):
    return [(x.dtype, x.tobytes()) for x in map(np.asarray, jax.tree.leaves(tree))]


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """A run of four steps that saved after two: its folder and its last state."""
    cfg = settings(tmp_path_factory.mktemp("run"), base[0])
    state, train_step, checkpoints, identity, said = start(cfg)
    assert f"frozen weights from {base[0]}/checkpoints/5 (step 5)" in said
    state = advance(train_step, state, 0, 2)
    checkpoints.save(2, state, describe_run(train_step, NO_DATA, identity))
    checkpoints.close()
    return cfg, jax.tree.map(np.asarray, advance(train_step, state, 2, 4))


def advance(train_step, state, first, last):
    for step in range(first, last):
        batch = place(train_step, random_batch(train_step.cfg, seed=step))
        state, _ = train_step.step(state, batch)
    return state


@pytest.fixture
def stopped(trained, tmp_path):
    """A copy of the run's folder, as its config names it."""
    shutil.copytree(trained[0].run_dir, tmp_path / "run")
    return dataclasses.replace(trained[0], run_dir=str(tmp_path / "run"))


def test_a_resumed_run_ends_with_the_same_bits(trained, stopped):
    state, train_step, checkpoints, _, said = start(stopped)
    checkpoints.close()
    assert "resuming at step 2" in said
    assert "frozen weights from" in said
    assert bits(advance(train_step, state, 2, 4)) == bits(trained[1])


def test_frozen_weights_are_those_of_the_base_to_the_end(base, trained):
    wanted = jax.tree.map(lambda x, y: x.astype(y.dtype), base[1].params, trained[1].frozen)
    assert bits(trained[1].frozen) == bits(wanted)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(trained[1].frozen)}
    assert dtypes == {"bfloat16", "float32"}
    # Selection biases go on from those of the base.
    moved = np.asarray(jax.tree.leaves(trained[1].router_bias)[0]) - 0.5
    assert 0 < np.max(np.abs(moved)) < 0.05


def test_checkpoints_hold_adapters_and_what_identifies_their_base(base, stopped):
    manifest = read_manifest(path_of(stopped) / "2")
    identity = manifest["base"]
    assert identity["path"] == str(base[0] / "checkpoints" / "5")
    assert len(identity["weights"]) == 64
    whole = read_manifest(base[0] / "checkpoints" / "5")
    assert bytes_of_weights(manifest) < bytes_of_weights(whole) / 2


def bytes_of_weights(manifest):
    return sum(f["bytes"] for name, f in manifest["files"].items() if name.startswith("weights/"))


def test_a_state_restores_onto_another_mesh(stopped):
    cfg = dataclasses.replace(stopped, mesh=small((1, 1, 1, 1)).mesh)
    one, _, checkpoints, *_ = start(cfg)
    checkpoints.close()
    other, _, checkpoints, *_ = start(stopped)
    checkpoints.close()
    assert bits(one) == bits(other)


def test_a_moved_base_is_the_same_and_another_one_is_refused(base, stopped, tmp_path):
    shutil.copytree(base[0], tmp_path / "moved")
    saved, source, _ = choose_checkpoint(with_base(stopped, tmp_path / "moved"), NO_DATA, ALONE)
    assert (saved.step, source.step) == (2, 5)
    # A base that went on since has newer weights; the step by name has those of then.
    steps = tmp_path / "moved" / "checkpoints"
    newer = shutil.copytree(steps / "5", steps / "6")
    (newer / "weights" / "more").write_bytes(b"more")
    (newer / MANIFEST).unlink()
    write_manifest(newer, {"step": 6, "config": source.manifest["config"]})
    with pytest.raises(InputError, match="base weights differ"):
        choose_checkpoint(with_base(stopped, tmp_path / "moved"), NO_DATA, ALONE)
    assert choose_checkpoint(with_base(stopped, steps / "5"), NO_DATA, ALONE)[1].step == 5
    (tmp_path / "other").mkdir()
    write_base(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match="base weights differ") as raised:
        choose_checkpoint(with_base(stopped, tmp_path / "other"), NO_DATA, ALONE)
    assert str(base[0]) in str(raised.value)
    assert str(tmp_path / "other") in str(raised.value)
    assert "\n" not in str(raised.value)


def with_base(cfg, folder):
    return dataclasses.replace(cfg, checkpoint=CheckpointConfig(init_from=str(folder)))


def test_adapters_without_a_base_are_refused(tmp_path, stopped):
    for check in (check_has_base, check_paths):
        with pytest.raises(InputError, match=r"`lora\.rank` is 2"):
            check(settings(tmp_path / "new", None))
    absent = with_base(stopped, tmp_path / "absent")
    for check in (check_paths, lambda cfg: choose_checkpoint(cfg, NO_DATA, ALONE)):
        with pytest.raises(InputError, match="no finished checkpoint"):
            check(absent)


def test_adapters_are_no_weights_to_start_from(stopped, tmp_path):
    lora = settings(tmp_path / "new", stopped.run_dir)
    for cfg in (lora, dataclasses.replace(lora, lora=LoraConfig())):
        with pytest.raises(InputError, match=r"holds adapters, no weights.*`lora\.rank` = 2"):
            choose_checkpoint(cfg, NO_DATA, ALONE)


def test_a_run_of_all_weights_does_not_go_on_with_adapters(base, tmp_path):
    run_dir = shutil.copytree(base[0], tmp_path / "run")
    with pytest.raises(InputError, match=r"lora\.rank: None -> 2"):
        choose_checkpoint(settings(run_dir, base[0]), NO_DATA, ALONE)


def test_the_summary_counts_what_is_frozen_and_what_is_trained(base, tmp_path):
    cfg = settings(tmp_path / "run", base[0])
    train_step = step_for(cfg)
    summary, full = summarize(train_step), step_for(small())
    plain = summarize(full)
    frozen = sum(x.size for x in jax.tree.leaves(full.abstract.params))
    trained = sum(x.size for x in jax.tree.leaves(train_step.abstract.params))
    assert (summary.counts.total, summary.counts.trained) == (frozen, trained)
    assert (plain.counts.total, plain.counts.trained) == (frozen, frozen)
    assert summary.counts.flops_per_token < plain.counts.flops_per_token
    given = train_step.argument_bytes()
    sizes = summary.bytes_by_kind
    assert sizes["adapters (float32 masters)"] == sizes["gradients"] == given["weights"]
    assert sizes["frozen weights (bfloat16)"] == given["frozen weights"]
    assert summary.peaks["step"] > sum(given.values())
