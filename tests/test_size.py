"""Nothing of the package is over its budget, nor is the first page."""

import pytest

from tests.size import CORE, FILES, README, core, over, table


@pytest.mark.slow
def test_nothing_is_over_the_budget():
    assert list(over()) == []


def test_the_core_can_be_read():
    assert len(core()) <= FILES, f"{', '.join(CORE)} have {len(core())} modules, of {FILES}"


def test_the_first_page_is_one_page():
    words, lines = README
    text = (core()[0].parents[2] / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= words
    assert len(text.splitlines()) <= lines


def test_the_table_counts_every_module():
    assert table().splitlines()[-1].startswith("all ")
