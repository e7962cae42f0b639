"""Nothing of the package is over its budget."""

from tests.size import over, table


def test_nothing_is_over_the_budget():
    assert list(over()) == []


def test_the_table_counts_every_module():
    assert table().splitlines()[-1].startswith("all ")
