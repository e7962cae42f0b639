"""Samples a short continuation, to see what the model has learned. Without a KV cache."""

import jax
import numpy as np

from moejax.runtime.processes import ALONE, Processes
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep


def sample(
    train_step: TrainStep,
    state: TrainState,
    prompt: list[int],
    *,
    length: int,
    allowed: int,
    seed: int,
    temperature: float = 0.7,
    processes: Processes = ALONE,
) -> list[int]:
    """Returns the prompt and `length` sampled tokens, fewer where logits are not finite.

    Runs the whole model on the last T - 1 tokens for each new one, on the training mesh.

    Args:
      allowed: ids from this one on are never sampled: the vocabulary's padding.
    """
    rows, T = train_step.abstract_prompt()[0].shape
    tokens, next_logits = list(prompt), train_step.next_logits
    draw = np.random.default_rng(seed)
    for _ in range(length):
        seen = tokens[-T:]
        window_BT = np.zeros((rows, T), np.int32)
        window_BT[:, : len(seen)] = seen
        placed = jax.make_array_from_callback(
            window_BT.shape, train_step.batch_sharding, lambda index, w=window_BT: w[index]
        )
        if len(tokens) == len(prompt):
            processes.compile(next_logits, state, (placed, len(seen)))
        logits_BV = next_logits(state, (placed, len(seen)))
        logit_V = np.asarray(logits_BV.addressable_data(0))[0, :allowed].astype(np.float64)
        # Each process has its own rows' logits, which may differ in the last bits.
        token = processes.gather(_drawn(logit_V, temperature, draw))[0]
        if token is None:
            break
        tokens.append(token)
    return tokens


def _drawn(logit_V: np.ndarray, temperature: float, draw: np.random.Generator) -> int | None:
    """Draws a token from softmax; None if a logit is not finite."""
    if not np.isfinite(logit_V.max()):
        return None
    chance_V = np.exp((logit_V - logit_V.max()) / temperature)
    return int(draw.choice(len(logit_V), p=chance_V / chance_V.sum()))
