"""A link of an emulated cluster is cut, or slow, in the middle of a run."""

import statistics

import pytest

from tests.faults.lab import HANGS, recovered, undisturbed
from tests.faults.links import FAST, HOSTS, LINKED, SLOW, cut, plug_in, slow
from tests.integration.runs import records
from tests.launch.test_emulate import needs_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.faults, needs_namespaces]


@pytest.mark.parametrize("host", [0, 1])
def test_a_cut_link_ends_the_run_and_the_next_start_waits_for_it(lab, host):
    name = f"cut-{host}"
    trial = lab.trial(name, 12, cut(host), launcher=HOSTS, failed=plug_in(host, after_s=15))
    recovered(lab, name, trial, HANGS)
    assert "hang: process 1 is behind" in trial.out, trial.out  # says process 0
    assert "hang: process 0 is behind" in trial.out, trial.out  # and the other way round
    assert "process 0 waits for process 1 of 2" in trial.out, trial.out  # in the next start


def test_a_slow_link_slows_the_run_and_nothing_else(lab):
    trial = lab.trial("slow", 12, slow(1), launcher=LINKED)
    undisturbed(lab, "slow", trial)
    assert "hang" not in trial.out
    rates = {r["step"]: r["tokens_per_second"] for r in records(lab.folder / "slow", "step")}
    before = statistics.median(rate for step, rate in rates.items() if step <= 10)
    after = statistics.median(rate for step, rate in rates.items() if step > 14)
    assert after < before / 2, f"a link of {SLOW} and not {FAST} Mbit/s changed little"
