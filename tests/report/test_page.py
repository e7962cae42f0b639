import base64
import hashlib
import json
import math
import re
from array import array
from pathlib import Path

import pytest

from moejax.errors import InputError
from moejax.html import embed
from moejax.report.command import main
from moejax.report.page import (
    LIBRARY,
    SCRIPTS,
    SHOWN_EVENTS,
    SHOWN_LOADS,
    TEMPLATE,
    changes,
    loads_data,
    names_of,
    page_data,
    write_report,
)
from moejax.report.runs import Load, RunRecord
from tests.browser import open_browser, opened_pages, wait_until
from tests.report.runs import HOSTILE, line, report_line, usual_run, write_run


def embedded(page) -> dict:
    found = re.findall(
        r"<script type=\"application/json\" id=\"data\">(.*?)</script>", page.read_text("utf-8")
    )
    assert len(found) == 1
    return json.loads(found[0])


def numbers(text: str, kind: str = "d") -> list:
    return list(array(kind, base64.b64decode(text)))


def test_the_page_holds_every_report(tmp_path):
    write_report([usual_run(tmp_path / "a")], tmp_path / "new" / "report.html")
    (run,) = embedded(tmp_path / "new" / "report.html")["runs"]
    loss = run["columns"]["loss"]
    assert numbers(loss["steps"]) == list(range(10, 501, 10))
    assert numbers(loss["values"])[0] == 5 / 1.1 + 0.1 * math.sin(10)
    assert run["plan"]["predicted"]["seconds"] == 0.5
    assert run["config"]["train.num_steps"] == 1000
    assert "config" not in run["starts"][0]
    changed = {"step": 250, "name": "model.width", "before": 32, "after": 64}
    assert run["changes"] == [changed], "a resume with another setting"


def test_a_value_that_is_no_number_is_a_gap(tmp_path):
    folder = write_run(tmp_path / "a", [report_line(1, 1.0), report_line(2, 1.0) | {"loss": None}])
    (run,) = page_data([folder])["runs"]
    assert math.isnan(numbers(run["columns"]["loss"]["values"])[1])


def test_devices_and_versions_that_changed_are_told():
    starts = [line("start", 0, devices=8, jax="0.12.0"), line("start", 7, devices=4, jax="0.12.0")]
    assert changes(starts) == [{"step": 7, "name": "devices", "before": 8, "after": 4}]
    assert changes(starts[:1]) == []


def test_loads_are_over_the_mean_of_their_layer():
    run = RunRecord("a", Path("a"), loads=[Load(5, [[1, 3], [0, 0]])])
    found = loads_data(run)
    assert (found["layers"], found["experts"], found["steps"]) == (2, 2, [5])
    assert numbers(found["values"], "H") == [500, 1500, 0, 0]


def test_of_many_loads_some_are_shown_and_always_the_last():
    run = RunRecord("a", Path("a"), loads=[Load(step, [[1]]) for step in range(1, 1002)])
    steps = loads_data(run)["steps"]
    assert len(steps) <= SHOWN_LOADS
    assert steps[-1] == 1001


def test_of_many_events_the_newest_are_shown_and_the_rest_is_counted(tmp_path):
    events = [line("note", step, text="a note") for step in range(SHOWN_EVENTS + 7)]
    (run,) = page_data([write_run(tmp_path / "a", events)])["runs"]
    assert len(run["events"]) == SHOWN_EVENTS
    assert run["left_out"] == 7
    assert run["events"][-1]["step"] == SHOWN_EVENTS + 6


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    assert names_of([tmp_path / "a"]) == ["a"]
    assert names_of([tmp_path / "x" / "a", tmp_path / "y" / "a"]) == ["x/a", "y/a"]
    with pytest.raises(InputError, match="a run stands twice"):
        names_of([tmp_path / "a", tmp_path / "b" / ".." / "a"])


