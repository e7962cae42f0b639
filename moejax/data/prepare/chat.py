"""Files of conversations to marked documents, row by row."""

import argparse
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from moejax.data.marks import MarkedDocument
from moejax.data.prepare.answers import ChatEncoder
from moejax.data.prepare.chat_template import ChatTemplate, load_template
from moejax.data.prepare.control_tokens import ByteEncoder, ControlEncoder, FileEncoder
from moejax.data.prepare.conversations import conversation_of, read_chat_rows
from moejax.data.prepare.rows import BadRowError
from moejax.data.sidecar import ChatForm
from moejax.errors import InputError

ANSWERS = ("all", "last")
SHOWN = "answer"  # of a conversation that shows how a template ends one


class ChatReader:
    """Reads conversations, and counts the rows that it leaves out."""

    def __init__(self, encoder: ChatEncoder, form: ChatForm, *, skip_bad: bool, dated: bool = True):
        """Takes whether broken rows are left out, and whether a given day may be written."""
        self._encoder, self.form, self._skip_bad, self._dated = encoder, form, skip_bad, dated
        self.num_skipped, self._first_skipped = 0, ""

    def read(self, files: list[Path]) -> Iterator[MarkedDocument]:
        """Yields the conversations of all files.

        Raises:
          BadRowError: for the first broken row, unless such rows are left out.
        """
        for row in read_chat_rows(files):
            try:
                document = self._encoder.encode(conversation_of(row))
            except BadRowError as error:
                if not self._skip_bad:
                    raise
                self.num_skipped += 1
                self._first_skipped = self._first_skipped or str(error)
                continue
            yield document

    def notes(self) -> list[str]:
        """Returns what the user should know after all was read."""
        template, notes = self._encoder.template, []
        if self.num_skipped:
            notes.append(
                f"rows left out as broken: {self.num_skipped:,}. The first: {self._first_skipped}"
            )
        if self._encoder.num_unended:
            notes.append(
                f"warning: conversations that end without a control token: "
                f"{self._encoder.num_unended:,}. {template.name} writes none there, so nothing "
                f"teaches the model where to stop"
            )
        if template.is_dated and not self._dated:
            notes.append(
                f"{template.name} writes today's date: --date gives the same files on every day"
            )
        return notes


def chat_reader(args: argparse.Namespace) -> ChatReader:
    """Returns the reader that the command line asks for.

    Raises:
      InputError: if the chat template or the tokenizer cannot be used.
    """
    tokenizer = None if args.tokenizer is None else Path(args.tokenizer)
    named = None if args.chat_template is None else Path(args.chat_template)
    today = None if args.date is None else _day(args.date)
    template = load_template(tokenizer, named, today)
    encoder = ByteEncoder() if tokenizer is None else FileEncoder(tokenizer)
    chat = ChatEncoder(template, encoder, args.answers or ANSWERS[0])
    form = form_of(template, encoder)
    return ChatReader(chat, form, skip_bad=args.skip_bad, dated=today is not None)


def form_of(template: ChatTemplate, encoder: ControlEncoder) -> ChatForm:
    """Returns what token files remember of a template, so that a model's texts get its form."""
    try:
        ends = sorted(ends_of_answers(template, encoder))
    except BadRowError:  # It takes other conversations than one question and its answer.
        ends = []
    return ChatForm(template.source, template.variables, ends)


def ends_of_answers(template: ChatTemplate, encoder: ControlEncoder) -> frozenset[int]:
    """Returns the first control token that a template writes behind an answer, if there is one.

    Raises:
      BadRowError: if the template does not take a question and an answer.
    """
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": SHOWN}]
    text = template.render(messages, None, "an example").text
    encoded, place = encoder.encode(text), text.rfind(SHOWN)
    if place < 0:
        return frozenset()
    behind_N = encoded.control_N & (encoded.first_N >= place + len(SHOWN))
    return frozenset(encoded.token_N[np.flatnonzero(behind_N)[:1]].tolist())


def _day(text: str) -> datetime:
    try:
        return datetime.strptime(text, "%Y-%m-%d")
    except ValueError as error:
        raise InputError(
            f"`--date` is no day. Got {text!r}. It must be written as 2026-01-31. Correct it."
        ) from error
