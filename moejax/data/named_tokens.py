"""The tokens that a tokenizer's settings name, such as the one that begins a text."""

import json
from pathlib import Path
from typing import Any

from moejax.errors import InputError

CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
MAX_BYTES = 64 << 20  # of a template or settings file; with a large vocabulary it has megabytes
MESSAGE_LIMIT = 160  # characters of another program's message


def named_tokens(tokenizer: Path) -> dict[str, str]:
    """Returns the texts of `bos_token` and other tokens that the files beside a tokenizer name.

    Raises:
      InputError: if a file is damaged.
    """
    found = {}
    for file in (SPECIAL, CONFIG):  # the newer one wins
        for name, value in read_settings(tokenizer.with_name(file)).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def ids_in(value: Any) -> list[int]:
    """Returns the ids of a configuration's entry: one, several, or none."""
    values = value if isinstance(value, list) else [value]
    return [value for value in values if type(value) is int]


def read_settings(file: Path) -> dict[str, Any]:
    """Returns the JSON object of a tokenizer's settings; an empty one if the file does not exist.

    Raises:
      InputError: if it is damaged or too large.
    """
    if not file.is_file():
        return {}
    check_size(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"tokenizer's settings are damaged. {file}: "
            f"{' '.join(str(error).split())[:MESSAGE_LIMIT]}. It must be a JSON object. Copy it "
            f"again."
        ) from error
    return content if isinstance(content, dict) else {}


def check_size(file: Path) -> None:
    """Refuses a file that is too large for a template or settings, before it is read."""
    if file.is_file() and file.stat().st_size > MAX_BYTES:
        raise InputError(
            f"file is too large. {file} has {file.stat().st_size:,} bytes. A chat template and a "
            f"tokenizer's settings have at most {MAX_BYTES:,}. Copy it again."
        )


def opening_token(library: Any, names: dict[str, str]) -> int | None:
    """Returns the id of the token that begins a text; None if the tokenizer has none.

    This is `bos_token` of the settings, as in lm-eval; without settings, the only token that the
    tokenizer itself puts in front of a text.

    Args:
      library: the tokenizers library's object.
      names: texts of tokens by name: see `named_tokens`.
    """
    if "bos_token" in names:
        return library.token_to_id(names["bos_token"])
    encoded = library.encode("a")
    added = encoded.special_tokens_mask
    first = next((index for index, is_added in enumerate(added) if not is_added), 0)
    return int(encoded.ids[0]) if first == 1 else None
