"""The likelihood of each document of a stream. No JAX here.

N: tokens of a stretch of the stream. A document's targets are those predicted from its tokens: in
a stream without marks, its text and the eos that ends it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from moejax.data.marks import Stretch
from moejax.data.tokenizer import Tokenizer
from moejax.data.tokens import JoinedSource, TokenSource

STRETCH = 1 << 20  # tokens that are read at once


@dataclass(frozen=True)
class DocumentScore:
    """The likelihood of a document's targets."""

    name: str
    tokens: int  # targets
    bytes: int | None  # of the text that they spell; None if unknown
    nats: float

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text; None if there is none, or its size is unknown."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


@dataclass
class DocumentSums:
    """Sums over the documents of a stream, in its order."""

    begins: list[int]  # position of each one's first token
    tokens: list[int]
    nats: list[float]  # summed in float64

    def add(self, start: int, stretch: Stretch, nats_N: np.ndarray) -> None:
        """Adds the targets of a stretch, which follows the one before.

        Args:
          start: position of its first token.
          nats_N: of every token after the first; 0 where there is no target.
        """
        begin_N, target_N = stretch.begin_N[:-1], stretch.target_N[1:]
        open_before = len(self.begins) - 1
        self.begins += (start + np.flatnonzero(begin_N)).tolist()
        new = len(self.begins) - len(self.tokens)
        self.tokens += [0] * new
        self.nats += [0.0] * new
        first = max(open_before, 0)
        document_N = open_before + np.cumsum(begin_N) - first
        tokens = np.bincount(document_N, target_N)
        nats = np.bincount(document_N, np.where(target_N, nats_N, 0))
        for index, (count, total) in enumerate(zip(tokens, nats, strict=True), first):
            self.tokens[index] += int(count)
            self.nats[index] += float(total)


def sum_documents(
    source: TokenSource, nats: Iterable[np.ndarray], batch_tokens: int
) -> DocumentSums:
    """Returns the sums over documents.

    Args:
      nats: loss of each target, batch by batch, as `data.batches.eval_batches` cuts the stream.
      batch_tokens: positions of a batch.
    """
    sums = DocumentSums([], [], [])
    for number, nats_N in enumerate(nats):
        start = number * batch_tokens
        stretch = source.stretch(start, min(batch_tokens + 1, source.num_tokens - start))
        sums.add(start, stretch, nats_N.ravel()[: len(stretch.token_N) - 1].astype(np.float64))
    return sums


def scores(
    source: TokenSource,
    sums: DocumentSums,
    tokenizer: Tokenizer | None,
    documents: list[tuple[str, int]] | None = None,
) -> list[DocumentScore]:
    """Returns the scores of all documents with targets.

    Args:
      tokenizer: counts the bytes of documents; None if it is not here.
      documents: names and bytes of the documents, if they are known.
    """
    if documents is None:
        sizes = _bytes_of_targets(source, tokenizer) if tokenizer else [None] * len(sums.begins)
        named: Iterable[tuple[str, int | None]] = zip(_names(source, sums), sizes, strict=True)
    else:
        named = documents
    return [
        DocumentScore(name, tokens, size, nats)
        for (name, size), tokens, nats in zip(named, sums.tokens, sums.nats, strict=True)
        if tokens
    ]


def _names(source: TokenSource, sums: DocumentSums) -> Iterator[str]:
    """Yields names of documents: their file, and their number in it from 0."""
    if not isinstance(source, JoinedSource):
        yield from (f"document {number}" for number in range(len(sums.begins)))
        return
    before, number = -1, 0
    for begin in sums.begins:
        index = int(np.searchsorted(source.ends, begin, side="right"))
        number = number + 1 if index == before else 0
        before = index
        ends = begin == source.ends[index] - 1  # the eos at the end of a file opens no text
        yield f"{source.sources[index].path}, {'end' if ends else f'document {number}'}"


def _bytes_of_targets(source: TokenSource, tokenizer: Tokenizer) -> list[int]:
    """Returns the bytes of the text that the targets of each document spell."""
    sizes: list[int] = []
    pending: list[np.ndarray] = []
    for part_N in _documents(source):
        if part_N is not None:
            pending.append(part_N)
            continue
        ids = np.concatenate(pending).tolist()
        sizes.append(len(tokenizer.decode(ids).encode("utf-8")))
        pending = []
    return sizes


def _documents(source: TokenSource) -> Iterator[np.ndarray | None]:
    """Yields targets in parts, and None at the end of each document."""
    is_open, last = False, source.num_tokens - 1
    for start in range(0, source.num_tokens, STRETCH):
        stretch = source.stretch(start, min(STRETCH, source.num_tokens - start))
        target_N = np.where(stretch.target_N, stretch.token_N, -1)
        first = 0
        for cut in np.flatnonzero(stretch.begin_N):
            yield target_N[first:cut][target_N[first:cut] >= 0]
            if is_open:
                yield None
            # A document that the last token opens has no target.
            is_open, first = start + cut < last, int(cut)
        yield target_N[first:][target_N[first:] >= 0]
    if is_open:
        yield None
