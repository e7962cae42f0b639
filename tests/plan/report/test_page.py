import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import PricedPlan, price, trace_config
from moejax.plan.price.routing import read_expert_load
from moejax.plan.price.sensitivity import break_even, changes
from moejax.plan.price.terms import terms
from moejax.plan.report import page as report
from moejax.plan.report.page import SCRIPT, TEMPLATE, write_report
from moejax.plan.search.search import SearchResult
from tests.browser import open_browser, opened_pages
from tests.cases import small_config
from tests.plan.clusters import cluster

# Nothing here depends on which JAX there is.
pytestmark = pytest.mark.slow

HOSTILE = '</script><script>alert(1)</script><!--<b> & {{DATA}} \u2028 "'

BASE = cluster(memory=2**30)
SLOW = BASE.tiers[1].links["all_to_all"]
CPU = replace(
    BASE.device,
    products={"float32": ((1e5, 1e9), (1e8, 1e10))},
    copy_bytes_per_s=4e9,
    gather_bytes_per_s=2e9,
    copies=((1e3, 8e9),),
)
CLUSTER = replace(BASE, name=HOSTILE, source=f"by hand {HOSTILE}", device=CPU)
LOAD = read_expert_load("balanced", 8)
MESHES = ((8, 1, 1, 1), (2, 4, 1, 1), (1, 1, 8, 1))  # the last one a rule of thumb


@pytest.fixture(scope="module")
def found() -> SearchResult:
    plans = [price(trace_config(_config(mesh), "cpu"), CLUSTER, LOAD) for mesh in MESHES]
    ranked = sorted(plans[:-1], key=lambda one: one.seconds)
    return SearchResult(ranked, 9, 3, 0, memory_budget=1e9, seconds=1.5, rules={"EP": plans[-1]})


def _config(mesh: tuple[int, int, int, int]):
    model = {"num_layers": 3, "scan_layers": True}
    cfg = small_config(mesh, model=model, train={"batch_sequences": 16})
    return replace(cfg, mesh=replace(cfg.mesh, nodes=2))


