"""The sequences of each step: a pure function of the seed and the step.

Sequence i of an epoch is tokens i * T to i * T + T of the stream: T inputs, and the same tokens
shifted by one, some of which the stream marks as targets. Every process asks for its own rows of
the global batch, so the order is the same on any number of processes. The position in the data is
one integer: the step, plus the batches that the run left out before it (`data.skipped`).

N: tokens of a stretch of the stream. U: T + 1.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, SupportsIndex, TypeVar

import grain
import numpy as np

from moejax.data.marks import Stretch
from moejax.data.routing import Stream
from moejax.data.tokens import TokenSource
from moejax.errors import InputError

Item = TypeVar("Item")


class BatchRows(NamedTuple):
    """Sequences of a batch, int32."""

    token_BT: np.ndarray
    target_BT: np.ndarray  # -1: no target
    segment_BT: np.ndarray  # document of each position
    expert_BTLK: np.ndarray | None = None  # recorded experts of each token: `data.routing`


class _Windows:
    """The stream as a random-access list of windows of T + 1 tokens, for grain."""

    def __init__(self, source: Stream, length: int):
        self.source, self.length = source, length

    def __len__(self) -> int:
        return (self.source.num_tokens - 1) // self.length

    def __getitem__(self, index: SupportsIndex) -> Stretch:
        return self.source.stretch(index.__index__() * self.length, self.length + 1)


class Batches:
    """The training sequences in order."""

    def __init__(
        self,
        source: Stream,
        *,
        mixture: Sequence[tuple[Stream, float]] = (),
        sequence_length: int,
        batch_sequences: int,
        seed: int,
        shuffle: bool = True,
        repeat: bool = True,
        isolate_documents: bool = True,
        share: tuple[int, int] = (0, 1),
    ):
        """Takes one stream, or a mixture of streams and weights, each stream with its own epochs.

        A stream of weight w gives w / (sum of weights) of the sequences, spread evenly.

        Args:
          share: (i, R): of R batches in turn the i-th alone, of a site that is a run of its own.

        Raises:
          InputError: if a stream holds no sequence.
        """
        self.batch_sequences, self._share = batch_sequences, share
        self.isolate, self.repeat = isolate_documents, repeat
        streams = [stream for stream, _ in mixture] or [source]
        orders = [
            _order(stream, sequence_length, seed + index, shuffle=shuffle)
            for index, stream in enumerate(streams)
        ]
        weights = [weight for _, weight in mixture]
        once = grain.MapDataset.mix(orders, weights) if mixture else orders[0]
        self.num_sequences = len(once)
        if repeat:
            repeated = [order.repeat() for order in orders]
            once = grain.MapDataset.mix(repeated, weights) if mixture else repeated[0]
        self._order = once

    def check_steps(self, num_steps: int, left_out: int = 0) -> None:
        """Raises InputError if the data ends before the run and may not be repeated.

        Args:
          left_out: batches that the run leaves out (`data.skipped`).
        """
        needed = (num_steps + left_out) * self.batch_sequences * self._share[1]
        if not self.repeat and needed > self.num_sequences:
            more = f" and {left_out} batches that are left out" if left_out else ""
            most = self.num_sequences // (self.batch_sequences * self._share[1]) - left_out
            raise InputError(
                f"too little data. {num_steps} steps{more} need {needed} sequences, the files hold "
                f"{self.num_sequences}. With data.repeat=false each is seen once. Lower "
                f"train.num_steps to {most}, or "
                f"set data.repeat=true."
            )

    def rows(self, position: int, start: int, stop: int) -> BatchRows:
        """Rows start .. stop - 1 of the global batch at a position (`data.skipped`)."""
        own, shares = self._share
        first = (position * shares + own) * self.batch_sequences
        windows: list[Any] = [self._order[first + row] for row in range(start, stop)]
        marked = zip(*(window[:3] for window in windows), strict=True)
        token_BU, target_BU, begin_BU = map(np.stack, marked)
        target_BT = np.where(target_BU[:, 1:], token_BU[:, 1:], -1)
        found = _rows(token_BU[:, :-1], target_BT, begin_BU[:, :-1], self.isolate)
        experts = [window.expert_NLK[:-1] for window in windows if window.expert_NLK is not None]
        return found._replace(expert_BTLK=np.stack(experts)) if experts else found


def _order(source: Stream, length: int, seed: int, *, shuffle: bool) -> grain.MapDataset:
    """Returns the sequences of one epoch of a stream."""
    windows = _Windows(source, length)
    if len(windows) < 1:
        raise InputError(
            f"too little data. {source.num_tokens} tokens hold no sequence of {length} and its "
            f"next token. One is the least. Add text, or lower data.sequence_length."
        )
    order = grain.MapDataset.source(windows)
    return order.seed(seed).shuffle() if shuffle else order


def _rows(
    token_BT: np.ndarray, target_BT: np.ndarray, begin_BT: np.ndarray, isolate: bool
) -> BatchRows:
    """Numbers the documents of each row."""
    segment_BT = np.cumsum(begin_BT & isolate, axis=1, dtype=np.int32)
    return BatchRows(token_BT, target_BT, segment_BT)


def count_eval_batches(source: TokenSource, batch_sequences: int, sequence_length: int) -> int:
    """Returns the number of batches that cover every target of a stream once."""
    return -(-(source.num_tokens - 1) // (batch_sequences * sequence_length))


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
    num_batches = count_eval_batches(source, B, T)
    taken = np.arange(num_batches)
    if limit is not None and limit < num_batches:
        taken = np.linspace(0, num_batches - 1, limit).round().astype(int)
    for batch in taken:
        start = int(batch) * T * B
        stretch = source.stretch(start, min(T * B + 1, source.num_tokens - start))
        # The loss ignores a target of -1; the input beside it may be any valid id.
        padded = ((0, T * B + 1 - len(stretch.token_N)),)
        token_N = np.pad(stretch.token_N, padded, constant_values=source.eos_id)
        target_N = np.where(np.pad(stretch.target_N, padded), token_N, -1)
        begin_N = np.pad(stretch.begin_N, padded, constant_values=True)
        arrays = (token_N[:-1], target_N[1:], begin_N[:-1])
        token_BT, target_BT, begin_BT = (array.reshape(B, T) for array in arrays)
        yield _rows(token_BT, target_BT, begin_BT, isolate_documents)


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
