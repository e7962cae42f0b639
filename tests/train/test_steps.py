import dataclasses
import math
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from moejax.config.schema import CheckpointConfig
from moejax.errors import DivergedError, ReplicasError
from moejax.runtime.processes import Processes
from moejax.train import steps
from moejax.train.steps import compare_with_plan, run_steps
from tests.annotations import without_annotations
from tests.cases import small_config
from tests.integration.runs import records as events
from tests.plan.clusters import cluster
from tests.train.running import BAD, initial_state


def config(num_steps, *, save_every=None, **train):
    cfg = small_config(train={"num_steps": num_steps, "eval_every": None, **train})
    return dataclasses.replace(cfg, checkpoint=CheckpointConfig(save_every=save_every))


def test_a_resumed_run_goes_on_with_the_data_where_it_was(training):
    seen, cfg = [], config(6)
    run, _ = training(cfg, seen=seen)
    _, stopped = run_steps(run, initial_state(step=3))
    assert not stopped
    wanted = [run.inputs.train.rows(step, 0, 8).token_BT for step in (3, 4, 5)]
    np.testing.assert_array_equal(seen, wanted)


def test_a_skipped_update_is_told_with_what_was_not_finite(training, tmp_path):
    cfg = config(9)
    bad = {3: BAD, 4: BAD, 7: {"loss": 2.5, "norm": math.inf}}
    run, shown = training(cfg, bad)
    run_steps(run, initial_state(skipped=5))
    said = [line for line in shown.getvalue().splitlines() if "warning" in line]
    assert said == [  # the second in a row is only recorded
        "warning: update of step 3 skipped: the loss is nan",
        "warning: update of step 7 skipped: the gradient's norm is inf (loss 2.5000)",
    ]
    assert [event["step"] for event in events(tmp_path, "skipped")] == [3, 4, 7]


def test_too_many_skipped_in_a_row_end_the_run_and_the_last_good_checkpoint_is_named(
    training, tmp_path
):
    cfg = config(30, save_every=2, max_skipped=3, rollbacks=0)
    # Two in a row are allowed.
    run, _ = training(cfg, dict.fromkeys((2, 3, *range(7, 31)), BAD))
    with pytest.raises(DivergedError) as found:
        run_steps(run, initial_state())
    text = " ".join(str(found.value).split())
    assert "Updates of steps 7 to 9 were skipped: the loss is nan. " in text
    assert f"from before them is {tmp_path / 'checkpoints' / '6'}. " in text
    assert "train.max_skipped" in text
    # A save that was due while updates were skipped would have pushed a good one out: a step is
    # looked at before it is saved.
    assert run.checkpoints.steps == [4, 6]
    assert [event["step"] for event in events(tmp_path, "diverged")] == [9]


@pytest.mark.parametrize(("limit", "last"), [(3, 4), (None, 12)])
def test_a_run_without_a_good_checkpoint_says_so_or_goes_on_if_told(training, limit, last):
    cfg = config(last, max_skipped=limit, rollbacks=0 if limit else 2)
    run, _ = training(cfg, dict.fromkeys(range(last - 2, last + 1), BAD))
    if limit is None:
        assert int(run_steps(run, initial_state())[0].step) == last
        assert run.checkpoints.steps == [last]
        return
    # The last step of all is looked at before it is saved.
    with pytest.raises(DivergedError, match="No checkpoint is from before"):
        run_steps(run, initial_state())
    assert run.checkpoints.steps == []


def test_steps_without_targets_are_neither_losses_nor_spikes(training, tmp_path):
    cfg = config(60, spike_threshold=6.0)
    none = {"loss": 0.0, "has_targets": np.array([False])}
    high = {"loss": 9.0}
    run, _ = training(cfg, {n: high if n > 54 else none for n in (*range(2, 40, 2), 55, 56, 57)})
    run_steps(run, initial_state())
    (spike,) = events(tmp_path, "spike")
    assert (spike["step"], spike["median"]) == (57, 1.0)
    assert 0.0 not in run.recent["losses"]


