"""Loads of experts that are told from what is known of a batch's tokens before it runs.

A token is known by a row of numbers in the order of time: its id, or the first experts that it, or
the token before it, chose in early layers. Counts of the experts behind each row of numbers,
learned from tokens that have run, tell the experts of others. A row that was seen too seldom gives
way to its end alone: a shorter path, at last to no path, which is how popular experts are.

Letters: N tokens, S numbers of a token, L layers, E experts, K experts of a token.

Source: Lina (Li et al., ATC 2023, section 5.2): paths through l layers. There they tell the layer
behind them, here every layer, so that weights may move before the batch begins.
"""

from typing import NamedTuple

import numpy as np


class _Counts(NamedTuple):
    """Counts of the experts behind rows of numbers; rows ascend."""

    rows: np.ndarray
    count_RLE: np.ndarray
    tokens_R: np.ndarray


class Paths:
    """Learns what follows paths, and tells loads."""

    def __init__(self, num_experts: int, *, least: int = 4):
        """Learns nothing yet.

        Args:
          least: tokens that must have had a path, or a shorter one is taken.
        """
        self._experts, self._least = num_experts, least
        self._known: list[np.ndarray] = []
        self._chosen: list[np.ndarray] = []
        self._counts: list[_Counts] = []  # of paths of 0, 1, ... numbers

    def learn(self, known_NS: np.ndarray, expert_NLK: np.ndarray) -> None:
        """Adds tokens that have run."""
        self._known.append(np.asarray(known_NS, np.int64))
        self._chosen.append(np.asarray(expert_NLK, np.int64))
        self._counts = []

    def predict(self, known_NS: np.ndarray) -> np.ndarray:
        """Returns the load of tokens that have not run, [L, E], in choices.

        Raises:
          ValueError: if nothing was learned.
        """
        if not self._known:
            raise ValueError("no path was learned. Call `learn` with tokens that have run.")
        if not self._counts:
            known_MS, chosen = np.concatenate(self._known), np.concatenate(self._chosen)
            lengths = range(known_MS.shape[1] + 1)
            self._counts = [_count(_end(known_MS, s), chosen, self._experts) for s in lengths]
        known_NS = np.asarray(known_NS, np.int64)
        load_LE = np.zeros(self._counts[0].count_RLE.shape[1:])
        left_N = np.ones(len(known_NS), bool)
        for length in range(known_NS.shape[1], -1, -1):
            counts, rows_N = self._counts[length], _end(known_NS, length)
            row_N = np.minimum(np.searchsorted(counts.rows, rows_N), len(counts.rows) - 1)
            enough_N = (counts.rows[row_N] == rows_N) & (counts.tokens_R[row_N] >= self._least)
            take_N = left_N & (enough_N | (length == 0))
            left_N &= ~take_N
            weight_R = np.bincount(row_N[take_N], minlength=len(counts.rows)) / counts.tokens_R
            load_LE += np.einsum("R,RLE->LE", weight_R, counts.count_RLE)
        return load_LE


def _end(known_NS: np.ndarray, length: int) -> np.ndarray:
    """Returns the last numbers of each row as one comparable value."""
    cut_NS = np.ascontiguousarray(known_NS[:, known_NS.shape[1] - length :])
    if not length:
        return np.zeros(len(known_NS), np.int64)
    return cut_NS.view([("", cut_NS.dtype)] * cut_NS.shape[1]).reshape(-1)


def _count(row_N: np.ndarray, expert_NLK: np.ndarray, experts: int) -> _Counts:
    rows, at_N, tokens_R = np.unique(row_N, return_inverse=True, return_counts=True)
    L = expert_NLK.shape[1]
    flat = ((at_N[:, None, None] * L + np.arange(L)[:, None]) * experts + expert_NLK).ravel()
    counts = np.bincount(flat, minlength=len(rows) * L * experts)
    return _Counts(rows, counts.reshape(len(rows), L, experts), tokens_R)
