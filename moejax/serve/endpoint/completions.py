"""Bodies and answers of `POST /v1/completions`."""

from collections.abc import Mapping, Sequence
from typing import Any

from moejax.serve.endpoint.answers import AnswerToken, Piece
from moejax.serve.endpoint.fields import Fields, RefusedError
from moejax.serve.endpoint.jobs import EncodedPrompt, Job, ServedModel, read_job, read_top
from moejax.serve.texts import TokenTexts

NAME, CHUNK, PREFIX = "text_completion", "text_completion", "cmpl"
TOKENS = 16  # OpenAI's default
NEUTRAL: Mapping[str, Any] = {"best_of": (1,), "suffix": ("",)}


def read(values: dict[str, Any], model: ServedModel) -> Job:
    """Returns what a body asks for.

    Raises:
      RefusedError: for the first wrong field.
    """
    fields = Fields(values)
    prompts = _prompts(fields, model)
    echo, logprobs = fields.flag("echo"), read_top(fields, "logprobs")
    tokens = fields.whole("max_tokens", 0, model.positions)
    if tokens == 0 and not echo:
        fields.refuse("max_tokens", 0, "It is 0 only with echo: nothing would be returned")
    fields.accept(NEUTRAL)
    return read_job(
        fields,
        model,
        prompts,
        tokens=TOKENS if tokens is None else tokens,
        stop_ids=model.vocabulary.stops,
        logprobs=logprobs,
        echo=echo,
    )


def _prompts(fields: Fields, model: ServedModel) -> list[EncodedPrompt]:
    """Returns the prompts of a text, of ids, or of a list of either."""
    value = fields.get("prompt")
    listed = value if isinstance(value, list) else [value]
    if not listed or type(listed[0]) is int:
        listed = [listed]  # ids of one prompt
    if len(listed) > model.texts:
        raise RefusedError(
            f"too many prompts. Got {len(listed)}. A request has at most {model.texts}. Send "
            f"several requests.",
            param="prompt",
        )
    return [_prompt(fields, one, model) for one in listed]


def _prompt(fields: Fields, value: Any, model: ServedModel) -> EncodedPrompt:
    if isinstance(value, str):
        text = fields.checked_text("prompt", value)
        return EncodedPrompt(model.vocabulary.encode(text), text)
    if not isinstance(value, list):
        fields.refuse("prompt", value, "It is a text, ids, or a list of texts or of lists of ids")
    if not value:
        fields.refuse("prompt", value, "It has at least one token")
    for id in value:
        if type(id) is not int or not 0 <= id < model.vocab_size:
            rule = f"Ids are at least 0 and below {model.vocab_size}, the model's vocabulary"
            fields.refuse("prompt", id, rule)
    return EncodedPrompt(value, model.vocabulary.tokenizer.decode(value))


def choice(piece: Piece, index: int, job: Job, texts: TokenTexts) -> dict[str, Any]:
    """Returns an answer, or a piece of one in a stream, as OpenAI's JSON."""
    logprobs = None if job.logprobs is None else _logprobs(piece.tokens, job.logprobs, texts)
    return {
        "index": index,
        "text": piece.text,
        "logprobs": logprobs,
        "finish_reason": piece.finished,
    }


chunk = choice  # a stream sends pieces in the same form


def opening(index: int) -> dict[str, Any] | None:
    """Returns the choice of a stream's first chunk; None: there is none without text."""
    return None


def _logprobs(tokens: Sequence[AnswerToken], top: int, texts: TokenTexts) -> dict[str, Any]:
    """Returns lists with an entry for each token."""
    return {
        "tokens": [texts(shown.id) for shown in tokens],
        "token_logprobs": [shown.token and shown.token.logprob for shown in tokens],
        "top_logprobs": [_top(shown, texts) for shown in tokens] if top else None,
        "text_offset": [shown.start for shown in tokens],
    }


def _top(shown: AnswerToken, texts: TokenTexts) -> dict[str, float] | None:
    """Returns the likeliest tokens and the token itself; the likelier of two with one text."""
    if shown.token is None:
        return None
    pairs = [*shown.token.likeliest, (shown.id, shown.token.logprob)]
    found: dict[str, float] = {}
    for id, logprob in pairs:
        found.setdefault(texts(id), logprob)
    return found
