"""The page of copies of hot experts: its record, and the choices of experts that it imposes."""

import numpy as np
import pytest

from benchmarks.emulated import copies
from benchmarks.emulated.choices import CASES, B, E, K, L, T, choices, loads, uneven_layers
from tests.benchmarks.records import results_of


def test_the_page_is_that_of_its_record():
    results_of("copies", copies.page, map(copies.case, CASES))


@pytest.mark.parametrize("name", CASES)
def test_a_token_has_different_experts(name):
    chosen = choices(name)
    assert chosen.shape == (2, B, T, L, K)
    assert (np.diff(np.sort(chosen, axis=-1), axis=-1) > 0).all()
    assert chosen.min() >= 0
    assert chosen.max() < E


def test_constructed_choices_are_what_their_names_say():
    hot = loads("hot set")[:, ::8]
    assert (hot > 2.5 * B * T * K / E).all()
    device = loads("hot device").reshape(L, 8, -1).sum(2)
    assert (device[:, 0] > 2 * device.mean(1)).all()
    assert (loads("an expert without tokens")[:, 5] == 0).all()
    even = loads("even").reshape(L, 8, -1).sum(2)
    assert (even.max(1) < 1.15 * even.mean(1)).all()


def test_layers_are_taken_by_their_busiest_device():
    """Eight devices of one expert: their busiest have 3, 1 and 2 of 8 tokens."""
    load_LE = np.array([[3, 1, 1, 1, 1, 1, 0, 0], [1] * 8, [0, 0, 1, 1, 1, 1, 2, 2]])
    assert uneven_layers(load_LE) == [0, 2]
