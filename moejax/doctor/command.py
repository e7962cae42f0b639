"""The command `moejax doctor`, with the checks of `--smoke` and `--mesh`."""

from pathlib import Path

from rich.console import Console

from moejax.config.schema import Config
from moejax.doctor.machine import Above
from moejax.doctor.machine import main as doctor


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    return doctor(argv, Above(_smoke, _mesh))


def _smoke(console: Console) -> int:
    # Imports the trainer, which plain `doctor` does not need.
    from moejax.doctor.smoke import smoke

    return smoke(console)


def _mesh(cfg: Config | None, run_dir: Path | None, deadline_s: float, console: Console) -> int:
    from moejax.doctor.mesh import check_mesh

    return check_mesh(cfg, run_dir, deadline_s, console)
