"""Saves of a run's state to the memory of its hosts, beside the steps.

A step waits while each process copies its pieces from the devices into a slot. What follows runs in
a thread: digests, the copy for the next host, and last the record. When the next save is due the
processes tell each other how the last one ended, so all of them reuse the same slot: the one that
does not hold the newest step that is complete everywhere.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax

from moejax.checkpoint.digests import DeviceSums, add_up
from moejax.runtime.processes import Json
from moejax.train.memory.exchange import Inbox, put
from moejax.train.memory.folder import check_room, remove
from moejax.train.memory.members import Members
from moejax.train.memory.placement import holders_of, neighbours, offsets_of, place
from moejax.train.memory.slots import (
    Slot,
    discard_others,
    fill,
    listed,
    names_from,
    names_of,
    sealed,
)

Told = Callable[..., None]  # (event, step, **values)


class Ended(NamedTuple):
    """How a save ended here.

    Attributes:
      stall_s: seconds that the step waited while its state was copied.
      whole_s: seconds until the copy on the next host was complete.
      nbytes: of this process's slot.
      sent: bytes that went to the next host.
      error: why it failed; None if it did not.
    """

    step: int
    stall_s: float
    whole_s: float
    nbytes: int
    sent: int
    error: str | None


class MemoryCheckpoints:
    """Keeps the newest states of a run in memory."""

    def __init__(
        self,
        members: Members,
        abstract: Mapping[str, Any],
        facts: Mapping[str, Any],
        told: Told,
        *,
        held: int | None = None,
    ):
        """Reserves the slots. All processes call it.

        Args:
          abstract: the shapes and shardings of the state's arrays, by key.
          facts: entries of a manifest about the run.
          told: is told of events: of saves, and of those that were skipped or failed.
          held: the slot with the step that the run goes on from, if it came from memory.
        Raises:
          InputError: in all processes, if a host has no room for its slots.
        """
        self._members, self._facts, self._told = members, facts, told
        self._kinds = {k: [list(x.shape), x.dtype.name] for k, x in abstract.items()}
        index, hosts = members.processes.index, members.hosts
        shares = place(holders_of(abstract), hosts)
        self._to = neighbours(hosts)[index]
        self._sent = len(shares[index].sent)
        offsets, self._bytes = offsets_of(shares[index].pieces)
        self._rooms = list(zip(shares[index].pieces, offsets, strict=True))
        self._prefix = offsets_of(shares[index].sent)[1]
        self._slots = [Slot(members.folder, name) for name in names_of(index)]
        self._inboxes = {
            sender: Inbox(
                offsets_of(shares[sender].sent)[1],
                [Slot(members.folder, name) for name in names_from(index, sender)],
                threading.Lock(),
            )
            for sender, target in enumerate(neighbours(hosts))
            if target == index
        }
        self._good = held  # the slot that must not be overwritten
        self._next = 0 if held is None else 1 - held
        self._pending: Future[Ended] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory checkpoint")
        self._reserve()

    def _reserve(self) -> None:
        """Maps the slots, but for one that holds a step in another size."""
        members = self._members
        sized = [(slot, self._bytes) for slot in self._slots]
        sized += [(slot, inbox.nbytes) for inbox in self._inboxes.values() for slot in inbox.slots]
        here = members.processes.gather([sum(n for _, n in sized), sum(s.stored for s, _ in sized)])
        needed, stored = (sum(here[one][at] for one in members.beside) for at in (0, 1))
        members.processes.together(lambda: check_room(members.folder, needed, stored))
        for number, (slot, size) in enumerate(sized):
            if number % 2 != self._good or slot.stored == size:
                slot.prepare(size)
        if members.server is not None:
            members.server.inboxes = self._inboxes

    def save(
        self,
        step: int,
        state: Mapping[str, jax.Array],
        facts: Mapping[str, Any],
        waiting: AbstractContextManager[None] | None = None,
    ) -> None:
        """Copies the state, and returns; the copy for the next host follows in a thread.

        A save whose predecessor is not complete everywhere is skipped: the run does not wait.

        Args:
          facts: entries of a manifest about the step.
          waiting: is entered while the step has ended and its state is copied.
        """
        busy = self._pending is not None and not self._pending.done()
        if any(self._members.processes.gather(busy)):
            self._told("memory_skipped", step)
            return
        self._settle()
        jax.block_until_ready(state)
        with waiting or nullcontext():
            self._copy(step, state, facts)

    def _copy(self, step: int, state: Mapping[str, jax.Array], facts: Mapping[str, Any]) -> None:
        """Copies the state into the next slot, and starts what follows."""
        began, slot = time.perf_counter(), self._slots[self._next]
        slot.forget()
        sums = add_up(state)
        try:
            slot.prepare(self._bytes)
            fill(slot, self._rooms, state)
        except OSError as error:  # no room for a slot of another size than before
            self._pending = Future()
            self._pending.set_result(Ended(step, 0, 0, self._bytes, self._prefix, str(error)))
            return
        stall = time.perf_counter() - began
        record = {"step": step, "facts": {**self._facts, **facts}}
        self._pending = self._thread.submit(self._finish, record, self._next, sums, began, stall)

    def _settle(self) -> None:
        """Agrees on how the last save ended, and tells of it."""
        if self._pending is None:
            return
        here, self._pending = self._pending.result(), None
        ends = [Ended(*one) for one in self._members.processes.gather(list(here))]
        failed = [f"process {n}: {end.error}" for n, end in enumerate(ends) if end.error]
        if failed:
            more = f", and {len(failed) - 1} processes more" if len(failed) > 1 else ""
            self._told("memory_failed", here.step, text=failed[0] + more)
            return
        self._good, self._next = self._next, 1 - self._next
        if self._members.turn[0] == 0:
            self._sweep()
        self._told(
            "memory_saved",
            here.step,
            bytes=sum(end.nbytes for end in ends),
            sent=sum(end.sent for end in ends),
            stall_s=round(max(end.stall_s for end in ends), 4),
            whole_s=round(max(end.whole_s for end in ends), 4),
        )

    def _sweep(self) -> None:
        """Removes slots of an earlier start that had other processes: a newer step is whole."""
        members = self._members
        names = [name for process in members.beside for name in names_of(process)]
        for sender, target in enumerate(neighbours(members.hosts)):
            if target in members.beside:
                names += names_from(target, sender)
        discard_others(members.folder, names)

    def _finish(
        self, facts: dict[str, Any], number: int, sums: DeviceSums, began: float, stall: float
    ) -> Ended:
        """Sends what the next host keeps, then writes the record. Its error is told later."""
        error = None
        try:
            self._complete(facts, number, sums.here())
        except Exception as raised:  # of the network, the file system or the device
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        whole = time.perf_counter() - began
        return Ended(facts["step"], stall, whole, self._bytes, self._prefix, error)

    def _complete(self, facts: dict[str, Any], number: int, sums: Json) -> None:
        members, slot = self._members, self._slots[number]
        record = {
            "run": members.run,
            "begun": members.begun,
            **facts,
            "process": members.processes.index,
            "processes": members.processes.count,
            "arrays": self._kinds,
            "sums": sums,
        }

        def of(count: int, size: int, sha256: str) -> dict[str, Any]:
            rooms = listed(self._rooms[:count])
            return {**record, "pieces": rooms, "bytes": size, "sha256": sha256}

        sent = slot.bytes[: self._prefix]
        digest = hashlib.sha256(memoryview(sent))
        if self._to is not None:
            one = sealed(of(self._sent, self._prefix, digest.hexdigest()))
            put(members.addresses[self._to], members.token, number, sent, one)
        digest.update(memoryview(slot.bytes[self._prefix :]))
        slot.commit(of(len(self._rooms), self._bytes, digest.hexdigest()))

    def end(self) -> None:
        """Ends the saves and removes what hosts hold: the run does not need it. All call it."""
        if self._pending is not None:
            self._pending.result()
        self._settle()  # all processes agree that nobody sends any more
        self.close()
        if self._members.turn[0] == 0:
            remove(self._members.folder)

    def close(self) -> None:
        """Waits for the save under way, and stops; what hosts hold stays."""
        self._thread.shutdown()
        self._members.close()
