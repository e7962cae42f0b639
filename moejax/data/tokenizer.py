"""Text to ids and back: bytes, or any `tokenizer.json`."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moejax.data.cuts import joined, may_cut
from moejax.data.named_tokens import named_tokens, opening_token
from moejax.errors import InputError

BYTES = "bytes"  # the name of the tokenizer of bytes
# End-of-document tokens of well-known tokenizers, most specific first.
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class Ends(NamedTuple):
    """The tokens around a document."""

    eos_id: int  # ends it
    bos_id: int | None  # begins it; None: the eos of the document before does


class ByteTokenizer:
    """Ids 0 to 255 are bytes of UTF-8; 256 ends a document.

    Attributes:
      eos_id: the token that ends a document.
      bos_id: the token that begins a document; None: eos does.
      cuts: whether long texts are encoded in parts, so that memory does not grow.
    """

    vocab_size = 257
    eos_id = 256
    bos_id: int | None = None
    cuts = True

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of the text."""
        return list(text.encode("utf-8"))

    def encode_pieces(self, pieces: Iterator[str]) -> Iterator[np.ndarray]:
        """Yields the bytes of each piece."""
        for piece in pieces:
            yield np.frombuffer(piece.encode("utf-8"), np.uint8)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of the bytes; invalid UTF-8 becomes a replacement character."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def name(self, id: int) -> str:
        """Returns a token's name, also of one without a text of its own."""
        return f"bytes:\\x{id:02x}" if id < 256 else f"<{id}>"


class FileTokenizer:
    """A `tokenizer.json`, through the `tokenizers` library; runs no code of the file's author.

    Its attributes are those of `ByteTokenizer`.
    """

    def __init__(self, path: Path, eos: str | None = None, ends: Ends | None = None):
        """Opens a file.

        Args:
          eos: name or id of the token that ends a document; None for a usual one.
          ends: both tokens around a document; None: looked up in the file and in those beside it.
        Raises:
          InputError: if a file is damaged, or no token can end a document.
        """
        self._tokenizer = load_library(path)
        # Ids may have gaps, so the bound is the largest id, not their number.
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        if ends is None:  # by the names in the settings beside the file
            names = named_tokens(path)
            eos_id = self._find_eos(path, eos, names.get("eos_token"))
            bos_id = opening_token(self._tokenizer, names)
            ends = Ends(eos_id, None if bos_id == eos_id else bos_id)
        self.eos_id, self.bos_id = ends
        self.cuts = may_cut(json.loads(self._tokenizer.to_str()))

    def _find_eos(self, path: Path, eos: str | None, named: str | None) -> int:
        """Returns the id of the token `eos`; if it is None, of a usual or the `named` one."""
        if eos is not None and eos.isdecimal():
            if int(eos) < self.vocab_size:
                return int(eos)
        else:
            usual = EOS_NAMES if named is None else (*EOS_NAMES, named)
            for name in usual if eos is None else (eos,):
                token_id = self._tokenizer.token_to_id(name)
                if token_id is not None:
                    return int(token_id)
        raise InputError(
            f"no end-of-document token. {path} has no {eos or ', '.join(EOS_NAMES)}. Documents are "
            f"joined by one token. Name it: --eos NAME, or --eos ID below {self.vocab_size}."
        )

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_pieces(self, pieces: Iterator[str]) -> Iterator[np.ndarray]:
        """Yields the ids of the text, cut at allowed places or encoded as a whole."""
        for text in joined(pieces) if self.cuts else ("".join(pieces),):
            yield np.array(self.encode(text), np.uint32)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids."""
        return self._tokenizer.decode([i for i in ids if i not in (self.eos_id, self.bos_id)])

    def name(self, id: int) -> str:
        """Returns a token's name in the file; its number if it has none."""
        return self._tokenizer.id_to_token(id) or f"<{id}>"


Tokenizer = ByteTokenizer | FileTokenizer


def begin_of_document(ends: Tokenizer | Ends) -> int:
    """Returns the token that every document begins with."""
    return ends.eos_id if ends.bos_id is None else ends.bos_id


def load_library(path: Path) -> Any:
    """Returns the tokenizers library's object of a tokenizer.json.

    Raises:
      InputError: if the file or the library is missing, or the file is damaged.
    """
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        raise InputError(
            f"the tokenizers library is missing. {path} needs it. It comes with an extra. Run "
            f"pip install 'moejax[hf]'."
        ) from error
    if not path.is_file():
        raise InputError(
            f"no tokenizer. {path} does not exist. It must be a tokenizer.json. Check the path."
        )
    try:
        library = Library.from_file(str(path))
    except Exception as error:  # The library raises plain Exception for every damaged file.
        raise InputError(
            f"tokenizer is damaged. {path}: {' '.join(str(error).split())[:160]}. It must be a "
            f"tokenizer.json. Copy it again."
        ) from error
    # A file may ask for truncation or padding, which would damage documents.
    library.no_truncation()
    library.no_padding()
    # Text that spells a special token stays text; otherwise a document could contain eos.
    library.encode_special_tokens = True
    return library


def digest(path: Path) -> str:
    """Returns the sha256 of a file."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
