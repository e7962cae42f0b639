"""The answers of a conversation: which of its tokens the assistant wrote, and so are learned.

A template with `{% generation %}` tags says so itself. Otherwise an answer is what the text of the
messages up to it has more than the prompt for it, the text of the messages before it with what asks
the model to answer. That holds if a template writes the beginning of a conversation as it writes it
within the whole, which is checked for every row.

N: tokens of a conversation.
"""

import re
from collections.abc import Sequence

import numpy as np

from moejax.data.marks import BEGIN, CONTEXT, TARGET, MarkedDocument
from moejax.data.prepare.chat_template import CLOSE, OPEN, ChatTemplate, Rendered
from moejax.data.prepare.control_tokens import ControlEncoder, Encoded
from moejax.data.prepare.conversations import Conversation, Message, as_json
from moejax.data.prepare.rows import BadRowError, check_unicode

Span = tuple[int, int]  # characters: first, stop
SHOWN = 30  # characters of a text in a message


class ChatEncoder:
    """Turns conversations into marked documents."""

    def __init__(self, template: ChatTemplate, encoder: ControlEncoder, answers: str = "all"):
        """Takes whether all answers of a conversation are learned, or the last one alone."""
        self.template, self._encoder, self._answers = template, encoder, answers
        names = (name for name in (*encoder.controls, OPEN, CLOSE) if name)
        self._forbidden = re.compile("|".join(map(re.escape, names)))
        self.num_unended = 0  # conversations without a control token at their end

    def encode(self, conversation: Conversation) -> MarkedDocument:
        """Returns the tokens of a conversation; the answers are targets.

        Raises:
          BadRowError: if the row cannot be used, or the template does not let answers be found.
        """
        self._check_texts(conversation)
        text, spans = self._render(conversation)
        check_unicode(text, conversation.source)
        encoded = self._encoder.encode(text)
        if not self.template.is_tagged:
            spans = [_up_to_end_of_turn(span, text, encoded) for span in spans]
        target_N = _inside(spans, encoded)
        target_N[:1] = False  # nothing precedes it
        if not target_N.any():
            raise BadRowError(
                f"row is broken. {conversation.source}: no token of an answer. "
                f"{self.template.name} writes nothing for it. Remove the row, or leave such rows "
                f"out with --skip-bad."
            )
        self.num_unended += not encoded.control_N[np.flatnonzero(target_N)[-1]]
        mark_N = np.where(target_N, TARGET, CONTEXT).astype(np.uint8)
        mark_N[0] = BEGIN
        return MarkedDocument(
            source=conversation.source,
            digest_text=conversation.key(),
            token_N=encoded.token_N,
            mark_N=mark_N,
            num_bytes=_text_bytes(text, [(0, len(text))], encoded),
            target_bytes=_text_bytes(text, spans, encoded),
        )

    def _check_texts(self, conversation: Conversation) -> None:
        """Refuses texts with the names of control tokens, which would end turns or open them."""
        for text in conversation.texts():
            if found := self._forbidden.search(text):
                raise BadRowError(
                    f"control token stands in a row. {conversation.source}: a text holds "
                    f"{found[0]!a}. Only the chat template writes these. Correct or remove the "
                    f"row, or leave such rows out with --skip-bad."
                )

    def _render(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Returns the whole text, and the characters of the wanted answers."""
        tools, source = conversation.tools, conversation.source
        messages, (whole, spans) = self._written(conversation)
        wanted = conversation.answers()
        if self._answers == "last":
            wanted = wanted[-1:]
        if self.template.is_tagged:
            if self._answers == "all" and not conversation.has_given_answers():
                return whole, spans
            wanted = wanted[:1]
        found = []
        for index in wanted:
            prompt = self.template.render(messages[:index], tools, source, prompt=True).text
            if not whole.startswith(prompt):
                asked = f"the first {index} messages with the prompt for an answer"
                raise self._parting(prompt, whole, asked, source)
            stop = len(whole)
            if index + 1 < len(messages):
                upto = self.template.render(messages[: index + 1], tools, source).text
                stop = len(self._shared(upto, whole, f"the first {index + 1} messages", source))
            found.append((len(prompt), stop))
        if self.template.is_tagged:
            return whole, [span for span in spans if span[0] >= found[0][0]]
        return whole, found

    def _written(self, conversation: Conversation) -> tuple[list[Message], Rendered]:
        """Returns messages as the template reads them, and what it writes.

        It reads arguments of calls as objects, as transformers wants them, or as text: with objects
        it then fails, or writes them as Python does.
        """
        forms, arguments = [conversation.messages], conversation.arguments()
        if arguments:
            forms.append(conversation.with_arguments_as_text())
        of_python = {str(one) for one in arguments} - {as_json(one) for one in arguments}
        found: list[tuple[int, list[Message], Rendered]] = []
        errors: list[BadRowError] = []
        for messages in forms:
            try:
                rendered = self.template.render(messages, conversation.tools, conversation.source)
            except BadRowError as error:
                errors.append(error)
                continue
            # A message may hold what Python writes as well, whatever the template reads.
            count = sum(rendered.text.count(text) for text in of_python)
            found.append((count, messages, rendered))
            if not count:
                break
        if not found:
            raise errors[0]
        _, messages, rendered = min(found, key=lambda one: one[0])
        return messages, rendered

    def _shared(self, upto: str, whole: str, what: str, source: str) -> str:
        """Returns the text of the first messages as it stands within the whole.

        A template may end each conversation with a further control token, behind the one that ends
        the turn.

        Raises:
          BadRowError: if the template writes these messages otherwise when more follow.
        """
        shared = upto
        while not whole.startswith(shared):
            shorter = self._without_control(shared.rstrip())
            if shorter is None:
                raise self._parting(upto, whole, what, source)
            shared = shorter
        if shared != upto and self._without_control(shared.rstrip()) is None:
            raise self._parting(upto, whole, what, source)
        return shared

    def _without_control(self, text: str) -> str | None:
        """Returns a text without the control token at its end; None if there is none."""
        names = (name for name in self._encoder.controls if name and text.endswith(name))
        longest = max(names, key=len, default=None)
        return None if longest is None else text.removesuffix(longest)

    def _parting(self, part: str, whole: str, what: str, source: str) -> BadRowError:
        """Returns the error about a template that writes messages otherwise when more follow.

        Args:
          part: the text that the whole does not begin with.
          what: what it is the text of.
        """
        pairs = enumerate(zip(part, whole, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(part), len(whole)))
        remedy = "name a template that marks answers with generation tags (--chat-template FILE)"
        if self._answers != "last":
            remedy = f"learn last answers only (--answers last), {remedy}"
        remedy += ", or leave such rows out with --skip-bad"
        return BadRowError(
            f"answers cannot be found. {source}: {self.template.name} writes {what} otherwise "
            f"when more follow: from character {at}, {part[at : at + SHOWN]!r} alone and "
            f"{whole[at : at + SHOWN]!r} in the whole. The model would be taught what it never "
            f"reads. {remedy[0].upper()}{remedy[1:]}."
        )


def _up_to_end_of_turn(span: Span, text: str, encoded: Encoded) -> Span:
    """Leaves out the white space behind the control token that ends an answer."""
    first, stop = span
    inside_N = encoded.control_N & (encoded.first_N >= first) & (encoded.stop_N <= stop)
    ends = encoded.stop_N[inside_N]
    if len(ends) and not text[ends[-1] : stop].strip():
        return first, int(ends[-1])
    return span


def _inside(spans: Sequence[Span], encoded: Encoded) -> np.ndarray:
    """Returns which tokens stand for a character of a span; control tokens where they begin.

    A control token may take in the white space around it, of an answer too.
    """
    first_N, stop_N = encoded.first_N, encoded.stop_N
    inside_N = np.zeros(len(first_N), bool)
    for first, stop in spans:
        overlap_N = (stop_N > first) & (first_N < stop)
        begins_N = (first_N >= first) & (first_N < stop)
        inside_N |= np.where(encoded.control_N, begins_N, overlap_N)
    return inside_N


def _text_bytes(text: str, spans: Sequence[Span], encoded: Encoded) -> int:
    """Returns the bytes of UTF-8 in spans, without those of control tokens."""
    total = 0
    for first, stop in spans:
        total += len(text[first:stop].encode("utf-8"))
        control_N = encoded.control_N & _inside([(first, stop)], encoded)
        for a, b in zip(encoded.first_N[control_N], encoded.stop_N[control_N], strict=True):
            total -= len(text[a : min(b, stop)].encode("utf-8"))
    return total
