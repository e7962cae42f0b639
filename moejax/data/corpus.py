"""Real text that every machine has: the source of Python's standard library.

About one file in twenty, chosen by a hash of its name, is held out: training never sees it.
`baselines` gives the bits per byte of general compressors, to compare a model with.
"""

import gzip
import hashlib
import lzma
import sysconfig
from collections import Counter
from functools import cache
from math import log2
from pathlib import Path

from moejax.errors import InputError

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_ONE_IN = 20
# Generated when Python is built, with paths of the build machine.
BUILT_HERE = ("_sysconfigdata", "config-")


@cache
def documents() -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Returns the training files and the held-out files, each in order of their names.

    Raises:
      InputError: if the library's source is not on this machine.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out, seen = [], [], set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT.intersection(name.parts) or name.parts[0].startswith(BUILT_HERE):
            continue
        text = path.read_bytes()
        # Copies are dropped: one could be on the other side of the split.
        if not text or text in seen or not _is_utf8(text):
            continue
        seen.add(text)
        (held_out if is_held_out_file(name.as_posix()) else train).append(text)
    if not train or not held_out:
        raise InputError(
            f"no standard library text. {root} has {len(train) + len(held_out)} usable .py files. "
            f"data.source=stdlib reads Python's own source. Use a Python that ships it, or set "
            f"data.source=tokens."
        )
    return tuple(train), tuple(held_out)


def is_held_out_file(name: str) -> bool:
    """Returns whether a file is kept from training; this depends on its name alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def baselines() -> dict[str, float]:
    """Returns the bits per byte of the joined held-out files for compressors and a unigram model.

    `gzip -9` and `xz -9` start from nothing and read the held-out files alone; the unigram model
    knows the byte frequencies of the training files, every byte counted once more than seen.
    """
    train, held_out = documents()
    text = b"".join(held_out)
    seen = Counter(b"".join(train))
    total = seen.total() + 256
    unigram = -sum(n * log2((seen[b] + 1) / total) for b, n in Counter(text).items()) / len(text)
    return {
        "gzip -9": 8 * len(gzip.compress(text, compresslevel=9, mtime=0)) / len(text),
        "xz -9": 8 * len(lzma.compress(text, preset=9)) / len(text),
        "a unigram model": unigram,
    }
