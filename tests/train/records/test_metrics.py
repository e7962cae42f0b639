import io
import json
import re
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from moejax.errors import StorageFullError
from moejax.report.runs import read_run
from moejax.step.state import Metrics
from moejax.train.records import metrics
from moejax.train.records.display import Display
from moejax.train.records.metrics import Board, Meter, Records


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time that passes when told."""
    fake = SimpleNamespace(now=100.0, perf_counter=lambda: fake.now, time=time.time)
    monkeypatch.setattr(metrics, "time", fake)
    return fake


def step_metrics(
    load=((1, 1, 1, 5), (2, 2, 2, 2)), loss=1.5, uneven=((0, 0, 0), (3, 0, 0)), **more
):
    return Metrics(
        loss=jnp.array(loss),
        balance=jnp.array(1.25),
        router_entropy=jnp.array(0.5),
        load_LE=jnp.array(load, jnp.int32).reshape(len(load), 4),
        uneven_L3=jnp.array(uneven, jnp.int32),
        gradient_norm=jnp.array(2.0),
        skipped=jnp.array(1, jnp.int32),
        **{name: jnp.array(value) for name, value in more.items()},
    )


def started(first=10):
    """A meter whose clock starts after so many steps."""
    meter = Meter(
        tokens_per_step=100,
        flops_per_token=50,
        peak=1e5,
        num_steps=30,
        schedule=lambda updates: updates / 100,
    )
    meter.start(first)
    return meter


def report(clock, **values):
    """The report of the step 14, two seconds after step 10."""
    return reported(started(), clock, 14, 2, **values)


def reported(meter, clock, step, seconds, **values):
    """The report of a step after some seconds."""
    clock.now += seconds
    meter.add(step_metrics(**values))
    return meter.report(step)


def recorded(folder, *reports):
    """The lines of reports in `metrics.jsonl`."""
    records = Records(folder)
    for one in reports:
        records.report(one)
    records.close()
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


def test_rates_are_of_the_steps_since_the_start_and_measurements_are_passed_on(clock):
    line = report(clock)
    assert line.step == 14
    assert line.tokens_per_second == pytest.approx(4 * 100 / 2)
    assert line.flops_per_second == pytest.approx(200 * 50)
    assert line.share_of_peak == pytest.approx(0.1)
    assert line.seconds_left == pytest.approx((30 - 14) / 2)
    assert (line.loss, line.balance, line.gradient_norm) == (1.5, 1.25, 2.0)
    assert (line.dropped, line.skipped, line.router_entropy) == ([0, 3], 1, 0.5)
    # Of 14 steps one was skipped, so this update was the thirteenth.
    assert line.learning_rate == pytest.approx(0.12)
    # Five of eight assignments against two on average, in the first of two layers.
    assert line.busiest_expert == pytest.approx(2.5)
    assert report(clock, load=()).busiest_expert == 1.0, "a model without experts"
    shown = "step 14/30  loss 1.5000  200 tok/s  0.0 GFLOP/s (10% of peak)  balance 1.250"
    assert line.line(30) == f"{shown}  dropped 3  skipped 1  0:08 left"


def test_forced_routing_is_told_with_every_line(clock, tmp_path):
    meter = started()
    meter.forced_routing = "balanced"
    line = reported(meter, clock, 14, 2)
    assert line.line(30).startswith("step 14/30  FORCED ROUTING balanced  loss 1.5000")
    (found,) = recorded(tmp_path, line)
    assert found["forced_routing"] == "balanced"
    assert "forced_routing" not in recorded(tmp_path, report(clock))[-1]


def test_recorded_choices_that_the_router_makes_too_are_told_as_a_share(clock, tmp_path):
    line = report(clock, replayed_L2=((30, 40), (15, 20)))
    assert line.routing_agreement == 45 / 60
    assert "balance 1.250  as recorded 75.0%  dropped 3" in line.line(30)
    free = report(clock, replayed_L2=((0, 0), (0, 0)))  # no token of the step has recorded experts
    assert "as recorded" not in free.line(30)
    found = recorded(tmp_path, line, free, report(clock))
    assert [one.get("routing_agreement", "absent") for one in found] == [0.75, None, "absent"]


def test_what_overflowed_is_told_and_rounds_of_steps_between_lines_count(clock):
    line = report(clock, uneven=((0, 40, 2), (0, 3, 1)))
    assert (line.dropped, line.overflowed, line.rounds) == ([0, 0], [40, 3], [2, 1])
    assert "dropped 0  overflow rounds 3  " in line.line(30)
    found = started()
    found.add(step_metrics(uneven=((0, 0, 9), (0, 0, 9))))
    found.start(10)  # what came before it does not count
    for rounds in (2, 0, 1):
        found.add(step_metrics(uneven=((0, 0, rounds), (7, 7, 1))))
    last = reported(found, clock, 14, 2, uneven=((0, 0, 5), (7, 7, 1)))
    assert last.rounds_per_step == (2 + 0 + 1 + 5 + 4) / 4
    found.start(14)
    assert reported(found, clock, 15, 1).rounds_per_step == 0


def test_no_loss_between_lines_is_lost(clock, tmp_path):
    found = started()
    found.add(step_metrics(loss=9.0))
    found.start(10)  # the step that compiled, told by `first_step`
    found.add(step_metrics(loss=4.0))
    found.add(step_metrics(loss=0.0, has_targets=[False, False]))
    found.add(step_metrics(loss=3.5))
    assert [one.load_LE is None for one in found._since] == [True, True, False]
    (line,) = recorded(tmp_path, reported(found, clock, 14, 2, loss=3.25))
    assert (line["loss"], line["losses"]) == (3.25, [4.0, None, 3.5, 3.25])
    (board,) = (tmp_path / "tensorboard").iterdir()
    drawn = {
        event.step: value.simple_value
        for event in events(board)
        for value in event.summary.value
        if value.tag == "train/loss"
    }
    np.testing.assert_equal(drawn, {11: 4.0, 12: np.nan, 13: 3.5, 14: 3.25})
    page = read_run(tmp_path).columns["loss"]
    assert (page.steps, page.values) == ([11, 12, 13, 14], [4.0, None, 3.5, 3.25])


def test_evaluation_does_not_count_as_training_time(clock):
    found = started(0)
    found.pause(5)
    assert reported(found, clock, 2, 7).tokens_per_second == pytest.approx(100)
    # The next stretch starts anew.
    found.start(2)
    assert reported(found, clock, 3, 1).tokens_per_second == pytest.approx(100)


def test_a_step_without_targets_has_no_loss_and_says_so(clock, tmp_path):
    told = report(clock, loss=0.0, ahead=0.0, has_targets=[False, False])
    assert "step 14/30  no targets  " in told.line(30)
    assert "ahead" not in told.line(30)
    (line,) = recorded(tmp_path, told)
    assert (line["loss"], line["ahead_loss"], line["without_targets"]) == (None, None, True)
    some = report(clock, loss=0.0, ahead=0.0, has_targets=[True, False])
    assert "loss 0.0000  no targets ahead  " in some.line(30)
    assert some.without_targets is None


def test_the_loss_of_the_token_after_the_next_is_told_where_it_is_predicted(clock, tmp_path):
    reports = report(clock), report(clock, ahead=2.5)
    without, with_it = recorded(tmp_path, *reports)
    assert "ahead_loss" not in without
    assert with_it["ahead_loss"] == 2.5
    assert "loss 1.5000  ahead 2.5000  " in reports[1].line(30)


def test_records_are_json_lines_and_tensorboard_events(tmp_path, clock):
    records = Records(tmp_path)
    records.report(report(clock))
    records.event("eval", 14, bits_per_byte=2.5)
    records.event("note", 0, text="a note")
    # Written as things happen: a killed run keeps its lines.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    records.close()
    assert [line["event"] for line in lines] == ["step", "eval", "note"]
    assert (lines[0]["step"], lines[0]["loss"], lines[0]["dropped"]) == (14, 1.5, [0, 3])
    assert (lines[1]["bits_per_byte"], lines[2]["text"]) == (2.5, "a note")
    (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    content = events.read_bytes()
    for tag in (b"train/loss", b"train/dropped", b"eval/bits_per_byte"):
        assert tag in content
    assert b"note/text" not in content


def shown(clock, terminal, width=200):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, markup=False)
    with Display(console, 30, 10) as display:
        display.step(11)
        display.show(report(clock))
        display.note("[held] out")
    return out.getvalue()


def test_a_report_is_a_line_that_stays_above_the_bar_of_a_terminal(clock):
    line = report(clock).line(30)
    assert shown(clock, terminal=False) == f"{line}\n[held] out\n"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(clock, terminal=True))
    assert line in text.replace("\r", "\n").splitlines()
    assert re.search(r"\u2501 step 10/30", text), "before the first step"
    assert text.rindex("step 11/30") > text.index("loss 1.5000"), "the bar is below"


def test_a_narrow_terminal_leaves_out_flops_first_and_keeps_what_was_dropped(clock):
    line = report(clock)
    whole = line.line(30)
    narrow = line.line(30, len(whole) - 1)
    assert narrow == re.sub(r"  [\d.]+ GFLOP/s \(.*?\)", "", whole)
    assert line.line(30, len(whole)) == whole
    narrowest = line.line(30, len(narrow) - 1)
    assert ("balance" in narrowest, "dropped 3" in narrowest) == (False, True)
    assert "GFLOP/s" not in shown(clock, terminal=True, width=80)


def events(path):
    """The events of a file, each checked against its two sums."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        content, end = data[12 : 12 + length], 16 + length
        sums = struct.unpack("<II", data[8:12] + data[12 + length : end])
        assert sums == (masked_crc32c(data[:8]), masked_crc32c(content))
        yield Event.FromString(content)
        data = data[end:]


def test_events_are_there_at_once_and_can_be_read(tmp_path):
    board = Board(tmp_path / "tensorboard")
    board.add(3, {"train/loss": 1.5, "train/skipped": 2})
    board.add(4, {})
    first, event = events(board.path)
    board.close()
    assert first.file_version == "brain.Event:2"
    assert event.step == 3
    values = [(value.tag, value.simple_value) for value in event.summary.value]
    assert values == [("train/loss", 1.5), ("train/skipped", 2.0)]


def test_an_event_that_is_written_in_parts_is_whole(tmp_path):
    board = Board(tmp_path)

    class Slow:
        """A file that takes three bytes at a time, as a disk that is nearly full or a pipe."""

        def __init__(self, file):
            self.file, self.close = file, file.close

        def write(self, data):
            return self.file.write(data[:3])

    board._file = Slow(board._file)
    board.add(3, {"train/loss": 1.5})
    board.close()
    *_, event = events(board.path)
    assert event.summary.value[0].simple_value == 1.5


def test_a_full_disk_ends_the_caller_and_not_a_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "open", lambda self, *_, **__: io.FileIO("/dev/full", "a"))
    with pytest.raises(StorageFullError, match="tfevents"):
        Board(tmp_path)
