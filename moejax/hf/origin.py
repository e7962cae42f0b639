"""The small files that came with weights: config, tokenizer, texts. Runs keep them for an export.

A run directory and an imported folder have them below `hf/`. Code is never among them.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moejax.errors import InputError, writing
from moejax.hf.files import CONFIG, check_inside
from moejax.hf.text import read_text_config

ORIGIN = "hf"
GENERATION = "generation_config.json"
NAMES = (
    GENERATION,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
MAX_BYTES = 256 << 20


def small_files(source: Path) -> list[str]:
    """Returns the names of the small files that a folder has.

    Raises:
      InputError: if one is a link to somewhere else, or too large.
    """
    names = [name for name in (CONFIG, *NAMES) if (source / name).exists()]
    for name in names:
        path = source / name
        check_inside(path)
        if path.stat().st_size > MAX_BYTES:
            raise InputError(
                f"{path} has {path.stat().st_size:,} bytes. A tokenizer's file has at most "
                f"{MAX_BYTES:,}. Remove it, or copy it again."
            )
    return names


def copy_small_files(source: Path, target: Path, *, config: bool = True) -> None:
    """Copies the small files of a folder.

    Args:
      config: whether `config.json` is one of them.
    Raises:
      InputError: see `small_files`.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in small_files(source):
        if config or name != CONFIG:
            with writing(target / name):
                shutil.copyfile(source / name, target / name)


def origin_of(step: Path) -> Path | None:
    """Returns the directory of the small files of a checkpoint's run, if it has any."""
    for place in (step.parent, step.parent.parent):
        if (place / ORIGIN / CONFIG).is_file():
            return place / ORIGIN
    return None


def read_config(origin: Path | None) -> Mapping[str, Any]:
    """Returns the text model's `config.json` among small files; empty without them."""
    return {} if origin is None else read_text_config(origin / CONFIG)
