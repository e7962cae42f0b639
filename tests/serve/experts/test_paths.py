"""Loads told by paths: cases worked out by hand."""

import numpy as np
import pytest

from moejax.serve.experts.paths import Paths


def paths(known, chosen, least=1):
    found = Paths(4, least=least)
    found.learn(np.array(known), np.array(chosen)[:, :, None])
    return found


# Behind 0, 0 comes 1 then 2; behind 1, 0 it is 3 twice in four, and behind 2, 1 it is 0.
KNOWN = [[0, 0], [0, 0], [1, 0], [1, 0], [2, 1]]
CHOSEN = [[1, 2], [1, 2], [3, 3], [3, 1], [0, 0]]


def test_a_path_tells_every_layer():
    load_LE = paths(KNOWN, CHOSEN).predict(np.array([[1, 0], [1, 0], [0, 0]]))
    assert load_LE.tolist() == [[0, 1, 0, 2], [0, 1, 1, 1]]


def test_an_unknown_path_gives_way_to_its_end_and_then_to_popularity():
    """3, 0 was not seen; 0 was, four times: 1 twice and 3 twice. 3 was not: all five tokens."""
    one = paths(KNOWN, CHOSEN).predict(np.array([[3, 0]]))
    assert one.tolist() == [[0, 0.5, 0, 0.5], [0, 0.25, 0.5, 0.25]]
    other = paths(KNOWN, CHOSEN).predict(np.array([[0, 3]]))
    np.testing.assert_allclose(other, [[0.2, 0.4, 0, 0.4], [0.2, 0.2, 0.4, 0.2]])


def test_a_path_that_was_seen_too_seldom_gives_way_too():
    found = paths(KNOWN, CHOSEN, least=3).predict(np.array([[2, 1], [0, 0]]))
    popular = np.array([[0.2, 0.4, 0, 0.4], [0.2, 0.2, 0.4, 0.2]])
    behind_0 = np.array([[0, 0.5, 0, 0.5], [0, 0.25, 0.5, 0.25]])
    np.testing.assert_allclose(found, popular + behind_0)


def test_paths_are_learned_in_parts_and_choices_are_all_counted():
    found = Paths(3, least=1)
    with pytest.raises(ValueError, match="no path was learned"):
        found.predict(np.array([[0]]))
    found.learn(np.array([[0]]), np.array([[[0, 1]]]))
    assert found.predict(np.array([[0]])).tolist() == [[1, 1, 0]]
    found.learn(np.array([[0]]), np.array([[[0, 2]]]))
    assert found.predict(np.array([[0], [0]])).tolist() == [[2, 1, 1]]
