"""The stage of a process, and a watchdog that ends it when a stage takes too long.

A process that no longer takes part (stopped, in an endless loop, on a dead machine) hangs all
others in their next collective, and JAX says nothing. So each process tells the others, once a
second, which stage it is in; one that waits longer than the stage's deadline names the process that
is behind, prints the stack of every thread, and exits with code 124. Deadlines are of stages,
because a long compilation, evaluation or save is not a hang.
"""

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from moejax.runtime.processes import ALONE, Processes

HANG = 124  # exit code, see docs/formats/exit.md
BEAT_S = 1.0
LOOK_S = 0.5
QUIET_S = 2.0  # after so long in one stage a process begins to look at the others
FOLDER = "pulse"
STEPPING = ("input", "step")
# Stages in which a process may be silent for long: lowering a large program lets no thread run.
SILENT = ("start", "plan", "restore", "compile", "on_step")


class Place(NamedTuple):
    """The progress of a process: its stage, the step, and the number of stages entered."""

    stage: str
    step: int
    entered: int

    def __str__(self) -> str:
        if not self.step:
            return self.stage
        return f"step {self.step}" if self.stage == "step" else f"{self.stage} of step {self.step}"


class Watch:
    """Keeps the place of this process. Every process enters the same stages in the same order."""

    def __init__(self, ended: Callable[[str, int, float], None] = lambda *_: None):
        """Takes a function that is told of every ended stage: its name, step and seconds."""
        self._ended = ended
        self.now = (Place("start", 0, 0), time.monotonic())  # replaced as one, for other threads
        self.stepped = False  # whether a step was entered

    def enter(self, stage: str, step: int = 0) -> None:
        """Enters a stage; the one before it has ended."""
        (before, since), now = self.now, time.monotonic()
        self.now = (Place(stage, step, before.entered + 1), now)
        self.stepped = self.stepped or stage == "step"
        self._ended(before.stage, before.step, now - since)

    @contextmanager
    def during(self, stage: str, step: int = 0) -> Iterator[None]:
        """Enters a stage, and afterwards the one before it again."""
        before = self.now[0]
        self.enter(stage, step)
        yield
        self.enter(before.stage, before.step)


class Peer(NamedTuple):
    """The last known state of another process."""

    place: Place
    silent_s: float  # seconds since it was heard of


class Deadlines(NamedTuple):
    """Seconds after which a stage counts as hung, by stage; None: it may take any time.

    Attributes:
      silent_s: after so long without a word from a process it counts as gone, except in `SILENT`.
    """

    by_stage: Mapping[str, float | None]
    silent_s: float | None = None

    def of(self, *stages: str) -> float:
        """Returns the longest deadline of some stages."""
        limits = [self.by_stage.get(stage) for stage in stages]
        return math.inf if None in limits else max(limit for limit in limits if limit is not None)


def find_hang(
    own: tuple[int, Place, float], peers: Mapping[int, Peer], deadlines: Deadlines
) -> str | None:
    """Returns a text about a hang; None if nothing hangs.

    Args:
      own: this process's number, its place, and the seconds that it has been there.
      peers: the other processes, as far as they were heard of.
    """
    index, place, waited = own
    silent_s = math.inf if deadlines.silent_s is None else deadlines.silent_s
    if place.stage not in SILENT and waited > silent_s:
        gone = {
            number: peer
            for number, peer in peers.items()
            if peer.silent_s > silent_s and peer.place.stage not in SILENT
        }
        if gone:
            return f"{_listed(gone)}. Process {index} waits {waited:.0f} s in {place}."
    behind = {n: peer for n, peer in peers.items() if peer.place.entered < place.entered}
    # A process that is behind may take its time too: it may still evaluate, or save.
    if waited <= deadlines.of(place.stage, *(peer.place.stage for peer in behind.values())):
        return None
    if behind:
        return f"{_listed(behind)}. Process {index} waits {waited:.0f} s in {place}."
    if any(peer.place.entered > place.entered for peer in peers.values()):
        return f"process {index} itself is behind: it has been {waited:.0f} s in {place}."
    if peers:
        return (
            f"no process is behind the others: all have been in {place}, process {index} for "
            f"{waited:.0f} s. A link or a device may be stuck."
        )
    return f"process {index} has been {waited:.0f} s in {place}."


def _listed(peers: Mapping[int, Peer]) -> str:
    shown = list(peers.items())[:8]
    texts = [
        f"process {number} is behind: it is in {peer.place}"
        + (f", and was last heard of {peer.silent_s:.0f} s ago" if peer.silent_s > QUIET_S else "")
        for number, peer in shown
    ]
    more = [f"{len(peers) - len(shown)} more are behind"] if len(peers) > len(shown) else []
    return "; ".join(texts + more)


class Watchdog:
    """Threads that tell the others where this process is, and end it when something hangs."""

    def __init__(
        self,
        watch: Watch,
        deadlines: Deadlines,
        processes: Processes = ALONE,
        hang: Callable[[str], None] | None = None,
    ):
        """Starts them. `hang` takes a text about a hang, once; by default the process ends."""
        self._watch, self._deadlines, self._processes = watch, deadlines, processes
        self._hang = hang or end_process
        self._heard: dict[int, tuple[str, float]] = {}  # last message, and the time of its arrival
        self._answered = time.monotonic()
        self._over = threading.Event()
        for target in [self._look] + [self._tell] * (processes.count > 1):
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True).start()

    def close(self) -> None:
        """Ends the threads."""
        self._over.set()

    def _tell(self) -> None:
        """Tells this process's place and, while it waits, hears the others'."""
        beat = 0
        # The first at once: one that is never heard of cannot be named.
        while not self._over.wait(BEAT_S if beat else 0):
            place, since = self._watch.now
            beat += 1
            with suppress(Exception):  # of JAX's client, which has no class of its own
                text = json.dumps([*place, beat])
                self._processes.publish(f"{FOLDER}/{self._processes.index}", text)
                # If all listened all the time, process 0 would have too much to answer.
                if time.monotonic() - since > QUIET_S:
                    for name, text in self._processes.notes(FOLDER).items():
                        if self._heard.get(int(name), ("", 0))[0] != text:
                            self._heard[int(name)] = (text, time.monotonic())
                self._answered = time.monotonic()

    def _look(self) -> None:
        """Checks whether this process, or another, hangs."""
        while not self._over.wait(LOOK_S):
            place, since = self._watch.now
            own = (self._processes.index, place, time.monotonic() - since)
            found = find_hang(own, self._peers(), self._deadlines)
            if found is not None:
                self._over.set()
                self._hang(found)

    def _peers(self) -> dict[int, Peer]:
        now, index = time.monotonic(), self._processes.index
        peers = {
            number: Peer(Place(*json.loads(text)[:3]), now - when)
            for number, (text, when) in self._heard.copy().items()
            if number != index
        }
        # It answers for all: if it is silent, of the others nothing is known.
        silent_s = now - self._answered
        if index and silent_s > QUIET_S:
            return {0: Peer(Place("an unknown stage", 0, -1), silent_s)}
        return peers


def end_process(found: str, keep: Path | None = None) -> NoReturn:
    """Prints the hang and the stack of every thread, also to a file, and ends the process."""
    print(f"moejax: hang: {found} Stacks of all threads:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(sys.stderr)
    print(f"moejax: hang: {found}", file=sys.stderr)  # again, where it is seen
    with suppress(OSError):
        if keep is not None:
            with keep.open("w", encoding="utf-8") as file:
                print(found, file=file, flush=True)
                faulthandler.dump_traceback(file)
    sys.stderr.flush()
    os._exit(HANG)
