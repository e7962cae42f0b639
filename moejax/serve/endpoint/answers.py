"""The texts of a job while they grow, with the tokens that make them up."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from moejax.serve.batch import Event, Token
from moejax.serve.endpoint.fields import RefusedError
from moejax.serve.endpoint.jobs import Job, ServedModel
from moejax.serve.texts import GrowingText


class AnswerToken(NamedTuple):
    """A token of an answer.

    Attributes:
      start: characters of the answer before it.
      token: None for the first token of a prompt, which has no log probability.
    """

    id: int
    start: int
    token: Token | None


class Piece(NamedTuple):
    """What an answer grew by; `finished` says how it ended, if it did."""

    text: str
    tokens: Sequence[AnswerToken]
    finished: str | None


class Answer:
    """One text of a job.

    Attributes:
      index: among the texts of the job.
      drawn: number of tokens that were drawn for it, with those of a stop string.
      finished: how it ended; None while it grows.
    """

    def __init__(self, job: Job, index: int, model: ServedModel):
        prompt, decode = job.prompt_of(index), model.vocabulary.tokenizer.decode
        self.index, self.drawn, self.finished = index, 0, None
        self._echo, self._scored = job.echo, job.logprobs is not None
        self._text = GrowingText(decode, prompt.ids, job.stops)
        self._tokens: list[Token] = []
        self._sent = 0  # tokens in pieces
        self._prompt, self._before = prompt, 0
        self._starts: list[int] = []
        if job.echo:
            self._before = len(prompt.text)
            if self._scored:
                self._starts = _starts(prompt.ids, decode)

    def take(self, event: Event) -> Piece | None:
        """Adds news of the text. Returns what it grew by, if anything can be shown.

        Raises:
          RefusedError: if logits are not finite.
        """
        _check_finite(event)
        text, tokens = "", []
        if self._echo and (event.tokens or event.ended or event.scored):
            text, tokens = self._prompt.text, self._prompt_tokens(event.scored)
            self._echo = False
        for token in event.tokens:
            self._tokens.append(token)
            self.drawn += 1
            text += self._text.add(token.id)
            if self._text.stopped:
                break
        if self._text.stopped:
            self.finished = "stop"
        elif event.ended is not None:
            text += self._text.end()
            self.finished = "stop" if self._text.stopped else event.ended
        tokens += self._settled()
        return Piece(text, tokens, self.finished) if text or tokens or self.finished else None

    def _settled(self) -> list[AnswerToken]:
        """Returns the tokens whose characters are shown, and were not at the last call."""
        if not self._scored:
            return []
        first, self._sent = self._sent, self._text.kept
        starts = (self._before + start for start in self._text.starts[first : self._sent])
        tokens = self._tokens[first : self._sent]
        return [AnswerToken(t.id, start, t) for t, start in zip(tokens, starts, strict=True)]

    def _prompt_tokens(self, scored: Sequence[Token]) -> list[AnswerToken]:
        if not self._scored:
            return []
        tokens = (None, *scored)
        found = zip(self._prompt.ids, self._starts, tokens, strict=True)
        return [AnswerToken(id, min(start, self._before), token) for id, start, token in found]


def _starts(ids: Sequence[int], decode: Any) -> list[int]:
    """Returns for each token of a prompt the characters before it."""
    text = GrowingText(decode)
    for id in ids:
        text.add(id)
    return text.starts


def _check_finite(event: Event) -> None:
    """Raises RefusedError for logits that are not finite."""
    tokens = (*event.tokens, *event.scored)
    if event.ended == "not finite" or not all(math.isfinite(t.logprob) for t in tokens):
        raise RefusedError(
            "logits are not finite. They continue this prompt, and other texts go on. Try another "
            "prompt, and tell whoever runs the server.",
            status=500,
            code="not_finite",
        )


def joined(pieces: Sequence[Piece]) -> Piece:
    """Returns pieces of one answer as one."""
    tokens = [token for piece in pieces for token in piece.tokens]
    return Piece("".join(piece.text for piece in pieces), tokens, pieces[-1].finished)


def usage(job: Job, drawn: int) -> dict[str, int]:
    """Returns numbers of tokens as OpenAI's JSON has them."""
    prompts = sum(len(prompt.ids) for prompt in job.prompts)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": drawn,
        "total_tokens": prompts + drawn,
    }
