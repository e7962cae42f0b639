"""Decides which hosts train: what the supervisors of `launch/host` agree on.

Every supervisor reads the others' statuses, and the lowest host that answers decides for all. It
issues assignments, each with a higher generation than the one before. An assignment is first only
proposed: every host ends its processes of the one before, and says that it is ready. Then it is
given a coordinator, and its hosts start. Standard library only; nothing here reads a clock or a
socket.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

DONE, BAD_INPUT, STOPPED, MISSING, CRASH_LOOP = 0, 2, 3, 6, 7  # docs/formats/exit.md
NO_MESH, HANG, SIGABRT = 9, 124, 134
FINAL = (BAD_INPUT, 4, 5, 8, 130)  # a new start would end in the same way
SETTLE_S = 5.0  # between a start and a planned change, so that hosts that come together join once
HALF_S = 15.0  # the half without the lowest host waits: the other half may be there, unreachable
PLANNED_S = 300.0  # within which a planned change must have saved
HEALTHY_S = 600.0  # a generation that lasts so long was no failure of the start


@dataclass(frozen=True)
class Assignment:
    """Which hosts train as one program.

    Attributes:
      generation: is higher in every new one.
      issuer: the host that decided.
      members: hosts that train, in the order of their processes; none: wait for hosts.
      planned: whether the processes before are asked to save, and take the new place themselves.
      why: in words.
      coordinator: address:port of process 0; empty while hosts are not ready.
      tries: starts after failures, one after the other. A host that is lost is none; a change that
        is planned begins anew, because only a run that makes steps is changed.
      unfit: numbers of hosts whose devices no mesh fits.
      needed: with no members, how many hosts must be there to begin again.
      code: all end with this exit code; None: they train.
    """

    generation: int
    issuer: int
    members: tuple[int, ...]
    planned: bool = False
    why: str = ""
    coordinator: str = ""
    tries: int = 0
    unfit: tuple[int, ...] = ()
    needed: int = 0
    code: int | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Its place in the order of assignments; the first of two that were issued at once wins."""
        return self.generation, -self.issuer


@dataclass(frozen=True)
class Status:
    """Report of a host about itself.

    Attributes:
      assignment: the newest it knows.
      ready: whether its processes of the assignment before have ended, or wait for the new one.
      ended: exit code of its processes in this assignment; None while they run.
      running_s: seconds since they were started.
      said: the last lines of the process that failed.
      leaving: whether the host is about to go away.
      free: address:port at which a process 0 could listen there.
    """

    assignment: Assignment | None = None
    ready: bool = True
    ended: int | None = None
    running_s: float = 0.0
    said: tuple[str, ...] = ()
    leaving: bool = False
    free: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self)


def from_json(value: Any) -> Status | None:
    """Reads what `to_json` gave; None if it is something else."""
    try:
        given = value["assignment"]
        if given is not None:
            lists = {name: tuple(map(int, given[name])) for name in ("members", "unfit")}
            given = Assignment(**{**given, **lists})
        return Status(**{**value, "assignment": given, "said": tuple(map(str, value["said"]))})
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


@dataclass(frozen=True)
class Rules:
    """Limits that a user sets.

    Attributes:
      hosts: how many there are at most.
      min_hosts: fewer do not train.
      restarts: starts after failures, one after the other.
      gather_s: how long hosts are waited for.
    """

    hosts: int
    min_hosts: int = 1
    restarts: int = 10
    gather_s: float = 300.0


def newest(statuses: Iterable[Status]) -> Assignment | None:
    """Returns the newest assignment that somebody knows."""
    known = [s.assignment for s in statuses if s.assignment is not None]
    return max(known, key=lambda a: (*a.key, a.coordinator != ""), default=None)


def decide(
    me: int, here: Mapping[int, Status], now: Assignment | None, waited_s: float, rules: Rules
) -> Assignment | None:
    """Returns the next assignment; None if the present one stays.

    Only the lowest host that answers calls it.

    Args:
      me: that host.
      here: the statuses of hosts that answer, its own among them.
      now: the newest assignment of those.
      waited_s: seconds since it has been as it is.
    """
    if now is None or (not now.members and now.code is None):
        return _gather(me, here, now, waited_s, rules)
    if now.code is not None:
        return None
    following = {h: s for h, s in here.items() if follows(s, now)}
    ended = {h: following[h].ended for h in now.members if h in following}
    codes = {h: code for h, code in ended.items() if code is not None}
    if DONE in codes.values():
        return None  # the program is at its end, and the others are about to end too
    first = failed_first(here, now)
    for code in codes.values():
        if code in FINAL or (code == STOPPED and not now.coordinator):
            return _new(now, me, (), code=code, why=f"host {first} ended with {code}")
    if STOPPED in codes.values():
        return None  # as above
    if NO_MESH in codes.values():
        fewer = replace(now, unfit=(*now.unfit, len(now.members)))
        return _restart(me, here, fewer, f"no mesh fits {_hosts(len(now.members))}", rules)
    lost = [h for h in now.members if h not in here]
    if lost:
        return _without(me, here, now, lost, waited_s, rules)
    if first is not None:
        return _again(me, here, now, f"host {first} ended with {codes[first]}", rules)
    if not now.coordinator:
        if len(following) == len(here) and all(s.ready for s in here.values()):
            return replace(now, coordinator=here[now.members[0]].free)
        if now.planned and waited_s > PLANNED_S:
            return _again(me, here, now, "the change that was planned took too long", rules)
        return None
    return _planned(me, here, now, rules)