@pytest.fixture(scope="module")
def page(found, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "new" / "plan.html"
    write_report(found, CLUSTER, LOAD, path)
    return path


@pytest.fixture(scope="module")
def data(page) -> dict:
    tag = '<script type="application/json" id="data">'
    (script,) = re.findall(f"{tag}(.*?)</script>", _text(page))
    return json.loads(script)


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_the_page_holds_every_plan_the_chosen_one_first(found, data):
    assert [one["name"] for one in data["plans"]] == ["1", "2", "EP"]
    wanted = [*found.ranked, found.rules["EP"]]
    for one, priced in zip(data["plans"], wanted, strict=True):
        assert one["seconds"] == priced.seconds
        assert one["terms"] == terms(priced)
        assert one["memory_bytes"] == priced.peak.bytes


def test_a_rule_that_was_ranked_is_one_row(found, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "sensitivity", lambda best, other: [])  # takes its time
    ranked = replace(found, rules={"FSDP": found.ranked[1]})
    write_report(ranked, CLUSTER, LOAD, tmp_path / "plan.html")
    assert '"name":"2 FSDP"' in _text(tmp_path / "plan.html")
    assert '"name":"2"' not in _text(tmp_path / "plan.html")


def test_a_plan_without_others_makes_a_page(found, tmp_path):
    alone = replace(found, ranked=found.ranked[:1], rules={})
    write_report(alone, CLUSTER, LOAD, tmp_path / "plan.html")
    assert '"name":"1"' in _text(tmp_path / "plan.html")


def test_memory_sums_to_the_peak(found, data):
    memory, most = data["memory"], found.ranked[0].peak
    assert sum(memory["arguments"].values()) == most.arguments
    assert sum(memory["temporary"].values()) == most.temporary
    assert memory["bytes"] == most.bytes
    assert memory["temporary"]["kept for backward"] > 0


def test_traffic_is_what_the_step_sends(found, data):
    _, simulated = found.ranked[0].parts[0]
    assert {(one["link"], one["class"]): one["bytes"] for one in data["traffic"]} == dict(
        simulated.totals.bytes_sent
    )


def test_timelines_hold_all_that_takes_time_also_inside_loops(found, data):
    drawn = data["timelines"]
    assert [one["plan"] for one in drawn] == ["1", "2", "EP"]
    for one, priced in zip(drawn, [*found.ranked[:2], found.rules["EP"]], strict=True):
        computed = _computed(one, 0)
        assert math.isclose(computed, sum(priced.main.totals.computed.values()), rel_tol=1e-5)
        assert one["nodes"][0]["seconds"] == priced.main.seconds


def _computed(timeline: dict, place: int) -> float:
    total = 0.0
    for lane, _, _, _, seconds, _, inner in timeline["nodes"][place]["tasks"]:
        if inner >= 0:
            total += timeline["nodes"][inner]["trip_count"] * _computed(timeline, inner)
        elif timeline["text"][lane] == "compute":
            total += seconds
    return total


def test_hostile_names_stay_data(page, data):
    assert data["cluster"]["name"] == HOSTILE
    text = _text(page)
    # The page's own two scripts, and nothing that names opened or closed.
    assert text.count("<script") == text.count("</script") == 2
    assert "alert(1)</script" not in text
    assert "<!--<b>" not in text


def test_the_page_asks_for_nothing_from_elsewhere():
    for text in (TEMPLATE.read_text("utf-8"), SCRIPT.read_text("utf-8")):
        assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|\bimport\(|fetch\(|innerHTML", text)
    assert "default-src 'none'" in TEMPLATE.read_text("utf-8")


def test_a_rate_at_which_a_plan_wins_is_found(found, data):
    best, other = found.ranked
    answers = data["plans"][1]["changes"]
    assert [answer["rate"] for answer in answers] == list(changes(CLUSTER))
    assert data["plans"][0]["changes"] is None
    wins = [(one["rate"], one["factor"]) for one in answers if isinstance(one["factor"], float)]
    assert wins, "no rate at which the other would win: the case tests nothing"
    rate, factor = wins[0]
    assert _slower(other, best, changes(CLUSTER)[rate](factor)) < 1
    assert _slower(other, best, changes(CLUSTER)[rate](factor**0.95)) >= 1 - 1e-9


def _slower(one: PricedPlan, other: PricedPlan, there: Topology) -> float:
    return price(one.traced, there, LOAD).seconds / price(other.traced, there, LOAD).seconds


def test_crossings_are_the_nearest_and_close():
    for gap, factor in (
        (lambda factor: 3.0 - factor, 3),
        (lambda factor: factor - 0.1, 0.1),
        (lambda factor: 1.0 if 0.5 < factor < 12 else -1.0, 0.5),
        (lambda factor: 1.0 if 0.1 < factor < 2 else -1.0, 2),
    ):
        assert break_even(gap) == pytest.approx(factor, rel=0.02)
    assert break_even(lambda factor: 1.0) is None
    assert break_even(lambda factor: 100.0 - factor) is None


def test_a_changed_rate_changes_no_other():
    for rate, changed in changes(CLUSTER).items():
        assert changed(1.0) == CLUSTER, rate
        assert changed(2.0) != CLUSTER, rate
    twice = changes(CLUSTER)["network: all-to-all bandwidth"](2.0)
    assert twice.tiers[0] == CLUSTER.tiers[0]
    assert twice.device == CLUSTER.device
    assert twice.tiers[1].links["all_to_all"].bytes_per_s == 2 * SLOW.bytes_per_s
    assert twice.tiers[1].links["all_gather"] == SLOW


def test_twice_as_good_is_twice_the_rate_or_half_the_time():
    soon = changes(CLUSTER)["network: start of a call"](2.0).tiers[1].links
    assert {link.startup_s for link in soon.values()} == {SLOW.startup_s / 2}
    before = CLUSTER.device
    faster = changes(CLUSTER)["matrix products"](2.0).device
    assert faster.product_rate("float32", 1e9) == 2 * before.product_rate("float32", 1e9)
    wider = changes(CLUSTER)["memory bandwidth"](2.0).device
    assert wider.copy_bytes_per_s == 2 * before.copy_bytes_per_s
    assert wider.copy_rate(1e3) == 2 * before.copy_rate(1e3)
    assert wider.gather_bytes_per_s == 2 * before.gather_bytes_per_s
    assert changes(CLUSTER)["start of an operation"](2.0).device.startup_s == before.startup_s / 2


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture
def tab(browser, page):
    """Opens the page at a size; it must have said nothing on the console when the test ends."""
    with opened_pages(browser, page, ".panel svg rect") as open_page:
        yield open_page


def test_the_page_draws_and_hostile_names_are_text(tab):
    opened = tab()
    assert HOSTILE.split()[0] in opened.inner_text("main")
    assert opened.locator("main script, main b script").count() == 0
    assert opened.locator("h2").count() == 5
    assert "as fast as the best rule of thumb, EP" in opened.inner_text(".tiles")


def test_a_loop_opens_when_clicked_and_by_keyboard(tab):
    opened = tab()
    panels = opened.locator(".panel")
    assert panels.count() == 2  # the step, and the longest loop
    longest = panels.nth(1).locator("h3").inner_text()
    loops = panels.nth(0).locator("[data-loop]")
    for place in range(loops.count()):
        loops.nth(place).click()
        title = panels.nth(1).locator("h3").inner_text()
        assert re.match(r"One turn of \d+ x", title)
        if title != longest:
            break
    else:
        pytest.fail("no loop but the longest")
    picture = panels.nth(0).locator("svg")
    picture.focus()
    for _ in range(200):
        picture.press("ArrowLeft")
    for _ in range(200):
        picture.press("ArrowRight")
        picture.press("Enter")
        if panels.nth(1).locator("h3").inner_text() == longest:
            return
    pytest.fail("the keyboard reached no loop")


def test_pointing_at_a_block_says_what_it_is(tab):
    opened = tab()
    opened.locator(".panel").nth(0).locator("[data-loop]").first.hover()
    said = opened.locator(".info").first.inner_text()
    assert re.search(r"\d+ x .*starts at .*takes .*open one turn", said)


def test_zooming_shows_less_time_and_all_shows_all(tab):
    opened = tab()
    panel = opened.locator(".panel").nth(1)
    ticks = panel.locator("svg > text")
    before = ticks.all_text_contents()
    panel.get_by_role("button", name="zoom in").click()
    assert ticks.all_text_contents() != before
    panel.get_by_role("button", name="show all").click()
    assert ticks.all_text_contents() == before


def test_a_heading_sorts_the_plans_both_ways(tab):
    opened = tab()
    shown = opened.locator(".plans tbody > tr:not(.detail) > td:nth-child(6)")
    heading = opened.locator(".plans th").nth(5)
    for direction in ("descending", "ascending"):  # the fastest are first already
        heading.get_by_role("button").click()
        assert heading.get_attribute("aria-sort") == direction
        times = [float(text.replace(",", "")) for text in shown.all_inner_texts()]
        assert len(times) == 3
        assert times == sorted(times, reverse=direction == "descending")


def test_a_plan_opens_and_closes(tab):
    opened = tab()
    button = opened.locator(".plans td button").last
    button.press("Enter")
    detail = opened.locator(".plans .detail").last
    assert "What would have to change" in detail.inner_text()
    assert re.search(r"\u00d7 (better|worse)", detail.inner_text())
    assert button.get_attribute("aria-expanded") == "true"
    button.click()
    assert not detail.is_visible()


def test_a_phone_shows_it_without_scrolling_sideways(tab):
    opened = tab(360, 740)
    buttons = opened.locator(".plans td button")
    for place in range(buttons.count()):
        buttons.nth(place).click()
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_reader_of_dark_pages_gets_one(tab):
    dark, light = (
        tab(scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("dark", "light")
    )
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (dark, light)]
    assert brightness[0] < 150 < 600 < brightness[1]


def test_another_plan_can_be_drawn(tab):
    opened = tab()
    before = opened.locator(".panel h3").first.inner_text()
    opened.get_by_label("plan to draw").select_option("EP")
    assert opened.locator(".panel h3").first.inner_text() != before
