"""A user's messages as prompts, written by the chat template that wrote the conversations."""

from pathlib import Path

import numpy as np

from moejax.data.chat_template import CLOSE, OPEN, ChatTemplate, load_template
from moejax.data.control_tokens import ByteEncoder, ControlEncoder, FileEncoder
from moejax.data.conversations import Message
from moejax.data.rows import BadRowError
from moejax.errors import InputError

ANSWER = "answer"  # of a conversation that shows how a template ends one


class ChatPrompts:
    """Turns messages into the ids after which a model answers.

    Attributes:
      stops: ids of the control token that the template writes behind an answer; empty if there is
        none.
    """

    def __init__(self, template: ChatTemplate, encoder: ControlEncoder):
        """Takes the encoder of the model's tokenizer."""
        self._template, self._encoder = template, encoder
        self.stops = self._find_stops()

    def encode(self, message: str) -> list[int]:
        """Returns the ids of a user's message and of what asks for its answer.

        Raises:
          InputError: if the message spells a control token, or the template does not take it.
        """
        for name in sorted(name for name in (*self._encoder.controls, OPEN, CLOSE) if name):
            if name in message:
                raise InputError(
                    f"control token stands in a prompt. {message[:40]!r} holds {name!a}. Only the "
                    f"chat template writes these. Take it out."
                )
        text = self._render([_message("user", message)], prompt=True)
        return self._encoder.encode(text).token_N.tolist()

    def _find_stops(self) -> frozenset[int]:
        """Returns the first control token behind an answer."""
        messages = [_message("user", "question"), _message("assistant", ANSWER)]
        text = self._render(messages, prompt=False)
        encoded, place = self._encoder.encode(text), text.rfind(ANSWER)
        behind_N = encoded.control_N & (encoded.first_N >= place + len(ANSWER))
        if place < 0:
            return frozenset()
        return frozenset(encoded.token_N[np.flatnonzero(behind_N)[:1]].tolist())

    def _render(self, messages: list[Message], *, prompt: bool) -> str:
        try:
            return self._template.render(messages, None, "prompt", prompt=prompt).text
        except BadRowError as error:  # its message is about rows of a file
            raise InputError(
                f"chat template does not take a prompt. {self._template.name} says: "
                f"{error.__cause__}. It is given one message of a user. Name another template with "
                f"--chat-template, or leave --chat out and write the prompt whole."
            ) from error


def open_chat(tokenizer: Path | None, home: Path | None, template: Path | None) -> ChatPrompts:
    """Opens the chat template of a model.

    Args:
      tokenizer: the model's tokenizer.json; None for bytes.
      home: the tokenizer.json that has the model's other small files beside it.
      template: the file of the command line; None for the one beside `home`.
    Raises:
      InputError: if there is no template, or it is damaged.
    """
    encoder = ByteEncoder() if tokenizer is None else FileEncoder(tokenizer)
    return ChatPrompts(load_template(home, template), encoder)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
