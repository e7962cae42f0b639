"""The likelihood of each document of a stream. No JAX here.

N: tokens of a stretch of the stream. A document's targets are those predicted from its tokens: in
a stream without marks, its text and the eos that ends it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moejax.data.tokenizer import Tokenizer
from moejax.data.tokens import JoinedSource, TokenSource


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


def sum_documents(
    source: TokenSource, nats: Iterable[np.ndarray], batch_tokens: int
) -> DocumentSums:
    """Returns the sums over documents.

    Args:
      nats: loss of each target, and 0 elsewhere, batch by batch, as `data.batches.eval_batches`
        cuts the stream.
      batch_tokens: positions of a batch.
    """
    sums = DocumentSums([], [], [])
    for number, nats_N in enumerate(nats):
        start = number * batch_tokens
        stretch = source.stretch(start, min(batch_tokens + 1, source.num_tokens - start))
        nats_N = nats_N.ravel()[: len(stretch.token_N) - 1].astype(np.float64)
        begin_N, target_N = stretch.begin_N[:-1], stretch.target_N[1:]
        open_before = len(sums.begins) - 1
        sums.begins += (start + np.flatnonzero(begin_N)).tolist()
        new = len(sums.begins) - len(sums.tokens)
        sums.tokens += [0] * new
        sums.nats += [0.0] * new
        first = max(open_before, 0)
        document_N = open_before + np.cumsum(begin_N) - first
        counts = np.bincount(document_N, target_N)
        totals = np.bincount(document_N, np.where(target_N, nats_N, 0))
        for index, (count, total) in enumerate(zip(counts, totals, strict=True), first):
            sums.tokens[index] += int(count)
            sums.nats[index] += float(total)
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
        sizes: Iterable[int | None] = [None] * len(sums.begins)
        if tokenizer is not None:
            sizes = _bytes_of_targets(source, sums, tokenizer)
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


def _bytes_of_targets(
    source: TokenSource, sums: DocumentSums, tokenizer: Tokenizer
) -> Iterator[int]:
    """Yields the bytes of the text that the targets of each document spell."""
    for begin, end in pairwise([*sums.begins, source.num_tokens]):
        stretch = source.stretch(begin, end - begin)
        text = tokenizer.decode(stretch.token_N[stretch.target_N].tolist())
        yield len(text.encode("utf-8"))