def failed_first(here: Mapping[int, Status], now: Assignment) -> int | None:
    """Returns the host whose code says most of a failure; None if none has ended.

    The others end within moments, because they wait for it: with 1, by SIGABRT, or as hung.
    """
    ends = {h: here[h].ended for h in now.members if h in here and follows(here[h], now)}
    codes = {h: code for h, code in ends.items() if code is not None}
    little = {HANG: 1, SIGABRT: 2, 1: 3, STOPPED: 4, DONE: 5}
    return min(codes, key=lambda h: little.get(codes[h], 0), default=None)


def follows(status: Status, now: Assignment) -> bool:
    """Whether a host has taken note of an assignment."""
    return status.assignment is not None and status.assignment.key == now.key


def _gather(
    me: int, here: Mapping[int, Status], now: Assignment | None, waited_s: float, rules: Rules
) -> Assignment | None:
    """Begins once all hosts are there, or after a while those that are."""
    able = _able(here)
    members = _fitting(able, () if now is None else now.unfit)
    wanted = rules.hosts if now is None else now.needed
    late = waited_s > rules.gather_s
    if len(members) >= rules.min_hosts and (len(able) >= wanted or late):
        return _new(now, me, members, why=f"{_hosts(len(members))} of {rules.hosts} are there")
    if late:
        why = f"{_hosts(len(able))} of {rules.hosts} came, and --min_hosts is {rules.min_hosts}"
        return _new(now, me, (), code=MISSING, why=why)
    return None


def _without(
    me: int,
    here: Mapping[int, Status],
    now: Assignment,
    lost: list[int],
    waited_s: float,
    rules: Rules,
) -> Assignment | None:
    """Goes on without hosts that do not answer, if the others are not the smaller part."""
    left, all_of_them = len(now.members) - len(lost), len(now.members)
    names = ", ".join(f"host {h}" for h in lost)
    why = f"{names} {'does' if len(lost) == 1 else 'do'} not answer"
    if 2 * left < all_of_them:
        why += ", and what is left is less than half: it waits for more hosts"
        return _new(now, me, (), needed=max(-(-all_of_them // 2), rules.min_hosts), why=why)
    if 2 * left == all_of_them and min(now.members) in lost and waited_s < HALF_S:
        return None
    return _restart(me, here, now, why, rules)


def _again(
    me: int, here: Mapping[int, Status], now: Assignment, why: str, rules: Rules
) -> Assignment:
    """Starts again after a failure, unless there were too many in a row."""
    longest = max((s.running_s for s in here.values()), default=0.0)
    tries = 1 if longest > HEALTHY_S else now.tries + 1
    if tries > rules.restarts:
        return _new(now, me, (), code=CRASH_LOOP, why=f"gave up after {rules.restarts} restarts")
    return _restart(me, here, replace(now, tries=tries), why, rules)


def _restart(
    me: int, here: Mapping[int, Status], now: Assignment, why: str, rules: Rules
) -> Assignment:
    members = _fitting(_able(here), now.unfit)
    if len(members) >= rules.min_hosts:
        return _new(now, me, members, why=why)
    if now.unfit and len(_able(here)) >= rules.min_hosts:
        return _new(now, me, (), code=NO_MESH, why=why)
    why += "; fewer than --min_hosts are left, and it waits for more"
    return _new(now, me, (), needed=rules.min_hosts, why=why)


def _planned(
    me: int, here: Mapping[int, Status], now: Assignment, rules: Rules
) -> Assignment | None:
    """Takes in hosts that have come, and lets go those that are about to leave."""
    able = _able(here)
    leaving = [h for h in now.members if here[h].leaving]
    if leaving and not able:
        return _new(now, me, (), code=STOPPED, why="all hosts were asked to leave")
    members = _fitting(able, now.unfit)
    if members == now.members or len(members) < rules.min_hosts:
        return None
    if min(here[h].running_s for h in now.members) < SETTLE_S:
        return None
    joining = [h for h in members if h not in now.members]
    texts = [f"host {h} leaves" for h in leaving] + [f"host {h} joins" for h in joining]
    why = ", ".join(texts) or "other hosts fit better"
    return _new(now, me, members, planned=True, tries=0, why=why)


def _able(here: Mapping[int, Status]) -> tuple[int, ...]:
    return tuple(sorted(h for h, status in here.items() if not status.leaving))


def _fitting(hosts: tuple[int, ...], unfit: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the largest number of hosts, from the lowest, that is not known to be unfit."""
    count = max((n for n in range(1, len(hosts) + 1) if n not in unfit), default=0)
    return hosts[:count]


def _new(now: Assignment | None, me: int, members: tuple[int, ...], **values: Any) -> Assignment:
    if now is None:
        return Assignment(1, me, members, **values)
    kept = {"tries": now.tries, "unfit": now.unfit}
    return Assignment(now.generation + 1, me, members, **{**kept, **values})


def _hosts(count: int) -> str:
    return f"{count} host{'' if count == 1 else 's'}"
