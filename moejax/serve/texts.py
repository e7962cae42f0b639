"""Texts that grow by tokens: characters that are final, and stop strings that end a text.

A token may hold a part of a character, and a stop string may begin in one token and end in another.
So the end of a text is held back until it is known what it becomes.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from moejax.data.tokenizer import Tokenizer
from moejax.errors import InputError

Decode = Callable[[list[int]], str]
BROKEN = "\ufffd"  # how bytes are decoded that are no character, or not yet
CHARACTER = 4  # most bytes of a character, so most tokens
FEW = 16  # tokens that are decoded again where bytes stay broken


class GrowingText:
    """The text that tokens add behind a prompt. Each token costs the same, however long it is.

    Put together, what `add` and `end` return is `Vocabulary.continuation` up to the first stop
    string. They may differ only where a tokenizer has tokens of single bytes, and these break off
    inside a character or spell U+FFFD: it then shows whole characters before them as broken too.

    Attributes:
      stopped: whether a stop string was found.
      starts: for each token the number of characters before it.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = (), stops: Sequence[str] = ()):
        """Takes the tokenizer's `decode`, ids of the prompt, and texts that end the text."""
        self.stopped, self.starts = False, []
        self._decode, self._stops = decode, tuple(stops)
        # Tokens that are decoded with the next one, and the final characters of their text.
        self._window = list(prompt)
        self._final = len(decode(self._window)) if prompt else 0
        self._open = 0  # tokens since the text last ended in a whole character
        self._held = ""  # final characters that may begin a stop string
        self._shown = 0  # characters that were returned
        self._ended = False

    @property
    def kept(self) -> int:
        """The tokens that make up the text that was returned."""
        if self._ended and not self.stopped:
            return len(self.starts)
        return bisect_left(self.starts, self._shown)

    def add(self, id: int) -> str:
        """Adds a token. Returns the characters that are final now. Nothing behind a stop string."""
        if self.stopped:
            return ""
        self.starts.append(self._shown + len(self._held))
        self._held += self._grow(id)
        return self._show()

    def end(self) -> str:
        """Returns the rest of the text: no token follows."""
        if self.stopped or self._ended:
            return ""
        self._ended = True
        self._held += self._decode(self._window)[self._final :]
        return self._show()

    def _grow(self, id: int) -> str:
        """Returns the characters that a token makes final."""
        self._window.append(id)
        self._open += 1
        text = self._decode(self._window)
        # A tokenizer shows the bytes of an unfinished character as one mark or as one each.
        few = self._open < CHARACTER
        final = text.rstrip(BROKEN) if few else text.removesuffix(BROKEN)
        grown = final[self._final :]
        self._final = max(self._final, len(final))
        if not text.endswith(BROKEN):
            self._shorten(text, self._open)
            self._open = 0
        elif self._open > FEW:
            self._shorten(text, FEW // 2)
        return grown

    def _shorten(self, text: str, count: int) -> None:
        """Keeps the last tokens of the window, if they show the end of its text by themselves.

        The first of them may lose a leading space. Tokens without text would lose it for others.
        """
        window = self._window[-count:]
        own, rest = self._decode(window), len(text) - self._final
        if len(own) > rest and text.endswith(own):
            self._window, self._final = window, len(own) - rest

    def _show(self) -> str:
        """Returns held characters up to a stop string, or to where one may begin."""
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.stopped, length = True, min(places)
        elif self._ended:
            length = len(self._held)
        else:
            length = len(self._held) - max((_begun(self._held, s) for s in self._stops), default=0)
        shown, self._held = self._held[:length], self._held[length:]
        self._shown += length
        return shown


def _begun(text: str, stop: str) -> int:
    """Returns the most last characters of a text that begin a stop string and are not all of it."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


def checked_stops(stops: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns one or several stop strings, or none.

    Raises:
      InputError: if one has no character, or is no text of Unicode.
    """
    stops = (stops,) if isinstance(stops, str) else tuple(stops or ())
    for stop in stops:
        if not isinstance(stop, str) or not stop or not is_unicode(stop):
            raise InputError(
                f"stop string is no text. Got {stop!a}. It has at least one character, and each "
                f"is one of Unicode. Correct it, or leave it out."
            )
    return stops


def is_unicode(text: str) -> bool:
    """Returns whether a text has no half of a surrogate pair, which has no bytes of UTF-8."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


class TokenTexts:
    """The text of single tokens, for lists of tokens."""

    def __init__(self, tokenizer: Tokenizer):
        """Takes the model's tokenizer."""
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bool]] = {}
        # Behind another token a space that begins one is not dropped.
        self._before = tokenizer.encode("a")
        self._text_before = tokenizer.decode(self._before)

    def __call__(self, id: int) -> str:
        """Returns a token's text; its name if it has none, as bytes inside a character."""
        return self._find(id)[0]

    def is_text(self, id: int) -> bool:
        """Returns whether a token has a text of its own."""
        return self._find(id)[1]

    def _find(self, id: int) -> tuple[str, bool]:
        if id not in self._known:
            text = self._tokenizer.decode([*self._before, id])[len(self._text_before) :]
            whole = bool(text) and BROKEN not in text
            self._known[id] = (text if whole else self._tokenizer.name(id), whole)
        return self._known[id]
