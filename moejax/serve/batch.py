"""Texts that are continued together: a free slot takes the next request.

The host decides call by call which rows run. A prompt enters in pieces. Between two pieces every
text that has begun grows by a token, so no text waits for another's end. Processes of one program
that are given the same requests make the same calls.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.errors import InputError, RunError
from moejax.model.cached import Loads
from moejax.runtime.processes import ALONE, Processes
from moejax.serve.programs import LIKELIEST, LONG, SHORT, NewTokens, Programs, no_tokens
from moejax.serve.sampling import GREEDY, NOT_FINITE, Draws, Sampling
from moejax.step.state import TrainState


@dataclass(frozen=True)
class Request:
    """A prompt, and how it is continued.

    Attributes:
      ids: the prompt's, at least one.
      tokens: the most that continue it; 0 only scores it.
      stops: ids that end the text, and are not part of it.
      number: with the seed decides the draws.
      likeliest: number of the likeliest tokens that are reported, at most `LIKELIEST`.
      scored: whether the log probabilities of the prompt's tokens are reported too.
      routing: whether the experts of its tokens are reported. The model has experts.
    """

    ids: Sequence[int]
    tokens: int
    sampling: Sampling = GREEDY
    stops: frozenset[int] = frozenset()
    number: int = 0
    likeliest: int = 0
    scored: bool = False
    routing: bool = False


class Token(NamedTuple):
    """A token of a text, the log of its chance, and the likeliest ones with theirs, in order."""

    id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """News of a text.

    Attributes:
      key: as `Batch.submit` returned it.
      tokens: tokens that continue the text.
      scored: tokens of the prompt behind its first, if they were asked for.
      ended: "stop", "length", or "not finite" where the logits are not; None: it goes on.
      experts: arrays expert_TLK of the tokens, of prompt and text, that ran since the last news,
        if they were asked for: the K experts that each of the L layers with experts chose. The
        last token of a text that ends by its length does not run.
    """

    key: int
    tokens: tuple[Token, ...] = ()
    scored: tuple[Token, ...] = ()
    ended: str | None = None
    experts: tuple[np.ndarray, ...] = ()


@dataclass
class _Text:
    """A request under way."""

    key: int
    request: Request
    ids: list[int]
    device: int = 0
    slot: int = 0
    cached: int = 0  # ids that are in the cache
    scored: list[Token] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)

    def news(self, tokens: tuple[Token, ...], ended: str | None) -> Event:
        """Returns an event, and what was held back for it."""
        scored, experts = tuple(self.scored), tuple(self.experts)
        self.scored, self.experts = [], []
        return Event(self.key, tokens, scored, ended, experts)

    @property
    def waits(self) -> int:
        """Ids of the prompt that are not in the cache."""
        return max(0, len(self.request.ids) - self.cached)

    @property
    def grown(self) -> int:
        return len(self.ids) - len(self.request.ids)


class Batch:
    """The texts in the slots of programs, and the requests that wait for one.

    Attributes:
      count: is given the loads of each call, with slots for experts.
      follow: is given the weights and the logits of a call that runs; returns the weights for the
        next call. None: weights stay.
    """

    def __init__(
        self,
        programs: Programs,
        state: TrainState,
        processes: Processes = ALONE,
        count: Callable[[Loads], None] | None = None,
        follow: Callable[[TrainState, jax.Array], TrainState] | None = None,
    ):
        """Takes weights as the programs take them; allocates the cache."""
        self._programs, self._state, self._processes = programs, state, processes
        self.count, self.follow = count, follow
        self._cache = programs.empty_cache()
        self._waiting: deque[_Text] = deque()
        self._texts: dict[int, _Text] = {}  # of the slots
        self._free = [list(range(programs.slots)) for _ in range(programs.devices)]
        self._next_key = 0

    @property
    def running(self) -> int:
        """Texts that have a slot."""
        return len(self._texts)

    @property
    def waiting(self) -> int:
        """Requests that have none yet."""
        return len(self._waiting)

    def submit(self, request: Request) -> int:
        """Adds a request. Returns the key of its events.

        Raises:
          InputError: if the prompt has no token, a slot no room for the text, or the model no
            experts to report.
        """
        if not request.ids:
            raise InputError("prompt has no token. It has at least one. Write a text.")
        # The last token that is drawn is not kept.
        needed, room = len(request.ids) + max(0, request.tokens - 1), self._programs.positions
        if needed > room:
            raise InputError(
                f"text would be too long. The prompt has {len(request.ids)} tokens, up to "
                f"{request.tokens} continue it. A slot has {room} positions. Shorten the prompt, "
                f"or ask for fewer tokens."
            )
        if request.routing and not self._programs.train_step.cfg.model.has_experts:
            raise InputError(
                "routing of a model without experts is asked for. Every token takes the same way "
                "there. Leave it out."
            )
        self._next_key += 1
        self._waiting.append(_Text(self._next_key, request, list(request.ids)))
        return self._next_key

    def cancel(self, key: int) -> None:
        """Frees a text's slot; does nothing if the text has ended."""
        if key in self._texts:
            self._release(self._texts[key])
        else:
            self._waiting = deque(text for text in self._waiting if text.key != key)

    def step(self) -> list[Event]:
        """Runs a piece of prompts, if any wait, and a token of each text that has begun."""
        self._admit()
        prompts = [text for text in self._texts.values() if text.waits]
        begun = [text for text in self._texts.values() if not text.waits]
        events = self._run(*self._pieces(prompts)) if prompts else []
        if begun:
            events += self._run(self._rows_of(begun, self._programs.slots), 1)
        return events

    def _admit(self) -> None:
        """Gives free slots to requests in their order, on the device that has most."""
        while self._waiting:
            device = max(range(len(self._free)), key=lambda d: len(self._free[d]))
            if not self._free[device]:
                return
            text = self._waiting.popleft()
            text.device, text.slot = device, self._free[device].pop(0)
            self._texts[text.key] = text

    def _release(self, text: _Text) -> None:
        del self._texts[text.key]
        self._free[text.device].append(text.slot)
        self._free[text.device].sort()

    def _pieces(self, prompts: list[_Text]) -> tuple[list[list[_Text]], int]:
        """Returns the texts of each device whose prompts go on, and the tokens of a row.

        Rows are long if no larger share of a call is padding then.
        """

        def call(length: int) -> tuple[list[list[_Text]], float]:
            rows = self._rows_of(prompts, self._programs.rows(self._programs.slots, length))
            count = self._programs.rows(max(map(len, rows)), length)
            new = sum(min(text.waits, length) for own in rows for text in own)
            return rows, new / (count * length)

        (long, share), (short, of_short) = call(LONG), call(SHORT)
        return (long, LONG) if share >= of_short else (short, SHORT)

    def _rows_of(self, texts: list[_Text], most: int) -> list[list[_Text]]:
        """Returns the first texts of each device, in the order in which they were taken up."""
        rows: list[list[_Text]] = [[] for _ in range(self._programs.devices)]
        for text in texts:
            if len(rows[text.device]) < most:
                rows[text.device].append(text)
        return rows

    def _run(self, texts: list[list[_Text]], length: int) -> list[Event]:
        """Runs the next tokens of texts. Returns their news."""
        programs = self._programs
        rows = programs.rows(max(map(len, texts)), length)
        every = rows == programs.slots
        placed = {}
        for device, own in enumerate(texts):
            for place, text in enumerate(own):
                placed[device * rows + (text.slot if every else place)] = text
        tokens = self._new_tokens(placed, rows, length)
        scored = any(text.request.scored and text.waits for text in placed.values())
        routing = any(text.request.routing for text in placed.values())
        arguments = [self._state, programs.place(tokens), self._cache]
        if scored:
            next_RT = programs.place(self._next_tokens(placed, tokens))
            call = programs.score(every, routing)
            logits, self._cache, scores, *more = self._call(call, *arguments, next_RT)
            self._keep_scores(placed, tokens, jax.device_get(_here(scores)))
        else:
            call = programs.extend(every, routing)
            logits, self._cache, *more = self._call(call, *arguments)
        if self.follow is not None:  # the host plans while the devices run
            self._state = self.follow(self._state, logits)
        if programs.expert_slots:
            loads = more.pop(0)
            if self.count is not None:
                self.count(jax.device_get(_here(loads)))
        for expert_RTLK in jax.device_get(_here(more)):
            self._keep_routing(placed, tokens, expert_RTLK)
        for row, text in placed.items():
            text.cached += int(tokens.count_R[row])
        return self._draw(placed, logits, rows * programs.devices)

    def _new_tokens(self, placed: dict[int, _Text], rows: int, length: int) -> NewTokens:
        tokens = no_tokens(self._programs, rows, length)
        for row, text in placed.items():
            new = text.ids[text.cached : text.cached + length]
            tokens.token_RT[row, : len(new)] = new
            tokens.slot_R[row], tokens.start_R[row] = text.slot, text.cached
            tokens.count_R[row] = len(new)
        return tokens

    def _next_tokens(self, placed: dict[int, _Text], tokens: NewTokens) -> np.ndarray:
        next_RT = np.zeros_like(tokens.token_RT)
        for row, text in placed.items():
            behind = text.ids[text.cached + 1 : text.cached + 1 + next_RT.shape[1]]
            next_RT[row, : len(behind)] = behind
        return next_RT

    def _keep_scores(self, placed: dict[int, _Text], tokens: NewTokens, scores: Any) -> None:
        """Appends the scores of prompts' tokens behind those that were run."""
        for row, text in placed.items():
            first, last = text.cached + 1, text.cached + int(tokens.count_R[row])
            if text.request.scored and text.waits:
                for place, id in enumerate(text.request.ids[first : last + 1]):
                    found = (x[row, place] for x in scores)
                    text.scored.append(_token(id, text.request.likeliest, *found))

    def _keep_routing(
        self, placed: dict[int, _Text], tokens: NewTokens, expert_RTLK: np.ndarray
    ) -> None:
        """Appends the experts of the tokens that ran, in 16 bits if their numbers have room."""
        most = np.min_scalar_type(-self._programs.train_step.cfg.moe.num_experts)
        for row, text in placed.items():
            if text.request.routing:
                expert_TLK = expert_RTLK[row, : tokens.count_R[row]]
                text.experts.append(expert_TLK.astype(np.promote_types(np.int16, most)))

    def _draw(self, placed: dict[int, _Text], logits: Any, rows: int) -> list[Event]:
        """Draws the next token of the texts whose prompts are in the cache. Returns their news."""
        events = []
        ready = {row: text for row, text in placed.items() if not text.waits}
        for row, text in list(ready.items()):
            if not text.request.tokens:
                del ready[row]
                is_finite = all(math.isfinite(token.logprob) for token in text.scored)
                events.append(text.news((), "length" if is_finite else "not finite"))
                self._release(text)
        if not ready:
            return events
        rules = [text.request for text in ready.values()]
        likeliest = LIKELIEST if any(rule.likeliest for rule in rules) else 0
        draws = self._programs.place(_draws(ready, rows))
        call = self._programs.draw(_kind(rules), likeliest)
        drawn = jax.device_get(_here(self._call(call, logits, draws)))
        for row, text in ready.items():
            id, *found = (x[row] for x in drawn)
            events.append(self._grow(text, _token(int(id), text.request.likeliest, *found)))
        return events

    def _grow(self, text: _Text, token: Token) -> Event:
        """Appends a token to a text, which may end."""
        ended, new = None, (token,)
        if token.id == NOT_FINITE:
            ended, new = "not finite", ()
        elif token.id in text.request.stops:
            ended, new = "stop", ()
        else:
            text.ids.append(token.id)
            ended = "length" if text.grown == text.request.tokens else None
        if ended is not None:
            self._release(text)
        return text.news(new, ended)

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Calls a function; no process waits for another's compiler."""
        if self._processes.count > 1:
            function = self._processes.compile(function, *arguments)
        return function(*arguments)


