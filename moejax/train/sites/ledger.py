"""The rounds of an outer loop whose sites are runs of their own: what arrived, and who counts.

The hub (`train.sites.hub`) keeps them in a folder, so that it can be killed and started again:

    form.json       what all sites have alike: their number, rows of a part and their bytes
    rounds.jsonl    a line for each decided round: its sites, their steps and weights
    12/0-3          row 3 of what site 0 sent in round 12, and 0-3.json, which says of what
    12/whole-3      the same of the outer weights and momentum at the start of round 12

A round that was decided stays decided. A site that goes back to an older checkpoint therefore comes
to the same bits, and so do runs that begin anew on the same record.

A row is what one device of a site sends. No JAX here, and no sockets.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moejax.errors import write_whole

WHOLE = "whole"  # in the place of a site: outer weights and momentum
Facts = Mapping[str, Any]  # of a row: steps of the round, tokens of the part, sum of outer weights


class LedgerError(ValueError):
    """A site asks for what the ledger does not allow. The message says why."""


class Ledger:
    """Decides each round. Its users hold one lock.

    Attributes:
      form: None before the first site came.
      rounds: by number: site -> {"steps", "tokens"}.
      open: the round that is decided next.
      oldest: the first round whose rows are kept.
      expected: sites that the open round waits for.
      wanted: whether a site asks for outer weights and momentum.
    """

    def __init__(
        self,
        folder: Path,
        *,
        patience_s: float = 60.0,
        keep: int = 64,
        most_steps: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Opens a folder.

        Args:
          patience_s: so long the open round waits after a site's part is complete.
          keep: decided rounds whose rows are kept.
          most_steps: of a round, by a site that is faster than the slowest.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.patience_s, self.clock = folder, patience_s, clock
        self._keep, self._most_steps = keep, most_steps
        path = folder / "form.json"
        self.form: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        self.rounds: dict[int, dict[str, dict[str, int]]] = {}
        self._record = folder / "rounds.jsonl"
        if self._record.exists():
            self._read_record()
        self.open = max(self.rounds, default=-1) + 1
        self._rows: dict[tuple[int, str], dict[int, Facts]] = {}
        for found in folder.glob("*/*-*.json"):
            site, _, row = found.stem.partition("-")
            rows = self._rows.setdefault((int(found.parent.name), site), {})
            rows[int(row)] = json.loads(found.read_text())
        self.oldest = min((number for number, _ in self._rows), default=min(self.rounds, default=0))
        last = self.rounds.get(self.open - 1)
        self.expected = set(range(self._sites)) if last is None else set(map(int, last))
        self.wanted = False
        self._since: float | None = None  # when the open round had its first whole part
        self._seconds: dict[int, float] = {}

    def _read_record(self) -> None:
        """Reads decided rounds. A line that was half written when the hub died is cut off."""
        text = self._record.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(self._record, len(whole))
        for line in whole.splitlines():
            found = json.loads(line)
            self.rounds[found["round"]] = found["sites"]

    @property
    def _sites(self) -> int:
        return 0 if self.form is None else self.form["sites"]

    def join(self, site: int, form: dict[str, Any]) -> None:
        """Compares a site's form with the others'; the first one's is kept.

        Raises:
          LedgerError: if they differ.
        """
        if self.form is None:
            self.form = form
            write_whole(self.folder / "form.json", json.dumps(form) + "\n")
            self.expected |= set(range(self._sites))
        for name, value in self.form.items():
            if form.get(name) != value:
                raise LedgerError(
                    f"site {site} has {name} {form.get(name)}, the others have {value}. All sites "
                    "need the same model, mesh (but for mesh.replica) and outer loop"
                )
        if not 0 <= site < self._sites:
            raise LedgerError(f"site {site} is none of {self._sites}")

    def begin(self, site: int, number: int, seconds: float | None) -> dict[str, Any]:
        """Says how a site does a round.

        Args:
          seconds: of one of its steps, as measured; None: not yet.
        Returns:
          {"steps": so many}; {"missed": True}: it was decided without the site; or {"gone": open}:
          its rows are no longer kept. "give" asks for outer weights and momentum too.
        """
        if seconds is not None:
            self._seconds[site] = seconds
        if not self.rounds and not self._rows and number > self.open:
            self.open = self.oldest = number  # the folder is new, the run is not
        if number > self.open:
            raise LedgerError(
                f"site {site} begins round {number}, and the hub is in round {self.open}: its "
                "folder is of another run"
            )
        if number < self.oldest:
            return {"gone": self.open}
        if number < self.open:
            own = self.rounds[number].get(str(site))
            return {"missed": True} if own is None else {"steps": own["steps"]}
        self.expected.add(site)
        steps = self._steps(site)
        for facts in self._rows.get((number, str(site)), {}).values():
            steps = facts["steps"]  # it was killed in this round
        give, self.wanted = self.wanted, False
        return {"steps": steps, "give": give}

    def _steps(self, site: int) -> int:
        """Returns so many steps that the slowest site does one meanwhile."""
        known = [self._seconds[one] for one in self.expected if one in self._seconds]
        if site not in self._seconds:
            return 1
        return min(max(int(max(known) / self._seconds[site]), 1), self._most_steps)

    def size(self, site: str) -> int:
        """Returns the bytes of each row of a part, or of `WHOLE`."""
        assert self.form is not None, "no site came before"
        return self.form["whole_bytes" if site == WHOLE else "bytes"]

    def path(self, number: int, site: str, row: int) -> Path:
        """Returns where a row is kept."""
        return self.folder / str(number) / f"{site}-{row}"

    def wants(self, number: int, site: str, row: int) -> bool:
        """Returns whether a row of a round is still to come.

        Raises:
          LedgerError: if there is no such row.
        """
        names = [WHOLE, *map(str, range(self._sites))]
        if self.form is None or site not in names or not 0 <= row < self.form["rows"]:
            raise LedgerError(f"no site {site} with a row {row}")
        if number in self.rounds and site != WHOLE and site not in self.rounds[number]:
            return False
        known = self.oldest <= number <= self.open
        return known and row not in self._rows.get((number, site), {})

    def add(self, number: int, site: str, row: int, facts: Facts) -> None:
        """Takes a row whose bytes are in its path.

        Raises:
          LedgerError: if the site's outer weights are not those of another site.
        """
        for (of, other), rows in self._rows.items():
            same = of == number and WHOLE not in (site, other) and row in rows
            if same and rows[row]["sum"] != facts["sum"]:
                raise LedgerError(
                    f"the outer weights of site {site} are not those of site {other} at the "
                    f"start of round {number}. Move the checkpoints of the one that is wrong "
                    "away: it then takes the outer weights from the other"
                )
        path = self.path(number, site, row)
        write_whole(path.with_name(f"{path.name}.json"), json.dumps(facts))
        self._rows.setdefault((number, site), {})[row] = facts
        self._prune(number - self._keep)

    def _prune(self, before: int) -> None:
        for number in sorted({of for of, _ in self._rows if of < before}):
            shutil.rmtree(self.folder / str(number), ignore_errors=True)
            self._rows = {key: rows for key, rows in self._rows.items() if key[0] != number}
        self.oldest = max(self.oldest, min(before, self.open))

    def _is_whole(self, number: int, site: str) -> bool:
        return self.form is not None and (
            len(self._rows.get((number, site), ())) == self.form["rows"]
        )

    def leave(self, site: int) -> None:
        """The open round no longer waits for a site."""
        self.expected.discard(site)

    def decide(self) -> None:
        """Decides the open round, if all that it waits for came, or the patience is over."""
        here = [site for site in range(self._sites) if self._is_whole(self.open, str(site))]
        if not here:
            self._since = None
            return
        self._since = self.clock() if self._since is None else self._since
        if not self.expected <= set(here) and self.clock() - self._since < self.patience_s:
            return
        found: dict[str, dict[str, int]] = {}
        for site in here:
            facts = self._rows[self.open, str(site)][0]
            found[str(site)] = {"steps": facts["steps"], "tokens": facts["tokens"]}
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"round": self.open, "sites": found}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rounds[self.open] = found
        self.expected &= set(here)
        self.open, self._since = self.open + 1, None

    def ready(self, number: int) -> dict[str, dict[str, int]] | None:
        """Returns the sites of a decided round whose rows are here; None: it is waited for."""
        found = self.rounds.get(number)
        if found is None or not all(self._is_whole(number, site) for site in found):
            return None
        return found

    def whole_from(self, number: int) -> int | None:
        """Returns the first round from a number on whose `WHOLE` is here; None without one."""
        whole = (of for of, site in self._rows if site == WHOLE and self._is_whole(of, site))
        return min((of for of in whole if of >= number), default=None)
