"""The command `moejax sites`: the hub, through which sites that are runs of their own meet.

It has no devices and no weights. Each site sends its encoded part of a round here; the hub decides
whose parts count (`train.sites.ledger`), and gives all of them to each site. So a part that counts
is one that everybody can get, whoever died or was cut off since.

A connection is one line of JSON with the token, what it asks for, and what follows:

    join   site, form                      the answer: {"ok"}
    begin  site, round, seconds            the answer is `Ledger.begin`'s
    put    site, round, bytes, facts       {"rows"}: those to send, then their bytes, then {"ok"}
    get    round, rows                     {"wait"} until it is decided; {"sites"}, then the bytes;
                                           or {"gone"}: they are no longer kept
    whole  round, rows                     the same for outer weights and momentum of a later round
    leave  site                            {"ok"}: no round waits for it any more
"""

import argparse
import os
import secrets
import socket
import textwrap
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moejax.config.command_line import Parser
from moejax.errors import InputError, exit_code
from moejax.runtime.meeting import line
from moejax.train.memory.exchange import Listener, read_into, send
from moejax.train.sites.ledger import WHOLE, Ledger

BEAT_S = 5.0  # a word to those that wait, so that they see that the link is not cut
SECRET = "MOEJAX_SITES_TOKEN"
SECRET_FILE = "token"
SHORTEST = 16  # letters of a token
EXAMPLE = """\
example:
  moejax sites runs/hub --host 0.0.0.0 --port 8470
"""


class Hub(Listener):
    """Serves a ledger."""

    def __init__(self, listen_at: tuple[str, int], token: str, ledger: Ledger):
        """Listens at an address (port 0: any port)."""
        self.ledger, self._changed = ledger, threading.Condition()
        super().__init__(listen_at, token)

    def answer(self, asked: dict[str, Any], reader: BinaryIO, connection: socket.socket) -> None:
        """Answers one site."""
        kind, ledger = asked["kind"], self.ledger
        if kind == "put":
            self._put(asked, reader, connection)
        elif kind in ("get", WHOLE):
            self._give(asked, connection)
        else:
            with self._changed:
                answer: dict[str, Any] = {"ok": True}
                if kind == "join":
                    ledger.join(int(asked["site"]), dict(asked["form"]))
                elif kind == "begin":
                    answer = ledger.begin(int(asked["site"]), asked["round"], asked["seconds"])
                elif kind == "leave":
                    ledger.leave(int(asked["site"]))
                self._changed.notify_all()
            connection.sendall(line(answer))

    def _put(self, asked: Mapping[str, Any], reader: BinaryIO, connection: socket.socket) -> None:
        """Takes those rows that are still to come."""
        number, site, ledger = asked["round"], str(asked["site"]), self.ledger
        facts = {int(row): dict(found) for row, found in asked["facts"].items()}
        with self._changed:
            wanted, size = (
                [row for row in facts if ledger.wants(number, site, row)],
                ledger.size(site),
            )
        if asked["bytes"] != size:
            raise ValueError(f"{asked['bytes']} bytes were announced, {size} are expected")
        connection.sendall(line({"rows": wanted}))
        for row in wanted:
            path = ledger.path(number, site, row)
            path.parent.mkdir(exist_ok=True)
            partial = path.with_name(f"{path.name}.{threading.get_ident()}.partial")
            try:
                read_into(reader, np.memmap(partial, np.uint8, "w+", shape=(size,)))
                with self._changed:
                    if ledger.wants(number, site, row):
                        partial.replace(path)
                        ledger.add(number, site, row, facts[row])
                        self._changed.notify_all()
            finally:
                partial.unlink(missing_ok=True)
        connection.sendall(line({"ok": True}))

    def _give(self, asked: Mapping[str, Any], connection: socket.socket) -> None:
        """Sends rows of all sites of a round once it is decided, or outer weights once given."""
        number, ledger = asked["round"], self.ledger
        began = ledger.clock()
        while True:
            with self._changed:
                found = self._find(asked, number, ended=ledger.clock() - began > ledger.patience_s)
                if found is None:
                    self._changed.wait(min(BEAT_S, ledger.patience_s / 4))
            if found is not None:
                break
            connection.sendall(line({"wait": True}))
        head, of, sites = found
        paths = [ledger.path(of, site, row) for site in sites for row in asked["rows"]]
        files = [np.memmap(path, np.uint8, "r") for path in paths]  # they may be pruned now
        connection.sendall(line({**head, "bytes": sum(file.size for file in files)}))
        for file in files:
            send(connection, np.asarray(file))

    def _find(
        self, asked: Mapping[str, Any], number: int, *, ended: bool
    ) -> tuple[dict[str, Any], int, Iterable[str]] | None:
        """Returns the answer's head, and whose rows of which round follow; None: to be waited for.

        Args:
          ended: whether it was waited for long.
        """
        ledger = self.ledger
        if asked["kind"] == WHOLE:
            found = ledger.whole_from(number)
            if found is not None:
                return {"round": found}, found, (WHOLE,)
            ledger.wanted = True  # again: a site that was asked may be gone
            return None
        ledger.decide()
        if number < ledger.oldest:
            return {"gone": True}, number, ()
        sites = ledger.ready(number)
        if sites is not None:
            return {"sites": sites}, number, sorted(sites, key=int)
        follows = asked.get("follows") and number == ledger.open
        if follows and (ended or not ledger.expected):
            return {"end": True}, number, ()
        return None


