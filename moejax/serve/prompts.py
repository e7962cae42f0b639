"""Texts to prompts, and tokens back to texts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from moejax.config.schema import Config
from moejax.data.named_tokens import ids_in, read_settings
from moejax.data.prepare.chat import ends_of_answers
from moejax.data.prepare.chat_template import CLOSE, OPEN, ChatTemplate, load_template
from moejax.data.prepare.control_tokens import ControlEncoder
from moejax.data.prepare.conversations import Message
from moejax.data.prepare.rows import BadRowError
from moejax.data.sidecar import sidecar_of
from moejax.data.tokenizer import Tokenizer, begin_of_document, load_library
from moejax.errors import InputError
from moejax.evaluate.checkpoint import Chosen, tokenizer_beside_weights
from moejax.evaluate.held_out import describe_training, open_tokenizer, tokenizer_that_came
from moejax.hf.origin import GENERATION, origin_of, read_config
from moejax.serve.texts import is_unicode


class ChatPrompts:
    """Turns messages into the ids after which a model answers.

    Attributes:
      stops: ids of the control token that the template writes behind an answer; empty if there is
        none.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Path | None):
        """Takes the model's chat template and its tokenizer.json; None for bytes."""
        self._template, self._encoder = template, ControlEncoder(tokenizer)
        self._names = sorted(name for name in (*self._encoder.controls, OPEN, CLOSE) if name)
        with self._naming_the_prompt():
            self.stops = ends_of_answers(template, self._encoder)

    def encode(self, messages: str | Sequence[Message]) -> list[int]:
        """Returns the ids of messages and of the template's request for an answer.

        Args:
          messages: a message of a user, or several, each with its `role` and `content`.
        Raises:
          InputError: if a message spells a control token, or the template does not take them.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        for message, name in product(messages, self._names):
            if name in message["content"]:
                raise InputError(
                    f"control token stands in a prompt. {message['content'][:40]!r} holds "
                    f"{name!a}. Only the chat template writes these. Take it out."
                )
        with self._naming_the_prompt():
            text = self._template.render(list(messages), None, "prompt", prompt=True).text
        return self._encoder.encode(text).token_N.tolist()

    @contextmanager
    def _naming_the_prompt(self) -> Iterator[None]:
        """Turns errors about rows of a file into errors about a prompt."""
        try:
            yield
        except BadRowError as error:
            raise InputError(
                f"chat template does not take a prompt. {self._template.name} says: "
                f"{error.__cause__}. It decides which messages it takes. Write others, name "
                f"another template with --chat-template, or write the prompt whole, without a chat."
            ) from error


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a model, and its rules for texts.

    Attributes:
      library: the tokenizers library's object of a tokenizer that came with the weights. It puts
        special tokens in front of prompts, as in an export. None if prompts begin as documents
        here.
      stops: ids that end a text.
      allowed: ids from this one on have no text.
      positions: the most that the model takes, prompt and continuation; None: not known.
      chat: writes a user's message as the prompt for an answer; None where texts are continued.
    """

    tokenizer: Tokenizer
    library: Any | None
    stops: frozenset[int]
    allowed: int
    positions: int | None
    chat: ChatPrompts | None = None

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a prompt."""
        if self.chat is not None:
            return self.chat.encode(text)
        begin = begin_of_document(self.tokenizer)
        if self.library is not None:
            return self.library.encode(text).ids or [begin]
        return [begin, *self.tokenizer.encode(text)]

    def continuation(self, prompt: list[int], ids: list[int]) -> str:
        """Returns the text of ids behind a prompt: a tokenizer may drop a space that begins one."""
        before = self.tokenizer.decode(prompt)
        return self.tokenizer.decode([*prompt, *ids])[len(before) :]

    @property
    def between(self) -> str:
        """The text between a prompt and its continuation where both are shown."""
        return "" if self.chat is None else "\n"


def open_vocabulary(
    chosen: Chosen,
    tokenizer: str | None,
    eos: str | None,
    *,
    chat: bool = False,
    template: str | None = None,
) -> Vocabulary:
    """Opens the tokenizer that the command line names, else the model's own.

    Args:
      chat: whether prompts are messages of a user.
      template: a chat template; None for the model's own.
    Raises:
      InputError: if there is none.
    """
    opened = open_tokenizer(tokenizer, eos, chosen)
    came = None if tokenizer is not None else tokenizer_that_came(chosen)
    origin = origin_of(chosen.saved.path)
    config = read_config(origin)
    positions = config.get("max_position_embeddings")
    positions = positions if type(positions) is int else None
    stops = {opened.eos_id}
    # Ids of the weights' own tokenizer, which token files of another one would give other meanings.
    if came is not None or tokenizer_beside_weights(chosen) is None:
        generation = {} if origin is None else read_settings(origin / GENERATION)
        stops.update(*(ids_in(one.get("eos_token_id")) for one in (config, generation)))
    allowed = min(opened.vocab_size, chosen.cfg.model.vocab_size)
    prompts = None
    if chat:
        prompts = open_chat(chosen, tokenizer, template)
        stops |= prompts.stops
    library = None if came is None else load_library(came)
    return Vocabulary(opened, library, frozenset(stops), allowed, positions, prompts)


def open_chat(chosen: Chosen, tokenizer: str | None, template: str | None) -> ChatPrompts:
    """Opens the chat template of the command line, of the run's conversations, or of weights."""
    beside, described = tokenizer_beside_weights(chosen), describe_training(chosen)
    path = tokenizer_that_came(chosen)
    if tokenizer is not None:
        path = Path(tokenizer)
    elif path is None and described is not None:
        path = described.tokenizer_file
    is_as_it_came = beside is not None and chosen.saved.step == 0
    form = None if described is None or is_as_it_came else described.sidecar.chat
    if described is not None and form is not None and tokenizer is None and template is None:
        written_by = ChatTemplate(form.template, str(sidecar_of(described.path)), form.tokens)
        return ChatPrompts(written_by, path)
    file = None if template is None else Path(template)
    # Beside token files is a copy of the tokenizer, without a template.
    home = path if tokenizer is not None else beside or path
    return ChatPrompts(load_template(home, file), path)


