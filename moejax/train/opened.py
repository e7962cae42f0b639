"""Opens what a run writes: its records, and its checkpoints."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moejax.config.load import save_json
from moejax.config.schema import Config
from moejax.runtime.processes import Processes
from moejax.train.checkpoint import Checkpoints
from moejax.train.copies import Copies
from moejax.train.metrics import Records
from moejax.train.trackers import open_trackers


def open_checkpoints(
    cfg: Config,
    processes: Processes,
    records: Records,
    console: Console,
    copies: Copies | None = None,
) -> Checkpoints:
    """Returns the run's checkpoints; failed saves and copies are recorded as soon as seen."""

    def failed(step: int, text: str) -> None:
        records.event("save_failed", step, text=text)

    def copied(steps: list[int], error: str | None) -> None:
        for step in steps:
            records.event("copied", step)
        if error is not None:
            records.event("copy_failed", 0, text=error)
            console.print(
                f"warning: checkpoints are not copied to {cfg.checkpoint.copy_to}: {error}",
                highlight=False,
                soft_wrap=True,
            )

    return Checkpoints(
        Path(cfg.run_dir) / "checkpoints",
        keep=cfg.checkpoint.keep,
        processes=processes,
        failed=failed,
        copies=copies,
        copied=copied,
    )


def open_records(
    cfg: Config, notes: Sequence[str], console: Console, processes: Processes
) -> Records:
    """Writes the resolved config, opens the records, and shows and records the start's notes."""
    run_dir = Path(cfg.run_dir)
    if processes.first:
        save_json(cfg, run_dir / "config.json")
    trackers = open_trackers(cfg) if processes.first else None
    records = Records(run_dir, written=processes.first, trackers=trackers)
    for text in notes:
        tell_note(console, records, (), text)
    return records


def tell_note(console: Console, records: Records, known: Sequence[str], text: str) -> None:
    """Shows and records a note of the start, unless it is known."""
    if text in known:
        return
    console.print(text, highlight=False, soft_wrap=True)
    records.event("note", 0, text=text)
