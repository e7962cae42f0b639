"""What a copy of the state in memory costs a run: the stall of its step, and what goes on beside.

One process, one compiled step. Rounds alternate between intervals of steps with a save to memory at
their begin and intervals without one, so that both sides meet the same machine; a save's cost is
how much longer its interval takes, digests in the background included. The stall is what the run
itself records (`memory_saved`). What the next host gets is sent over the loopback apart from that.
Writes memory_checkpoints.json and memory_checkpoints.md.

    python -m benchmarks.cpu.memory_checkpoints --out benchmarks/results
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.cpu.saving import Steps, prepare
from benchmarks.machine import describe
from moejax.checkpoint.digests import add_up
from moejax.checkpoint.writer import arrays_of
from moejax.runtime.processes import ALONE
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep
from moejax.train.memory.checkpoints import MemoryCheckpoints
from moejax.train.memory.exchange import Inbox, Server, put
from moejax.train.memory.members import Members
from moejax.train.memory.placement import holders_of, offsets_of
from moejax.train.memory.slots import Slot, fill, listed, sealed, sha256_of

EVERY = 10  # steps between saves over which a cost is spread


def measure_saves(
    train_step: TrainStep, steps: Steps, state: TrainState, folder: Path, rounds: int, count: int
) -> tuple[TrainState, dict[str, Any]]:
    """Returns seconds of intervals with and without a save, and of the parts of each save."""
    events: list[dict[str, float]] = []

    def on_event(event: str, _: int, **values: float) -> None:
        assert event == "memory_saved", event
        events.append(values)

    members = Members(ALONE, ["host"], [("", 0)], "", None, folder, "run", "start")
    began = time.perf_counter()
    kept = MemoryCheckpoints(members, arrays_of(train_step.abstract), {}, on_event)
    reserve = time.perf_counter() - began
    kept.save(0, arrays_of(state), {})
    found: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(rounds):
        for side in sorted(found, reverse=bool(turn % 2)):
            state, _ = steps(state, 1)  # what the interval before left has ended
            began = time.perf_counter()
            if side == "with":
                kept.save(turn + 1, arrays_of(state), {})
            state, _ = steps(state, count)
            found[side].append(time.perf_counter() - began)
    kept.end()
    stalls = [event["stall_s"] for event in events]
    wholes = [event["whole_s"] for event in events]
    return state, {
        **found,
        "steps": count,
        "reserve": reserve,
        "first": stalls[0],
        "stall": stalls[1:],
        "whole": wholes[1:],
        "bytes": events[0]["bytes"],
    }


def measure_parts(state: TrainState, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Returns seconds of the parts of a save, each apart, with nothing beside it."""
    arrays = arrays_of(state)
    pieces = list(holders_of(arrays))
    offsets, size = offsets_of(pieces)
    rooms = list(zip(pieces, offsets, strict=True))
    slot, other = Slot(folder, "0-0"), np.zeros(size, np.uint8)
    slot.prepare(size)
    there = folder / "there"
    there.mkdir()
    server = Server(("127.0.0.1", 0), "token", there)
    inbox = Inbox(size, [Slot(there, f"1-from-0-{s}") for s in (0, 1)], threading.Lock())
    inbox.slots[0].prepare(size)
    server.inboxes = {0: inbox}
    found: dict[str, list[float]] = {"fill": [], "copy": [], "sums": [], "sha256": [], "put": []}
    fill(slot, rooms, arrays)
    as_filled = slot.bytes.copy()
    facts = {"process": 0, "step": 1, "pieces": listed(rooms), "bytes": size}
    record = sealed({**facts, "sha256": sha256_of(as_filled)})

    def timed(name: str, function: Any) -> None:
        began = time.perf_counter()
        function()
        found[name].append(time.perf_counter() - began)

    for _ in range(rounds):
        timed("fill", lambda: fill(slot, rooms, arrays))
        timed("copy", lambda: np.copyto(slot.bytes, other))
        timed("sums", lambda: add_up(arrays).here())
        np.copyto(slot.bytes, as_filled)
        timed("sha256", lambda: sha256_of(slot.bytes))
        timed("put", lambda: put(("127.0.0.1", server.port), "token", 0, slot.bytes, record))
    server.close()
    return found


