"""How unevenly choices fall on experts and devices, and how long the hottest experts stay hot.

Letters: N tokens, L layers, E experts, K experts of a token, M micro-batches, P devices.
"""

from typing import Any

import numpy as np

HOT_SHARE = 8  # one expert in so many is hot


def loads_of(expert_NLK: np.ndarray, *, experts: int, tokens: int) -> np.ndarray:
    """Returns how many choices each expert gets in micro-batches of so many tokens, [M, L, E].

    Tokens behind the last whole micro-batch are left out.
    """
    count, layers = len(expert_NLK) // tokens, expert_NLK.shape[1]
    cut_MNLK = expert_NLK[: count * tokens].reshape(count, tokens, layers, -1).astype(np.int64)
    place_MNLK = (np.arange(count)[:, None, None, None] * layers) + np.arange(layers)[:, None]
    flat = (place_MNLK * experts + cut_MNLK).ravel()
    return np.bincount(flat, minlength=count * layers * experts).reshape(count, layers, experts)


def busiest_expert(load_MLE: np.ndarray) -> np.ndarray:
    """Returns the busiest expert's load over the mean, [M, L]."""
    return load_MLE.max(axis=-1) / load_MLE.mean(axis=-1)


def busiest_device(load_MLE: np.ndarray, devices: int) -> np.ndarray:
    """Returns the busiest device's load over the mean, [M, L]. Experts are placed in order."""
    held_MLPe = load_MLE.reshape(*load_MLE.shape[:2], devices, -1)
    return busiest_expert(held_MLPe.sum(axis=-1))


def summary(found_ML: np.ndarray) -> dict[str, Any]:
    """Returns medians over micro-batches: of the median layer, the worst one, and each."""
    layer_L = np.median(found_ML, axis=0)
    return {
        "median": float(np.median(layer_L)),
        "worst": float(layer_L.max()),
        "layers": [round(float(x), 4) for x in layer_L],
    }


def hottest(load_LE: np.ndarray) -> np.ndarray:
    """Returns whether each expert is among the hottest eighth of its layer, [..., L, E]."""
    order = np.argsort(-load_LE, axis=-1, kind="stable")
    hot = np.zeros(load_LE.shape, bool)
    np.put_along_axis(hot, order[..., : load_LE.shape[-1] // HOT_SHARE], True, axis=-1)
    return hot


def kept(before_LE: np.ndarray, after_LE: np.ndarray) -> np.ndarray:
    """Returns the share of the hottest experts that are hot in both, [..., L]."""
    hot, still = hottest(before_LE), hottest(after_LE)
    return (hot & still).sum(axis=-1) / hot.sum(axis=-1)


def kept_apart(load_MLE: np.ndarray, apart: int) -> np.ndarray:
    """Returns the share of hot experts that are hot in a micro-batch so many later too, [M, L]."""
    return kept(load_MLE[:-apart], load_MLE[apart:])
