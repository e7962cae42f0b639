"""Most of a plan's time is tracing."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def annotations_are_not_checked(unchecked_annotations):
    """See `unchecked_annotations`."""