def token_of(folder: Path | None) -> str:
    """Returns the secret that all sites share: from the environment, else from the hub's folder.

    Args:
      folder: where a secret is drawn if there is none yet; None: of a site.
    Raises:
      InputError: if there is none, or a short one.
    """
    found, path = os.environ.get(SECRET, ""), None if folder is None else folder / SECRET_FILE
    if not found and path is not None:
        if not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(16))
        found = path.read_text().strip()
    if len(found) < SHORTEST:
        raise InputError(
            f"{SECRET} has {len(found)} letters. The hub and all sites need the same secret, of at "
            f"least {SHORTEST}. Set it to what the hub's folder has in {SECRET_FILE}."
        )
    return found


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    about = textwrap.fill((__doc__ or "").split("\n\n")[1], 78)
    command = Parser(prog="moejax sites", description=about, epilog=EXAMPLE)
    command.add_argument("folder", type=Path, metavar="FOLDER", help="keeps the rounds of one run")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on")
    command.add_argument("--port", type=int, default=8470, help="0: a free one")
    command.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="so long a round waits for the other sites once the first part is here",
    )
    command.add_argument(
        "--most-steps",
        type=int,
        default=1,
        metavar="N",
        help="of a round, by a site that is faster than the slowest (default: 1, all alike)",
    )
    command.add_argument(
        "--keep", type=int, default=64, metavar="ROUNDS", help="whose parts stay in the folder"
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks of bad input")
    return command


def main(argv: list[str]) -> int:
    """Runs the command. Returns the exit code."""
    args = parser().parse_args(argv)
    stopped = "the same command goes on, and sites wait for it"
    return exit_code(lambda: run(args), stopped=stopped, debug=args.debug, files=True)


def run(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C."""
    if not 0 <= args.port <= 65535 or args.patience <= 0 or min(args.most_steps, args.keep) < 1:
        raise InputError(
            f"no such hub. Got --port {args.port}, --patience {args.patience:g}, --most-steps "
            f"{args.most_steps}, --keep {args.keep}. Ports are 0 to 65535, patience is above 0, "
            "and the other two are at least 1."
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    token = token_of(args.folder)
    kept = {"patience_s": args.patience, "keep": args.keep, "most_steps": args.most_steps}
    ledger = Ledger(args.folder, **kept)
    hub = Hub((args.host, args.port), token, ledger)
    at = f"{args.host}:{hub.port}"
    print(f"sites meet at {at}, in round {ledger.open}; token in {args.folder}", flush=True)
    threading.Event().wait()
    return 0
