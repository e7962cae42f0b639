"""The JSON file that describes the token file beside it.

Format: docs/formats/tokens.md. All fields are checked: a wrong dtype would train on noise.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moejax.config.fields import one_line
from moejax.data.tokenizer import Ends
from moejax.errors import InputError

FORMAT_VERSION = 3  # the newest that is read
# Versions: 1 is text, 2 marked conversations, 3 either with a begin token or a chat template.
UNMARKED, MARKED, BEGUN = 1, 2, 3
MARKED_FIELDS = ("marks_sha256", "num_targets", "target_bytes")
BEGUN_FIELDS = ("bos_id", "chat")
FIELDS_OF = {UNMARKED: (), MARKED: MARKED_FIELDS, BEGUN: (*MARKED_FIELDS, *BEGUN_FIELDS)}
SIDECAR_LIMIT = 1 << 20
DTYPES = ("uint8", "uint16", "uint32")


@dataclass(frozen=True)
class ChatForm:
    """The form in which conversations were written."""

    template: str  # text of the chat template
    tokens: dict[str, str]  # texts of `bos_token` and other names that the template may write
    end_ids: list[int]  # tokens that end an answer


@dataclass(frozen=True)
class Sidecar:
    """The content of `FILE.json` about the token file beside it."""

    format_version: int
    format: str  # "bin" or "array_record"
    dtype: str
    vocab_size: int
    eos_id: int
    num_tokens: int
    num_bytes: int | None  # bytes of the UTF-8 text; None if unknown
    num_documents: int | None
    sha256: str  # digest of the token file
    tokenizer: str  # "bytes", or the name of a tokenizer.json beside this file
    tokenizer_sha256: str | None = None  # digest of that tokenizer.json
    chunk_tokens: int | None = None  # array_record: tokens of a record
    # Set if the file has marks: their digest, the number of targets, the bytes of their text.
    marks_sha256: str | None = None
    num_targets: int | None = None
    target_bytes: int | None = None
    bos_id: int | None = None  # begins each document; None: eos does, or the template decides
    chat: ChatForm | None = None  # form of the conversations

    @property
    def is_marked(self) -> bool:
        """True if a file beside the tokens marks targets and documents."""
        return self.marks_sha256 is not None

    @property
    def ends(self) -> Ends:
        """The tokens around a document."""
        return Ends(self.eos_id, self.bos_id)

    def content_digest(self) -> str:
        """Returns a digest of a run's input: tokens, marks, and the meaning of the ids."""
        facts = self._facts()
        # These do not change the tokens.
        for field in ("num_bytes", "num_documents", "tokenizer", "num_targets", "target_bytes"):
            facts.pop(field, None)
        if self.format_version == BEGUN and self.is_marked:
            # Marks say where documents begin, so the digest leaves these fields out.
            facts = {name: x for name, x in facts.items() if name not in BEGUN_FIELDS}
            facts["format_version"] = MARKED
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Writes the sidecar of a token file.

        Raises:
          InputError: if a chat template makes it too large to be read.
        """
        text = json.dumps(self._facts(), indent=1) + "\n"
        if len(text) > SIDECAR_LIMIT:
            raise InputError(
                f"chat template is too large. The sidecar of {path} would have {len(text):,} "
                f"bytes, of which {SIDECAR_LIMIT:,} are read. Name another --chat-template."
            )
        sidecar_of(path).write_text(text, encoding="utf-8")

    def _facts(self) -> dict[str, Any]:
        """Returns the fields that the file has in its format version."""
        own = FIELDS_OF[self.format_version]
        left_out = [name for name in FIELDS_OF[BEGUN] if name not in own]
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def sidecar_of(path: Path) -> Path:
    """Returns the sidecar's path: the token file's with .json appended."""
    return path.with_name(path.name + ".json")


def read_sidecar(path: Path) -> Sidecar:
    """Reads and checks the sidecar of a token file.

    Raises:
      InputError: if it is missing, too large, damaged, or of a newer format.
    """
    file = sidecar_of(path)
    if not file.is_file():
        raise InputError(
            f"no sidecar. {file} does not exist. A token file needs the JSON that moejax prepare "
            f"wrote beside it. Copy it too, or prepare the text again."
        )
    if file.stat().st_size > SIDECAR_LIMIT:
        raise InputError(
            f"sidecar is too large. {file} has {file.stat().st_size} bytes. The limit is "
            f"{SIDECAR_LIMIT}. Prepare the text again."
        )
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        version = facts.get("format_version")
    # Brackets nested thousands deep end json with RecursionError.
    except (ValueError, AttributeError, RecursionError) as error:
        raise _damaged(file, str(error)) from error
    if type(version) is int and version > FORMAT_VERSION:
        raise InputError(
            f"token file of a newer moejax. {file} has format {version}. This version reads up to "
            f"{FORMAT_VERSION}. Upgrade moejax."
        )
    return _checked(file, facts)


def is_plain_name(name: str) -> bool:
    """Returns whether a file name stays in its folder on every operating system."""
    return re.fullmatch(r"\w[\w .+-]*", name, re.ASCII) is not None


def _checked(file: Path, facts: dict[str, Any]) -> Sidecar:
    """Builds the sidecar; refuses missing and unknown fields and wrong types."""
    version = facts.get("format_version")
    if type(version) is not int or version not in FIELDS_OF:
        raise _damaged(file, f"format_version {version!r} is unknown")
    if extra := [x for x in FIELDS_OF[BEGUN] if x in facts and x not in FIELDS_OF[version]]:
        raise _damaged(file, f"format {version} has no field {extra[0]}")
    try:
        if facts.get("chat") is not None:
            facts = {**facts, "chat": ChatForm(**facts["chat"])}
        sidecar = Sidecar(**facts)
    except TypeError as error:
        raise _damaged(file, str(error)) from error
    if wrong := _find_wrong(sidecar):
        raise _damaged(file, wrong)
    return sidecar


def _damaged(file: Path, wrong: str) -> InputError:
    return InputError(
        f"sidecar is damaged. {file}: {one_line(wrong)[:200]}. It must be the JSON that moejax "
        f"prepare wrote. Prepare the text again."
    )


def _find_wrong(sidecar: Sidecar) -> str | None:
    """Returns a violation of the format, if any. No asserts: `python -O` would leave them out."""
    digest, name = sidecar.tokenizer_sha256, sidecar.tokenizer
    may_be_open = ("num_bytes", "num_documents", "chunk_tokens", "target_bytes")
    for field in ("vocab_size", "eos_id", "num_tokens", *may_be_open):
        value = getattr(sidecar, field)
        # `type`, because True is an int to isinstance.
        is_count = type(value) is int and value >= 0
        if not is_count and not (value is None and field in may_be_open):
            return f"{field} is {value!r}, not a count"
    if sidecar.dtype not in DTYPES:
        return f"dtype {sidecar.dtype!r} is not one of {DTYPES}"
    if not sidecar.eos_id < sidecar.vocab_size < 2**31:
        return f"eos_id {sidecar.eos_id} or vocab_size {sidecar.vocab_size} is out of range"
    if sidecar.num_tokens < 2:
        return f"num_tokens is {sidecar.num_tokens}; a stream has an eos at each end"
    if sidecar.format not in ("bin", "array_record"):
        return f"format {sidecar.format!r} is unknown"
    if sidecar.format == "array_record" and not sidecar.chunk_tokens:
        return "chunk_tokens is missing"
    if not isinstance(name, str) or not is_plain_name(name):
        return f"tokenizer {name!r} is not a plain name"
    if not _is_digest(sidecar.sha256) or (digest is not None and not _is_digest(digest)):
        return "a sha256 is not 64 hexadecimal digits"
    if sidecar.format_version == UNMARKED:
        return None
    return _find_wrong_later(sidecar)


def _find_wrong_later(sidecar: Sidecar) -> str | None:
    """Returns a violation of the format, if any, in the fields that format 1 has not."""
    is_marked = sidecar.is_marked or sidecar.format_version == MARKED
    if is_marked and not _is_digest(sidecar.marks_sha256):
        return "marks_sha256 is not 64 hexadecimal digits"
    targets = sidecar.num_targets
    if type(targets) is not int or not 0 < targets < sidecar.num_tokens:
        return f"num_targets is {targets!r}, not between 1 and num_tokens - 1"
    bos, chat, known = sidecar.bos_id, sidecar.chat, range(sidecar.vocab_size)
    if bos is not None and (type(bos) is not int or bos not in known or bos == sidecar.eos_id):
        return f"bos_id is {bos!r}, not another id of the vocabulary than eos_id"
    if chat is None:
        return None
    if not isinstance(chat.template, str):
        return "the template of chat is no text"
    if not isinstance(chat.tokens, dict) or not all(
        isinstance(text, str) for text in chat.tokens.values()
    ):
        return "the tokens of chat are not texts by name"
    ids = chat.end_ids
    if not isinstance(ids, list) or not all(type(id) is int and id in known for id in ids):
        return f"the end_ids of chat are {ids!r}, not ids of the vocabulary"
    return None


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None
