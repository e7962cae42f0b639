"""The sequences of each step: a pure function of the seed and the step.

Sequence i of an epoch is tokens i * T to i * T + T of the stream: T inputs, and the same shifted by
one as targets. Every process asks for its own rows of the global batch, so the order is the same on
any number of processes, and the position in the data is one integer, the step.
"""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar

import grain
import numpy as np

from moejax.data.tokens import TokenSource
from moejax.errors import InputError

Item = TypeVar("Item")


@dataclass(frozen=True)
class BatchRows:
    """Sequences of a batch, int32."""

    token_BT: np.ndarray
    target_BT: np.ndarray  # -1: no target
    segment_BT: np.ndarray  # document of each position


class _Windows:
    """The stream as a random-access list of windows of T + 1 tokens, for grain."""

    def __init__(self, source: TokenSource, length: int):
        self.source, self.length = source, length

    def __len__(self) -> int:
        return (self.source.num_tokens - 1) // self.length

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        return self.source.read(index.__index__() * self.length, self.length + 1)


class Batches:
    """The training sequences in order."""

    def __init__(
        self,
        source: TokenSource,
        *,
        sequence_length: int,
        batch_sequences: int,
        seed: int,
        shuffle: bool = True,
        repeat: bool = True,
        isolate_documents: bool = True,
    ):
        windows = _Windows(source, sequence_length)
        self.num_sequences, self.batch_sequences = len(windows), batch_sequences
        self.eos_id, self.isolate, self.repeat = source.eos_id, isolate_documents, repeat
        if self.num_sequences < 1:
            raise InputError(
                f"too little data. {source.num_tokens} tokens hold no sequence of "
                f"{sequence_length} and its next token. One is the least. Add text, or lower "
                f"data.sequence_length."
            )
        order = grain.MapDataset.source(windows)
        if shuffle:
            order = order.seed(seed).shuffle()
        self._order = order.repeat() if repeat else order

    def check_steps(self, num_steps: int) -> None:
        """Raises InputError if the data ends before the run and may not be repeated."""
        needed = num_steps * self.batch_sequences
        if not self.repeat and needed > self.num_sequences:
            raise InputError(
                f"too little data. {num_steps} steps need {needed} sequences, the files hold "
                f"{self.num_sequences}. With data.repeat=false each is seen once. Lower "
                f"train.num_steps to {self.num_sequences // self.batch_sequences}, or set "
                f"data.repeat=true."
            )

    def rows(self, step: int, start: int, stop: int) -> BatchRows:
        """Rows start .. stop - 1 of the global batch of a step."""
        first = step * self.batch_sequences
        windows = np.stack([self._order[first + row] for row in range(start, stop)])
        return _rows(windows, self.eos_id, self.isolate)


def _rows(window_BT: np.ndarray, eos_id: int, isolate: bool) -> BatchRows:
    """Splits windows of T + 1 tokens into inputs and targets; an eos opens the next document."""
    token_BT = window_BT[:, :-1]
    segment_BT = np.cumsum(token_BT == eos_id, axis=1, dtype=np.int32)
    if not isolate:
        segment_BT = np.zeros_like(segment_BT)
    return BatchRows(token_BT, window_BT[:, 1:], segment_BT)


def eval_batches(
    source: TokenSource,
    *,
    sequence_length: int,
    batch_sequences: int,
    limit: int | None,
    isolate_documents: bool = True,
) -> Iterator[BatchRows]:
    """Yields batches that cover every target of the stream once, in order; the end is padded.

    Args:
      limit: number of batches, spread evenly over the stream; None for all.
    """
    T, B = sequence_length, batch_sequences
    num_batches = -(-(source.num_tokens - 1) // (T * B))
    taken = np.arange(num_batches)
    if limit is not None and limit < num_batches:
        taken = np.linspace(0, num_batches - 1, limit).round().astype(int)
    for batch in taken:
        start = int(batch) * T * B
        read = source.read(start, min(T * B + 1, source.num_tokens - start))
        # The loss ignores a target of -1; the input beside it may be any valid id.
        stream = np.full(T * B + 1, -1, np.int32)
        stream[: len(read)] = read
        target_BT = stream[1:].reshape(B, T)
        token_BT = np.where(stream[:-1] < 0, source.eos_id, stream[:-1]).reshape(B, T)
        windows = np.concatenate([token_BT, target_BT[:, -1:]], axis=1).astype(np.int32)
        rows = _rows(windows, source.eos_id, isolate_documents)
        yield BatchRows(rows.token_BT, target_BT, rows.segment_BT)


def prefetch(
    make: Callable[[int], Item], first: int, last: int, *, depth: int = 2
) -> Generator[Item, None, None]:
    """Yields make(first) .. make(last - 1), prepared up to `depth` ahead in one thread.

    An error of `make` is raised in place of its item. Closing the iterator stops the
    thread.
    """
    pending: list[Future[Any]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="data") as thread:
        try:
            for step in range(first, last):
                while len(pending) < depth and step + len(pending) < last:
                    pending.append(thread.submit(make, step + len(pending)))
                yield pending.pop(0).result()
        finally:
            for waiting in pending:
                waiting.cancel()
