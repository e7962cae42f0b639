"""Writes token files document by document, in pieces of bounded size."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moejax.data.documents import AnyDocument
from moejax.data.marks import MarkedDocument, marks_of
from moejax.data.sidecar import MARKED, UNMARKED, Sidecar, sidecar_of
from moejax.data.tokenizer import Tokenizer, digest
from moejax.errors import InputError

CHUNK_TOKENS = 8192


class Writer:
    """Writes a token file under temporary names; subclasses store ids."""

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        tokenizer_name: str,
        tokenizer_sha256: str | None = None,
        *,
        marked: bool = False,
    ):
        """Takes whether documents come with marks: text has none."""
        self.path, self.tokenizer_name = path, tokenizer_name
        self.tokenizer_sha256 = tokenizer_sha256
        self.partial = _partial(path)
        self.vocab_size, self.eos_id = tokenizer.vocab_size, tokenizer.eos_id
        self.dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        self.num_tokens = self.num_bytes = self.num_documents = 0
        self.num_targets = self.target_bytes = 0
        self._marks = _partial(marks_of(path)).open("wb") if marked else None
        self._open()
        if not marked:
            self._store(np.array([self.eos_id]))

    def add(self, document: AnyDocument, tokenizer: Tokenizer) -> None:
        """Adds a document and the token that ends it."""
        for ids in tokenizer.encode_pieces(self._counted(document.pieces())):
            if (ids == self.eos_id).any():
                raise InputError(
                    f"eos stands in a document. {document.source} holds token {self.eos_id}, which "
                    f"separates documents. Choose another --eos, or take that text out."
                )
            self._store(ids)
        self._store(np.array([self.eos_id]))
        self.num_documents += 1

    def add_marked(self, document: MarkedDocument) -> None:
        """Adds a document whose tokens are marked."""
        assert self._marks is not None
        self._store(document.token_N)
        self._marks.write(document.mark_N.tobytes())
        self.num_bytes += document.num_bytes
        self.num_targets += document.num_targets
        self.target_bytes += document.target_bytes
        self.num_documents += 1

    def _counted(self, pieces: Iterator[str]) -> Iterator[str]:
        for piece in pieces:
            self.num_bytes += len(piece.encode("utf-8"))
            yield piece

    def _store(self, ids: np.ndarray) -> None:
        array = ids.astype(np.dtype(self.dtype).newbyteorder("<"))
        self.num_tokens += len(array)
        self._put(array)

    def finish(self) -> None:
        """Closes the files, writes the sidecar, and renames them to their final names."""
        self._close()
        marks, marked = marks_of(self.path), {}
        if self._marks is not None:
            self._marks.close()
            marked = {
                "marks_sha256": digest(_partial(marks)),
                "num_targets": self.num_targets,
                "target_bytes": self.target_bytes,
            }
        sidecar = Sidecar(
            format_version=MARKED if marked else UNMARKED,
            format=self.format,
            dtype=self.dtype,
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            num_documents=self.num_documents,
            sha256=digest(self.partial),
            tokenizer=self.tokenizer_name,
            tokenizer_sha256=self.tokenizer_sha256,
            chunk_tokens=CHUNK_TOKENS if self.format == "array_record" else None,
            **marked,
        )
        sidecar_of(self.path).unlink(missing_ok=True)
        self.partial.replace(self.path)
        if marked:
            _partial(marks).replace(marks)
        sidecar.write(self.path)

    def abandon(self) -> None:
        """Removes the temporary files."""
        self._close()
        self.partial.unlink(missing_ok=True)
        if self._marks is not None:
            self._marks.close()
            _partial(marks_of(self.path)).unlink(missing_ok=True)

    format = ""

    def _open(self) -> None:
        raise NotImplementedError

    def _put(self, array: np.ndarray) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError


def _partial(path: Path) -> Path:
    """Returns the name of a file that is not complete yet."""
    return path.with_name(path.name + ".partial")


class BinWriter(Writer):
    """Writes ids one after the other."""

    format = "bin"
    _file: BinaryIO

    def _open(self) -> None:
        self._file = self.partial.open("wb")

    def _put(self, array: np.ndarray) -> None:
        self._file.write(array.tobytes())

    def _close(self) -> None:
        self._file.close()


class ArrayRecordWriter(Writer):
    """Writes records of CHUNK_TOKENS ids; the last one is shorter."""

    format = "array_record"

    def _open(self) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter as Library

        # One record a group, because sequences are read at random.
        self._writer = Library(str(self.partial), "group_size:1")
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0

    def _put(self, array: np.ndarray) -> None:
        self._waiting.append(array)
        self._num_waiting += len(array)
        if self._num_waiting >= CHUNK_TOKENS:
            joined = np.concatenate(self._waiting)
            whole = len(joined) // CHUNK_TOKENS * CHUNK_TOKENS
            for start in range(0, whole, CHUNK_TOKENS):
                self._writer.write(joined[start : start + CHUNK_TOKENS].tobytes())
            self._waiting, self._num_waiting = [joined[whole:]], len(joined) - whole

    def _close(self) -> None:
        if not self._writer.is_open():
            return
        if self._num_waiting:
            self._writer.write(np.concatenate(self._waiting).tobytes())
        self._writer.close()
