"""Writes token files document by document, in pieces of bounded size."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moejax.data.marks import MarkedDocument, marks_of
from moejax.data.prepare.documents import AnyDocument
from moejax.data.sidecar import BEGUN, MARKED, UNMARKED, ChatForm, Sidecar, sidecar_of
from moejax.data.tokenizer import Tokenizer, digest
from moejax.errors import InputError

CHUNK_TOKENS = 8192


class BinWriter:
    """Writes a token file, ids one after the other, under temporary names."""

    format = "bin"

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        tokenizer_name: str,
        tokenizer_sha256: str | None = None,
        *,
        marked: bool = False,
        chat: ChatForm | None = None,
    ):
        """Takes whether documents come with marks, as conversations do, and their form."""
        self.path, self.tokenizer_name = path, tokenizer_name
        self.tokenizer_sha256 = tokenizer_sha256
        self.partial = _partial(path)
        self.vocab_size, self.chat = tokenizer.vocab_size, chat
        self.eos_id, self.bos_id = tokenizer.eos_id, tokenizer.bos_id
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self.num_tokens = self.num_bytes = self.num_documents = 0
        self.num_targets = self.target_bytes = 0
        self._marks = _partial(marks_of(path)).open("wb") if marked else None
        self._ids = self._open()
        if not marked and self.bos_id is None:
            self._store(np.array([self.eos_id]))

    def add(self, document: AnyDocument, tokenizer: Tokenizer) -> None:
        """Adds a document, the token that begins it if there is one, and the one that ends it."""
        first = self.num_tokens
        if self.bos_id is not None:
            self._store(np.array([self.bos_id]))
        for ids in tokenizer.encode_pieces(self._counted(document.pieces())):
            self._check_inside(ids, document.source)
            self._store(ids)
        self._store(np.array([self.eos_id]))
        self.num_documents += 1
        self.num_targets += self.num_tokens - first - (self.bos_id is not None)

    def _check_inside(self, ids: np.ndarray, source: str) -> None:
        """Refuses the tokens around documents inside of one."""
        for name, id in (("eos", self.eos_id), ("bos", self.bos_id)):
            if id is not None and (ids == id).any():
                remedy = "Choose another --eos, or take" if name == "eos" else "Take"
                raise InputError(
                    f"{name} stands in a document. {source} holds token {id}, which separates "
                    f"documents. {remedy} that text out."
                )

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
        self.num_tokens += len(ids)
        self._ids.write(ids.astype(self.dtype.newbyteorder("<")).tobytes())

    def finish(self) -> None:
        """Closes the files, writes the sidecar, and renames them to their final names."""
        self._ids.close()
        marks, marks_sha256 = marks_of(self.path), None
        if self._marks is not None:
            self._marks.close()
            marks_sha256 = digest(_partial(marks))
        version = UNMARKED if self._marks is None else MARKED
        if self.chat is not None or self.bos_id is not None:
            version = BEGUN
        sidecar = Sidecar(
            format_version=version,
            format=self.format,
            dtype=self.dtype.name,
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            num_documents=self.num_documents,
            sha256=digest(self.partial),
            tokenizer=self.tokenizer_name,
            tokenizer_sha256=self.tokenizer_sha256,
            chunk_tokens=CHUNK_TOKENS if self.format == "array_record" else None,
            marks_sha256=marks_sha256,
            num_targets=self.num_targets,
            target_bytes=self.num_bytes if self._marks is None else self.target_bytes,
            bos_id=self.bos_id,
            chat=self.chat,
        )
        sidecar_of(self.path).unlink(missing_ok=True)
        self.partial.replace(self.path)
        if self._marks is not None:
            _partial(marks).replace(marks)
        sidecar.write(self.path)

    def abandon(self) -> None:
        """Removes the temporary files."""
        self._ids.close()
        self.partial.unlink(missing_ok=True)
        if self._marks is not None:
            self._marks.close()
            _partial(marks_of(self.path)).unlink(missing_ok=True)

    def _open(self) -> "BinaryIO | _Records":
        """Opens the file of the ids."""
        return self.partial.open("wb")


def _partial(path: Path) -> Path:
    """Returns the name of a file that is not complete yet."""
    return path.with_name(path.name + ".partial")


class ArrayRecordWriter(BinWriter):
    """Writes records of CHUNK_TOKENS ids; the last one is shorter."""

    format = "array_record"

    def _open(self) -> "_Records":
        return _Records(self.partial, CHUNK_TOKENS * self.dtype.itemsize)


class _Records:
    """An ArrayRecord file, written as a stream of bytes."""

    def __init__(self, path: Path, record_bytes: int):
        from array_record.python.array_record_module import ArrayRecordWriter as Library

        # One record a group, because sequences are read at random.
        self._library = Library(str(path), "group_size:1")
        self._waiting, self._record_bytes = bytearray(), record_bytes

    def write(self, content: bytes) -> None:
        self._waiting += content
        while len(self._waiting) >= self._record_bytes:
            self._library.write(bytes(self._waiting[: self._record_bytes]))
            del self._waiting[: self._record_bytes]

    def close(self) -> None:
        if not self._library.is_open():
            return
        if self._waiting:
            self._library.write(bytes(self._waiting))
        self._library.close()
