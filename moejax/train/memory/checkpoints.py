"""Saves of a run's state to the memory of its hosts, beside the steps.

A step waits while each process copies its pieces from the devices into a slot. A thread does the
rest: digests, the copy for the next host, and last the record. Before the next save the processes
exchange how the last one ended. All of them then overwrite the same slot: not the one with the
newest step that is complete everywhere.
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


class SaveResult(NamedTuple):
    """The result of a save in this process.

    Attributes:
      stall_s: seconds that the step waited while its state was copied.
      whole_s: seconds until the copy on the next host was complete.
      nbytes: of this process's slot.
      sent: bytes that went to the next host.
      error: the reason of a failure; None if it succeeded.
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
        on_event: Callable[..., None],
        *,
        held: int | None = None,
    ):
        """Reserves the slots. All processes call it.

        Args:
          abstract: the shapes and shardings of the state's arrays, by key.
          facts: entries of a manifest about the run.
          on_event: called with (event, step, **values) of each save: saved, skipped or failed.
          held: 0 or 1: the slot with the step that the run resumed; None if not from memory.
        Raises:
          InputError: in all processes, if a host has no room for its slots.
        """
        self._members, self._facts, self._on_event = members, facts, on_event
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
        self._newest = held  # the slot with the newest step that is complete everywhere
        self._next = 0 if held is None else 1 - held
        self._pending: Future[SaveResult] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory checkpoint")
        self._reserve()

    def _reserve(self) -> None:
        """Maps the slots, except one that holds the resumed step in another size."""
        members = self._members
        sized = [(slot, self._bytes) for slot in self._slots]
        sized += [(slot, inbox.nbytes) for inbox in self._inboxes.values() for slot in inbox.slots]
        here = members.processes.gather([sum(n for _, n in sized), sum(s.stored for s, _ in sized)])
        needed, stored = (sum(here[one][at] for one in members.beside) for at in (0, 1))
        members.processes.together(lambda: check_room(members.folder, needed, stored))
        for number, (slot, size) in enumerate(sized):
            if number % 2 != self._newest or slot.stored == size:
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
        """Copies the state. A thread sends the copy for the next host afterwards.

        If the save before is not complete everywhere this one is skipped: the run does not wait.

        Args:
          facts: entries of a manifest about the step.
          waiting: context that is entered while the state is copied.
        """
        busy = self._pending is not None and not self._pending.done()
        if any(self._members.processes.gather(busy)):
            self._on_event("memory_skipped", step)
            return
        self._settle()
        jax.block_until_ready(state)
        with waiting or nullcontext():
            self._copy(step, state, facts)

    def _copy(self, step: int, state: Mapping[str, jax.Array], facts: Mapping[str, Any]) -> None:
        """Copies the state into the next slot, and gives the rest to the thread."""
        began, slot = time.perf_counter(), self._slots[self._next]
        slot.forget()
        sums = add_up(state)
        try:
            slot.prepare(self._bytes)
            fill(slot, self._rooms, state)
        except OSError as error:  # no room for a slot of another size than before
            self._pending = Future()
            self._pending.set_result(SaveResult(step, 0, 0, self._bytes, self._prefix, str(error)))
            return
        stall = time.perf_counter() - began
        record = {"step": step, "facts": {**self._facts, **facts}}
        self._pending = self._thread.submit(self._finish, record, self._next, sums, began, stall)

    def _settle(self) -> None:
        """Agrees with all processes on how the last save ended, and reports it."""
        if self._pending is None:
            return
        here, self._pending = self._pending.result(), None
        ends = [SaveResult(*one) for one in self._members.processes.gather(list(here))]
        failed = [f"process {n}: {end.error}" for n, end in enumerate(ends) if end.error]
        if failed:
            more = f", and {len(failed) - 1} processes more" if len(failed) > 1 else ""
            self._on_event("memory_failed", here.step, text=failed[0] + more)
            return
        self._newest, self._next = self._next, 1 - self._next
        if self._members.turn[0] == 0:
            self._sweep()
        self._on_event(
            "memory_saved",
            here.step,
            bytes=sum(end.nbytes for end in ends),
            sent=sum(end.sent for end in ends),
            stall_s=round(max(end.stall_s for end in ends), 4),
            whole_s=round(max(end.whole_s for end in ends), 4),
        )

    def _sweep(self) -> None:
        """Removes slots of an earlier start with other processes: a newer step is complete."""
        members = self._members
        names = [name for process in members.beside for name in names_of(process)]
        for sender, target in enumerate(neighbours(members.hosts)):
            if target in members.beside:
                names += names_from(target, sender)
        discard_others(members.folder, names)

    def _finish(
        self, facts: dict[str, Any], number: int, sums: DeviceSums, began: float, stall: float
    ) -> SaveResult:
        """Sends the next host its copy, then writes the record. Returns an error if one occurs."""
        error = None
        try:
            self._complete(facts, number, sums.here())
        except Exception as raised:  # of the network, the file system or the device
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        whole = time.perf_counter() - began
        return SaveResult(facts["step"], stall, whole, self._bytes, self._prefix, error)

    def _complete(self, facts: dict[str, Any], number: int, sums: Json) -> None:
        members, slot = self._members, self._slots[number]
        record = {
            "run": members.run,
            "begun": members.start_id,
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
        """Ends the saves and removes all copies. All processes call it."""
        if self._pending is not None:
            self._pending.result()
        self._settle()  # all processes agree that nobody sends any more
        self.close()
        if self._members.turn[0] == 0:
            remove(self._members.folder)

    def close(self) -> None:
        """Waits for the save under way, and stops. The copies stay."""
        self._thread.shutdown()
        self._members.close()