def read_prompts(text: str | None, file: str | None) -> list[str]:
    """Returns the prompts of the command line: a text, or the lines of a file that are not blank.

    Lines end as in JSONL: at a line feed, and not at other characters, such as U+2028, that
    a text may hold.

    Raises:
      InputError: if the file cannot be read, or has none.
    """
    if text is not None:
        return [text]
    assert file is not None, "the command line names one of both"
    try:
        content = Path(file).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"prompts cannot be read. --prompts {file}: {error}. It must be a file of UTF-8, a "
            f"prompt a line. Correct it, or name another."
        ) from error
    lines = content.removesuffix("\n").split("\n")
    prompts = [line.removesuffix("\r") for line in lines if line.strip()]
    if not prompts:
        raise InputError(
            f"no prompt. --prompts {file} has {len(lines)} lines without text. It must have a "
            f"prompt a line. Write one, or use --prompt TEXT."
        )
    return prompts


def encode_prompts(
    texts: Sequence[str], vocabulary: Vocabulary, cfg: Config, tokens: int
) -> tuple[list[list[int]], list[str]]:
    """Returns the ids of prompts, and notes for the user.

    Args:
      tokens: most tokens that continue each.
    Raises:
      InputError: if a prompt has no token, or the model no position for its continuation.
    """
    for text in texts:
        if not is_unicode(text):
            raise InputError(
                f"prompt is no text of Unicode. Got {text[:40]!a}. It has half of a surrogate "
                f"pair. Correct it."
            )
    prompts = [vocabulary.encode(text) for text in texts]
    for text, ids in zip(texts, prompts, strict=True):
        if not ids:
            raise InputError(
                f"prompt has no token. Got {text!r}. The model continues at least one. Write "
                f"a text."
            )
        if max(ids) >= cfg.model.vocab_size:
            raise InputError(
                f"prompt has an unknown token. {text[:40]!r} has id {max(ids)}, model.vocab_size "
                f"is {cfg.model.vocab_size}. The tokenizer must be the model's. Name it: "
                f"--tokenizer FILE."
            )
    check_length(prompts, tokens, vocabulary)
    longest = max(map(len, prompts)) + tokens
    if vocabulary.positions is None and longest > cfg.data.sequence_length:
        return prompts, [
            f"warning: texts of up to {longest} tokens, and the run trained on sequences of "
            f"{cfg.data.sequence_length}"
        ]
    return prompts, []


def check_length(prompts: Sequence[Sequence[int]], tokens: int, vocabulary: Vocabulary) -> None:
    """Checks that the model has positions for prompts and for so many tokens behind them.

    Raises:
      InputError: if not.
    """
    longest, most = max(map(len, prompts)), vocabulary.positions
    if most is not None and longest + tokens > most:
        raise InputError(
            f"text would be too long. The longest prompt has {longest} tokens, up to {tokens} "
            f"continue it. The model has {most} positions. Shorten the prompt, or ask for fewer "
            f"tokens."
        )