class Mailbox(Processes):
    """One process that counts as several: what it gathers is what the others said too."""

    def __init__(self, others):
        super().__init__()
        self.others = others

    def gather(self, value):
        if isinstance(value, list):  # asked to stop, why hosts change, whose memory is short
            return [value, [self.others, None, None]]
        return [value]


@pytest.mark.parametrize("asked", [None, "other", "this"])
def test_who_was_asked_to_stop_where_another_plan_follows_is_heard(training, asked):
    cfg = config(9, save_every=3)
    run, shown = training(cfg)
    run.new_links, run.processes = cluster(), Mailbox(asked == "other")
    save = run.checkpoints.save

    def signalled(*arguments):
        save(*arguments)
        if asked == "this":  # too late for the loop to ask all to stop
            signal.raise_signal(signal.SIGTERM)

    run.checkpoints.save = signalled
    state, early = run_steps(run, initial_state())
    assert (int(state.step), early) == (3, True)
    assert (run.new_links is None) == bool(asked)
    assert ("stopped at step 3; run the same command" in shown.getvalue()) == bool(asked)
    assert ("planning again" in shown.getvalue()) != bool(asked)


def test_a_run_that_is_asked_to_stop_saves_and_says_so(training, tmp_path):
    cfg = config(9)
    run, _ = training(cfg)
    step = run.train_step.step.function

    def signalled(state, batch):
        if int(state.step) == 3:
            signal.raise_signal(signal.SIGTERM)
        return step(state, batch)

    run.train_step.step.function = signalled
    state, stopped = run_steps(run, initial_state())
    assert (int(state.step), stopped) == (4, True)
    assert run.checkpoints.steps == [4]
    assert [event["step"] for event in events(tmp_path, "stopped")] == [4]


@pytest.mark.parametrize(
    ("off", "measures", "topology"),
    [(False, False, None), (True, False, None), (True, True, "links"), (True, True, None)],
)
def test_steps_are_compared_with_the_plan_and_links_measured_where_that_may_be(
    off, measures, topology
):
    """All processes take what process 0 measured."""
    did = []

    def during(stage, step):
        did.append((stage, step))
        return nullcontext()

    class Monitor:
        predicted = 0.5
        measure = (lambda self, progress: topology) if measures else None

        def off(self, seconds):
            did.append(seconds)
            return off

        def mismatch(self, seconds, now):
            did.append(seconds)
            assert now == topology
            return "why"

    run = SimpleNamespace(
        new_links=None,
        processes=SimpleNamespace(gather=lambda seconds: [0.25, seconds]),
        records=SimpleNamespace(event=lambda name, step, **more: did.append((name, step, more))),
        display=SimpleNamespace(note=did.append, busy=nullcontext),
        watch=SimpleNamespace(
            during=lambda stage, step: did.append((stage, step)) or nullcontext()
        ),
    )
    with without_annotations():
        compare_with_plan(run, Monitor(), 8, 0.75)
    told = ["why", ("note", 8, {"text": "why"})]
    measured = [("plan", 8)] * measures
    assert did == [("predicted", 8, {"ratio": 0.5}), 0.25, *([*measured, 0.25, *told] * off)]
    assert (run.new_links is not None) == (topology is not None)


def test_copies_that_differ_are_recorded_before_the_run_ends(training, tmp_path, monkeypatch):
    def differ(arrays, step, processes):
        raise ReplicasError("device 3")

    monkeypatch.setattr(steps, "check_replicas", differ)
    run, _ = training(config(2))
    with without_annotations(), pytest.raises(ReplicasError, match="device 3"):
        steps.compare(run, 2, initial_state())
    (told,) = events(tmp_path, "replicas_differ")
    assert (told["step"], told["text"]) == (2, "device 3")
