"""Supervisors that launch/elastic.py starts at every place: here all on this machine."""

import sys

import pytest

from tests.launch.modules import module

elastic = module("elastic")
free_port = sys.modules["statuses"].free_port
Place = elastic.Place


@pytest.fixture
def run(tmp_path, capfd):
    """Runs a script on hosts a and b. Returns the code and what was shown."""

    def run(script, prefix=(), **given):
        names = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in "ab"]
        places = [Place(name, prefix) for name in "ab"]
        given = {"devices": None, "logs": tmp_path / "logs", "restarts": 0, **given}
        code = elastic.run(places, names, ["sh", "-c", script], **given)
        shown = capfd.readouterr()
        return code, shown.out + shown.err

    return run


def test_each_host_has_a_place_and_what_it_says_is_kept(run, tmp_path):
    script = "echo $MOEJAX_PROCESS of $MOEJAX_PROCESSES, $JAX_NUM_CPU_DEVICES"
    code, shown = run(script, ("sh", "-c"), devices=3, one_word=True)
    assert code == 0, shown
    for host, number in (("a", 0), ("b", 1)):
        assert f"[{host}] [h{number}] {number} of 2, 3\n" in shown
        log = tmp_path / "logs" / f"{host}.supervisor.log"
        assert f"{number} of 2, 3\n" in log.read_text()


@pytest.mark.parametrize(("ending", "code"), [("exit 4", 4), ("exit 1", 7)])
def test_a_failure_is_passed_on_and_restarts_are_counted(run, ending, code):
    got, shown = run(ending, restarts=1)
    assert got == code, shown
    assert ("generation 2" in shown) == (code == 7)
