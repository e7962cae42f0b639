r"""Finds places to cut a text so that its parts encode to the same ids as the whole.

Tokenizers split a text with a regular expression and look for tokens in each match alone. A cut
changes nothing if the matches to both sides stay the same. In every pattern of PATTERNS

- a match that holds a space holds it first, or holds white space alone;
- nothing looks behind, and the only look-ahead, `\s+(?!\S)`, starts from white space.

So a match always ends before a space that follows non-white space. Text before it matches as if the
text ended there, and text after it matches as before. NFC does not join a space to the character
before it.
"""

from collections.abc import Iterator
from typing import Any

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
# Patterns of `Split`; the library itself has the pattern of `ByteLevel` (GPT-2).
PATTERNS = (
    # cl100k, Llama 3
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _MARKS + _REST,
    # Qwen 2 and 3
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _MARKS + _REST,
    # o200k, Llama 4
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST,
)


def may_cut(tokenizer: dict[str, Any]) -> bool:
    """Returns whether texts may be cut before a space that follows anything but white space.

    Args:
      tokenizer: the content of a tokenizer.json.
    """
    normalizer = tokenizer.get("normalizer") or {"type": "NFC"}
    return (
        normalizer == {"type": "NFC"}
        and _is_known(tokenizer.get("pre_tokenizer") or {})
        and tokenizer["model"].get("dropout") is None
        # Added tokens are matched before the pattern; one with a space could cross a cut.
        and not any(
            " " in token["content"] or token["lstrip"] or token["rstrip"] or token["single_word"]
            for token in tokenizer.get("added_tokens", ())
        )
    )


def _is_known(splitter: dict[str, Any]) -> bool:
    """Returns whether a `pre_tokenizer` is ByteLevel, with GPT-2's pattern or one of PATTERNS."""
    if splitter.get("type") != "Sequence":
        return splitter.get("type") == "ByteLevel" and splitter["use_regex"]
    parts = splitter["pretokenizers"]
    if [part["type"] for part in parts] != ["Split", "ByteLevel"]:
        return False
    split = parts[0]  # ByteLevel then works on each match alone.
    settings = split["pattern"].get("Regex"), split["behavior"], split["invert"]
    return settings in [(pattern, "Isolated", False) for pattern in PATTERNS]


def joined(pieces: Iterator[str]) -> Iterator[str]:
    """Cuts a stream of pieces again, only at allowed places, at most once a piece.

    Text without allowed places, as in scripts without spaces, stays whole.
    """
    held: list[str] = []
    for piece in pieces:
        at = _last_cut(piece)
        if at:
            yield "".join([*held, piece[:at]])
            held = []
        held.append(piece[at:])
    if held:
        yield "".join(held)


def _last_cut(text: str) -> int:
    """Returns the last allowed cut inside a text; 0 if there is none."""
    at = text.rfind(" ")
    while at > 0 and text[at - 1].isspace():
        at = text.rfind(" ", 0, at)
    return max(at, 0)
