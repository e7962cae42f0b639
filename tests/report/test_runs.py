import pytest

from moejax.errors import InputError
from moejax.report.page import round_cost
from moejax.report.runs import read_run
from tests.report.runs import CONFIG, PLAN, line, report_line, usual_run, write_run


def test_a_run_is_read_whole(tmp_path):
    run = read_run(usual_run(tmp_path / "a"))
    assert run.name == "a"
    assert run.columns["loss"].steps == list(range(10, 501, 10))
    assert run.columns["dropped"].values[0] == 1.0  # over all layers
    assert run.columns["held_out_nats_per_token"].steps == [100, 200, 300, 400, 500]
    assert run.columns["held_out_nats_per_token"].values[-1] == 2.0  # the final evaluation
    assert run.columns["predicted_ratio"].values[0] == 1.1
    assert "held_out_time" not in run.columns
    assert [start["step"] for start in run.starts] == [0, 250]
    assert [one["event"] for one in run.events[:4]] == ["start", "note", "plan", "first_step"]
    assert "config" not in run.events[0]
    assert run.config == CONFIG
    assert run.plan == PLAN
    assert [load.step for load in run.loads] == list(range(50, 501, 50))
    assert run.damaged == []


@pytest.mark.parametrize(
    "event",
    [
        line("first_step", 21),  # killed at 40, resumed at 20
        line("rolled_back", 45, to=20, skipped=25),
    ],
)
def test_steps_that_a_run_lost_are_forgotten(tmp_path, event):
    before = [report_line(step, 1.0) for step in (10, 20, 30, 40)]
    run = read_run(write_run(tmp_path, [*before, event, report_line(25, 2.0)]))
    assert run.columns["loss"].steps == [10, 20, 25]
    assert run.columns["loss"].values == [1.0, 1.0, 2.0]
    assert run.events == [event]


def test_of_a_step_that_stands_twice_the_later_line_counts(tmp_path):
    lines = [report_line(10, 1.0), report_line(20, 1.0), report_line(20, 3.0)]
    loss = read_run(write_run(tmp_path, lines)).columns["loss"]
    assert (loss.steps, loss.values) == ([10, 20], [1.0, 3.0])


@pytest.mark.parametrize("half", ['{"time": 1, "event": "st', "[1, 2]", '"text"', '{"step": "x"}'])
def test_half_a_line_and_what_is_no_record_are_told(tmp_path, half):
    folder = write_run(tmp_path, [report_line(10, 1.0)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(half)
    run = read_run(folder)
    assert run.columns["loss"].steps == [10]
    assert run.damaged == ["metrics.jsonl, line 2: no record"]


@pytest.mark.parametrize("load", [None, [], [[]], [[1, 2], [1]], [[1, -2]], [["a"]], [[1.5]]])
def test_a_load_that_is_no_table_is_told(tmp_path, load):
    loads = [line("load", 5, load=[[1, 2]]), line("load", 10, load=load)]
    run = read_run(write_run(tmp_path, [report_line(10, 1.0)], loads=loads))
    assert [one.step for one in run.loads] == [5]
    assert run.damaged == ["experts.jsonl, step 10: no table of counts"]


def test_loads_of_another_number_of_experts_are_left_out(tmp_path):
    loads = [line("load", 5, load=[[1, 2]]), line("load", 10, load=[[1, 2, 3]])]
    run = read_run(write_run(tmp_path, [report_line(10, 1.0)], loads=loads))
    assert [one.step for one in run.loads] == [10]


def test_a_config_that_is_no_json_is_told(tmp_path):
    folder = write_run(tmp_path, [report_line(10, 1.0)])
    (folder / "config.json").write_text("{")
    (folder / "plan.json").write_text("[]")
    run = read_run(folder)
    assert (run.config, run.plan) == ({}, None)
    assert run.damaged[0].startswith("config.json: ")
    assert run.damaged[1] == "plan.json: no JSON object"


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no run to report.*has no metrics\.jsonl"):
        read_run(tmp_path)


def steps_with_rounds(counts, second_of):
    """A run whose steps of 16 x 128 tokens take `second_of` their rounds."""
    return [
        report_line(
            step, 1.0, rounds_per_step=count, tokens_per_second=2048 / second_of(step, count)
        )
        for step, count in enumerate(counts)
    ]


def test_a_round_costs_what_steps_with_more_of_them_take_longer(tmp_path):
    counts = [9.0, 7.5, 4.0, 0.0, 2.5] * 20

    def second_of(step, count):
        # 20 ms a round, a step in seven five times as slow, and up to 2 ms of noise.
        return (0.5 + 0.02 * count) * (5 if step % 7 == 0 else 1) + 0.002 * (step % 3 - 1)

    cost = round_cost(read_run(write_run(tmp_path, steps_with_rounds(counts, second_of))))
    assert cost["seconds"] == pytest.approx(0.02, rel=0.1)
    assert cost["low"] < 0.02 < cost["high"]
    every = sum(second_of(step, count) for step, count in enumerate(counts))
    assert cost["share"] == pytest.approx(cost["seconds"] * sum(counts) / every)


@pytest.mark.parametrize(
    ("counts", "second_of"),
    [
        ([2.0, 4.0] * 9, lambda step, count: count),  # few lines
        ([3.0] * 40, lambda step, count: 1 + step),  # always as many
        ([1.0, 2.0, 3.0] * 20, lambda step, count: 1 + step * 7 % 11),  # noise
        ([0.0] * 40, lambda step, count: 1.0),
    ],
)
def test_a_cost_of_rounds_that_cannot_be_told_apart_from_noise_is_not_told(
    tmp_path, counts, second_of
):
    assert round_cost(read_run(write_run(tmp_path, steps_with_rounds(counts, second_of)))) is None
    assert round_cost(read_run(usual_run(tmp_path / "a"))) is None, "no rounds were recorded"
