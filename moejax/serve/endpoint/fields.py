"""Values of a JSON body, each of the type and in the range that its reader names.

A body comes from anywhere: whatever it holds is read, or refused in one line.
"""

import json
import math
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any, NoReturn

from moejax.errors import InputError
from moejax.serve.texts import is_unicode

LONGEST_SHOWN = 60  # characters of a value in a message


class RefusedError(Exception):
    """A request that is not answered as it asks. Becomes OpenAI's JSON of an error.

    Attributes:
      status: of HTTP.
      param: the field that is wrong.
      code: a word for programs.
      headers: of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = int(status), param, code
        self.headers = headers or {}

    @property
    def outcome(self) -> str:
        """How the request is counted."""
        known = {
            HTTPStatus.TOO_MANY_REQUESTS: "busy",
            HTTPStatus.SERVICE_UNAVAILABLE: "not_ready",
        }
        usual = "failed" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "refused"
        return known.get(HTTPStatus(self.status), usual)

    def body(self) -> dict[str, Any]:
        """Returns OpenAI's JSON."""
        kinds = {
            HTTPStatus.UNAUTHORIZED: "authentication_error",
            HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
        }
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(HTTPStatus(self.status), usual)
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


def to_json(value: Any) -> bytes:
    """Returns JSON in UTF-8. Halves of characters, which JSON may hold and UTF-8 not, are codes."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(
        "utf-8", "backslashreplace"
    )


def parse_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body.

    Raises:
      RefusedError: if it is none.
    """

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number of JSON")

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # also of UTF-8, and of very long numbers
        raise RefusedError(
            f"body is no JSON. {_shown(str(error))}. It must be a JSON object in UTF-8. Correct it."
        ) from None
    if not isinstance(value, dict):
        raise RefusedError(
            f"body is no JSON object. Got {_kind(value)}. It must have fields. Write "
            f'{{"prompt": "Once", "max_tokens": 20}}.'
        )
    return value


class Fields:
    """The fields of an object, read one by one. Null is as if the field were not there."""

    def __init__(self, values: dict[str, Any], place: str = ""):
        """Takes an object, and the path of fields that leads to it, such as `messages[0].`."""
        self._values, self._place = values, place
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """Returns a value of any type; None if there is none."""
        self._read.add(name)
        return self._values.get(name)

    def flag(self, name: str) -> bool:
        """Returns true or false, which is the default."""
        value = self.get(name)
        if value is not None and type(value) is not bool:
            self.refuse(name, value, "It is true or false")
        return bool(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        """Returns a whole number from low to high, or None."""
        value = self.get(name)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            self.refuse(name, value, f"It is a whole number from {low} to {high}")
        return value

    def number(self, name: str, rule: str, low: float, high: float) -> float | None:
        """Returns a number from low to high, or None.

        Args:
          rule: the range in words.
        """
        value = self.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            self.refuse(name, value, rule)
        return float(value)

    def text(self, name: str) -> str | None:
        """Returns a text, or None."""
        value = self.get(name)
        return None if value is None else self.checked_text(name, value)

    def checked_text(self, name: str, value: Any) -> str:
        """Returns a value that must be a text of whole characters."""
        if not isinstance(value, str) or not is_unicode(value):
            self.refuse(name, value, "It is a text of Unicode")
        return value

    def fields(self, name: str) -> "Fields | None":
        """Returns the fields of an object inside, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, value, "It is an object")
        return Fields(value, f"{self._place}{name}.")

    def accept(self, neutral: Mapping[str, Collection[Any]]) -> None:
        """Takes fields that have no effect here, as long as their values ask for none."""
        for name, values in neutral.items():
            value = self.get(name)
            if value is not None and not any(_same(value, other) for other in values):
                path, accepted = f"{self._place}{name}", " or ".join(map(json.dumps, values))
                raise RefusedError(
                    f"`{path}` is not supported. Only {accepted} is accepted. Leave it out.",
                    param=path,
                )

    def accept_any(self, *names: str) -> None:
        """Takes fields that ask for nothing, whatever they hold."""
        self._read.update(names)

    def end(self) -> None:
        """Refuses fields that nobody has read, but for nulls."""
        for name, value in self._values.items():
            if name not in self._read and value is not None:
                self.refuse(name, value, "It is unknown here", "Leave it out")

    def refuse(self, name: str, value: Any, rule: str, remedy: str = "Change it") -> NoReturn:
        """Refuses the request for the value of a field.

        Raises:
          RefusedError: always.
        """
        path = f"{self._place}{name}"
        raise RefusedError(
            f"`{_shown(path)}` is wrong. Got {_said(value)}. {rule}. {remedy}.", param=path[:200]
        )


def _same(value: Any, other: Any) -> bool:
    """Whether a value equals another one, true and false not taken for numbers."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return kinds.get(type(value), "null" if value is None else "a number")


def _said(value: Any) -> str:
    """Returns a value for a message: itself if it is short, else its kind."""
    if isinstance(value, str):
        return repr(_shown(value))
    if isinstance(value, dict | list) or (
        type(value) is int and value.bit_length() > LONGEST_SHOWN
    ):
        return _kind(value)
    return json.dumps(value)


def _shown(text: str) -> str:
    """Returns a text on one line, not too long."""
    text = " ".join(text[: 4 * LONGEST_SHOWN].split())
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def refused(error: InputError, param: str | None) -> RefusedError:
    """Returns an error of the house as one of a request."""
    return RefusedError(str(error), param=param)
