"""Real processes meet a fault: it is named in time, and the run ends with the same bits."""

import signal

import pytest

from tests.faults.lab import DEATHS, HANGS, STEPS, injected, kill_in_save, recovered, seeded, send

pytestmark = [pytest.mark.slow, pytest.mark.faults]


@pytest.mark.parametrize("member", [0, 1])
def test_a_killed_process(lab, member):
    name = f"kill-{member}"
    trial = lab.trial(name, 15, send(signal.SIGKILL, member))
    recovered(lab, name, trial, DEATHS)
    assert f"p{member} failed first: ended by SIGKILL" in trial.said


@pytest.mark.parametrize("member", [0, 1])
def test_a_stopped_process(lab, member):
    name = f"stop-{member}"
    trial = lab.trial(name, 15, send(signal.SIGSTOP, member))
    recovered(lab, name, trial, HANGS)
    assert f"hang: process {member} is behind" in trial.out


@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize("fault", ["loop", "exception", "hold", "exit"])
def test_a_fault_in_the_program(lab, fault, member):
    name = f"{fault}-{member}"
    trial = lab.trial(name, 15, wrapped=injected(fault, member, 15, lab.folder / f"{name}.done"))
    recovered(lab, name, trial, HANGS if fault in ("loop", "hold") else DEATHS)
    if fault in ("loop", "hold"):
        assert f"process {member} is behind" in trial.out or f"process {member} itself" in trial.out


@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_a_random_moment(lab, seed):
    member, step, delay = seeded(seed)
    trial = lab.trial(f"random-{seed}", step, send(signal.SIGKILL, member, delay))
    recovered(lab, f"random-{seed}", trial, DEATHS)


@pytest.mark.parametrize("seed", range(10))
def test_a_kill_during_a_save(lab, seed):
    name = f"save-{seed}"
    trial = lab.trial(name, 8 if seed % 2 else 18, kill_in_save(lab, name, seed // 2 % 2))
    recovered(lab, name, trial, DEATHS)
    assert STEPS == 30, "saves are at 10, 20 and 30"
