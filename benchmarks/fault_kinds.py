"""The kinds of faults that `benchmarks.faults` tries, and how a trial of each is made."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from moejax.checkpoint.find import newest
from moejax.report.goodput import read_goodput
from tests.faults import copies, disks, links, strangers, takeover
from tests.faults.damage import damage
from tests.faults.lab import STEPS, Lab, Trial, injected, kill_in_save, seeded, send, steps_again
from tests.faults.lab import with_wrong_clock as wrong_clock
from tests.integration.runs import final_state

# (lab, run, seed) -> the trial, and whether its end is that of a run without a fault.
Plan = Callable[[Lab, str, int], tuple[Trial, bool]]


@dataclass
class Kind:
    """A kind of fault.

    Attributes:
      plan: makes a trial.
      times: trials for each that is asked for.
    """

    name: str
    plan: Plan
    times: int = 1


def bits_of(run_dir: Path) -> list[bytes]:
    """Returns the arrays of a run's newest checkpoint."""
    return [x.tobytes() for x in final_state(run_dir)[1]]


def judged(lab: Lab, name: str, trial: Trial, code: int = 0) -> tuple[Trial, bool]:
    """Returns a trial, and whether it ended with a code and the bits of a run without a fault."""
    same = trial.code == code and bits_of(lab.folder / name) == bits_of(lab.folder / "straight")
    return trial, same


def signalled(number: int) -> Plan:
    """Returns trials that send a signal to a random process after a random step."""

    def plan(lab: Lab, name: str, seed: int) -> tuple[Trial, bool]:
        member, step, delay = seeded(seed)
        return judged(lab, name, lab.trial(name, step, send(number, member, delay)))

    return plan


def in_save(lab: Lab, name: str, seed: int) -> tuple[Trial, bool]:
    """A trial that kills a random process while a checkpoint is written."""
    member, step, _ = seeded(seed)
    trial = lab.trial(name, 8 if step < 15 else 18, kill_in_save(lab, name, member))
    return judged(lab, name, trial)


def inside(fault: str) -> Plan:
    """Returns trials whose program fails by itself in a random process after a random step."""

    def plan(lab: Lab, name: str, seed: int) -> tuple[Trial, bool]:
        member, step, _ = seeded(seed)
        once = lab.folder / f"{name}.done"
        trial = lab.trial(name, step, wrapped=injected(fault, member, step, once))
        return judged(lab, name, trial)

    return plan


def taken_over(who: str) -> Plan:
    """Returns trials in which others go on with a run of which a process was killed."""

    def plan(lab: Lab, name: str, seed: int) -> tuple[Trial, bool]:
        killed = f"{name}-killed"
        trial = takeover.kill(lab, killed)
        try:
            said = takeover.take_over(lab, killed, name, takeover.OTHERS[who])
            takeover.check_batches(lab, killed, name)
            takeover.check_losses(lab, name)
        except AssertionError as error:
            return replace(trial, out=f"{trial.out}\n{error}"), False
        return replace(trial, code=0, lost=steps_again(trial.out, said)), True

    return plan


def link_cut(lab: Lab, name: str, seed: int) -> tuple[Trial, bool]:
    """A trial on two emulated hosts, one of which is cut off for a while."""
    host, step, _ = seeded(seed)
    fault, after = links.cut(host), links.plug_in(host, after_s=0)
    return judged(lab, name, lab.trial(name, step, fault, launcher=links.HOSTS, failed=after))


def link_slow(lab: Lab, name: str, seed: int) -> tuple[Trial, bool]:
    """A trial on two emulated hosts, one of which has a slow link from a step on."""
    host, step, _ = seeded(seed)
    return judged(lab, name, lab.trial(name, step, links.slow(host), launcher=links.LINKED))


def clock(lab: Lab, name: str, seed: int) -> tuple[Trial, bool]:
    """A trial in which the clock of a random process is wrong and jumps."""
    member, step, _ = seeded(seed)
    trial, same = judged(lab, name, lab.trial(name, step, wrapped=wrong_clock(member)))
    return trial, same and min(read_goodput(lab.folder / name).seconds.values()) >= 0


def at_the_port(lab: Lab, name: str, seed: int) -> tuple[Trial, bool]:
    """A trial during all of which strangers come to the coordinator's port."""
    crowd = strangers.Strangers()
    try:
        trial = lab.trial(name, seeded(seed)[1], wrapped=strangers.LATE, begun=crowd.begin)
    finally:
        crowd.end()
    trial, same = judged(lab, name, trial)
    return trial, same and crowd.refused > 0 and len(crowd.heard) > 0


