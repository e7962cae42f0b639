"""Whole steps are traced here for another purpose than their annotations."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def annotations(unchecked_annotations):
    """Leaves annotations unchecked: layers have tests of their own."""
