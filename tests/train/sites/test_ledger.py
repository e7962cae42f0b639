"""The ledger of rounds: who counts, after which wait, what a hub that was killed still knows."""

import pytest

from moejax.train.sites.ledger import WHOLE, Ledger, LedgerError

FORM = {"sites": 3, "rows": 2, "bytes": 4, "whole_bytes": 8, "settings": "same"}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def opened(tmp_path, clock):
    def again(**settings):
        settings = {"patience_s": 10, "keep": 3, **settings}
        ledger = Ledger(tmp_path, clock=clock, **settings)
        for site in range(3):
            ledger.join(site, FORM)
        return ledger

    return again


def add(ledger, number, site, rows=(0, 1), *, tokens=5, steps=1, total=7):
    for row in rows:
        if ledger.wants(number, str(site), row):
            path = ledger.path(number, str(site), row)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"abcd")
            facts = {"steps": steps, "tokens": tokens, "sum": total}
            ledger.add(number, str(site), row, facts)
    ledger.decide()


def who(ledger, number):
    found = ledger.ready(number)
    return None if found is None else sorted(map(int, found))


def test_a_round_waits_for_all_rows_of_all_sites(opened):
    ledger = opened()
    add(ledger, 0, 0)
    add(ledger, 0, 2)
    add(ledger, 0, 1, rows=(1,))
    assert who(ledger, 0) is None
    add(ledger, 0, 1, rows=(0,), tokens=9)
    assert who(ledger, 0) == [0, 1, 2]
    assert ledger.ready(0)["1"] == {"steps": 1, "tokens": 9}
    assert who(ledger, 1) is None


def test_a_site_that_stalls_is_waited_for_once_and_counts_again_when_it_is_back(opened, clock):
    ledger = opened()
    for site in (0, 1):
        add(ledger, 0, site)
    clock.now = 9.9
    ledger.decide()
    assert who(ledger, 0) is None
    clock.now = 10.1
    ledger.decide()
    assert who(ledger, 0) == [0, 1]
    for site in (0, 1):  # at once
        add(ledger, 1, site)
    assert who(ledger, 1) == [0, 1]
    assert not ledger.wants(0, "2", 0)  # a decided round stays decided
    assert ledger.begin(2, 0, None) == ledger.begin(2, 1, None) == {"missed": True}
    assert ledger.begin(2, 2, None)["steps"] == 1
    for site in (0, 1):
        add(ledger, 2, site)
    assert who(ledger, 2) is None  # it is waited for again
    add(ledger, 2, 2)
    assert who(ledger, 2) == [0, 1, 2]


def test_a_site_that_leaves_is_not_waited_for(opened):
    ledger = opened()
    add(ledger, 0, 0)
    add(ledger, 0, 1)
    ledger.leave(2)
    ledger.decide()
    assert who(ledger, 0) == [0, 1]


def test_a_hub_that_is_started_again_goes_on(opened, tmp_path):
    ledger = opened()
    for site in range(3):
        add(ledger, 0, site, tokens=site)
    add(ledger, 1, 0, steps=2)
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 1, "si')  # it was killed while it wrote
    ledger = opened()
    assert (ledger.open, who(ledger, 0)) == (1, [0, 1, 2])
    assert ledger.ready(0)["2"] == {"steps": 1, "tokens": 2}
    assert not ledger.wants(1, "0", 1)
    assert ledger.begin(0, 1, None)["steps"] == 2  # of what it sent in this round
    for site in (1, 2):
        add(ledger, 1, site)
    assert who(ledger, 1) == [0, 1, 2]
    assert opened().open == 2


def test_a_record_alone_decides_the_same_rounds_again(opened, tmp_path, clock):
    record = '{"round": 0, "sites": {"0": {"steps": 3, "tokens": 0}}}\n'
    (tmp_path / "rounds.jsonl").write_text(record)
    ledger = opened()
    assert ledger.begin(0, 0, None) == {"steps": 3}
    assert ledger.begin(1, 0, None) == {"missed": True}
    add(ledger, 0, 1)
    clock.now = 100
    ledger.decide()
    assert who(ledger, 0) is None  # whatever came, and however late the one that counts is
    add(ledger, 0, 0)
    assert who(ledger, 0) == [0]


def test_old_rounds_are_let_go(opened, tmp_path):
    ledger = opened()
    for number in range(6):
        for site in range(3):
            add(ledger, number, site)
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.is_dir()) == [2, 3, 4, 5]
    assert ledger.begin(0, 1, None) == {"gone": 6}
    assert who(ledger, 1) is None
    assert opened().begin(0, 1, None) == {"gone": 6}


@pytest.mark.parametrize(
    ("seconds", "most", "wanted"),
    [((1.0, 1.0, 1.0), 8, (1, 1, 1)), ((1.0, 3.5, 2.0), 8, (3, 1, 1)), ((1, 9, 9), 4, (4, 1, 1))],
)
def test_a_fast_site_does_the_steps_that_the_slowest_leaves_time_for(opened, seconds, most, wanted):
    ledger = opened(most_steps=most)
    for site, own in enumerate(seconds):
        ledger.begin(site, 0, own)
    found = [ledger.begin(site, 0, own)["steps"] for site, own in enumerate(seconds)]
    assert tuple(found) == wanted


def test_outer_weights_that_differ_are_refused(opened):
    ledger = opened()
    add(ledger, 0, 0)
    with pytest.raises(LedgerError, match="site 2 are not those of site 0 at the start of round 0"):
        add(ledger, 0, 2, total=8)


def test_a_site_with_other_settings_is_refused(opened):
    ledger = opened()
    with pytest.raises(LedgerError, match="site 1 has bytes 5, the others have 4"):
        ledger.join(1, {**FORM, "bytes": 5})
    with pytest.raises(LedgerError, match="site 3 is none of 3"):
        ledger.join(3, FORM)
    for site, row in (("7", 0), ("0", 2), ("../0", 0), ("-1", 0)):
        with pytest.raises(LedgerError, match="no site"):
            ledger.wants(0, site, row)


def test_a_new_folder_takes_up_a_run_where_it_is_and_another_runs_folder_does_not(opened):
    ledger = opened()
    assert ledger.begin(0, 40, None)["steps"] == 1
    assert ledger.begin(1, 39, None) == {"gone": 40}
    add(ledger, 40, 0)
    with pytest.raises(LedgerError, match="of another run"):
        ledger.begin(0, 50, None)


def test_one_site_is_asked_for_outer_weights(opened):
    ledger = opened()
    ledger.wanted = True
    assert ledger.begin(0, 0, None)["give"] is True
    assert ledger.begin(1, 0, None)["give"] is False
    add(ledger, 0, WHOLE, rows=(0,))
    assert ledger.whole_from(0) is None
    add(ledger, 0, WHOLE, rows=(1,))
    assert (ledger.whole_from(0), ledger.whole_from(1)) == (0, None)
    assert who(ledger, 0) is None  # it is no site
