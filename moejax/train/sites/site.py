"""A site that is a run of its own: its rounds, beside its steps.

At the start of a round the site's part is encoded. While its steps compute, a thread sends the part
to the hub and gets those of all sites, which are averaged at the end. All processes of a site do
the same: process 0 asks the hub how a round is done, and each sends and gets the rows of its
devices.
"""

import hashlib
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.config.load import to_dict
from moejax.config.schema import Config
from moejax.runtime.processes import Processes
from moejax.step.outer import Pending
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep
from moejax.train.sites.hub import token_of
from moejax.train.sites.ledger import WHOLE
from moejax.train.sites.link import Link
from moejax.train.sites.programs import Programs

ENTRY = "sites"  # of manifests: the round at whose start the state is, and tokens of rounds before
SPEED_STEPS = 9  # whose median is a site's speed
Waiting = Callable[[int], AbstractContextManager[None]]  # (step) -> the stage of a wait


class _Round(NamedTuple):
    """A round under way.

    Attributes:
      left: steps still to do.
      pending: as of `Programs.start`.
      arrived: the head of the hub's answer, and rows.
      sent: bytes of rows so far.
    """

    left: int
    steps: int
    pending: Pending
    arrived: Future[tuple[dict[str, Any], np.ndarray]]
    sent: int


