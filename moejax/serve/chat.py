"""A user's messages as prompts, written by the chat template that wrote the conversations."""

from pathlib import Path

from moejax.data.prepare.chat import ends_of_answers
from moejax.data.prepare.chat_template import CLOSE, OPEN, ChatTemplate, load_template
from moejax.data.prepare.control_tokens import ByteEncoder, ControlEncoder, FileEncoder
from moejax.data.prepare.conversations import Message
from moejax.data.prepare.rows import BadRowError
from moejax.data.sidecar import ChatForm
from moejax.errors import InputError


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
        """Returns the ids of a user's message and of the template's request for an answer.

        Raises:
          InputError: if the message spells a control token, or the template does not take it.
        """
        for name in sorted(name for name in (*self._encoder.controls, OPEN, CLOSE) if name):
            if name in message:
                raise InputError(
                    f"control token stands in a prompt. {message[:40]!r} holds {name!a}. Only the "
                    f"chat template writes these. Take it out."
                )
        text = self._render([{"role": "user", "content": message}], prompt=True)
        return self._encoder.encode(text).token_N.tolist()

    def _find_stops(self) -> frozenset[int]:
        """Returns the first control token behind an answer."""
        try:
            return ends_of_answers(self._template, self._encoder)
        except BadRowError as error:
            raise self._refused(error) from error

    def _render(self, messages: list[Message], *, prompt: bool) -> str:
        try:
            return self._template.render(messages, None, "prompt", prompt=prompt).text
        except BadRowError as error:
            raise self._refused(error) from error

    def _refused(self, error: BadRowError) -> InputError:
        """Turns an error about rows of a file into an error about a prompt."""
        return InputError(
            f"chat template does not take a prompt. {self._template.name} says: "
            f"{error.__cause__}. It is given one message of a user. Name another template with "
            f"--chat-template, or leave --chat out and write the prompt whole."
        )


def written_as(form: ChatForm, tokenizer: Path | None, name: str) -> ChatPrompts:
    """Opens the chat template that a run's conversations were written by.

    Args:
      tokenizer: the model's tokenizer.json; None for bytes.
      name: where the form is from, for messages.
    """
    encoder = ByteEncoder() if tokenizer is None else FileEncoder(tokenizer)
    return ChatPrompts(ChatTemplate(form.template, name, form.tokens), encoder)


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
