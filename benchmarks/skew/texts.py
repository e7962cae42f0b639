"""Texts that every machine has, as rows of bytes: Python's own library, and other kinds.

Letters: B rows, T bytes of a row.
"""

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.machine import ROOT
from moejax.data.corpus import documents
from moejax.data.tokenizer import ByteTokenizer
from moejax.errors import InputError

OWN = "own"  # the kind of text that models are trained on
OTHER = ("prose", "C headers", "minified JavaScript")


def files_of(kind: str) -> list[bytes]:
    """Returns the files of a kind of text."""
    if kind == OWN:
        return list(documents()[1])  # held out
    if kind == "prose":
        site = Path(sysconfig.get_path("purelib"))
        found = [path.read_bytes() for path in sorted(site.glob("*.dist-info/METADATA"))]
        return [text.partition(b"\n\n")[2] for text in found]  # behind the header
    if kind == "C headers":
        include = Path(sysconfig.get_path("include"))
        return [path.read_bytes() for path in sorted(include.rglob("*.h"))]
    return [(ROOT / "moejax/report/echarts.min.js").read_bytes()]


def rows_of(texts: Iterable[bytes], count: int, length: int) -> np.ndarray:
    """Returns rows of ids [B, T], one file behind the other, each ended; equal files are one.

    Files stand in the order of their digests, which is no order.
    """
    texts = sorted({t for t in texts if t}, key=lambda text: hashlib.sha256(text).digest())
    ids: list[int] = []
    for text in texts:
        ids += [*text, ByteTokenizer.eos_id]
        if len(ids) >= count * length:
            break
    if len(ids) < count * length:
        raise InputError(
            f"too little text. Got {len(ids)} bytes for {count} rows of {length}. Lower --rows."
        )
    return np.array(ids[: count * length], np.int32).reshape(count, length)
