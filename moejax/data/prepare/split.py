"""Which documents are held out.

Those whose text has a low hash, so that a text is on the same side in every large corpus. Where
that misses the share by more than a tenth, as it does with few documents, or with one that is
larger than the rest, sizes decide as well: in the order of their hashes documents are held out as
long as they fit into the share, and then some are added, left out or changed for others while that
comes nearer to it. Documents stay whole, and copies of a text stay together.
"""

from bisect import bisect
from typing import NamedTuple

from moejax.data.marks import MarkedDocument
from moejax.data.prepare.documents import AnyDocument, TextFile, rank_of

NEAR = 0.1  # of the share: a split by hashes alone that is off by less stays
EXACT = 0.01  # of the share: documents are exchanged until they come as near
# Documents of other texts whose sizes are kept. Of more, hashes alone come near to any share.
KNOWN = 1 << 18
# Training keeps at least this part of the bytes that are meant for it.
LEAST_LEFT = 0.5


class Split:
    """Says which documents are held out, and counts both sides."""

    def __init__(self, share: float, chosen: frozenset[float] | None = None):
        """Takes the share of the bytes to hold out, and ranks (`rank_of`); None: low ones."""
        self.share, self._chosen = share, chosen
        self.num_bytes = self.held_out_bytes = 0
        self._sizes: dict[float, int] = {}  # by rank
        self._whole = True  # whether no document is a part of a file

    def holds_out(self, document: AnyDocument | MarkedDocument) -> bool:
        """Whether a document is held out."""
        if not self.share:
            return False
        self._whole &= not isinstance(document, TextFile) or document.held_out is None
        self._rank = rank_of(document)
        if self._chosen is None:
            return self._rank < self.share
        return self._rank in self._chosen

    def count(self, num_bytes: int, held_out: bool) -> None:
        """Counts the document that was asked about last."""
        num_bytes = max(num_bytes, 1)
        self.num_bytes += num_bytes
        self.held_out_bytes += num_bytes if held_out else 0
        if self.share and (self._rank in self._sizes or len(self._sizes) < KNOWN):
            self._sizes[self._rank] = self._sizes.get(self._rank, 0) + num_bytes

    @property
    def is_near(self) -> bool:
        """Whether what is held out comes near to the share."""
        wanted = self.share * self.num_bytes
        return abs(self.held_out_bytes - wanted) <= NEAR * wanted

    def nearer(self) -> "Split | None":
        """Returns the split of the same documents by size; None where this one is to stay."""
        both = 0 < self.held_out_bytes < self.num_bytes
        if not self.share or self._chosen is not None or not self._whole:
            return None
        if both and (self.is_near or len(self._sizes) == KNOWN):
            return None
        chosen = choose(self._sizes, self.share, self.num_bytes)
        return Split(self.share, chosen) if chosen else None


class _Move(NamedTuple):
    """Documents that are exchanged, by rank, and how far from the share that leaves."""

    off: float
    out: float | None
    into: float | None


def choose(sizes: dict[float, int], share: float, num_bytes: int) -> frozenset[float]:
    """Returns the ranks of the documents to hold out, none if there is one text alone.

    Args:
      sizes: bytes of the documents of each rank, at least 1.
      share: of the bytes that is wanted.
      num_bytes: of all documents.
    """
    if len(sizes) < 2:
        return frozenset()
    wanted, taken = share * num_bytes, 0
    chosen: set[float] = set()
    for rank in sorted(sizes):
        if taken + sizes[rank] <= wanted:
            chosen.add(rank)
            taken += sizes[rank]
    if not chosen:
        chosen = {min(sizes, key=lambda rank: (sizes[rank], rank))}
    most = (1 - LEAST_LEFT * (1 - share)) * num_bytes
    while (move := _nearest(sizes, chosen, wanted, most)) is not None:
        if move.out is not None:
            chosen.remove(move.out)
        if move.into is not None:
            chosen.add(move.into)
    return frozenset(chosen)


def _nearest(
    sizes: dict[float, int], chosen: set[float], wanted: float, most: float
) -> _Move | None:
    """Returns the exchange that comes nearest to `wanted` bytes; None if none comes nearer.

    Args:
      most: bytes that may be held out.
    """
    taken = sum(sizes[rank] for rank in chosen)
    off = abs(taken - wanted)
    if off <= EXACT * wanted:
        return None
    rest = sorted((sizes[rank], rank) for rank in sizes.keys() - chosen)
    moves = []
    for out in (None, *chosen):
        left = taken - (0 if out is None else sizes[out])
        at = bisect(rest, wanted - left, key=lambda one: one[0])
        for size, into in ((0, None), *rest[max(at - 1, 0) : at + 1]):
            is_split = into is not None or out is None or len(chosen) > 1
            if is_split and left + size <= most:
                moves.append(_Move(abs(left + size - wanted), out, into))
    best = min(moves, key=lambda move: move.off)
    return best if best.off < off else None
