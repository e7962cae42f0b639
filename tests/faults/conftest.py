"""One lab for all files of this folder: its run without a fault is made once."""

import pytest

from tests.faults.lab import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A lab whose run without a fault is there."""
    lab = Lab(tmp_path_factory.mktemp("faults"))
    lab.straight()
    return lab
