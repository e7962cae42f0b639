"""How well the path of a token tells its experts in the next layer, after Lina's estimator.

A path is the likeliest expert of each of the last layers. Counts of the next layer's experts by
path, learned from some tokens, predict those of others. A path that was seen too seldom gives way
to the next shorter one, and the shortest of all is no path: how popular experts are.

Letters: N tokens, L layers, E experts, K experts of a token.

Source: Lina (Li et al. 2023), Table 5.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Counts:
    """How often a key was followed by each expert. Keys ascend; rows are theirs."""

    keys: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, key_N: np.ndarray, expert_NK: np.ndarray, experts: int) -> "Counts":
        """Counts the experts behind each key."""
        keys, row_N = np.unique(key_N, return_inverse=True)
        flat = (row_N[:, None] * experts + expert_NK).ravel()
        counts = np.bincount(flat, minlength=len(keys) * experts)
        return cls(keys, counts.reshape(len(keys), experts))

    def find(self, key_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the counts of keys, and how many tokens had them: 0 where none had."""
        row_N = np.minimum(np.searchsorted(self.keys, key_N), len(self.keys) - 1)
        count_NE = np.where((self.keys[row_N] == key_N)[:, None], self.counts[row_N], 0)
        return count_NE, count_NE.sum(axis=1)


def key_of(expert_NLK: np.ndarray, layer: int, length: int, experts: int) -> np.ndarray:
    """Returns the number of each token's path: its first experts in so many layers before one."""
    key_N = np.zeros(len(expert_NLK), np.int64)
    for before in range(layer - length, layer):
        key_N = key_N * experts + expert_NLK[:, before, 0]
    return key_N


def right(count_NE: np.ndarray, expert_NK: np.ndarray) -> dict[str, float]:
    """Returns how well counts predict: the first of them, and as many as a token has experts."""
    choices = expert_NK.shape[1]
    order_NK = np.argsort(-count_NE, axis=1, kind="stable")[:, :choices]
    found_NK = (order_NK[:, :, None] == expert_NK[:, None, :]).any(axis=2)
    return {"first": float(found_NK[:, 0].mean()), "share": float(found_NK.mean())}


def predicted(
    learn_NLK: np.ndarray,
    test_NLK: np.ndarray,
    *,
    layer: int,
    length: int,
    experts: int,
    least: int = 1,
) -> dict[str, float]:
    """Returns how well paths of a length tell a layer's experts; length 0: popularity alone.

    Args:
      least: tokens that must have had a path, or a shorter one is taken.
    """
    choices = learn_NLK.shape[2]
    count_NE = np.zeros((len(test_NLK), experts), np.int64)
    missing_N, seen = np.ones(len(test_NLK), bool), 1.0
    for steps in range(length, -1, -1):
        learned = Counts.of(
            key_of(learn_NLK, layer, steps, experts), learn_NLK[:, layer].astype(np.int64), experts
        )
        found_NE, total_N = learned.find(key_of(test_NLK, layer, steps, experts))
        take_N = missing_N & ((total_N >= least * choices) | (steps == 0))
        count_NE[take_N] = found_NE[take_N]
        missing_N &= ~take_N
        if steps == length:
            seen = float(take_N.mean())
    return {**right(count_NE, test_NLK[:, layer]), "seen": seen}


def predicted_by_id(
    learn: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    *,
    layer: int,
    experts: int,
) -> dict[str, float]:
    """Returns how well ids of tokens tell a layer's experts. Pairs are ids [N] and experts."""
    (learn_N, learn_NLK), (test_N, test_NLK) = learn, test
    learned = Counts.of(learn_N, learn_NLK[:, layer].astype(np.int64), experts)
    count_NE, total_N = learned.find(test_N)
    popular_E = learned.counts.sum(axis=0)
    count_NE = np.where(total_N[:, None] > 0, count_NE, popular_E)
    return right(count_NE, test_NLK[:, layer])
