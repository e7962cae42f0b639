"""A tokenizer's chat template: how a conversation becomes the text that the model reads.

Templates are Jinja, written for transformers: its settings of the environment, globals, filters and
variables are those here. They come from elsewhere, so they run in Jinja's sandbox.
"""

import json
import re
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from moejax.data.named_tokens import (
    CONFIG,
    MESSAGE_LIMIT,
    check_size,
    named_tokens,
    read_settings,
)
from moejax.data.prepare.control_tokens import BYTES_EOS
from moejax.data.prepare.conversations import Message
from moejax.data.prepare.rows import BadRowError
from moejax.errors import InputError

TEMPLATE = "chat_template.jinja"
SAFE_JINJA = (3, 1, 6)  # earlier ones let templates out of the sandbox
# What {% generation %} and {% endgeneration %} write: characters that no text may contain.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning


class Rendered(NamedTuple):
    """A conversation as text, and the characters (first, stop) of its tagged answers."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """A chat template, compiled.

    Attributes:
      name: its origin, for messages.
      source: its text.
      variables: texts of control tokens by the names that it may write.
    """

    def __init__(
        self,
        source: str,
        name: str,
        variables: dict[str, str] | None = None,
        today: datetime | None = None,
    ):
        """Compiles a template.

        Args:
          source: its text.
          name: its origin, for messages.
          variables: names of control tokens, such as bos_token.
          today: the day that it may write; None for the day on which it runs.
        Raises:
          InputError: if it is not a template, or Jinja is missing.
        """
        self.name, self.source, self.variables, self._today = name, source, variables or {}, today
        self.is_dated = False  # whether it has written a date
        # Tags say what the assistant wrote; without them it is found by rendering prefixes.
        self.is_tagged = re.search(r"{%[-+]?\s*generation\s*[-+]?%}", source) is not None
        jinja = _jinja(name)
        environment = _environment(self._strftime_now)
        try:
            self._template = environment.from_string(source)
        except jinja.TemplateSyntaxError as error:
            raise InputError(
                f"chat template is damaged. {name}, line {error.lineno}: {_cut(error)}. It must be "
                f"a Jinja template. Copy it again, or name another one: --chat-template FILE."
            ) from error

    def render(
        self, messages: list[Message], tools: list[Any] | None, source: str, *, prompt: bool = False
    ) -> Rendered:
        """Returns the text of messages.

        Args:
          source: their origin, for messages.
          prompt: whether to add what asks the model for its answer.
        Raises:
          BadRowError: if the template does not take them.
        """
        try:
            text = self._template.render(
                **self.variables,
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # A template may fail in any way, or refuse a row itself.
            raise BadRowError(
                f"chat template does not take a row. {source}: {_cut(error)}. {self.name} decides "
                f"what it takes. Correct or remove the row, or leave such rows out with "
                f"--skip-bad."
            ) from error
        return _without_marks(text)

    def _strftime_now(self, format: str) -> str:
        self.is_dated = True
        return (self._today or datetime.now()).strftime(format)


def load_template(
    tokenizer: Path | None, file: Path | None, today: datetime | None = None
) -> ChatTemplate:
    """Returns the chat template of a file, else of the folder of a tokenizer.json.

    Raises:
      InputError: if there is none, or it is damaged.
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


def _with_reasoning(message: Message) -> Message:
    """Returns a message with its reasoning under both names that templates read."""
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


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


def _jinja(name: str) -> Any:
    """Returns the Jinja library, of a version whose sandbox is whole."""
    try:
        import jinja2
    except ImportError as error:
        raise InputError(
            f"the Jinja library is missing. {name} needs it. It comes with an extra. Run pip "
            f"install 'moejax[hf]'."
        ) from error
    present = version("jinja2")
    if tuple(int(part) for part in re.findall(r"\d+", present)[:3]) < SAFE_JINJA:
        raise InputError(
            f"the Jinja library is too old. It has version {present}. Before "
            f"{'.'.join(map(str, SAFE_JINJA))} a template could leave the sandbox. Run pip install "
            f"--upgrade 'jinja2>={'.'.join(map(str, SAFE_JINJA))}'."
        )
    return jinja2


def _safe_namespace() -> Any:
    """Returns the maker of a template's namespaces, without names that begin with "_"."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class Names(Namespace):
        """A namespace without private names, which would reach Python's own."""

        def __setitem__(self, name: str, value: Any) -> None:
            """Stores a value."""
            if name.startswith("_"):
                raise SecurityError(f"a namespace has no name {name!r}")
            super().__setitem__(name, value)

    def namespace(*values: Any, **named: Any) -> Names:
        names = Names()
        for name, value in dict(*values, **named).items():
            names[name] = value
        return names

    return namespace


def _environment(strftime_now: Any) -> Any:
    """Returns the sandbox with all that templates expect."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tags {% generation %} and {% endgeneration %} around what the assistant wrote."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja's class declares it

        def parse(self, parser: Any) -> Any:
            """Keeps what is inside, between two marks."""
            line = next(parser.stream).lineno
            inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)

            def mark(text: str) -> Any:
                return nodes.Output([nodes.TemplateData(text)]).set_lineno(line)

            return [mark(OPEN), *inside, mark(CLOSE)]

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own would escape for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "namespace": _safe_namespace(),
        "dict": lambda *values, **named: dict(*values, **named),  # not the class
    }
    return environment


def _cut(error: BaseException) -> str:
    """Returns another program's message on one line, not too long."""
    return " ".join(str(error).split())[:MESSAGE_LIMIT] or type(error).__name__
