"""Writes token files document by document, in pieces of bounded size."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moejax.data.marks import MarkedDocument, marks_of
from moejax.data.prepare.documents import AnyDocument
from moejax.data.sidecar import (
    BEGUN,
    FIELDS_OF,
    MARKED,
    UNMARKED,
    ChatForm,
    Sidecar,
    sidecar_of,
)
from moejax.data.tokenizer import Ends, Tokenizer, digest
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
        chat: ChatForm | None = None,
    ):
        """Takes whether documents come with marks, as conversations do, and their form."""
        self.path, self.tokenizer_name = path, tokenizer_name
        self.tokenizer_sha256 = tokenizer_sha256
        self.partial = _partial(path)
        self.vocab_size, self.chat = tokenizer.vocab_size, chat
        self.eos_id, self.bos_id = self.ends = Ends(tokenizer.eos_id, tokenizer.bos_id)
        self.dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        self.num_tokens = self.num_bytes = self.num_documents = 0
        self.num_targets = self.target_bytes = 0
        self._marks = _partial(marks_of(path)).open("wb") if marked else None
        self._open()
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
        for name, id in zip(("eos", "bos"), self.ends, strict=True):
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
        array = ids.astype(np.dtype(self.dtype).newbyteorder("<"))
        self.num_tokens += len(array)
        self._put(array)

    def finish(self) -> None:
        """Closes the files, writes the sidecar, and renames them to their final names."""
        self._close()
        marks, marks_sha256 = marks_of(self.path), None
        if self._marks is not None:
            self._marks.close()
            marks_sha256 = digest(_partial(marks))
        version = UNMARKED if self._marks is None else MARKED
        if self.chat is not None or self.bos_id is not None:
            version = BEGUN
        held = {
            "marks_sha256": marks_sha256,
            "num_targets": self.num_targets,
            "target_bytes": self.num_bytes if self._marks is None else self.target_bytes,
            "bos_id": self.bos_id,
            "chat": self.chat,
        }
        sidecar = Sidecar(
            format_version=version,
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
            **{name: held[name] for name in FIELDS_OF[version]},
        )
        sidecar_of(self.path).unlink(missing_ok=True)
        self.partial.replace(self.path)
        if self._marks is not None:
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
