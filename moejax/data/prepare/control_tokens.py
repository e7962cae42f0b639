"""Ids of a rendered conversation, where the names of control tokens stand for those tokens.

In plain text they stay text (`moejax.data.tokenizer`). N: tokens of a text.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moejax.data.tokenizer import ByteTokenizer, load_library

BYTES_EOS = "<|endoftext|>"  # how a template of bytes spells their end-of-document token


class Encoded(NamedTuple):
    """Ids of a text, and the characters first .. stop - 1 that each stands for."""

    token_N: np.ndarray
    first_N: np.ndarray
    stop_N: np.ndarray
    control_N: np.ndarray  # bool


class ControlEncoder:
    """Encodes texts with control tokens.

    Attributes:
      controls: the names of control tokens.
    """

    def __init__(self, path: Path | None):
        """Takes a tokenizer.json; None for bytes, whose templates may write BYTES_EOS."""
        content = bytes_tokenizer() if path is None else json.loads(load_library(path).to_str())
        special = [token for token in content.get("added_tokens") or () if token["special"]]
        self.controls = frozenset(token["content"] for token in special)
        self._ids = np.array([token["id"] for token in special], np.uint32)
        # It would add tokens that the template writes itself, and trim spaces from the offsets.
        content["post_processor"] = None
        from tokenizers import Tokenizer

        self._library = Tokenizer.from_str(json.dumps(content))
        self._library.encode_special_tokens = False

    def encode(self, text: str) -> Encoded:
        """Returns the ids of a text."""
        encoded = self._library.encode(text, add_special_tokens=False)
        token_N = np.array(encoded.ids, np.uint32)
        offset_N2 = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        return Encoded(token_N, offset_N2[:, 0], offset_N2[:, 1], np.isin(token_N, self._ids))


def bytes_tokenizer() -> dict[str, Any]:
    """Returns a tokenizer.json with the ids of `ByteTokenizer`."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    # The letters that stand for bytes, as GPT-2 has them.
    letters = {chr(byte): byte for byte in printed}
    letters |= {chr(256 + number): byte for number, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    eos = {"id": ByteTokenizer.eos_id, "content": BYTES_EOS, "special": True, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [eos | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": False},
        "post_processor": None,
        "decoder": {**level, "use_regex": False},
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }
