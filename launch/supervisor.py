"""The supervisor of one host: keeps its processes running, and agrees with the other hosts' ones.

`assign.py` decides, `statuses.py` carries what supervisors say, `trainers.py` runs the processes.
Standard library only.
"""

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from assign import (
    DONE,
    STOPPED,
    Assignment,
    Rules,
    Status,
    decide,
    failed_first,
    follows,
    newest,
)
from group import SAID_BY_ALL, Interrupts, describe, say
from statuses import ASK_EVERY_S, LOST_S, Address, Statuses, free_port
from trainers import Host, Trainers

TICK_S = 0.1
LATE_S = 2.0  # a supervisor that did not run for so long first hears the others again
STOP_S = 60.0  # to save and stop
LINGER_S = 30.0  # for the others to end, after this host has
LONGEST_PAUSE_S = 30.0
LONGEST_LINE = 300  # characters of a line that other hosts show
ABSENT = 1  # as which a host ends that was restarted while it was assigned


class Asked(Interrupts):
    """SIGINT asks all hosts to stop, SIGTERM lets this one leave; the second of either kills."""

    def __init__(self) -> None:
        super().__init__()
        self.leaving = False

    def _pass(self, number: int, _: object) -> None:
        if number == signal.SIGTERM and not self.leaving:
            self.leaving = True
        else:
            super()._pass(number, _)


@dataclass
class Place:
    """Assignment of this host, and the state of its processes.

    Attributes:
      given: the assignment that it follows.
      since: when that, or the hosts that answer, last changed.
      began: when its processes started, or changed their places.
      ended: how they ended.
      said: their last lines, if they failed.
    """

    given: Assignment | None = None
    since: float = 0.0
    began: float | None = None
    ended: int | None = None
    said: tuple[str, ...] = ()
    ready: bool = True


class Supervisor:
    """Runs until the program has ended, or this host has left it."""

    def __init__(self, host: Host, addresses: Sequence[Address], rules: Rules):
        self._host, self._addresses, self._rules = host, addresses, rules
        self._asked = Asked()
        self._place = Place()
        self._own = Status(free=self._free())
        self._seen: tuple[object, ...] = ()
        self._heard_since = self._ticked = time.monotonic()

    def run(self) -> int:
        """Returns the exit code.

        Raises:
          OSError: if this host cannot listen at its address.
        """
        statuses = Statuses(self._addresses, self._host.number, lambda: self._own)
        try:
            with self._asked, Trainers(self._host, self._asked) as trainers:
                while True:
                    code = self._tick(statuses, trainers)
                    if code is not None:
                        return self._linger(statuses, code)
                    time.sleep(TICK_S)
        finally:
            statuses.close()

    def _tick(self, statuses: Statuses, trainers: Trainers) -> int | None:
        """Looks, decides where it is this host's turn, and acts. Returns the exit code at the end.

        It is one step of a loop that never waits, so that the others hear of this host.
        """
        now = time.monotonic()
        if now - self._ticked > LATE_S:
            self._heard_since = now
        self._ticked = now
        self._watch(trainers)
        self._say_status(now)
        here = statuses.here()
        given = newest(here.values())
        seen = (given, tuple(here), tuple(s.leaving for s in here.values()))
        if seen != self._seen:
            self._seen, self._place.since = seen, now
        if self._may_decide(here, now):
            waited = now - self._place.since
            after = decide(self._host.number, here, given, waited, self._rules)
            if after is not None:
                _say(after, given, here)
                given = after
        if given is not None and given != self._place.given:
            return self._follow(given, trainers)
        return self._over(here, trainers)

    def _may_decide(self, here: dict[int, Status], now: float) -> bool:
        """Whether this host is the lowest that answers, and has had time to hear the others."""
        heard = len(here) == len(self._addresses) or now - self._heard_since > LOST_S
        return heard and min(here) == self._host.number

    def _watch(self, trainers: Trainers) -> None:
        """Takes note of how processes ended, or that they wait for a change."""
        place = self._place
        if place.given is None or not trainers.running:
            return
        code = trainers.code
        if code is None:
            if not place.ready:
                place.ready = trainers.waits(place.given)
            return
        place.said = tuple(line[:LONGEST_LINE] for line in trainers.said)
        trainers.kill()
        # Where a change was proposed, a host that is no longer wanted ends as if asked to stop.
        if not place.ready and code == STOPPED and self._host.number not in place.given.members:
            place.ready = True
            return
        place.ended = code if code >= 0 else 128 - code
        say(f"host {self._host.number} {describe(code)}")

    def _follow(self, given: Assignment, trainers: Trainers) -> int | None:
        """Does what a new assignment asks. Returns the exit code where it ends this host."""
        place, before = self._place, self._place.given
        self._place = replace(place, given=given)
        if before is None or before.key != given.key:
            self._place.ended, self._place.said = None, ()
            if given.code is not None:
                return self._end(given, trainers)
            if not (given.planned and trainers.running and trainers.code is None):
                trainers.kill()
            elif not given.coordinator:
                trainers.tell(given)
            self._place.ready = not trainers.running
        if not given.coordinator:
            return None
        return self._go(given, trainers, new=before is None or before.key != given.key)

    def _go(self, given: Assignment, trainers: Trainers, *, new: bool) -> int | None:
        """Starts the processes, or lets those go on that wait."""
        if self._host.number not in given.members:
            trainers.kill()
            return STOPPED if self._asked.leaving else None
        if new:
            # The others wait for what this host was before it was started again.
            trainers.kill()
            self._place.ended = ABSENT
            return None
        if trainers.running:
            trainers.tell(given)
        else:
            pause = min(2.0 ** (given.tries - 2), LONGEST_PAUSE_S) if given.tries > 1 else 0.0
            self._asked.sleep(pause)
            trainers.start(given)
        self._place.began = time.monotonic()
        return None

    def _end(self, given: Assignment, trainers: Trainers) -> int:
        """Ends the processes as all hosts agreed."""
        assert given.code is not None
        if given.code == STOPPED:
            trainers.signal(signal.SIGTERM)
            until = time.monotonic() + STOP_S
            while trainers.running and trainers.code is None and time.monotonic() < until:
                time.sleep(TICK_S)
        trainers.kill()
        self._say_status(time.monotonic())
        return given.code

    def _over(self, here: dict[int, Status], trainers: Trainers) -> int | None:
        """Returns the exit code once the program has ended, or this host may leave it."""
        place, given = self._place, self._place.given
        if place.ended in (DONE, STOPPED):
            return place.ended
        if trainers.running or (given is not None and self._host.number in given.members):
            return None
        if given is not None:
            ended = {here[h].ended for h in given.members if h in here and follows(here[h], given)}
            for code in (DONE, STOPPED):
                if code in ended:
                    return code
        # Those that stay need this host's word until the change is made.
        settled = given is None or not given.members or given.coordinator
        return STOPPED if settled and (self._asked.leaving or self._asked.count) else None

    def _linger(self, statuses: Statuses, code: int) -> int:
        """Answers the others until all of them know how this host ended."""
        until = time.monotonic() + (LINGER_S if code in (DONE, STOPPED) else 2 * LOST_S)
        self._say_status(time.monotonic())
        given = self._place.given
        if given is None or (given.code is None and self._host.number not in given.members):
            return code
        while time.monotonic() < until and self._asked.count < 2:
            if all(_knows(h, status, given) for h, status in statuses.here().items()):
                time.sleep(2 * ASK_EVERY_S)  # they ask once more
                break
            time.sleep(TICK_S)
        return code

    def _say_status(self, now: float) -> None:
        place = self._place
        if place.given != self._own.assignment:
            self._own = replace(self._own, free=self._free())
        self._own = replace(
            self._own,
            assignment=place.given,
            ready=place.ready,
            ended=place.ended,
            said=place.said,
            running_s=0.0 if place.began is None else now - place.began,
            leaving=self._asked.leaving,
        )

    def _free(self) -> str:
        """Returns an address at which a process 0 on this host could listen."""
        name = self._addresses[self._host.number][0]
        with suppress(OSError):
            port = free_port(name)
            return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        return ""


def _say(given: Assignment, before: Assignment | None, here: dict[int, Status]) -> None:
    """Says what was decided; where the run ends with a failure, also the last lines of it."""
    if given.code is None:
        if given.members and not given.coordinator:
            named = ", ".join(map(str, given.members))
            say(f"generation {given.generation} on hosts {named}: {given.why}")
        elif not given.members:
            say(given.why)
        return
    say(f"all hosts end with {given.code}: {given.why}")
    first = None if before is None else failed_first(here, before)
    if first is not None and given.code not in SAID_BY_ALL:
        said = here[first].said
        head = f"host {first} failed first and said {'last:' if said else 'nothing.'}"
        say("\n    ".join([head, *said]))


def _knows(host: int, status: Status, given: Assignment) -> bool:
    """Whether a host has ended too, or does not wait for this one."""
    if given.code is not None:
        return follows(status, given)
    return status.ended is not None or host not in given.members or not follows(status, given)
