"""The compiled and the traced step: annotations are checked where layers are tested."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def annotations(unchecked_annotations):
    """Leaves annotations unchecked; see `unchecked_annotations`."""
