"""Conversations out of the rows of JSONL and Parquet files.

A row has `messages`, or `prompt` and `completion`, or `instruction` (with `input`) and `output`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejax.data.inputs import kind_of
from moejax.data.rows import BadRowError, Line, ParquetRow, read_lines, read_parquet
from moejax.errors import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")
PAIRS = (("prompt", "completion"), ("instruction", "output"))  # of a question and its answer
COLUMNS = ("messages", "prompt", "completion", "instruction", "input", "output", "system", "tools")
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages, the tools that they may call, and their origin."""

    messages: list[Message]
    tools: list[Any] | None
    source: str

    def answers(self) -> list[int]:
        """Returns the indices of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def key(self) -> str:
        """Returns a text that is the same for the same conversation, however a row spells it."""
        content = {"messages": self.messages, "tools": self.tools}
        return json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)

    def texts(self) -> Iterator[str]:
        """Yields every text of messages and tools."""
        return _texts([self.messages, self.tools])


def read_chat_rows(files: list[Path]) -> Iterator[Line | ParquetRow]:
    """Yields the rows of all files.

    Raises:
      InputError: for a file that is neither JSONL nor Parquet.
    """
    for file in files:
        if kind_of(file) == "jsonl":
            yield from read_lines(file)
        elif kind_of(file) == "parquet":
            yield from read_parquet(file, COLUMNS)
        else:
            raise InputError(
                f"no file of conversations. {file} ends in {file.suffix or 'nothing'}. --chat "
                f"reads .jsonl, an object a line, and .parquet. Convert it (jq -c '.[]' turns a "
                f"JSON list into lines), or leave --chat out to read text."
            )


def conversation_of(row: Line | ParquetRow) -> Conversation:
    """Returns the conversation of a row.

    Raises:
      BadRowError: names the row and what is wrong with it.
    """
    value, source = row.value(), row.source
    if not isinstance(value, dict):
        raise _no_conversation(source, type(value).__name__)
    messages = [
        _message(message, index, source) for index, message in enumerate(_listed(value, source))
    ]
    conversation = Conversation(messages, _tools(value.get("tools"), source), source)
    if not conversation.answers():
        roles = ", ".join(message["role"] for message in messages[:8]) or "no message"
        raise _bad(source, f"it has no assistant turn ({roles})", "An answer is what is learned")
    return conversation


def _listed(value: dict[str, Any], source: str) -> list[Any]:
    """Returns the messages of a row in any of the three forms."""
    if value.get("messages") is not None:
        if isinstance(value["messages"], list):
            return value["messages"]
        raise _bad(source, f"messages is {type(value['messages']).__name__}", "It must be a list")
    for question, answer in PAIRS:
        if question in value and answer in value:
            asked = value[question]
            if question == "instruction" and isinstance(asked, str) and value.get("input"):
                asked = f"{asked}\n\n{value['input']}"
            system = [{"role": "system", "content": value["system"]}] if value.get("system") else []
            return [
                *system,
                {"role": "user", "content": asked},
                {"role": "assistant", "content": value[answer]},
            ]
    raise _no_conversation(source, ", ".join(sorted(value)[:8]) or "no field")


def _message(message: Any, index: int, source: str) -> Message:
    """Returns a checked message; fields without a value are left out, as templates expect."""
    if not isinstance(message, dict):
        raise _bad(source, f"message {index} is {type(message).__name__}", "It must be an object")
    kept = {name: value for name, value in message.items() if value is not None}
    role, content = kept.get("role"), kept.get("content")
    if role not in ROLES:
        raise _bad(source, f"message {index} has role {role!r}", f"Roles are {', '.join(ROLES)}")
    if isinstance(content, list):
        kept["content"] = content = _joined(content, index, source)
    calls = role == "assistant" and kept.get("tool_calls")
    if not isinstance(content, str) and not (content is None and calls):
        seen = "null" if content is None else type(content).__name__
        raise _bad(source, f"message {index} ({role}) has content {seen}", "It must be a text")
    return kept


def _joined(parts: list[Any], index: int, source: str) -> str:
    """Returns the text of a content in parts, which must all be texts."""
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise _bad(source, f"message {index} has parts that are no texts", "Only text is read")
    return "".join(map(str, texts))


def _tools(tools: Any, source: str) -> list[Any] | None:
    """Returns a row's tools, a list or the JSON of one."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (json.JSONDecodeError, RecursionError) as error:
            raise _bad(source, f"tools is not JSON ({error})", "It must be a list") from error
    if tools is not None and not isinstance(tools, list):
        raise _bad(source, f"tools is {type(tools).__name__}", "It must be a list")
    return tools or None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _no_conversation(source: str, have: str) -> BadRowError:
    forms = "messages, or " + ", or ".join(" and ".join(pair) for pair in PAIRS)
    return _bad(source, f"it has {have}", f"A conversation is {forms}")


def _bad(source: str, wrong: str, rule: str) -> BadRowError:
    return BadRowError(
        f"row is broken. {source}: {wrong}. {rule}. Correct or remove it, or leave such rows out "
        f"with --skip-bad."
    )
