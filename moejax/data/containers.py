"""Token files on disk: ids one after the other, or records of them.

N: tokens of a stretch of the file.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moejax.data.marks import BEGIN, TARGET, Marks, Stretch, without_marks
from moejax.data.sidecar import Sidecar
from moejax.errors import InputError


class FileSource:
    """A token file, opened and checked; subclasses read it."""

    def __init__(self, path: Path, sidecar: Sidecar):
        self.path, self.sidecar = path, sidecar
        self.vocab_size, self.eos_id = sidecar.vocab_size, sidecar.eos_id
        self.num_tokens = sidecar.num_tokens
        self._dtype = np.dtype(sidecar.dtype).newbyteorder("<")
        self._marks = Marks(path, sidecar.num_tokens) if sidecar.is_marked else None

    @property
    def num_targets(self) -> int:
        """Number of tokens that are predicted; in format 1, every one after the first."""
        return self.sidecar.num_targets or self.num_tokens - 1

    @property
    def first_is_target(self) -> bool:
        """True if the first token is a target after another file."""
        return not self.sidecar.is_marked and self.sidecar.bos_id is None

    @property
    def target_bytes(self) -> int | None:
        """Bytes of the text that the targets spell, if known."""
        return self.sidecar.target_bytes if self.sidecar.is_marked else self.sidecar.num_bytes

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start + length - 1, int32.

        Raises:
          InputError: for an id outside the vocabulary, with file and offset.
        """
        if not 0 <= start <= start + length <= self.num_tokens:
            raise IndexError(f"tokens {start} to {start + length} of {self.num_tokens}")
        tokens = self._read(start, length).astype(np.int64)
        wrong = np.flatnonzero(tokens >= self.vocab_size)
        if len(wrong):
            offset = start + int(wrong[0])
            raise InputError(
                f"token id outside the vocabulary. {self.path}, token {offset}: id "
                f"{tokens[wrong[0]]}. Ids must be below {self.vocab_size}. The file is damaged or "
                f"of another tokenizer: check it with its sha256, or prepare the text again."
            )
        return tokens.astype(np.int32)

    def stretch(self, start: int, length: int) -> Stretch:
        """The same tokens, with the targets and the first tokens of documents marked."""
        token_N = self.read(start, length)
        if self._marks is None:
            return without_marks(token_N, *self.sidecar.ends)
        mark_N = self._marks.read(start, length)
        return Stretch(token_N, mark_N == TARGET, mark_N == BEGIN)

    def check_ends(self) -> None:
        """Raises InputError unless documents begin and end at both ends of the stream."""
        if self._marks is not None:
            self._marks.check_begin()
            self.read(0, 1)
            self.read(self.num_tokens - 1, 1)
            return
        eos, bos = self.sidecar.ends
        for offset, name, wanted in (
            (0, "eos" if bos is None else "bos", eos if bos is None else bos),
            (self.num_tokens - 1, "eos", eos),
        ):
            token = int(self.read(offset, 1)[0])
            if token != wanted:
                raise InputError(
                    f"token file has no {name} at its ends. {self.path}, token {offset}: id "
                    f"{token}. It must be {name} = {wanted}. Check the file with its sha256, or "
                    f"prepare the text again."
                )

    def _read(self, start: int, length: int) -> np.ndarray:
        raise NotImplementedError


class BinSource(FileSource):
    """Little-endian ids, one after the other, read through a memory map."""

    def __init__(self, path: Path, sidecar: Sidecar):
        super().__init__(path, sidecar)
        size, width = path.stat().st_size, self._dtype.itemsize
        if size != sidecar.num_tokens * width:
            tail = f" ({size % width} bytes beyond whole tokens)" if size % width else ""
            raise InputError(
                f"token file has the wrong size. {path} has {size} bytes{tail}, its sidecar says "
                f"{sidecar.num_tokens} tokens of {sidecar.dtype}. They must agree. Copy both files "
                f"again, or prepare the text again."
            )

    @cached_property
    def _map(self) -> np.ndarray:
        return np.memmap(self.path, dtype=self._dtype, mode="r")

    def _read(self, start: int, length: int) -> np.ndarray:
        return np.array(self._map[start : start + length])


class ArrayRecordSource(FileSource):
    """Records of `chunk_tokens` ids each; the format itself checks a hash of each record."""

    @cached_property
    def _records(self) -> Any:
        # Imported late: grain takes a second, which other sources do not need.
        from grain.sources import ArrayRecordDataSource

        return ArrayRecordDataSource([str(self.path)])

    def _read(self, start: int, length: int) -> np.ndarray:
        chunk = self.sidecar.chunk_tokens
        assert chunk is not None, "checked with the sidecar"
        if not length:
            return np.empty(0, self._dtype)
        first, last = start // chunk, (start + length - 1) // chunk
        try:
            records = [self._records[i] for i in range(first, last + 1)]
        except (ValueError, RuntimeError, IndexError) as error:
            raise InputError(
                f"ArrayRecord is damaged. {self.path}, records {first} to {last}: "
                f"{' '.join(str(error).split())[:120]}. Every record carries a hash. Copy the file "
                f"again, or prepare the text again."
            ) from error
        full = chunk * self._dtype.itemsize
        total = self.num_tokens * self._dtype.itemsize
        for number, record in enumerate(records, first):
            # Another dtype or chunk size would make all ids wrong.
            if len(record) != (expected := min(full, total - number * full)):
                raise InputError(
                    f"ArrayRecord does not fit its sidecar. {self.path}, record {number} has "
                    f"{len(record)} bytes, dtype and chunk_tokens of the sidecar ask for "
                    f"{expected}. They must agree. Copy both files again, or prepare the text "
                    f"again."
                )
        tokens = np.frombuffer(b"".join(records), self._dtype)
        return tokens[start - first * chunk :][:length]
