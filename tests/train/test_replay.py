"""A step that is run again: equal to the bit, or what differs is named."""

import dataclasses
import json
import shutil

import pytest

from moejax.errors import InputError
from moejax.runtime.event_log import RunLock
from moejax.train import __main__, replay
from tests.integration.runs import records as events
from tests.train.small_runs import EVERY, STEPS, change_manifest, config, run_again, train

BAD = {5, 6}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run that went back from step 7 to 4, and left out three batches."""
    run_dir = tmp_path_factory.mktemp("replay") / "run"
    train(config(run_dir), BAD)
    return run_dir


def files(run_dir):
    """All that a run directory holds, with when it was changed."""
    return {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 8, STEPS])
def test_a_step_equals_what_was_logged_and_saved_and_nothing_is_written(trained, step):
    before = files(trained)
    lock = RunLock(trained)  # a live run is not disturbed
    try:
        before[trained / "lock"] = (trained / "lock").stat().st_mtime_ns
        equal, shown = run_again(config(trained), step, BAD)
    finally:
        lock.close()
    assert equal
    assert "trains in" in shown
    logged = next(e for e in events(trained, "step")[::-1] if e["step"] == step)
    assert f"loss {logged['loss']!r}: equals the logged one" in shown
    assert f"gradient norm {logged['gradient_norm']!r}: equals the logged one" in shown
    assert ("arrays equal" in shown) == (step % EVERY == 0)
    assert files(trained) == before


@pytest.mark.slow
def test_what_differs_is_named(trained, tmp_path):
    run_dir = shutil.copytree(trained, tmp_path / "run")

    def change(facts):
        digests = facts["arrays"]["weights/params.groups.0.blocks.0.moe.w_out"]["digests"]
        digests[0] = digests[0][:16] + "0123456789abcdef"

    change_manifest(run_dir / "checkpoints" / "8", change)
    log = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["event"] == "step" and line["step"] == 8:
            line["loss"] += 1e-7
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    equal, shown = run_again(config(run_dir), 8, BAD)
    assert not equal
    assert "the logged one, " in shown
    assert "expert 1 of layer 0 (groups.0.blocks.0.moe.w_out) is changed" in shown
    # Of other data is another step.
    equal, shown = run_again(config(trained), 8, {10})
    assert not equal
    assert "loss nan: differs from the logged one" in shown


@pytest.mark.parametrize(
    ("step", "mesh", "said"),
    [
        (0, {}, "--replay_step is 0, and the last known step of "),
        (STEPS + 1, {}, f"is {STEPS}. A step is run again that the run has done."),
        (4, {}, "no whole checkpoint before step 4."),
        (8, {"fsdp": 2}, "mesh.fsdp is 2, was 1. Bits are equal on the same mesh alone."),
    ],
)
def test_what_cannot_be_run_again_is_refused_before_a_device_is_touched(
    trained, monkeypatch, step, mesh, said
):
    cfg = config(trained)
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **mesh))
    monkeypatch.setattr(replay, "_build", None)
    with pytest.raises(InputError) as found:
        replay.replay(cfg, step, replay.Console(quiet=True))
    assert said in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("equal", [True, False])
def test_the_exit_code_says_whether_it_was_equal(tmp_path, monkeypatch, equal):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(replay, "replay", lambda cfg, step, console: equal and step == 7)
    words = ["--config", str(tmp_path / "config.json"), "--replay_step", "7"]
    assert __main__.main(words) == (0 if equal else 1)
    with pytest.raises(SystemExit):  # one thing at a time
        __main__.main([*words, "--dry_run"])
