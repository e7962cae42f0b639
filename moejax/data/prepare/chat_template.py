"""A tokenizer's chat template: how a conversation becomes the text that the model reads.

transformers renders it, in Jinja's sandbox, since templates come from elsewhere. Two things that it
cannot do are written into the template first: a day that the user gives takes the place of today's,
and tags around answers write marks, which are right also inside macros and variables
(docs/decisions/0029-chat-templates-by-transformers.md).
"""

import os
import re
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from moejax.data.named_tokens import CONFIG, MESSAGE_LIMIT, check_size, named_tokens, read_settings
from moejax.data.prepare.control_tokens import BYTES_EOS
from moejax.data.prepare.conversations import Message
from moejax.data.prepare.rows import BadRowError
from moejax.errors import InputError

TEMPLATE = "chat_template.jinja"
SAFE = "5.22.2"  # of transformers: earlier ones let templates out of the sandbox
# What {% generation %} and {% endgeneration %} write: characters that no text may contain.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
TAG = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")
# A tag of the same kind as TAG, so that the white space around it stays the same.
MARKS = f"{{% macro marked_answer() %}}{OPEN}{{{{ caller() }}}}{CLOSE}{{% endmacro %}}\n"
DATE = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")


class Rendered(NamedTuple):
    """A conversation as text, and the characters (first, stop) of its tagged answers."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """A chat template.

    Attributes:
      name: its origin, for messages.
      source: its text.
      variables: texts of control tokens by the names that it may write, such as bos_token.
      is_dated: whether it writes a date.
      is_tagged: whether tags say what the assistant wrote; else it is found by rendering prefixes.
    """

    def __init__(
        self,
        source: str,
        name: str,
        variables: dict[str, str] | None = None,
        today: datetime | None = None,
    ):
        """Takes a template, and the day that it may write; None for the day on which it runs.

        Raises:
          InputError: if transformers is missing, or the day cannot be written.
        """
        self.name, self.source, self.variables = name, source, variables or {}
        self.is_dated = "strftime_now(" in source
        self.is_tagged = TAG.search(source) is not None
        self._marked = _with_marks(_on_day(source, today, name) if today else source)
        self._renderer = _renderer(name)

    def render(
        self, messages: list[Message], tools: list[Any] | None, source: str, *, prompt: bool = False
    ) -> Rendered:
        """Returns the text of messages.

        Args:
          source: their origin, for messages.
          prompt: whether to add what asks the model for its answer.
        Raises:
          BadRowError: if the template does not take them.
          InputError: if it is not a template.
        """
        from jinja2 import TemplateSyntaxError

        try:
            (text,) = self._renderer.apply_chat_template(
                [messages],
                tools,
                chat_template=self._marked,
                add_generation_prompt=prompt,
                tokenize=False,
                **self.variables,
            )
        except TemplateSyntaxError as error:
            line = error.lineno - self.is_tagged  # MARKS is a line
            raise InputError(
                f"chat template is damaged. {self.name}, line {line}: {_cut(error)}. It must be "
                f"a Jinja template. Copy it again, or name another one: --chat-template FILE."
            ) from error
        except ImportError as error:  # Jinja is too old
            raise _missing(self.name, str(error)) from error
        except Exception as error:  # A template may fail in any way, or refuse a row itself.
            raise BadRowError(
                f"chat template does not take a row. {source}: {_cut(error)}. {self.name} decides "
                f"what it takes. Correct or remove the row, or leave such rows out with "
                f"--skip-bad."
            ) from error
        return _without_marks(text)


def load_template(
    tokenizer: Path | None, file: Path | None, today: datetime | None = None
) -> ChatTemplate:
    """Returns the chat template of a file, else of the folder of a tokenizer.json.

    Raises:
      InputError: if there is none, or it cannot be read.
    """
    config = read_settings(tokenizer.with_name(CONFIG)) if tokenizer else {}
    variables = named_tokens(tokenizer) if tokenizer else {"eos_token": BYTES_EOS}
    if file is None and tokenizer is not None and tokenizer.with_name(TEMPLATE).is_file():
        file = tokenizer.with_name(TEMPLATE)
    if file is not None:
        return ChatTemplate(_read_text(file), str(file), variables, today)
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    if isinstance(source, str) and tokenizer is not None:
        return ChatTemplate(source, str(tokenizer.with_name(CONFIG)), variables, today)
    where = "The tokenizer of bytes has none"
    if tokenizer is not None:
        where = f"{tokenizer.parent} has no {TEMPLATE}, and no default `chat_template` in {CONFIG}"
    raise InputError(
        f"no chat template. {where}. A conversation is written as the model "
        f"was taught. Copy the file from the model's folder, or name one: --chat-template FILE."
    )


def _read_text(file: Path) -> str:
    check_size(file)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"no chat template. {file}: {_cut(error)}. It must be a Jinja template in UTF-8. Check "
            f"the path of --chat-template."
        ) from error


def _on_day(source: str, day: datetime, name: str) -> str:
    """Returns a template that writes a day in place of today's."""
    fixed = DATE.sub(lambda found: repr(day.strftime(found[2])), source)
    if "strftime_now(" in fixed:
        raise InputError(
            f"`--date` cannot be written. {name} computes how it writes a date. Leave --date out, "
            f"or write the day into the template."
        )
    return fixed


def _with_marks(source: str) -> str:
    """Returns a template whose tags write marks."""

    def call(found: re.Match[str]) -> str:
        return f"{{%{found[1]} {'endcall' if found[2] else 'call marked_answer()'} {found[3]}%}}"

    return MARKS + TAG.sub(call, source) if TAG.search(source) else source


def _without_marks(text: str) -> Rendered:
    """Takes the characters out that the tags have written."""
    parts, spans, length, first = [], [], 0, 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", text):
        if piece == OPEN:
            first = length
        elif piece == CLOSE:
            spans.append((first, length))
        else:
            parts.append(piece)
            length += len(piece)
    return Rendered("".join(parts), [span for span in spans if span[0] < span[1]])


def _renderer(name: str) -> Any:
    """Returns what renders templates: a tokenizer of transformers, without tokens."""
    # It would say that PyTorch is missing, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        present = version("transformers")
        import jinja2  # noqa: F401 - else its absence is told at the first conversation
        from packaging.version import Version
        from transformers import PreTrainedTokenizerBase
    except ImportError as error:
        raise _missing(name, str(error)) from error
    if Version(present) < Version(SAFE):
        raise _missing(name, f"it is {present}, from whose sandbox a template gets out")
    return PreTrainedTokenizerBase()


def _missing(name: str, why: str) -> InputError:
    return InputError(
        f"the transformers library is missing or too old. {name} needs version {SAFE} or newer, "
        f"and Jinja: {' '.join(why.split())}. Run pip install --upgrade 'moejax[hf]'."
    )


def _cut(error: BaseException) -> str:
    """Returns another program's message on one line, not too long."""
    return " ".join(str(error).split())[:MESSAGE_LIMIT] or type(error).__name__
