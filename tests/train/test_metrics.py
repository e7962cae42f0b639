import io
import json
import re

import jax.numpy as jnp
import pytest
from rich.console import Console

from moejax.step.state import Metrics
from moejax.train.records import metrics
from moejax.train.records.display import Display
from moejax.train.records.metrics import Meter, Records


class Clock:
    """Time that passes when told."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(metrics, "time", fake)
    return fake


def step_metrics(load=((1, 1, 1, 5), (2, 2, 2, 2)), loss=1.5):
    return Metrics(
        loss=jnp.array(loss),
        balance=jnp.array(1.25),
        router_entropy=jnp.array(0.5),
        load_LE=jnp.array(load, jnp.int32).reshape(len(load), 4),
        uneven_L3=jnp.array([[0, 0, 0], [3, 0, 0]], jnp.int32),
        gradient_norm=jnp.array(2.0),
        skipped=jnp.array(1, jnp.int32),
    )


def meter():
    return Meter(
        tokens_per_step=100,
        flops_per_token=50,
        peak=1e5,
        num_steps=30,
        schedule=lambda updates: updates / 100,
    )


def report(clock):
    found = meter()
    found.start(10)
    clock.now += 2
    return found.report(14, step_metrics())


def test_what_overflowed_is_told(clock):
    found = meter()
    found.start(10)
    clock.now += 2
    uneven_L3 = jnp.array([[0, 40, 2], [0, 3, 1]], jnp.int32)
    line = found.report(14, step_metrics()._replace(uneven_L3=uneven_L3))
    assert (line.dropped, line.overflowed, line.rounds) == ([0, 0], [40, 3], [2, 1])
    assert "dropped 0  overflow rounds 3  " in line.line(30)


def test_rounds_of_steps_between_lines_count(clock):
    found = meter()
    found.add(step_metrics()._replace(uneven_L3=jnp.array([[0, 0, 9], [0, 0, 9]])))
    found.start(10)  # what came before it does not count
    for rounds in (2, 0, 1, 5):
        found.add(step_metrics()._replace(uneven_L3=jnp.array([[0, 0, rounds], [7, 7, 1]])))
    clock.now += 2
    assert found.report(14, step_metrics()).rounds_per_step == (2 + 0 + 1 + 5 + 4) / 4
    found.start(14)
    found.add(step_metrics())
    clock.now += 1
    assert found.report(15, step_metrics()).rounds_per_step == 0


def test_rates_are_of_the_steps_since_the_start(clock):
    line = report(clock)
    assert line.step == 14
    assert line.tokens_per_second == pytest.approx(4 * 100 / 2)
    assert line.flops_per_second == pytest.approx(200 * 50)
    assert line.share_of_peak == pytest.approx(0.1)
    assert line.seconds_left == pytest.approx((30 - 14) / 2)


def test_what_the_step_measured_is_passed_on(clock):
    line = report(clock)
    assert (line.loss, line.balance, line.gradient_norm) == (1.5, 1.25, 2.0)
    assert (line.dropped, line.skipped) == ([0, 3], 1)
    assert "overflow" not in line.line(30)
    assert line.router_entropy == 0.5
    # Of 14 steps one was skipped, so this update was the thirteenth.
    assert line.learning_rate == pytest.approx(0.12)
    # Five of eight assignments against two on average, in the first of two layers.
    assert line.busiest_expert == pytest.approx(2.5)


def test_evaluation_does_not_count_as_training_time(clock):
    found = meter()
    found.start(0)
    clock.now += 7
    found.pause(5)
    assert found.report(2, step_metrics()).tokens_per_second == pytest.approx(100)
    # The next stretch starts anew.
    found.start(2)
    clock.now += 1
    assert found.report(3, step_metrics()).tokens_per_second == pytest.approx(100)


def test_a_model_without_experts_has_no_busiest_one(clock):
    found = meter()
    found.start(0)
    clock.now += 1
    assert found.report(1, step_metrics(load=())).busiest_expert == 1.0


def test_the_line_shows_everything_a_reader_needs(clock):
    line = report(clock).line(30)
    for part in ("step 14/30", "loss 1.5000", "200 tok/s", "(10% of peak)", "dropped 3"):
        assert part in line
    assert "skipped 1" in line
    assert "0:08 left" in line


def test_a_step_without_targets_has_no_loss_and_says_so(clock, tmp_path):
    found = meter()
    found.start(10)
    clock.now += 2
    none = step_metrics(loss=0.0)._replace(
        ahead=jnp.array(0.0), has_targets=jnp.array([False, False])
    )
    told = found.report(14, none)
    assert "step 14/30  no targets  ahead nan  " in told.line(30)
    assert "0.0000" not in told.line(30)
    records = Records(tmp_path)
    records.report(told)
    records.close()
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (line["loss"], line["ahead_loss"], line["without_targets"]) == (None, None, True)
    some = found.report(14, none._replace(has_targets=jnp.array([True, False])))
    assert "loss 0.0000  ahead nan" in some.line(30)
    assert some.without_targets is None


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
    assert lines[1]["bits_per_byte"] == 2.5
    assert lines[2]["text"] == "a note"
    assert all(line["time"] > 0 for line in lines)
    (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    content = events.read_bytes()
    for tag in (b"train/loss", b"train/dropped", b"eval/bits_per_byte"):
        assert tag in content
    assert b"note/text" not in content


def test_a_second_run_adds_to_the_records_of_the_first(tmp_path, clock):
    for step in (1, 2):
        records = Records(tmp_path)
        records.event("stopped", step)
        records.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_a_loss_that_is_no_number_stays_json(tmp_path, clock):
    records = Records(tmp_path)
    found = meter()
    found.start(0)
    clock.now += 1
    records.report(found.report(1, step_metrics(loss=float("nan"))))
    records.close()

    def refuse(constant):
        raise ValueError(constant)

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["loss"] is None


def test_the_loss_of_the_token_after_the_next_is_told_where_it_is_predicted(tmp_path, clock):
    records, found = Records(tmp_path), meter()
    found.start(0)
    clock.now += 1
    lines = [step_metrics(), step_metrics()._replace(ahead=jnp.array(2.5))]
    reports = [found.report(step, metrics) for step, metrics in enumerate(lines, 1)]
    for line in reports:
        records.report(line)
    records.close()
    without, with_it = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "ahead_loss" not in without
    assert with_it["ahead_loss"] == 2.5
    assert "ahead" not in reports[0].line(30)
    assert "loss 1.5000  ahead 2.5000  " in reports[1].line(30)


def shown(clock, terminal, width=200):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width)
    with Display(console, 30, 10) as display:
        display.step(11)
        display.show(report(clock))
        display.note("[held] out")
    return out.getvalue()


def test_without_a_terminal_lines_are_plain(clock):
    text = shown(clock, terminal=False)
    assert "\x1b" not in text
    assert text.splitlines()[0] == report(clock).line(30)
    assert len(text.splitlines()) == 2


def test_on_a_terminal_every_report_stays_above_a_bar_that_says_the_step(clock):
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(clock, terminal=True))
    assert report(clock).line(30) in text.replace("\r", "\n").splitlines()
    assert re.search(r"\u2501 step 10/30", text), "before the first step"
    assert text.rindex("step 11/30") > text.index("loss 1.5000"), "the bar is below"


def test_a_narrow_terminal_leaves_out_flops_first_and_keeps_what_was_dropped(clock):
    whole = report(clock).line(30)
    narrow = report(clock).line(30, len(whole) - 1)
    assert "GFLOP/s" not in narrow
    assert narrow == re.sub(r"  [\d.]+ GFLOP/s \(.*?\)", "", whole)
    assert report(clock).line(30, len(whole)) == whole
    text = shown(clock, terminal=True, width=80)
    assert re.search(r"dropped 3  skipped 1  \d:\d\d left", text)
    assert "GFLOP/s" not in text
    narrowest = report(clock).line(30, len(narrow) - 1)
    assert ("balance" in narrowest, "dropped 3" in narrowest) == (False, True)
