"""The marks beside a token file: the targets among its tokens, and the first token of a document.

One byte a token. Format: docs/formats/tokens.md. N: tokens of a stretch of a stream.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moejax.errors import InputError

CONTEXT = 0  # is read, and not predicted
TARGET = 1  # is predicted
BEGIN = 2  # opens a document, and is not predicted


class Stretch(NamedTuple):
    """Part of a stream."""

    token_N: np.ndarray  # int32
    target_N: np.ndarray  # bool: predicted
    begin_N: np.ndarray  # bool: opens a document
    # Recorded experts of each token in each layer with experts, int32: `data.routing`.
    expert_NLK: np.ndarray | None = None

    @classmethod
    def empty(cls) -> "Stretch":
        """No tokens."""
        return cls(np.empty(0, np.int32), np.empty(0, bool), np.empty(0, bool))


def without_marks(token_N: np.ndarray, eos_id: int, bos_id: int | None = None) -> Stretch:
    """Returns a stretch of a stream without marks.

    If a begin token opens documents, it is no target. Otherwise eos opens documents, and
    all tokens are targets.
    """
    if bos_id is None:
        return Stretch(token_N, np.ones(len(token_N), bool), token_N == eos_id)
    begin_N = token_N == bos_id
    return Stretch(token_N, ~begin_N, begin_N)


@dataclass(frozen=True)
class MarkedDocument:
    """A document whose tokens are marked."""

    source: str
    digest_text: str  # decides, by its hash, whether the document is held out
    token_N: np.ndarray
    mark_N: np.ndarray  # uint8
    num_bytes: int  # bytes of its text, without control tokens
    target_bytes: int  # bytes of the text that its targets spell

    @property
    def num_targets(self) -> int:
        """Number of tokens that are predicted."""
        return int(np.sum(self.mark_N == TARGET))

    def size(self) -> int:
        """Number of bytes."""
        return self.num_bytes

    def digest(self) -> str:
        """Returns the sha256 of the content."""
        return hashlib.sha256(self.digest_text.encode("utf-8")).hexdigest()


def marks_of(path: Path) -> Path:
    """Returns the path of a token file's marks: the token file's with .marks appended."""
    return path.with_name(path.name + ".marks")


class Marks:
    """The marks of one token file, read through a memory map."""

    def __init__(self, token_file: Path, num_tokens: int):
        self.path = marks_of(token_file)
        if not self.path.is_file():
            raise InputError(
                f"no marks. {self.path} does not exist. The sidecar of {token_file} says that "
                f"marks stand beside it. Copy them too, or prepare the conversations again."
            )
        if (size := self.path.stat().st_size) != num_tokens:
            raise InputError(
                f"marks have the wrong size. {self.path} has {size} bytes, the sidecar says "
                f"{num_tokens} tokens. There is one byte a token. Copy the file again, or prepare "
                f"the conversations again."
            )

    def read(self, start: int, length: int) -> np.ndarray:
        """Returns the marks of tokens start .. start + length - 1, uint8.

        Raises:
          InputError: for a byte that is no mark, with file and offset.
        """
        mark_N = np.array(self._map[start : start + length])
        wrong = np.flatnonzero(mark_N > BEGIN)
        if len(wrong):
            raise InputError(
                f"marks are damaged. {self.path}, byte {start + int(wrong[0])}: "
                f"{mark_N[wrong[0]]}. A mark is {CONTEXT}, {TARGET} or {BEGIN}. Check the file "
                f"with moejax prepare --verify, or prepare the conversations again."
            )
        return mark_N

    def check_begin(self) -> None:
        """Raises InputError unless the first token begins a document."""
        if (first := int(self.read(0, 1)[0])) != BEGIN:
            raise InputError(
                f"marks do not begin with a document. {self.path}, byte 0: {first}. The first "
                f"token opens a document, mark {BEGIN}. Check the file with moejax prepare "
                f"--verify, or prepare the conversations again."
            )

    @cached_property
    def _map(self) -> np.ndarray:
        return np.memmap(self.path, dtype=np.uint8, mode="r")
