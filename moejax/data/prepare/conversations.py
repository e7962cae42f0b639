"""Conversations out of the rows of JSONL and Parquet files.

A row has `messages`, or `prompt` and `completion`, or `instruction` (with `input`) and `output`.
However it is spelled, there is one form inside. Fields that are null are left out at any depth:
Parquet and `datasets` give every row the fields of all others, as null. Arguments of calls are
objects, whether a row has objects or their JSON; in that text a null is the author's, and stays.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejax.data.prepare.inputs import kind_of
from moejax.data.prepare.rows import BadRowError, Row, read_lines, read_parquet
from moejax.errors import InputError

DEEPEST = 100  # levels of lists and objects in a message
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
    given: int = 0  # messages of `prompt`, which are context

    def answers(self) -> list[int]:
        """Returns the indices of the assistant's messages behind those that are given."""
        roles = [message["role"] for message in self.messages]
        return [i for i, role in enumerate(roles) if role == "assistant" and i >= self.given]

    def has_given_answers(self) -> bool:
        """Whether there are messages of the assistant that are context."""
        return any(message["role"] == "assistant" for message in self.messages[: self.given])

    def arguments(self) -> list[dict[str, Any]]:
        """Returns the arguments of all calls of tools."""
        calls = [call for message in self.messages for call in _calls(message)]
        return [call["arguments"] for call in calls if "arguments" in call]

    def with_arguments_as_text(self) -> list[Message]:
        """Returns the messages with the arguments of calls as JSON, which some templates read."""
        messages = copy.deepcopy(self.messages)
        for call in (call for message in messages for call in _calls(message)):
            if "arguments" in call:
                call["arguments"] = as_json(call["arguments"])
        return messages

    def key(self) -> str:
        """Returns a text that is the same for the same conversation, however a row spells it."""
        content = {"messages": self.messages, "tools": self.tools}
        return json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)

    def texts(self) -> Iterator[str]:
        """Yields every text of messages and tools."""
        return _texts([self.messages, self.tools])


def read_chat_rows(files: list[Path]) -> Iterator[Row]:
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


def conversation_of(row: Row) -> Conversation:
    """Returns the conversation of a row.

    Raises:
      BadRowError: names the row and what is wrong with it.
    """
    value, source = row.value(), row.source
    if not isinstance(value, dict):
        raise _no_conversation(source, type(value).__name__)
    listed, given = _listed(value, source)
    messages = [_message(message, index, source) for index, message in enumerate(listed)]
    conversation = Conversation(messages, _tools(value.get("tools"), source), source, given)
    if not conversation.answers():
        roles = ", ".join(message["role"] for message in messages[:8]) or "no message"
        raise _bad(source, f"it has no assistant turn ({roles})", "An answer is what is learned")
    return conversation


def _listed(value: dict[str, Any], source: str) -> tuple[list[Any], int]:
    """Returns the messages of a row in any of the three forms, and how many are given."""
    if value.get("messages") is not None:
        if isinstance(value["messages"], list):
            return value["messages"], 0
        raise _bad(source, f"messages is {type(value['messages']).__name__}", "It must be a list")
    for question, answer in PAIRS:
        if question in value and answer in value:
            asked = value[question]
            if question == "instruction" and isinstance(asked, str) and value.get("input"):
                asked = f"{asked}\n\n{value['input']}"
            system = [{"role": "system", "content": value["system"]}] if value.get("system") else []
            before = [*system, *_turns(asked, "user")]
            return [*before, *_turns(value[answer], "assistant")], len(before)
    raise _no_conversation(source, ", ".join(sorted(value)[:8]) or "no field")


def _turns(value: Any, role: str) -> list[Any]:
    """Returns the messages of a prompt or completion: a list of some, or the content of one."""
    if isinstance(value, list) and any(isinstance(one, dict) and "role" in one for one in value):
        return value
    return [{"role": role, "content": value}]


def _message(message: Any, index: int, source: str) -> Message:
    """Returns a checked message in the form of this module."""
    if not isinstance(message, dict):
        raise _bad(source, f"message {index} is {type(message).__name__}", "It must be an object")
    for call in _calls(message):
        if "arguments" in call and call["arguments"] is None:
            call["arguments"] = {}  # Parquet has no object without fields
    kept = _without_nulls(message, source)
    if isinstance(kept.get("tool_calls"), str):
        kept["tool_calls"] = _from_json(kept["tool_calls"], list, "tool_calls", source)
    for call in _calls(kept):
        if "arguments" in call:
            call["arguments"] = _arguments(call["arguments"], f"message {index}", source)
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


def _calls(message: Message) -> Iterator[dict[str, Any]]:
    """Yields what a message calls: objects that may have `arguments`."""
    calls = message.get("tool_calls")
    for call in (*(calls if isinstance(calls, list) else ()), message.get("function_call")):
        inner = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(inner, dict):
            yield inner


def _arguments(arguments: Any, where: str, source: str) -> dict[str, Any]:
    """Returns the arguments of a call, an object or the JSON of one."""
    if isinstance(arguments, str):
        arguments = _from_json(arguments, dict, f"{where}, arguments of a call", source)
    if not isinstance(arguments, dict):
        seen = type(arguments).__name__
        raise _bad(source, f"{where}, arguments of a call: {seen}", "They must be an object")
    return arguments


def _tools(tools: Any, source: str) -> list[Any] | None:
    """Returns a row's tools, a list or the JSON of one."""
    if isinstance(tools, str):
        return _from_json(tools, list, "tools", source) or None
    if tools is not None and not isinstance(tools, list):
        raise _bad(source, f"tools is {type(tools).__name__}", "It must be a list")
    return _without_nulls(tools, source) or None


def _from_json(text: str, kind: type, name: str, source: str) -> Any:
    """Returns the list or object that a text spells, an empty one for a blank text."""
    rule = f"It must be {'a list' if kind is list else 'an object'}"
    try:
        value = json.loads(text) if text.strip() else kind()
    except (json.JSONDecodeError, RecursionError) as error:
        raise _bad(source, f"{name} is not JSON ({error})", rule) from error
    if not isinstance(value, kind):
        raise _bad(source, f"{name} is the JSON of {type(value).__name__}", rule)
    _without_nulls(value, source)  # for its depth
    return value


def as_json(value: Any) -> str:
    """Returns the JSON that templates write."""
    return json.dumps(value, ensure_ascii=False)


def _without_nulls(value: Any, source: str, depth: int = 0) -> Any:
    """Returns a copy without the fields that are null."""
    if depth > DEEPEST:
        raise _bad(source, f"it is nested more than {DEEPEST} deep", "Templates write less")
    if isinstance(value, dict):
        return {
            name: _without_nulls(inner, source, depth + 1)
            for name, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list):
        return [_without_nulls(inner, source, depth + 1) for inner in value]
    return value


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
