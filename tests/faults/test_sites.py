"""A site, the hub or a link between them fails, where sites are runs of their own."""

import os
import signal
import time

import numpy as np
import pytest

from tests.faults.sites import CONFIG, EVERY, STEPS, TOKENS, Sites
from tests.integration.runs import (
    REPOSITORY,
    assert_same_end,
    find_member,
    records,
    write_config,
)

TWO_PROCESSES = (REPOSITORY / "launch" / "local", "--processes", 2, "--devices", 1)
pytestmark = [pytest.mark.slow, pytest.mark.faults]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    return write_config(folder, CONFIG, folder / "unused")


@pytest.fixture(scope="module")
def straight(place):
    """Two sites without a fault."""
    with Sites(place, "straight") as sites:
        for site in range(2):
            sites.start(site)
        sites.end()
        return sites


def assert_equal_copies(sites):
    for one, other in zip(sites.outer(0), sites.outer(1), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.all(np.isfinite(one))


def test_two_sites_end_with_the_same_outer_weights(straight):
    assert_equal_copies(straight)
    for site in range(2):
        found = straight.rounds(site)
        assert [r["round"] for r in found] == list(range(STEPS))
        assert all(sorted(r["sites"]) == ["0", "1"] for r in found)


def kill_a_site(sites):
    sites.kill(1)  # after its part of this round has counted, perhaps
    sites.start(1)


def kill_the_hub(sites):
    port = sites.port
    sites.kill_hub()
    time.sleep(1)
    sites.start_hub(port)


def cut_a_link(sites):
    sites.links[1].sever()
    time.sleep(60)
    sites.links[1].cut.clear()


@pytest.mark.parametrize("fault", [kill_a_site, kill_the_hub, cut_a_link])
def test_a_fault_that_is_waited_for_changes_no_bit(place, straight, fault):
    with Sites(place, fault.__name__) as sites:
        for site in range(2):
            sites.start(site)
        sites.wait_for(1, "step 7/")
        fault(sites)
        sites.end()
    for site in range(2):
        assert_same_end(sites.run_dir(site), straight.run_dir(site))


def test_a_site_of_two_processes_trains_as_one_does_also_after_one_is_killed(place, straight):
    def both(name, *, kill):
        with Sites(place, name) as sites:
            sites.start(0, launcher=TWO_PROCESSES)
            sites.start(1)
            if kill:
                sites.wait_for(0, "step 7/")
                os.kill(find_member(sites.running[0].pid, 1), signal.SIGKILL)
                assert sites.running[0].wait(timeout=300) != 0
                sites.start(0, launcher=TWO_PROCESSES)
            sites.end()
        return sites

    whole, killed = both("processes", kill=False), both("killed", kill=True)
    assert_equal_copies(whole)
    for site in range(2):
        assert_same_end(killed.run_dir(site), whole.run_dir(site))
        # Gloo adds in another order than one process does.
        losses = [
            [r["loss"] for r in records(sites.run_dir(site), "step")] for sites in (whole, straight)
        ]
        np.testing.assert_allclose(*losses, rtol=1e-4)


def test_a_fast_site_does_more_steps_a_round_and_weighs_more(place):
    with Sites(place, "unequal", most_steps=4) as sites:
        sites.start(0, "--config.train.num_steps=40")
        sites.start(1, program=("tests.faults.sites", "--slow", "1.5", "--"))
        sites.end()
    assert_equal_copies(sites)
    found = [r["sites"] for r in sites.rounds(1)]
    steps = [[r[site]["steps"] for r in found if site in r] for site in ("0", "1")]
    assert max(steps[0]) > 1
    assert set(steps[1]) == {1}
    for number in range(EVERY, len(steps[0])):  # the part has the steps since it was last averaged
        tokens = TOKENS * sum(steps[0][number - EVERY : number])
        assert found[number]["0"]["tokens"] == tokens


def test_others_go_on_without_a_site_and_it_comes_back(place):
    """First site 1 is killed, then site 0 is cut off, for longer than the patience."""
    with Sites(place, "without", patience_s=3) as sites:
        sites.start_together()
        sites.wait_for(1, "step 7/")
        sites.kill(1)
        sites.wait_for(0, "step 11/")
        sites.links[0].sever()
        sites.start(1)
        sites.wait_for(1, "step 10/")
        sites.links[0].cut.clear()
        sites.end()
    assert_equal_copies(sites)
    alone = [[r["round"] for r in sites.rounds(0) if list(r["sites"]) == [str(s)]] for s in (0, 1)]
    assert all(alone), alone
    missed = [[r["round"] for r in sites.rounds(site) if not r["counted"]] for site in (0, 1)]
    assert missed[0][: len(alone[1])] == alone[1][: len(missed[0])]
    assert set(alone[0]) <= set(missed[1])
    for site in (0, 1):  # each did all of its steps
        assert (
            sum(
                r["sites"].get(str(site), {"steps": 0})["steps"]
                for r in sites.rounds(site)
                if r["counted"]
            )
            >= STEPS - 1
        )


def test_a_site_that_stands_still_is_not_waited_for_again(place):
    with Sites(place, "still", patience_s=3) as sites:
        sites.start_together()
        sites.wait_for(1, "step 7/")
        os.kill(sites.running[1].pid, signal.SIGSTOP)
        sites.wait_for(0, "step 11/")
        os.kill(sites.running[1].pid, signal.SIGCONT)
        sites.end()
    assert_equal_copies(sites)
    waited = [r["waited_s"] for r in sites.rounds(0) if list(r["sites"]) == ["0"]]
    assert waited
    assert max(waited[1:], default=0) < 3


def test_a_site_that_sends_no_numbers_does_not_count(place):
    with Sites(place, "spoiled") as sites:
        sites.start(0)
        sites.start(1, program=("tests.faults.sites", "--spoil", "6", "--"))
        sites.end()
    assert_equal_copies(sites)


def test_a_site_without_checkpoints_takes_outer_weights_of_another(place):
    with Sites(place, "added", patience_s=2) as sites:
        sites.start(0, "--config.train.num_steps=40")  # site 1 comes before its end
        sites.wait_for(0, "step 9/")
        sites.links[0].sever()
        # Of its first rounds the hub keeps nothing.
        for number in range(4):
            for path in (sites.folder / "hub" / str(number)).iterdir():
                path.unlink()
            (sites.folder / "hub" / str(number)).rmdir()
        sites.kill_hub()
        sites.start_hub(sites.port)
        sites.start(1)
        sites.wait_for(1, "compiled")
        time.sleep(2)
        sites.links[0].cut.clear()
        sites.end()
    assert_equal_copies(sites)
    assert records(sites.run_dir(1), "took_outer")[0]["round"] >= 9
