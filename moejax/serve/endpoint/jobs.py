"""What a body asks for: prompts and sampling parameters, checked."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moejax.errors import InputError
from moejax.serve.batch import Request
from moejax.serve.endpoint.fields import Fields, RefusedError, refused
from moejax.serve.programs import LIKELIEST
from moejax.serve.prompts import ChatPrompts, Vocabulary
from moejax.serve.sampling import GREEDY, Sampling
from moejax.serve.texts import TokenTexts, checked_stops

STOPS = 16  # OpenAI takes 4; tasks of lm-eval send more
STOP_LENGTH = 1000  # characters
SEEDS = 2**32
# Fields of both forms that have no effect here, with the values that ask for none.
NEUTRAL = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "store": (False,),
}
IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # say who asks


@dataclass(frozen=True)
class ServedModel:
    """The model, and the most that may be asked of it.

    Attributes:
      name: as bodies name it.
      chat: turns messages into prompts; None if the model has no chat template.
      vocab_size: of the weights.
      positions: of a text, its prompt included.
      texts: of a body: prompts times n.
    """

    name: str
    vocabulary: Vocabulary
    token_texts: TokenTexts
    chat: ChatPrompts | None
    vocab_size: int
    positions: int
    texts: int


class EncodedPrompt(NamedTuple):
    """Ids of a prompt, and its text as a client sent it."""

    ids: list[int]
    text: str


@dataclass(frozen=True)
class Job:
    """Texts that a body asks for.

    Attributes:
      prompts: each is continued n times.
      requests: one for each text; those of a prompt are neighbours.
      stops: texts that end a text.
      logprobs: number of the likeliest tokens beside each; None: no logprobs.
      echo: whether a text begins with its prompt.
      stream: whether it is sent while it grows.
      usage: whether a stream ends with the numbers of tokens.
    """

    prompts: tuple[EncodedPrompt, ...]
    requests: tuple[Request, ...]
    stops: tuple[str, ...]
    logprobs: int | None
    echo: bool
    stream: bool
    usage: bool

    def prompt_of(self, number: int) -> EncodedPrompt:
        """Returns the prompt of a text."""
        return self.prompts[number * len(self.prompts) // len(self.requests)]


def read_job(
    fields: Fields,
    model: ServedModel,
    prompts: Sequence[EncodedPrompt],
    *,
    tokens: int | None,
    stop_ids: frozenset[int],
    logprobs: int | None,
    echo: bool = False,
) -> Job:
    """Reads the fields that both forms have, and refuses those that nobody has read.

    Args:
      tokens: most tokens of each text; None: as many as there are positions.
    Raises:
      RefusedError: for the first wrong field.
    """
    check_name(fields, model)
    sampling, stops = _sampling(fields), _stops(fields)
    n = fields.whole("n", 1, model.texts) or 1
    stream = fields.flag("stream")
    usage = _usage(fields, stream)
    fields.accept(NEUTRAL)
    fields.accept_any(*IGNORED)
    fields.end()
    if len(prompts) * n > model.texts:
        raise RefusedError(
            f"too many texts. Got {len(prompts)} prompts, n is {n}. A request has at most "
            f"{model.texts} texts. Send several requests.",
            param="n",
        )
    requests = [
        Request(
            prompt.ids,
            _room(prompt, tokens, model),
            sampling,
            stop_ids,
            number * n + copy,
            logprobs or 0,
            scored=echo and logprobs is not None,
        )
        for number, prompt in enumerate(prompts)
        for copy in range(n)
    ]
    return Job(tuple(prompts), tuple(requests), stops, logprobs, echo, stream, usage)


def _usage(fields: Fields, stream: bool) -> bool:
    """Returns whether a stream ends with the numbers of tokens."""
    options = fields.fields("stream_options")
    if options is None:
        return False
    if not stream:
        fields.refuse("stream_options", {}, "It is of streams", "Set stream, or leave it out")
    usage = options.flag("include_usage")
    options.accept({"include_obfuscation": (False,)})
    options.end()
    return usage


def check_name(fields: Fields, model: ServedModel) -> None:
    """Refuses the name of another model."""
    name = fields.text("model")
    if name is not None and name != model.name:
        raise RefusedError(
            f"no model {name[:200]!r}. {model.name!r} is served here. Name it, or leave it out.",
            status=404,
            param="model",
            code="model_not_found",
        )


def _sampling(fields: Fields) -> Sampling:
    temperature = fields.number("temperature", "It is from 0 to 100", 0, 100)
    top_p = fields.number("top_p", "It is above 0 and at most 1", 0, 1)
    if top_p == 0:
        fields.refuse("top_p", top_p, "It is above 0 and at most 1")
    top_k = fields.whole("top_k", 1, 2**31 - 1)
    min_p = fields.number("min_p", "It is from 0 to 1", 0, 1)
    seed = fields.whole("seed", -(2**63), 2**63 - 1)
    if temperature == 0:
        return GREEDY
    # Of clients that name no seed each gets other draws.
    seed = secrets.randbelow(SEEDS) if seed is None else seed % SEEDS
    given = 1.0 if temperature is None else temperature
    return Sampling(given, top_k, 1.0 if top_p is None else top_p, min_p or 0.0, seed)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    rule = f"It is a text, or up to {STOPS} texts, each of at most {STOP_LENGTH:,} characters"
    if not isinstance(stops, list) or len(stops) > STOPS:
        fields.refuse("stop", value, rule)
    texts = tuple(fields.checked_text("stop", stop) for stop in stops)
    if any(len(stop) > STOP_LENGTH for stop in texts):
        fields.refuse("stop", value, rule)
    try:
        return checked_stops(texts)
    except InputError as error:
        raise refused(error, "stop") from None


def _room(prompt: EncodedPrompt, tokens: int | None, model: ServedModel) -> int:
    """Returns the most tokens that continue a prompt.

    Raises:
      RefusedError: if there is no position for them, or the model lacks a token of the prompt.
    """
    if max(prompt.ids, default=0) >= model.vocab_size:
        raise RefusedError(
            f"prompt has an unknown token. Its id is {max(prompt.ids)}, the model has "
            f"{model.vocab_size} tokens. Leave that text out.",
            param="prompt",
        )
    length = len(prompt.ids)
    wanted = max(1, model.positions - length) if tokens is None else tokens
    if length + wanted > model.positions:
        raise RefusedError(
            f"text would be too long. The prompt has {length} tokens, up to {wanted} continue it. "
            f"A text has {model.positions} positions here. Shorten the prompt, or ask for fewer "
            f"tokens.",
            param="prompt" if length >= model.positions else "max_tokens",
            code="context_length_exceeded",
        )
    return wanted


def read_top(fields: Fields, name: str) -> int | None:
    """Returns a number of likeliest tokens."""
    return fields.whole(name, 0, LIKELIEST)
