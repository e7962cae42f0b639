"""The side of transformers, imported when a test asks for it: other environments have no torch."""

import importlib

import pytest


@pytest.fixture(scope="module")
def theirs():
    """What `tests/parity/theirs.py` computes with torch."""
    return importlib.import_module("tests.parity.theirs")


@pytest.fixture(scope="module")
def make_models():
    """The script that wrote the golden files."""
    return importlib.import_module("tests.golden.make_models")


@pytest.fixture(scope="module")
def config_defaults():
    """The script that wrote what transformers makes of missing and null keys."""
    return importlib.import_module("tests.golden.config_defaults")
