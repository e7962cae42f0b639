"""Continues prompts: batches of them, token by token."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moejax.errors import RunError
from moejax.runtime.processes import ALONE, Processes
from moejax.serve.engine import DecodingInputs, Engine, Prompts
from moejax.serve.sampling import NOT_FINITE
from moejax.step.state import TrainState


class Token(NamedTuple):
    """A token that continues a prompt."""

    prompt: int  # number of the prompt
    id: int


def generate(
    engine: Engine,
    state: TrainState,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    stops: frozenset[int],
    processes: Processes = ALONE,
) -> Iterator[Token]:
    """Yields the tokens that continue the prompts, in the order in which they are found.

    A prompt's tokens are the same in any batch. Tokens that end a text are not among them.

    Args:
      prompts: ids, each at least one and at most as many as the engine was built for.
      tokens: the most for each prompt.
      stops: ids that end a text.
    Raises:
      RunError: if logits are not finite.
    """
    if processes.count > 1:  # no process waits for another's compiler
        weights, (padded_prompts, rows, made) = engine.train_step.abstract, engine.abstract()
        processes.compile(engine.prefill, weights, padded_prompts)
        processes.compile(engine.decode, weights, rows, made.cache)
        processes.compile(engine.draw, made.logit_BV, rows)
    batch = engine.batch_shape[0]
    for first in range(0, len(prompts), batch):
        yield from _batch(engine, state, prompts[first : first + batch], first, tokens, stops)


def _batch(
    engine: Engine,
    state: TrainState,
    prompts: Sequence[Sequence[int]],
    first: int,
    tokens: int,
    stops: frozenset[int],
) -> Iterator[Token]:
    """Continues the prompts of a batch until all have ended."""
    batch, rows = padded(prompts, engine.batch_shape, first)
    logits, cache = engine.prefill(state, engine.place(batch))
    rows = engine.place(rows)
    going = dict(enumerate(range(first, first + len(prompts))))
    for left in range(tokens - 1, -1, -1):
        rows, token_B = engine.draw(logits, rows)
        found_B = np.asarray(token_B.addressable_data(0))
        for row, prompt in list(going.items()):
            token = int(found_B[row])
            if token == NOT_FINITE:
                raise RunError(
                    f"logits are not finite. They continue prompt {prompt}. The checkpoint is as "
                    f"it was. Take another one: --step."
                )
            if token in stops:
                del going[row]
            else:
                yield Token(prompt, token)
        if not going or not left:
            return
        logits, cache = engine.decode(state, rows, cache)


def padded(
    prompts: Sequence[Sequence[int]], shape: tuple[int, int], first: int
) -> tuple[Prompts, DecodingInputs]:
    """Returns prompts as arrays, and the rows before their first draw.

    Rows without a prompt have one of a single token. The row's last token is the prompt's, so that
    a draw comes one position behind it.

    Args:
      shape: rows, and positions of a prompt.
      first: number of the first prompt.
    """
    token_BT, length_B = np.zeros(shape, np.int32), np.ones(shape[0], np.int32)
    for row, prompt in enumerate(prompts):
        token_BT[row, : len(prompt)], length_B[row] = prompt, len(prompt)
    last_B = token_BT[np.arange(shape[0]), length_B - 1]
    number_B = np.arange(first, first + shape[0], dtype=np.int32)
    return Prompts(token_BT, length_B), DecodingInputs(last_B, length_B - 1, number_B)
