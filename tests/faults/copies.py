"""A copy in memory that is damaged while its run is down, which the copy of the neighbour answers.

A host is a name in MOEJAX_HOST here: each process of a run has one.
"""

import json
import random
from pathlib import Path

from tests.faults.damage import spoil
from tests.faults.lab import TRAIN, Lab

EVERY = 4  # steps between copies
ON_HOSTS = ("sh", "-c", 'MOEJAX_HOST=host-$MOEJAX_PROCESS exec "$0" "$@"', *TRAIN)


def settings(lab: Lab, name: str) -> tuple[str, ...]:
    """Returns the settings of a run that keeps copies in memory, and saves to disk at its end."""
    return (
        "--config.checkpoint.save_every=none",
        f"--config.checkpoint.memory_every={EVERY}",
        f"--config.checkpoint.memory_dir={lab.folder / f'{name}-memory'}",
    )


def step_of(slot: Path) -> int:
    """Returns the step in a slot, by its record."""
    return json.loads(slot.with_suffix(".json").read_text())["step"]


def flip_newest(lab: Lab, name: str, draw: random.Random) -> Path:
    """Flips a bit in one of the copies of the newest step that both hosts hold whole."""
    (run,) = (lab.folder / f"{name}-memory").iterdir()
    records = list(run.glob("*/*.json"))
    steps = [step_of(path) for path in records]
    step = max(step for step in steps if steps.count(step) == 4)  # two owners, two holders
    record = draw.choice(sorted(path for path in records if step_of(path) == step))
    slot = record.with_suffix(".slot")
    spoil(slot, "flip", draw)
    return slot
