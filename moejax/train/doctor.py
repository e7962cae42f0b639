"""The command `moejax doctor`, with what its `--smoke` runs."""

from rich.console import Console

from moejax.aot.doctor import main as doctor


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    return doctor(argv, _smoke)


def _smoke(console: Console) -> int:
    # Imports the trainer, which plain `doctor` does not need.
    from moejax.train.smoke import smoke

    return smoke(console)