def _here(arrays: Any) -> Any:
    """Returns this process's copy of arrays that all devices have."""
    return jax.tree.map(lambda x: x.addressable_data(0), arrays)


def _token(id: int, likeliest: int, logprob: Any, ids_N: Any, logprob_N: Any) -> Token:
    pairs = zip(ids_N[:likeliest].tolist(), logprob_N[:likeliest].tolist(), strict=True)
    return Token(id, float(logprob), tuple(pairs))


def _kind(rules: list[Request]) -> str:
    """Returns the cheapest draw that serves all rules."""
    if all(rule.sampling.temperature == 0 for rule in rules):
        return "greedy"
    return "filtered" if any(rule.sampling.filters for rule in rules) else "all"


def _draws(ready: dict[int, _Text], rows: int) -> Draws:
    """Returns the rules of rows as arrays."""
    everything = np.iinfo(np.int32).max
    draws = Draws(
        np.zeros(rows, np.float32),
        np.full(rows, everything, np.int32),
        np.ones(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.uint32),
        np.zeros(rows, np.int32),
        np.zeros(rows, np.int32),
    )
    for row, text in ready.items():
        rule = text.request.sampling
        values = rule.temperature, rule.top_k or everything, rule.top_p, rule.min_p, rule.seed
        for array, value in zip(draws, (*values, text.request.number, len(text.ids)), strict=True):
            array[row] = value
    return draws


def news(
    batch: Batch,
    requests: Sequence[Request],
    ends: Callable[[int, Token], bool] | None = None,
) -> Iterator[tuple[int, Event]]:
    """Yields the news of texts, each with its prompt's number, as they come, until all have ended.

    Args:
      ends: is given each token, with its prompt's number; returns whether the text ends with it.
    Raises:
      RunError: if logits are not finite.
    """
    numbers = {batch.submit(request): number for number, request in enumerate(requests)}
    going = len(requests)
    while going:
        for event in batch.step():
            number = numbers[event.key]
            if event.ended == "not finite":
                raise RunError(
                    f"logits are not finite. They continue prompt {number}. The checkpoint is as "
                    f"it was. Take another one: --step."
                )
            stopped = [ends(number, token) for token in event.tokens] if ends is not None else []
            if any(stopped):
                batch.cancel(event.key)
                event = event._replace(ended="stop")
            yield number, event
            going -= event.ended is not None