def intruder(kind: str) -> Plan:
    """Returns trials in which somebody else must be refused; the run goes on.

    Args:
      kind: "second", "second elsewhere" or "process".
    """

    def plan(lab: Lab, name: str, seed: int) -> tuple[Trial, bool]:
        ends: list[strangers.Done] = []
        spent: list[float] = []

        def visit(launcher: int) -> None:
            began = time.monotonic()
            if kind == "process":
                ends.append(strangers.process_of_another_run(lab, f"{name}-visitor", launcher))
            else:
                host = "elsewhere" if kind == "second elsewhere" else None
                ends.append(strangers.second_run(lab, name, host))
            spent.append(time.monotonic() - began)

        trial = strangers.visited(lab, name, seeded(seed)[1], visit)
        trial, same = judged(lab, name, trial)
        refused = [end.returncode for end in ends] == [6 if kind == "process" else 2]
        said = "\n".join(end.stdout.strip() for end in ends)
        return replace(trial, detected_s=spent[0] if refused else None, said=said), same and refused

    return plan


def disk_full(lab: Lab, name: str, seed: int) -> tuple[Trial, bool]:
    """A trial whose disk is full after a random step, until the run has ended."""
    folder = lab.folder / name
    with disks.small_disk(folder):
        trial = lab.trial(name, seeded(seed)[1], disks.fill(folder))
        disks.empty(folder)
        done = lab.run(name)
        lost = steps_again(trial.out, done.stdout)
        trial = replace(trial, lost=lost, out=trial.out + done.stdout)
        trial, same = judged(lab, name, trial, code=5)
        return trial, same and done.returncode == 0


def damaged(lab: Lab, name: str, seed: int) -> tuple[Trial, bool]:
    """A trial that damages a file of the newest of two checkpoints; it must be found or harmless.

    Same: the state that is taken is that of its step, of the older one where damage was found.
    """
    run_dir, straight = lab.folder / name, lab.folder / "straight"
    older = lab.folder / "straight-older"
    if not older.exists():
        shutil.copytree(straight, older)
        shutil.rmtree(older / "checkpoints" / str(STEPS))
    shutil.copytree(straight, run_dir)
    what, _ = damage(run_dir / "checkpoints" / str(STEPS), random.Random(seed))
    began = time.monotonic()
    saved, notes = newest(run_dir / "checkpoints", "full")
    seconds = time.monotonic() - began
    found = saved is not None and saved.step != STEPS
    same = bits_of(run_dir) == bits_of(older if found else straight)
    lost = 0 if saved is None else STEPS - saved.step
    shutil.rmtree(run_dir)
    said = "; ".join(notes) or f"no harm: {what}"
    return Trial(0, "", seconds if found else None, None, lost, said), same


def copy_damaged(lab: Lab, name: str, seed: int) -> tuple[Trial, bool]:
    """A trial that kills a process and flips a bit of a copy in memory before the next start."""
    member, step, delay = seeded(seed)
    flipped: list[Path] = []
    trial = lab.trial(
        name,
        max(step, copies.EVERY + 2),  # a copy is whole by then
        send(signal.SIGKILL, member, delay),
        wrapped=copies.ON_HOSTS,
        words=copies.settings(lab, name),
        failed=lambda _: flipped.append(copies.flip_newest(lab, name, random.Random(seed))),
    )
    trial, same = judged(lab, name, trial)
    told = [line for line in trial.out.splitlines() if "copy in memory" in line]
    named = any(str(flipped[0].with_suffix("")) in line for line in told) if flipped else False
    seen = trial.detected_s if named else None
    again = "from the memory of hosts" in trial.out
    return replace(trial, detected_s=seen, said="; ".join(told)), same and named and again


def missing() -> dict[str, str]:
    """Returns what this machine lacks, by kind of fault that needs it."""
    lacking = {}
    if wanting := links.module("namespaces").missing():
        lacking |= dict.fromkeys((CUT, SLOW, ELSEWHERE), ", ".join(wanting))
    if os.geteuid():
        lacking[FULL] = "root"
    return lacking


CUT, SLOW = "a link is cut, until all have ended", "a link is slow, a twentieth of its rate"
ELSEWHERE, FULL = "the same from another host", "the disk is full, until the run has ended"
KINDS = (
    Kind("SIGKILL at a random moment", signalled(signal.SIGKILL), times=8),
    Kind("SIGKILL while a checkpoint is written", in_save, times=8),
    Kind("SIGSTOP at a random moment", signalled(signal.SIGSTOP)),
    Kind("an endless loop in Python", inside("loop")),
    Kind("a call of C that never returns and keeps Python's lock", inside("hold")),
    Kind("an exception", inside("exception")),
    Kind("an exit without a word", inside("exit")),
    *(Kind(f"SIGKILL, taken over by {who}", taken_over(who)) for who in takeover.OTHERS),
    Kind(CUT, link_cut),
    Kind(FULL, disk_full),
    Kind("damage to a file of the newest checkpoint", damaged, times=100),
    Kind("SIGKILL, and a bit flips in a copy in memory", copy_damaged),
    Kind(SLOW, link_slow),
    Kind("a wall clock that is 30 hours off, and jumps", clock),
    Kind("strangers at the coordinator's port", at_the_port),
    Kind("a process of another run at that port", intruder("process")),
    Kind("a second run in the run's directory", intruder("second")),
    Kind(ELSEWHERE, intruder("second elsewhere")),
)