def share(seconds: list[float], step: float) -> str:
    """Returns seconds in words, and as a share of a step."""
    middle, worst = statistics.median(seconds), max(seconds)
    return (
        f"{1e3 * middle:.1f} ms, {100 * middle / step:.1f} % of a step (median of {len(seconds)}; "
        f"worst {1e3 * worst:.1f} ms, {100 * worst / step:.1f} %)"
    )


def answers(saves: dict[str, Any], parts: dict[str, list[float]], step: float) -> dict[str, str]:
    """Returns the rows of the page.

    Args:
      step: seconds of a step without a save.
    """
    middle = statistics.median
    pairs = list(zip(saves["with"], saves["without"], strict=True))
    costs = sorted((held - free) / step for held, free in pairs)
    ratios = sorted(held / free for held, free in pairs)
    speed = saves["bytes"] / middle(parts["copy"]) / 1e9
    return {
        "the stall, while the state is copied": share(saves["stall"], step),
        f"the stall spread over {EVERY} steps": (
            f"{100 * middle(saves['stall']) / step / EVERY:.2f} % of their time"
        ),
        f"{saves['steps']} steps with a save at their begin, over as many without, in turns": (
            f"{middle(ratios):.3f} x (median of {len(ratios)}; {ratios[0]:.3f} to {ratios[-1]:.3f})"
        ),
        "the same as a cost, in steps, the background included": (
            f"{middle(costs):.2f} ({costs[0]:.2f} to {costs[-1]:.2f})"
        ),
        "the first save of a start, which compiles the digests of numbers": (
            f"{saves['first']:.2f} s"
        ),
        "reserving both slots at the start": f"{saves['reserve']:.2f} s",
        "beside steps: from the copy to the record, without a next host": (
            f"{1e3 * middle(saves['whole']):.0f} ms"
        ),
        "apart: copying the pieces into a slot": share(parts["fill"], step),
        "apart: as many bytes in one copy": (
            f"{1e3 * middle(parts['copy']):.1f} ms, {speed:.1f} GB/s"
        ),
        "apart: digests of numbers on the device": share(parts["sums"], step),
        "apart, in the background: SHA-256 of the slot, one thread": (
            f"{1e3 * middle(parts['sha256']):.0f} ms"
        ),
        "apart, in the background: sending all of it over the loopback, with SHA-256 there": (
            f"{1e3 * middle(parts['put']):.0f} ms"
        ),
    }


def write_page(
    out: Path, saves: dict[str, Any], parts: dict[str, list[float]], load: float
) -> None:
    """Writes the results as JSON and as a page."""
    step = statistics.median(saves["without"]) / saves["steps"]
    machine = describe(sorted(os.sched_getaffinity(0)))
    result = {"saves": saves, "parts": parts, "machine": machine, "load": load}
    out.mkdir(parents=True, exist_ok=True)
    (out / "memory_checkpoints.json").write_text(json.dumps(result, indent=1) + "\n")
    rows = answers(saves, parts, step)
    table = "\n".join(f"| {question} | {answer} |" for question, answer in rows.items())
    text = (
        f"# What a copy in memory costs\n\n`python -m benchmarks.cpu.memory_checkpoints`\n\n"
        f"A state of {saves['bytes'] / 1e6:,.0f} MB, one process, a step of {1e3 * step:,.0f} ms "
        f"(jax {jax.__version__}). Load of the machine by others at the begin: {load:.1f}.\n\n"
        f"| question | answer |\n|---|---|\n{table}\n\nMachine: {json.dumps(machine)}\n"
    )
    (out / "memory_checkpoints.md").write_text(text)
    print(text)


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--memory_dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2, help="steps of one interval")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    train_step, state, steps = prepare()
    with tempfile.TemporaryDirectory(dir=args.memory_dir) as folder:
        saves, parts = Path(folder) / "run" / "host", Path(folder) / "parts"
        saves.mkdir(parents=True)
        parts.mkdir()
        state, measured = measure_saves(train_step, steps, state, saves, args.rounds, args.steps)
        apart = measure_parts(state, parts, args.rounds)
    write_page(args.out, measured, apart, load)


if __name__ == "__main__":
    main()
