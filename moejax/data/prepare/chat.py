"""Files of conversations to marked documents, row by row."""

import argparse
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from moejax.data.marks import MarkedDocument
from moejax.data.prepare.answers import ChatEncoder
from moejax.data.prepare.chat_template import ChatTemplate, load_template
from moejax.data.prepare.control_tokens import ControlEncoder
from moejax.data.prepare.conversations import conversation_of, read_chat_rows
from moejax.data.prepare.documents import Skipped
from moejax.data.prepare.rows import BadRowError
from moejax.data.sidecar import ChatForm
from moejax.errors import InputError

ANSWERS = ("all", "last")
SHOWN = "answer"  # of a conversation that shows how a template ends one


class ChatReader:
    """Reads conversations as the command line asks."""

    def __init__(self, args: argparse.Namespace):
        """Opens the chat template and the tokenizer.

        Raises:
          InputError: if one of them cannot be used.
        """
        tokenizer = None if args.tokenizer is None else Path(args.tokenizer)
        named = None if args.chat_template is None else Path(args.chat_template)
        self._day = None if args.date is None else _day(args.date)
        self._template = load_template(tokenizer, named, self._day)
        encoder = ControlEncoder(tokenizer)
        self._encoder = ChatEncoder(self._template, encoder, args.answers or ANSWERS[0])
        try:
            ends = sorted(ends_of_answers(self._template, encoder))
        except BadRowError:  # It takes other conversations than one question and its answer.
            ends = []
        # A model's texts get this form.
        self.form = ChatForm(self._template.source, self._template.variables, ends)

    def read(self, files: list[Path], skipped: Skipped) -> Iterator[MarkedDocument]:
        """Yields the conversations of all files.

        Raises:
          BadRowError: for the first broken row, unless `skipped` takes it.
        """
        for row in read_chat_rows(files):
            try:
                document = self._encoder.encode(conversation_of(row))
            except BadRowError as error:
                skipped.add(error)
                continue
            yield document

    def notes(self) -> list[str]:
        """Returns what the user should know after all was read."""
        name, notes = self._template.name, []
        if self._encoder.num_unended:
            notes.append(
                f"warning: conversations that end without a control token: "
                f"{self._encoder.num_unended:,}. {name} writes none there, so nothing teaches the "
                f"model where to stop"
            )
        if self._template.is_dated and self._day is None:
            notes.append(f"{name} writes today's date: --date gives the same files on every day")
        return notes


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
