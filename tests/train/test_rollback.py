"""Real runs that go back: on one device, with batches whose loss is not finite."""

import signal
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from moejax.checkpoint.find import newest
from moejax.checkpoint.manifest import finished_steps, read_manifest
from moejax.checkpoint.writer import restore_state
from moejax.config.schema import TrainConfig
from moejax.errors import DivergedError, InputError
from moejax.runtime.watch import Watch
from moejax.train import rollback
from moejax.train.faults import spikes
from moejax.train.faults.bad_steps import BadSteps, GoBackError, StepCheck
from tests.annotations import without_annotations
from tests.cases import some_of, step_for
from tests.integration.runs import records as events
from tests.train.small_runs import STEPS, batch, change_manifest, config, train


@pytest.fixture
def run(tmp_path):
    """Trains in the test's own directory; see `train`."""

    def start(name, bad, *, die=None, jump=False, **settings):
        return train(config(tmp_path / name, **settings), bad, die=die, jump=jump)

    return start


def end_of(run_dir):
    """The newest checkpoint, and its bits."""
    saved, notes = newest(run_dir / "checkpoints", "full")
    assert notes == []
    state = restore_state(saved, step_for(config(run_dir)).abstract)
    return saved, [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


@pytest.mark.slow
def test_a_run_goes_back_and_leaves_out_exactly_the_bad_batches_also_if_it_is_killed(run, tmp_path):
    # Batches 5 and 6 are those of steps 6 and 7: from the checkpoint of step 4 on they are left out
    # with batch 4, of step 5, which is not in that checkpoint.
    shown, seen = run("straight", {5, 6})
    begun = len(seen) - (STEPS - 4)
    assert begun == 8, "one step more is under way when a step is known to be bad"
    assert [step for step, _ in seen] == [*range(1, 9), *range(5, STEPS + 1)]
    assert seen[begun:] == [(step, batch(step - 1 + 3)) for step in range(5, STEPS + 1)]
    assert "The run goes back to step 4, and leaves out 3 batches: those of steps 5 to 7" in shown
    assert shown.count("compiling the step") == 1
    straight = tmp_path / "straight"
    (told,) = events(straight, "rolled_back")
    assert (told["step"], told["to"], told["skipped"]) == (7, 4, 3)
    saved, bits = end_of(straight)
    assert (saved.step, saved.manifest["data_position"]) == (STEPS, STEPS + 3)
    assert saved.manifest["skipped_data"] == [{"after_step": 4, "skip": 3}]
    assert read_manifest(straight / "checkpoints" / "4")["skipped_data"] == []
    for die in ("before", "after"):
        run(die, {5, 6}, die=die)
        known = die == "after"
        assert (tmp_path / die / "skipped_data.json").exists() == known
        shown, again = run(die, {5, 6})
        assert ("went back to step 4: the next 3 batches are left out" in shown) == known
        assert again[-1] == seen[-1]
        assert end_of(tmp_path / die)[1] == bits


@pytest.mark.slow
def test_a_run_without_a_checkpoint_from_before_goes_back_to_its_first_state(run, tmp_path):
    _, seen = run("first", {3, 4, 9, 10}, max_skipped=2)
    # First from step 5 to 0 without batches 0 to 4; then batches 9 and 10 are those of steps 5, 6.
    backs = [(e["step"], e["to"], e["skipped"]) for e in events(tmp_path / "first", "rolled_back")]
    assert backs == [(5, 0, 5), (6, 4, 2)]
    assert dict(seen)[1] == batch(5)
    assert dict(seen)[5] == batch(11)
    # Step 4 was looked at before it would have been saved.
    assert aside(tmp_path / "first") == []
    assert sorted(finished_steps(tmp_path / "first" / "checkpoints")) == [4, 8, STEPS]


def test_a_run_that_went_back_often_enough_ends_and_says_so(run, tmp_path):
    with pytest.raises(DivergedError, match=r"The run went back 1 times before \(train.rollbacks"):
        run("ends", {*range(5, 40)}, rollbacks=1)
    assert len(events(tmp_path / "ends", "rolled_back")) == 1
    # Another start knows it too.
    with pytest.raises(DivergedError, match="The run went back 1 times"):
        run("ends", {*range(5, 40)}, rollbacks=1)
    (tmp_path / "ends" / "skipped_data.json").write_text('[{"after_step": 2, "skip": 3}]')
    run("ends", {}, rollbacks=1)
    (tmp_path / "ends" / "skipped_data.json").write_text('[{"after_step": 1, "skip": 3}]')
    with pytest.raises(InputError, match="lists of skipped data contradict each other"):
        run("ends", {}, rollbacks=1, num_steps=STEPS + 1)


def aside(run_dir):
    """The checkpoints that a run went back behind."""
    return sorted(path.name for path in (run_dir / "checkpoints").glob("*.abandoned"))


def tables():
    """How many arrays have the shape of the embedding: one of weights and two of the optimizer."""
    return sum(x.shape == (264, 8) for x in jax.live_arrays())


def test_the_state_is_gone_from_the_devices_before_another_is_read(run, monkeypatch):
    before, held = tables(), []
    choose = rollback.choose_checkpoint

    def counted(*arguments, **names):
        held.append(tables())
        return choose(*arguments, **names)

    monkeypatch.setattr(rollback, "choose_checkpoint", counted)
    run("gone", {5, 6})
    assert held == [before]


def stop_at(step, patch):
    """Has a run be asked to stop when it looks at a step."""
    look = StepCheck.after

    def signalled(self, number, metrics):
        if number == step:
            signal.raise_signal(signal.SIGTERM)
        look(self, number, metrics)

    patch.setattr(StepCheck, "after", signalled)


def test_a_run_that_was_asked_to_stop_when_it_goes_back_stops_there(run, tmp_path, monkeypatch):
    stop_at(7, monkeypatch)
    shown, _ = run("stopped", {5, 6})
    assert "stopped at step 4; run the same command to go on" in shown
    assert [e["step"] for e in events(tmp_path / "stopped", "stopped")] == [4]
    assert finished_steps(tmp_path / "stopped" / "checkpoints") == [4]
    monkeypatch.undo()
    _, seen = run("stopped", {5, 6})
    assert seen[0] == (5, batch(7))


# With a checkpoint each step those of high losses must not push out the last one from before.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_spike", "every"),
    [
        pytest.param("tell", 24, marks=pytest.mark.exhaustive),
        pytest.param("roll_back", 12, marks=pytest.mark.exhaustive),
        ("roll_back", 1),
    ],
)
def test_a_loss_that_jumps_is_told_and_left_out_if_wanted(run, tmp_path, on_spike, every):
    settings = {"on_spike": on_spike, "num_steps": 42, "every": every}
    shown, _ = run("spike", {36, 37, 38}, jump=True, **settings)
    (told,) = events(tmp_path / "spike", "spike")
    assert (told["step"], told["loss"]) == (39, 100.0)
    assert told["median"] < 10
    assert shown.count("the loss jumped at step 37: it is 100.0000 at step 39") == 1
    backs = [(e["to"], e["skipped"]) for e in events(tmp_path / "spike", "rolled_back")]
    assert backs == ([(36, 3)] if on_spike == "roll_back" else [])


