"""Ids of a rendered conversation, where the names of control tokens stand for those tokens.

In plain text they stay text (`moejax.data.tokenizer`). N: tokens of a text.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from moejax.data.tokenizer import ByteTokenizer, load_library

BYTES_EOS = "<|endoftext|>"  # how a template of bytes spells their end-of-document token


class Encoded(NamedTuple):
    """Ids of a text, and the characters first .. stop - 1 that each stands for."""

    token_N: np.ndarray
    first_N: np.ndarray
    stop_N: np.ndarray
    control_N: np.ndarray  # bool


@runtime_checkable
class ControlEncoder(Protocol):
    """Encodes texts with control tokens."""

    controls: frozenset[str]  # the names of control tokens

    def encode(self, text: str) -> Encoded:
        """Returns the ids of a text."""
        ...


class FileEncoder:
    """Encodes with a tokenizer.json."""

    def __init__(self, path: Path):
        library = load_library(path)
        content = json.loads(library.to_str())
        special = [token for token in content.get("added_tokens") or () if token["special"]]
        self.controls = frozenset(token["content"] for token in special)
        self._ids = np.array([token["id"] for token in special], np.uint32)
        # It would add tokens that the template writes itself, and trim spaces from the offsets.
        content["post_processor"] = None
        self._library = type(library).from_str(json.dumps(content))
        self._library.encode_special_tokens = False

    def encode(self, text: str) -> Encoded:
        """Returns the ids of a text."""
        encoded = self._library.encode(text, add_special_tokens=False)
        token_N = np.array(encoded.ids, np.uint32)
        offset_N2 = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        return Encoded(token_N, offset_N2[:, 0], offset_N2[:, 1], np.isin(token_N, self._ids))


class ByteEncoder:
    """Encodes as bytes; a template may write BYTES_EOS."""

    controls = frozenset({BYTES_EOS})

    def encode(self, text: str) -> Encoded:
        """Returns the bytes of a text, and 256 for BYTES_EOS."""
        parts: list[tuple[list[int], int, int, bool]] = []
        for match in re.finditer(f"{re.escape(BYTES_EOS)}|(?s:.)", text):
            control = match[0] == BYTES_EOS
            ids = [ByteTokenizer.eos_id] if control else list(match[0].encode("utf-8"))
            parts.append((ids, *match.span(), control))
        repeats = [len(ids) for ids, *_ in parts]
        ids, firsts, stops, controls = zip(*parts, strict=True) if parts else ((), (), (), ())
        return Encoded(
            np.array([id for group in ids for id in group], np.uint32),
            np.repeat(np.array(firsts, np.int64), repeats),
            np.repeat(np.array(stops, np.int64), repeats),
            np.repeat(np.array(controls, bool), repeats),
        )