class Site:
    """The rounds of a run that is a site.

    Attributes:
      number: of the next round, or of the one under way.
    """

    def __init__(
        self,
        train_step: TrainStep,
        processes: Processes,
        waiting: Waiting,
        on_event: Callable[..., None],
    ):
        """Joins the hub.

        Args:
          on_event: takes a name, a step and values of each round.
        Raises:
          InputError: in all processes, if the hub cannot be reached or refuses the site.
        """
        cfg = train_step.cfg
        host, _, port = (cfg.outer.hub or "").rpartition(":")
        self._link = Link((host.strip("[]"), int(port)), token_of(None), cfg.outer.site)
        self._programs, self._processes = Programs(train_step), processes
        self._waiting, self._on_event = waiting, on_event
        self._tokens_per_step = cfg.train.batch_sequences * cfg.data.sequence_length
        self._last_step = cfg.train.num_steps
        self._rows = self._programs.rows_here()
        form = form_of(cfg, self._programs)
        processes.from_first(lambda: self._link.join(form))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="site")
        self._tokens: deque[int] = deque(maxlen=self._programs.every)
        self._seconds: deque[float] = deque(maxlen=SPEED_STEPS)
        self._round: _Round | None = None
        self._since = 0.0
        self.number = 0

    def resume(self, facts: Mapping[str, Any]) -> None:
        """Goes on at the round of a manifest's entries; at the first without an entry."""
        found = facts.get(ENTRY, {"round": 0, "tokens": []})
        self.number, self._round = found["round"], None
        self._tokens = deque(found["tokens"], maxlen=self._programs.every)

    def facts(self) -> dict[str, Any]:
        """Returns the manifest's entry."""
        return {ENTRY: {"round": self.number, "tokens": list(self._tokens)}}

    @property
    def between_rounds(self) -> bool:
        """Whether a state is whole now: no part of it is on its way."""
        return self._round is None

    def before(self, step: int, state: TrainState) -> TrainState:
        """Begins a round before a step, unless one is under way.

        Rounds that were decided without this site are caught up with first.
        """
        while self._round is None:
            found = self._processes.from_first(lambda: self._link.begin(self.number, self._speed()))
            if "gone" in found:
                state = self._take_whole(step, state)
            elif "missed" in found:
                state = self._apply(step, state, self._get(step))
            else:
                steps = min(found["steps"], self._last_step - step)
                whole = self._programs.whole(state) if found.get("give") else None
                self._round = self._begin(state, steps)
                if whole is not None:  # after this round's part, for which others wait
                    self._thread.submit(self._give, self.number, whole)
                self._since = time.perf_counter()
        return state

    def _speed(self) -> float | None:
        return statistics.median(self._seconds) if self._seconds else None

    def _begin(self, state: TrainState, steps: int) -> _Round:
        payload, sums, pending = self._programs.start(state, np.int32(self._part))
        tokens, number, sent = sum(self._tokens), self.number, self._link.sent

        def exchange() -> tuple[dict[str, Any], np.ndarray]:
            rows, totals = self._programs.to_send(payload), self._programs.to_send(sums[:, None])
            facts = {
                row: {"steps": steps, "tokens": tokens, "sum": int(totals[row][0])} for row in rows
            }
            self._link.put(number, rows, facts)
            return self._link.get(number, self._rows, self._programs.row_bytes)

        return _Round(steps, steps, pending, self._thread.submit(exchange), sent)

    @property
    def _part(self) -> int:
        return self.number % self._programs.every

    def after(self, step: int, state: TrainState) -> TrainState:
        """Ends the round after its last step; after the run's last step, follows the others."""
        now = self._round
        assert now is not None, "a step is in a round"
        if now.left > 1:
            self._round = now._replace(left=now.left - 1)
            return state
        jax.block_until_ready(state.step)
        began = time.perf_counter()
        self._seconds.append((began - self._since) / now.steps)
        with self._waiting(step):
            head, rows = now.arrived.result()
        waited = time.perf_counter() - began
        state = self._apply(step, state, (head, rows), now, waited)
        self._round = None
        return self._follow(step, state) if step == self._last_step else state

    def _apply(
        self,
        step: int,
        state: TrainState,
        arrived: tuple[dict[str, Any], np.ndarray],
        now: _Round | None = None,
        waited: float = 0.0,
    ) -> TrainState:
        """Averages the parts of a round. Without one under way this site takes outer weights."""
        head, data = arrived
        # While this site was cut off. Perhaps one of its processes was earlier than another.
        if any(self._processes.gather("gone" in head)):
            return self._take_whole(step, state)
        weights = {int(site): own["tokens"] for site, own in head["sites"].items()}
        rows = {row: data[:, at] for at, row in enumerate(self._rows)}
        pending = now.pending if now else self._programs.start(state, np.int32(self._part))[2]
        state = self._programs.finish(state, pending, rows, weights, self._part)
        self._on_event(
            "round",
            step,
            round=self.number,
            sites=head["sites"],
            counted=str(self._link.site) in head["sites"],
            waited_s=round(waited, 3),
            sent=self._link.sent - now.sent if now else 0,
        )
        self.number += 1
        self._tokens.append(now.steps * self._tokens_per_step if now else 0)
        return state

    def _get(self, step: int, **how: Any) -> tuple[dict[str, Any], np.ndarray]:
        with self._waiting(step):
            return self._link.get(self.number, self._rows, self._programs.row_bytes, **how)

    def _follow(self, step: int, state: TrainState) -> TrainState:
        """Applies the rounds of sites that have further steps, so that all end alike."""
        while True:
            if self._processes.first:
                self._link.leave()
            found = self._get(step, follows=True)
            # Each process may see the end at another moment: they go as far as all of them saw.
            if any(self._processes.gather("end" in found[0])):
                return state
            state = self._apply(step, state, found)

    def _give(self, number: int, whole: jax.Array) -> None:
        """Sends outer weights and momentum at the start of a round, for a site that asks."""
        rows = self._programs.to_send(whole)
        facts = {row: {"steps": 0, "tokens": 0, "sum": 0} for row in rows}
        self._link.put(number, rows, facts, WHOLE)

    def _take_whole(self, step: int, state: TrainState) -> TrainState:
        """Takes outer weights and momentum from another site, at the start of one of its rounds."""
        size, began = self._programs.whole_bytes, self.number
        with self._waiting(step):
            of_first = self._processes.from_first(
                lambda: self._link.get(began, [], size, kind=WHOLE)[0]["round"]
            )
            _, data = self._link.get(of_first, self._rows, size, kind=WHOLE)
        state = self._programs.take(state, dict(zip(self._rows, data[0], strict=True)))
        self.number = of_first
        self._tokens.clear()
        self._on_event("took_outer", step, round=of_first)
        return state

    def close(self) -> None:
        """Leaves: no round waits for this site any more."""
        if self._processes.first:
            self._link.leave()
        self._link.closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)


def form_of(cfg: Config, programs: Programs) -> dict[str, Any]:
    """Returns what all sites must have alike."""
    same = to_dict(cfg)
    mesh = {name: same["mesh"][name] for name in ("fsdp", "expert", "tensor", "expert_weights")}
    outer = {name: same["outer"][name] for name in ("every", "rate", "momentum", "codec")}
    model = {"model": same["model"], "experts": cfg.moe.num_experts, "seed": cfg.train.seed}
    text = json.dumps([model, cfg.compression.block, mesh, outer], sort_keys=True)
    return {
        "sites": programs.sites,
        "rows": programs.rows,
        "bytes": programs.row_bytes,
        "whole_bytes": programs.whole_bytes,
        "settings": hashlib.sha256(text.encode()).hexdigest()[:12],
    }