@pytest.mark.parametrize(("went_back", "goes_back"), [(0, True), (1, True), (2, False)])
def test_after_a_spike_a_run_goes_back_as_often_as_it_may(went_back, goes_back):
    told = []
    check = object.__new__(StepCheck)
    check._interrupt = None
    check._run = SimpleNamespace(
        cfg=SimpleNamespace(train=TrainConfig(on_spike="roll_back", rollbacks=2)),
        inputs=SimpleNamespace(skipped=[None] * went_back),
        records=SimpleNamespace(event=lambda *_, **__: None),
        display=SimpleNamespace(note=told.append),
    )
    spike = spikes.Spike(first=5, step=7, loss=9.0, median=2.0)
    with pytest.raises(GoBackError) if goes_back else nullcontext():
        check._report_spike(spike)
    assert len(told) == (not goes_back)


@pytest.mark.slow
@pytest.mark.parametrize("stopped_at", some_of([5, 9], 9))
def test_a_run_that_was_stopped_goes_back_where_one_that_was_not_does(
    run, tmp_path, monkeypatch, stopped_at
):
    """Stopped before the losses jump at step 9, and among the high ones."""
    monkeypatch.setattr(spikes, "LEAST", 6)  # more than either start sees by itself
    settings = {"jump": True, "on_spike": "roll_back", "every": 3}
    run("straight", {8, 9, 10}, **settings)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(stopped_at, patch)
        shown, _ = run("stopped", {8, 9, 10}, **settings)
    assert f"stopped at step {stopped_at + 1}" in shown
    run("stopped", {8, 9, 10}, **settings)
    (straight,) = events(tmp_path / "straight", "rolled_back")
    (resumed,) = events(tmp_path / "stopped", "rolled_back")
    assert (straight["step"], straight["to"], straight["skipped"]) == (11, 6, 5)
    assert aside(tmp_path / "straight") == ["9.abandoned"], "of the first high loss"
    assert resumed | {"time": 0} == straight | {"time": 0}
    assert end_of(tmp_path / "stopped")[1] == end_of(tmp_path / "straight")[1]


def test_updates_that_were_skipped_before_a_stop_count_after_it(run, tmp_path, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        stop_at(5, patch)
        run("stopped", {5, 6, 7}, max_skipped=3)
    run("stopped", {5, 6, 7}, max_skipped=3)
    (told,) = events(tmp_path / "stopped", "rolled_back")
    assert (told["step"], told["to"], told["skipped"]) == (8, 4, 4)


@pytest.mark.slow
def test_checkpoints_from_before_losses_were_kept_are_read(run, tmp_path):
    run("old", {}, num_steps=8)
    step = tmp_path / "old" / "checkpoints" / "8"
    assert len(read_manifest(step)["recent_losses"]["losses"]) == 8
    change_manifest(step, lambda facts: facts.pop("recent_losses"))
    _, seen = run("old", {})
    assert [number for number, _ in seen] == [9, 10, 11, 12]


@pytest.mark.parametrize("wrong", ["no checkpoint from before is whole", "data ends too early"])
def test_a_run_that_cannot_go_back_has_diverged_and_writes_nothing(tmp_path, monkeypatch, wrong):
    told = []

    def before(run, bad):
        if wrong.startswith("no"):
            raise InputError(wrong)
        return SimpleNamespace(step=4), {}

    def check_enough():
        raise InputError(wrong)

    monkeypatch.setattr(rollback, "_state_before", before)
    run = SimpleNamespace(
        watch=Watch(),
        record_saved=told.append,
        checkpoints=SimpleNamespace(wait_with_copies=lambda: "settled"),
        inputs=SimpleNamespace(skipped=(), check_enough=check_enough),
        records=SimpleNamespace(event=lambda *event: told.append(event)),
        cfg=SimpleNamespace(run_dir=str(tmp_path)),
    )
    run.watch.enter("step", 8)
    with (
        without_annotations(),
        pytest.raises(DivergedError, match=f"and cannot go back. losses are nan. {wrong}"),
    ):
        rollback.go_back(run, BadSteps(6, 7, "losses are nan"))
    assert told == ["settled", ("diverged", 7)]
    assert run.watch.now[0][:2] == ("restore", 8)
    assert list(tmp_path.iterdir()) == []
