"""Recorded and constructed choices of experts, for `copies.py` and its worker."""

import json

import numpy as np

from benchmarks.machine import ROOT

HOSTS, DEVICES = 2, 4
B, T, L, E, K = 8, 128, 2, 32, 4
RECORDED = ROOT / "benchmarks/recorded/unbalanced.npz"
BALANCED = RECORDED.with_name("balance_loss.json")
CASES = (
    "recorded, its own text",
    "recorded, other text",
    "a recorded load, with a balance loss",
    "hot set",
    "hot device",
    "moving hot set",
    "burst",
    "an expert without tokens",
    "even",
)


def choices(name: str) -> np.ndarray:
    """The experts of each token in two steps after each other, [2, B, T, L, K], all different."""
    if name.startswith("recorded"):
        return recorded(other=name.endswith("other text"))
    draw = np.random.default_rng(0)
    share_SLE = np.full((2, L, E), 1 / E)
    if name.startswith("a recorded load"):
        load_LE = np.array(json.loads(BALANCED.read_text())["load"])
        share_SLE[:] = load_LE[uneven_layers(load_LE)] / load_LE[0].sum()
    hot = np.arange(0, E, E // 4)  # experts of four devices
    if name == "hot set":
        share_SLE[..., hot] *= 6
    if name == "hot device":
        share_SLE[..., : E // (HOSTS * DEVICES)] *= 4
    if name == "moving hot set":
        for step in range(2):
            share_SLE[step][:, hot + step] *= 6
    if name == "burst":
        share_SLE[1][:, hot] *= 6
    if name == "an expert without tokens":
        share_SLE[..., 5] = 0
    # The K largest of exponential times are K draws without replacement.
    with np.errstate(divide="ignore"):
        times = draw.exponential(size=(2, B, T, L, E)) / share_SLE[:, None, None]
    return np.argsort(times, axis=-1)[..., :K].astype(np.int32)


def recorded(*, other: bool) -> np.ndarray:
    """Two steps of recorded choices, in the layers whose busiest device has most, and the middle.

    Args:
      other: the second half of the file, of a text unlike that of training.
    """
    with np.load(RECORDED, allow_pickle=False) as file:
        expert_TLK, tokens_N = file["expert_TLK"].astype(np.int32), file["tokens_N"]
    half = int(tokens_N[: len(tokens_N) // 2].sum())
    own_TLK = expert_TLK[half:] if other else expert_TLK[:half]
    own_TLK = own_TLK[(own_TLK >= 0).all(axis=(1, 2))][: 2 * B * T]
    assert len(own_TLK) == 2 * B * T, "the file has too few tokens"
    counts = [np.bincount(own_LK.ravel(), minlength=E) for own_LK in own_TLK.swapaxes(0, 1)]
    return own_TLK[:, uneven_layers(np.stack(counts))].reshape(2, B, T, L, K)


def uneven_layers(load_LE: np.ndarray) -> list[int]:
    """The layer whose busiest device has most, and the one in the middle."""
    busiest_L = load_LE.reshape(len(load_LE), HOSTS * DEVICES, -1).sum(2).max(1)
    order = np.argsort(busiest_L / load_LE.sum(1))
    return [int(order[-1]), int(order[len(order) // 2])]


def loads(name: str) -> np.ndarray:
    """The load of each layer in the timed step, [L, E]."""
    chosen = choices(name)[1].reshape(-1, L, K)
    return np.stack([np.bincount(chosen[:, layer].ravel(), minlength=E) for layer in range(L)])
