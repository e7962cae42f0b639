"""Trackers are told what the records hold, and cannot stop or delay a run."""

import dataclasses
import json
import sys
import threading
import time
import types

import pytest

from moejax.config.schema import Config, TrackConfig
from moejax.errors import InputError
from moejax.train.records import trackers
from moejax.train.records.metrics import Records
from moejax.train.records.trackers import Trackers, check_trackers, open_trackers
from tests.cases import small_config


class Kept:
    """A tracker that keeps what it is told."""

    def __init__(self):
        self.lines, self.finished = [], False

    def log(self, *line):
        self.lines.append(line)

    def finish(self):
        self.finished = True


def tracked(cfg: Config, **names) -> Config:
    return dataclasses.replace(cfg, track=TrackConfig(**names))


def test_a_tracker_is_told_what_the_records_hold(tmp_path):
    kept = Kept()
    records = Records(tmp_path, trackers=Trackers({"kept": lambda: kept}))
    records.event("eval", 3, bits_per_byte=2.5)
    records.event("note", 3, text="no number")
    records.event("saved", 4)
    assert records.close() == []
    assert kept.lines == [(3, {"eval/bits_per_byte": 2.5})]
    assert kept.finished


def test_what_goes_wrong_at_the_end_is_told_too(tmp_path):
    class Late(Kept):
        def finish(self):
            raise OSError("not sent")

    (problem,) = Records(tmp_path, trackers=Trackers({"late": Late})).close()
    assert "not sent" in problem


@pytest.mark.parametrize("where", ["open", "log", "finish"])
def test_a_tracker_that_raises_is_named_and_left(where):
    class Broken(Kept):
        def __init__(self):
            super().__init__()
            if where == "open":
                raise ConnectionError("no such host\nsecond line")

        def log(self, step, values):
            if where == "log":
                raise SystemExit("tried to end the run")

        def finish(self):
            if where == "finish":
                raise OSError("late")

    kept = Kept()
    both = Trackers({"broken": Broken, "kept": lambda: kept})
    for step in range(5):
        both.log(step, {"a": 1.0})
    both.close()
    (problem,) = both.problems()
    assert problem.startswith("broken is told no more: ")
    assert "\n" not in problem
    # The other one lacks nothing, and a problem is told once.
    assert [step for step, _ in kept.lines] == [0, 1, 2, 3, 4]
    assert both.problems() == []


def test_a_tracker_that_hangs_delays_nothing_and_ends_with_the_run(monkeypatch):
    monkeypatch.setattr(trackers, "WAITING", 10)
    release = threading.Event()

    class Hangs(Kept):
        def log(self, step, values):
            release.wait()

    slow = Trackers({"slow": Hangs})
    began = time.monotonic()
    for step in range(50):
        slow.log(step, {"a": 1.0})
    slow.close(patience_s=0.2)
    assert time.monotonic() - began < 5
    assert slow.problems() == [
        "slow is slow: reports are left out of it",
        "slow did not finish in time: its last reports may be missing",
    ]
    release.set()


def test_a_missing_library_and_mlflow_without_an_address_are_refused_before_the_run(monkeypatch):
    cfg = small_config()
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"wandb is not installed\. Install moejax\[wandb\]"):
        check_trackers(tracked(cfg, wandb="moe"))
    check_trackers(cfg)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: True)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(InputError, match="MLFLOW_TRACKING_URI is not set"):
        check_trackers(tracked(cfg, mlflow="moe"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check_trackers(tracked(cfg, mlflow="moe"))


def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(tmp_path, monkeypatch):
    """With a stand-in for the library, of the calls that are made."""
    begun = []

    class Run:
        def __init__(self, **options):
            self.id, self.options, self.lines = options["id"] or f"id{len(begun)}", options, []
            begun.append(self)

        def define_metric(self, name, step_metric):
            self.defined = (name, step_metric)

        def log(self, values):
            self.lines.append(values)

        def finish(self):
            self.lines.append("end")

    library = types.SimpleNamespace(init=Run, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", library)
    cfg = dataclasses.replace(small_config(), run_dir=str(tmp_path))
    for step in (1, 2):
        found = open_trackers(tracked(cfg, wandb="moe"))
        found.log(step, {"train/loss": 1.0})
        found.close()
        assert found.problems() == []
    assert [run.id for run in begun] == ["id0", "id0"]
    assert begun[1].options["resume"] == "allow"
    assert begun[1].options["config"]["train.num_steps"] == cfg.train.num_steps
    assert begun[1].lines == [{"step": 2, "train/loss": 1.0}, "end"]
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": "id0"}
