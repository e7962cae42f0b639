"""Runs that several tests of a module look at; the module says with what CONFIG."""

import pytest

from tests.integration.runs import run, write_config


@pytest.fixture(scope="module")
def place(tmp_path_factory, request):
    """A directory with token files and a config."""
    folder = tmp_path_factory.mktemp("runs")
    return write_config(folder, request.module.CONFIG, folder / "straight")


@pytest.fixture(scope="module")
def straight(place):
    """The directory and the output of an undisturbed run."""
    code, out, err = run(place)
    assert code == 0, err
    return place / "straight", out
