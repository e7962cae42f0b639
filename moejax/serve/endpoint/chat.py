"""Bodies and answers of `POST /v1/chat/completions`."""

from collections.abc import Mapping, Sequence
from typing import Any

from moejax.data.prepare.conversations import Message
from moejax.data.prepare.rows import BadRowError
from moejax.errors import InputError
from moejax.serve.endpoint.answers import AnswerToken, Piece
from moejax.serve.endpoint.fields import Fields, RefusedError, refused
from moejax.serve.endpoint.jobs import EncodedPrompt, Job, ServedModel, read_job, read_top
from moejax.serve.texts import TokenTexts

NAME, CHUNK, PREFIX = "chat.completion", "chat.completion.chunk", "chatcmpl"
ROLES = ("system", "developer", "user", "assistant")
MOST = 1000  # messages
NEUTRAL: Mapping[str, Any] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


def read(values: dict[str, Any], model: ServedModel) -> Job:
    """Returns what a body asks for.

    Raises:
      RefusedError: for the first wrong field, or if the model has no chat template.
    """
    if model.chat is None:
        raise RefusedError(
            "This model has no chat template, so /v1/chat/completions is off. Use /v1/completions.",
            code="no_chat_template",
        )
    fields = Fields(values)
    messages = _messages(fields)
    try:
        ids = model.chat.encode(messages)
    except InputError as error:
        if isinstance(error.__cause__, BadRowError):  # its message names a flag of the server
            raise RefusedError(
                f"chat template does not take these messages. It says: "
                f"{error.__cause__.__cause__}. It decides which messages it takes. Write others, "
                f"or use /v1/completions.",
                param="messages",
            ) from None
        raise refused(error, "messages") from None
    names = ("max_completion_tokens", "max_tokens")  # the second is the older one
    counts = [fields.whole(name, 1, model.positions) for name in names]
    scored, top = fields.flag("logprobs"), read_top(fields, "top_logprobs")
    if top is not None and not scored:
        fields.refuse("top_logprobs", top, "It is of logprobs", "Set logprobs, or leave it out")
    fields.accept(NEUTRAL)
    return read_job(
        fields,
        model,
        [EncodedPrompt(ids, "")],
        tokens=next((count for count in counts if count is not None), None),
        stop_ids=model.vocabulary.stops | model.chat.stops,
        logprobs=(top or 0) if scored else None,
    )


def _messages(fields: Fields) -> list[Message]:
    """Returns messages of texts."""
    value = fields.get("messages")
    if not isinstance(value, list) or not 0 < len(value) <= MOST:
        fields.refuse("messages", value, f"It is a list of 1 to {MOST:,} messages")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            fields.refuse("messages", message, "A message is an object with role and content")
        own = Fields(message, f"messages[{number}].")
        role = own.text("role")
        if role not in ROLES:
            own.refuse("role", role, f"It is one of {', '.join(ROLES)}")
        messages.append({"role": role, "content": _content(own)})
        own.accept_any("name")
        own.end()
    return messages


def _content(message: Fields) -> str:
    """Returns a message's text, of one or several parts."""
    value = message.get("content")
    if isinstance(value, str):
        return message.checked_text("content", value)
    if not isinstance(value, list) or not value:
        message.refuse("content", value, "It is a text, or a list of parts of texts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            message.refuse("content", part, 'A part is {"type": "text", "text": TEXT}')
        texts.append(message.checked_text("content", part.get("text")))
    return "".join(texts)


def choice(piece: Piece, index: int, job: Job, texts: TokenTexts) -> dict[str, Any]:
    """Returns an answer as OpenAI's JSON."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": piece.text, "refusal": None},
        "logprobs": _logprobs(piece.tokens, job, texts),
        "finish_reason": piece.finished,
    }


def chunk(piece: Piece, index: int, job: Job, texts: TokenTexts) -> dict[str, Any]:
    """Returns a piece of an answer as a stream has it."""
    return {
        "index": index,
        "delta": {"content": piece.text} if piece.text else {},
        "logprobs": _logprobs(piece.tokens, job, texts),
        "finish_reason": piece.finished,
    }


def opening(index: int) -> dict[str, Any] | None:
    """Returns the choice of a stream's first chunk, which says who speaks."""
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprobs(tokens: Sequence[AnswerToken], job: Job, texts: TokenTexts) -> dict[str, Any] | None:
    if job.logprobs is None:
        return None
    content = []
    for shown in tokens:
        if shown.token is None:
            continue
        top = [_entry(id, logprob, texts) for id, logprob in shown.token.likeliest]
        entry = _entry(shown.id, shown.token.logprob, texts)
        content.append({**entry, "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    text = texts(id)
    known = texts.is_text(id)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if known else None}
