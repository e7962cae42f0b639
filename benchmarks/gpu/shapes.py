"""Expert layers of published models, and how many rows each expert gets."""

from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """The experts of one device.

    Attributes:
      D, F: width of the model, and of an expert.
      G: experts on the device.
      K: experts that a token visits.
    """

    model: str
    D: int
    F: int
    G: int
    K: int


# Jiang et al. 2024; Qwen team 2025; Muennighoff et al. 2024; DeepSeek-AI 2024, whose 256 experts
# are spread over eight devices. The others have all of theirs.
MIXTRAL = Shape("Mixtral 8x7B", 4096, 14336, 8, 2)
QWEN3 = Shape("Qwen3-30B-A3B", 2048, 768, 128, 8)
OLMOE = Shape("OLMoE-1B-7B", 2048, 1024, 64, 8)
DEEPSEEK = Shape("DeepSeek-V3", 7168, 2048, 32, 8)
MODELS = (MIXTRAL, QWEN3, OLMOE, DEEPSEEK)
TINY = Shape("tiny", 256, 128, 4, 2)  # where there is no GPU

SKEW = 0.8  # of a Zipf law: the fullest of 128 experts gets 15 times the mean


def group_sizes(rows: int, groups: int, *, skewed: bool) -> np.ndarray:
    """Rows of each group, int32, together `rows`: all alike, or by a Zipf law in random order."""
    share = 1 / np.arange(1, groups + 1) ** (SKEW if skewed else 0)
    share = np.random.default_rng(0).permutation(share / share.sum())
    ends = np.rint(np.cumsum(share) * rows).astype(np.int32)
    return np.diff(ends, prepend=np.int32(0))


class Placement(NamedTuple):
    """Where tokens go: numbers of rows sorted by expert, see `moejax.kernels.permute`."""

    token_M: np.ndarray  # the token that a row copies
    slot_NK: np.ndarray  # the row of each choice of a token
    assignment_M: np.ndarray  # the choice that a row answers


def place_tokens(tokens: int, shape: Shape, *, skewed: bool) -> Placement:
    """Tokens in the order of the experts that they were drawn for, K different ones each."""
    rng = np.random.default_rng(0)
    weight_G = group_sizes(2**20, shape.G, skewed=skewed).astype(float)
    # The K largest of log weight + Gumbel noise: a draw without putting back.
    key_NG = np.log(weight_G) + rng.gumbel(size=(tokens, shape.G))
    expert_NK = np.argpartition(-key_NG, shape.K - 1, axis=1)[:, : shape.K]
    assignment_M = np.argsort(expert_NK.reshape(-1), kind="stable").astype(np.int32)
    slot_NK = np.empty_like(assignment_M)
    slot_NK[assignment_M] = np.arange(assignment_M.size, dtype=np.int32)
    return Placement(
        (assignment_M // shape.K).astype(np.int32),
        slot_NK.reshape(tokens, shape.K),
        assignment_M,
    )
