"""A test that hangs is a failure with a name, and the others run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = """
import threading

def test_before():
    pass

def test_hangs():
    threading.Event().wait()

def test_behind():
    pass
"""


def run(folder, *flags):
    """Runs pytest on a file whose second test hangs; returns its exit code and output."""
    (folder / "test_one.py").write_text(FILE)
    (folder / "test_two.py").write_text("def test_other():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.crashes", *flags]
    command += ["-c", "/dev/null", "--rootdir", folder, folder]
    for setting in ("timeout=1", "exit_on_timeout=true"):
        command += ["-o", f"faulthandler_{setting}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stdout + done.stderr


def test_these_tests_have_a_limit(pytestconfig):
    assert float(pytestconfig.getini("faulthandler_timeout")) > 0
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
    assert pytestconfig.pluginmanager.hasplugin("tests.crashes")


@pytest.mark.slow
def test_beside_others_it_fails_once_and_the_rest_runs(tmp_path):
    code, said = run(tmp_path, "-n", "2", "--dist", "loadfile")
    assert code == 1
    assert re.findall(r"FAILED \S*::(\w+)", said) == ["test_hangs"]
    assert "1 failed, 3 passed" in said


@pytest.mark.slow
def test_alone_it_ends_the_run_and_shows_where(tmp_path):
    code, said = run(tmp_path, "-n", "0")
    assert code == 1
    assert "in test_hangs" in said