def test_nothing_of_a_users_text_ends_the_data(tmp_path):
    write_report([usual_run(tmp_path / "a")], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "alert(1)</script" not in text
    assert "<!--<b>" not in text
    assert not set(embed({"a": HOSTILE})) & set("<>&")
    assert json.loads(embed({"a": HOSTILE})) == {"a": HOSTILE}
    with pytest.raises(ValueError, match="JSON compliant"):
        embed(math.nan)


def test_the_page_asks_for_nothing_from_elsewhere():
    for text in (path.read_text("utf-8") for path in (TEMPLATE, *SCRIPTS)):
        assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|\bimport\(|innerHTML", text)
    assert "default-src 'none'" in TEMPLATE.read_text("utf-8")


def test_the_library_is_the_one_that_its_notice_names():
    notice = LIBRARY.with_name("echarts.NOTICE").read_text("utf-8")
    assert hashlib.sha256(LIBRARY.read_bytes()).hexdigest() in notice


@pytest.mark.parametrize("out", ["report.html", "other.html"])
def test_the_command_writes_report_html_unless_another_page_is_named(
    tmp_path, capsys, monkeypatch, out
):
    monkeypatch.chdir(tmp_path)
    named = [] if out == "report.html" else ["--out", out]
    assert main([str(usual_run(tmp_path / "a", steps=20)), *named]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    assert embedded(tmp_path / out)["live"] is False


def test_a_page_that_cannot_be_written_names_the_flag(tmp_path, capsys):
    folder = usual_run(tmp_path / "a", steps=20)
    for out in ("/proc/x.html", tmp_path):
        assert main([str(folder), "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"moejax: error: --out {'=' if out != tmp_path else 'is'} {out}")
        assert error.count("\n") == 1
        assert "partial" not in error


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["no_run", "--out", "/tmp/r.html"], "no run to report"),
        (["--live", "--out", "x.html"], "Got --out and --live"),
        (["--live", "--port", "70000"], "no such port"),
        (["--live", "--host", "203.0.113.7", "--port", "0"], "cannot listen"),
    ],
)
def test_a_wrong_wish_is_one_line(tmp_path, capsys, flags, said):
    folder = usual_run(tmp_path / "a", steps=20)
    assert main([str(folder), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("moejax: error: ")
    assert error.count("\n") == 1
    assert said in error


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report([usual_run(folder / "a")], folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def tab(browser, page):
    """Opens the page at a size; it must have said nothing on the console when the test ends."""
    with opened_pages(browser, page, ".chart canvas") as open_page:
        yield open_page


@pytest.fixture
def compared(browser, tmp_path):
    """Opens a page about two runs."""
    runs = [usual_run(tmp_path / "a"), usual_run(tmp_path / "b", steps=300)]
    write_report(runs, tmp_path / "both.html")
    with opened_pages(browser, tmp_path / "both.html", ".chart canvas") as open_page:
        yield open_page


# How many pixels of the first chart have another colour than its ground.
INKED = """() => {
  const canvas = document.querySelector('.chart canvas');
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let inked = 0;
  for (let i = 3; i < data.length; i += 4) inked += data[i] > 100;
  return inked;
}"""


def test_the_page_draws_and_hostile_text_stays_text(tab):
    opened = tab()
    headings = opened.locator("h2").all_inner_texts()
    wanted = ["Training", "Speed", "Routing", "Experts' load", "Goodput", "The plan"]
    assert headings[:7] == [*wanted, "What travels"]
    assert opened.evaluate(INKED) > 500
    assert "null" not in opened.inner_text("main").split("Training")[0]
    opened.get_by_text(re.compile(r"The newest \d+")).click()
    assert HOSTILE.split()[0] in opened.inner_text("main")
    assert opened.locator("main script, main b").count() == 0


def test_tiles_say_how_the_run_stands(tab):
    tiles = tab().locator(".tiles div")
    said = [tile.inner_text().split("\n") for tile in tiles.all()]
    assert said[0] == ["not finished", "step 500 of 1,000"]
    named = {tile[1]: tile[0] for tile in said}
    assert {"loss, last report", "bits per byte, held out", "tokens/s, median"} <= named.keys()
    assert {"wall time", "goodput"} <= named.keys()
    assert (named["parameters"], named["mesh of 8 x cpu"]) == ("2.35 million", "fsdp 2, expert 4")
    assert named["tokens/s, median"].startswith("4 k")


@pytest.mark.parametrize(
    ("step", "event", "newest", "live", "wanted"),
    [
        (1000, "stopped", "ended", False, "finished"),
        (500, "stopped", "ended", False, "stopped"),
        (500, "diverged", "ended", False, "diverged"),
        (500, "first_step", "hang", False, "hung"),
        (500, "first_step", "error", False, "failed"),
        (500, "first_step", None, True, "running"),
    ],
)
def test_a_run_stands_as_its_steps_and_last_words_say(tab, step, event, newest, live, wanted):
    run = {
        "config": {"train.num_steps": 1000},
        "columns": {"loss": {"steps": [step]}},
        "events": [{"event": "start"}, {"event": event}, {"event": "note"}],
        "goodput": {"processes": [{"starts": [[0, 1, newest]]}]},
    }
    assert (
        tab().evaluate("([run, live]) => { given.live = live; return state(run); }", [run, live])
        == wanted
    )


def test_every_chart_is_drawn_without_scrolling(tab):
    """A full-page picture, as bots and previews take it, was white below the first screen."""
    opened = tab()
    wait_until(opened, "moejax.charts.length > 8 && moejax.charts.every((chart) => chart.made)")


def test_a_phone_shows_all_columns_of_what_travels(tab):
    """Calls and bytes were behind a sideways scroll that nothing hinted at."""
    opened = tab(390, 800)
    row = opened.locator("section", has_text="What travels").locator("tbody tr").first
    for cell in row.locator("td").all():
        box = cell.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= 390
    assert row.locator("td").nth(4).get_attribute("data-name") == "calls a step"


def test_numbers_are_said_in_words_and_in_one_form(browser, tmp_path):
    lines = [report_line(step, 3.0, dropped=0.0, learning_rate=step * 5e-4) for step in (1, 2)]
    write_report([write_run(tmp_path / "a", lines)], tmp_path / "page.html")
    with opened_pages(browser, tmp_path / "page.html", ".chart canvas") as open_page:
        opened = open_page()
        assert "Assignments dropped in a step\n\nNone were dropped." in opened.inner_text("main")
        assert opened.evaluate("[0, 5e-4, 1e-3, 2.5e-4].map(exponent)") == [
            *("0", "5e-4", "1e-3", "2.5e-4")
        ]
        assert opened.evaluate("[0, 5.67e-6, 0.5].map(percent)") == ["0 %", "under 0.1 %", "50 %"]


def test_pointing_at_a_curve_says_its_values(tab):
    opened = tab()
    opened.locator(".chart").first.hover()
    tip = opened.locator(".chart").first.locator("div", has_text="step 2").last
    assert re.search(r"loss: [\d.]+", tip.inner_text())


def test_dragging_over_a_chart_zooms_all_and_the_button_shows_all(tab):
    opened = tab()
    box = opened.locator(".chart").first.bounding_box()
    middle = box["y"] + box["height"] / 2
    opened.mouse.move(box["x"] + 0.4 * box["width"], middle)
    opened.mouse.down()
    opened.mouse.move(box["x"] + 0.7 * box["width"], middle, steps=5)
    opened.mouse.up()
    view = opened.evaluate("moejax.view")
    assert 20 < view["from"] < 50 < view["to"] < 80
    shown = "moejax.charts.filter((chart) => chart.zooms && chart.made)"
    zooms = f"{shown}.map((chart) => chart.made.getOption().dataZoom[0].end)"
    ends = opened.evaluate(zooms)
    assert len(ends) > 2
    assert all(abs(end - view["to"]) < 0.01 for end in ends)
    opened.get_by_role("button", name="whole run").click()
    assert opened.evaluate("moejax.view.to") == 100
    assert set(opened.evaluate(zooms)) == {100}


def test_smoothing_and_the_axis_change_the_curve(tab):
    opened = tab()
    shown = "moejax.charts[0].made.getOption().series.map((s) => [s.name, Array.from(s.data)])"
    before = opened.evaluate(shown)
    opened.locator("input[type=range]").first.fill("0.9")
    smooth = opened.evaluate(shown)
    assert len(smooth) == len(before) + 1  # what was measured stands behind, faint
    assert smooth[0] == before[0]
    assert smooth[1][1][1::2] != before[0][1][1::2]
    opened.locator("select").first.select_option("hours")
    late = 60 + 10 + 100  # seconds: the pause, the second start, and the steps that it does again
    assert opened.evaluate(shown)[0][1][-2] == pytest.approx((490 + late) / 3600)


def test_steps_between_two_lines_have_times_between(browser, tmp_path):
    lines = [report_line(10, 2.0), report_line(20, 1.0, losses=[*range(9, 0, -1), 1.0])]
    write_report([write_run(tmp_path / "a", lines)], tmp_path / "page.html")
    with opened_pages(browser, tmp_path / "page.html", ".chart canvas") as open_page:
        opened = open_page()
        opened.locator("select").first.select_option("hours")
        points = opened.evaluate("Array.from(moejax.charts[0].made.getOption().series[0].data)")
    assert points[::2] == pytest.approx([seconds / 3600 for seconds in range(11)])
    assert points[1::2] == [2, *range(9, 0, -1), 1]


def test_the_heat_map_shows_another_step_and_layer(tab):
    opened = tab()
    opened.locator("h2", has_text="Experts' load").scroll_into_view_if_needed()
    wait_until(opened, "moejax.charts.filter((c) => !c.zooms && c.made).length >= 2")
    option = "moejax.charts.filter((c) => !c.zooms)[{}].made.getOption()"
    for chart, across in enumerate(("layer", "step")):
        axes = [opened.evaluate(f"{option.format(chart)}.{axis}Axis[0].name") for axis in "xy"]
        assert axes == [across, "expert"]
    cells = f"{option.format(0)}.series[0].data"
    before = opened.evaluate(cells)
    assert len(before) == 4 * 16
    opened.locator("section", has_text="Experts' load").locator("input").fill("0")
    assert opened.evaluate(cells) != before
    opened.locator("section", has_text="Experts' load").locator("select").select_option("2")


def test_goodput_is_a_bar_a_timeline_and_a_table(tab):
    opened = tab()
    shown = opened.locator("section", has_text="Where the time went")
    assert re.search(r"training [\d.]+ %", shown.locator(".key").inner_text())
    cells = shown.locator("table").last.locator("tbody td").all_inner_texts()
    assert (cells[1], cells[2], cells[5]) == ("150", "100", "process 1")
    assert HOSTILE.split()[0] in cells[6]
    shown.scroll_into_view_if_needed()
    wait_until(
        opened, "moejax.charts.filter((c) => c.node.ariaLabel?.includes('faults') && c.made)[0]"
    )
    chart = "moejax.charts.find((c) => c.node.ariaLabel.includes('faults')).made.getOption()"
    assert opened.evaluate(f"{chart}.yAxis[0].data") == ["process 0", "process 1"]
    failed = opened.evaluate(f"{chart}.series.at(-1).data.map((one) => [one.value[1], one.said])")
    assert [row for row, _ in failed] == [0, 1], "process 1's newest start ended well"
    assert failed[1][1].startswith("no last word")


def test_the_planners_page_opens_inside(tab):
    opened = tab()
    opened.get_by_text("The planner's page, with its timeline").click()
    frame = opened.frame_locator("iframe")
    assert frame.locator("p").inner_text() == "the planner's page"


def test_runs_are_compared_in_a_table(compared):
    opened = compared()
    rows = opened.locator("section", has_text="Where they stand").locator("tbody tr")
    assert rows.count() == 2
    assert rows.nth(0).locator("td").nth(1).inner_text() == "500"
    assert rows.nth(1).locator("td").nth(1).inner_text() == "300"


def series_of(opened, title):
    """The lines of a chart: name, colour, dashes, and colours of the marks on it."""
    chart = opened.get_by_role("img", name=title, exact=True)
    chart.scroll_into_view_if_needed()
    wait_until(opened, f"moejax.charts.some((c) => c.node.ariaLabel === '{title}' && c.made)")
    return opened.evaluate(
        f"""moejax.charts.find((c) => c.node.ariaLabel === '{title}').made.getOption().series.map(
        (s) => ({{ name: s.name, colour: s.itemStyle.color, dashes: s.lineStyle.type,
          marks: (s.markLine?.data ?? []).map((m) => m.lineStyle.color) }}))"""
    )


def test_a_chart_of_several_lines_says_which_is_which(tab, compared):
    opened = tab()
    legend = opened.locator(".key.line").first
    assert legend.locator("li").all_inner_texts() == ["loss", "held out"]
    drawn = [line["colour"] for line in series_of(opened, "Loss")]
    shown = [one.evaluate("(i) => i.style.background") for one in legend.locator("i").all()]
    assert [f"rgb{tuple(bytes.fromhex(colour[1:]))}" for colour in drawn] == shown
    assert opened.locator(".key.line").count() == 1, "a chart of one line needs none"
    both = compared().locator(".key.line").first
    assert both.locator("li").all_inner_texts() == ["loss", "held out"]


def test_marks_of_runs_have_their_colours_and_equal_lines_take_turns(compared):
    opened = compared()
    colours = [run["colour"] for run in opened.evaluate("moejax.runs()")]
    marks = series_of(opened, "Loss")[0]["marks"]
    assert marks == [colours[0], colours[0], colours[1], colours[1]], "a stop and a resume each"
    first, second = series_of(opened, "Learning rate")
    assert (first["dashes"], second["dashes"]) == ("solid", [8, 8])


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, pytest.param(1600, marks=pytest.mark.exhaustive)])
def test_a_phone_and_a_wide_screen_show_it_without_scrolling_sideways(tab, width):
    opened = tab(width, 800)
    for place in range(opened.locator("summary").count()):
        opened.locator("summary").nth(place).click()
    assert opened.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_a_reader_of_dark_pages_gets_one(tab):
    dark, light = (
        tab(scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("dark", "light")
    )
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (dark, light)]
    assert brightness[0] < 150 < 600 < brightness[1]
