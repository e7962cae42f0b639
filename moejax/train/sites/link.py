"""A site's connections to the hub (`train.sites.hub`), which may break and come back."""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from moejax.errors import InputError, RunError
from moejax.runtime.meeting import line
from moejax.train.memory.exchange import PATIENCE_S, ExchangeError, read_into, read_line, send

RETRY_S = 0.5
START_S = 60.0  # so long a start waits for the hub
T = TypeVar("T")


class SitesError(RunError):
    """The hub refuses a site, or its round is no longer kept."""


class Link:
    """Asks the hub, again and again where the connection breaks."""

    def __init__(self, hub: tuple[str, int], token: str, site: int):
        """Connects nowhere yet."""
        self._hub, self._token, self.site = hub, token, site
        self.closed = threading.Event()
        self.sent = 0  # bytes of rows

    def join(self, form: Mapping[str, Any]) -> None:
        """Introduces the site.

        Raises:
          InputError: if the hub cannot be reached, or refuses it.
        """
        where = f"outer.hub is {self._hub[0]}:{self._hub[1]}"
        try:
            self._retry(lambda: self._ask(kind="join", form=form), time.monotonic() + START_S)
        except SitesError as error:
            raise InputError(f"{where}. It refuses this site: {error}.") from error
        except (OSError, ExchangeError) as error:
            raise InputError(
                f"{where}. Nobody answers there, or another token is known there ({error}). Start "
                "`moejax sites` there, and set the same MOEJAX_SITES_TOKEN."
            ) from error

    def begin(self, number: int, seconds: float | None) -> dict[str, Any]:
        """Begins a round: see `Ledger.begin`."""
        return self._retry(lambda: self._ask(kind="begin", round=number, seconds=seconds))

    def leave(self) -> None:
        """Says that no round shall wait for this site; tries it once."""
        try:
            self._ask(kind="leave")
        except (OSError, ExchangeError):
            return

    def put(
        self,
        number: int,
        rows: Mapping[int, np.ndarray],
        facts: Mapping[int, Any],
        site: Any = None,
    ) -> None:
        """Sends those rows of a round that the hub does not have.

        Args:
          facts: by row, of `ledger.Facts`.
          site: `ledger.WHOLE`; None: this site.
        """
        if not rows:  # of a process that holds copies alone
            return
        size, name = next(iter(rows.values())).size, self.site if site is None else site
        asked = {"kind": "put", "round": number, "bytes": size, "facts": facts, "site": name}

        def once() -> None:
            with self._asked(**asked) as (connection, read):
                for row in _answer(read)["rows"]:
                    send(connection, rows[row])
                    self.sent += size
                _answer(read)

        self._retry(once)

    def get(
        self, number: int, rows: list[int], size: int, *, kind: str = "get", follows: bool = False
    ) -> tuple[dict[str, Any], np.ndarray]:
        """Waits for a round. Returns the answer's head, and [sites of the round, rows, size].

        Args:
          size: bytes of a row.
          kind: "whole": outer weights and momentum of this round or a later one.
          follows: the site has ended: if nobody goes on the head has "end".
        """
        asked = {"kind": kind, "round": number, "rows": rows, "follows": follows}

        def once() -> tuple[dict[str, Any], np.ndarray]:
            with self._asked(**asked) as (_, read):
                while "wait" in (head := _answer(read)):
                    if self.closed.is_set():
                        raise SitesError("closed")
                count = 1 if kind == "whole" else len(head.get("sites", ()))
                if head["bytes"] != count * len(rows) * size:
                    raise SitesError(f"{head['bytes']} bytes of round {number} were announced")
                out = np.empty((count, len(rows), size), np.uint8)
                read_into(read, out.reshape(-1))
                return head, out

        return self._retry(once)

    @contextmanager
    def _asked(self, **asked: Any) -> Any:
        """Connects and asks. Yields the connection, and what reads from it."""
        connection = socket.create_connection(self._hub, timeout=PATIENCE_S)
        with connection, connection.makefile("rb") as reader:
            connection.sendall(line({"site": self.site, **asked, "token": self._token}))
            yield connection, reader

    def _ask(self, **asked: Any) -> dict[str, Any]:
        with self._asked(**asked) as (_, read):
            return _answer(read)

    def _retry(self, once: Callable[[], T], until: float | None = None) -> T:
        """Calls until the hub answers.

        Raises:
          SitesError: if it refuses.
          OSError, ExchangeError: if `until` is over.
        """
        while True:
            try:
                return once()
            except (OSError, ExchangeError):
                if until is not None and time.monotonic() > until:
                    raise
                if self.closed.wait(RETRY_S):
                    raise


def _answer(reader: Any) -> dict[str, Any]:
    """Returns an answer of the hub."""
    found = read_line(reader)
    if "error" in found:
        raise SitesError(str(found["error"]))
    return found
