"""The lines that a run shows, and on a terminal a bar below them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn

from moejax.screen import text_column
from moejax.train.records.metrics import Report


class Display:
    """Shows reports and notes, and why the run waits. A context manager around the steps."""

    def __init__(self, console: Console, num_steps: int, first_step: int):
        self.console, self.num_steps = console, num_steps
        self._progress: Progress | None = None  # while the steps run, on a terminal
        self._first_step = first_step

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            columns = (BarColumn(bar_width=20), text_column())
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self.console)
            self._task = self._progress.add_task(
                self._position(self._first_step), total=self.num_steps, completed=self._first_step
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _position(self, step: int) -> str:
        return f"step {step}/{self.num_steps}"

    def step(self, step: int) -> None:
        """Moves the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=self._position(step))

    def show(self, report: Report) -> None:
        """Shows a report in a line that stays. On a narrow terminal it is shorter."""
        live = self._progress is not None
        self.note(report.line(self.num_steps, self.console.width if live else None))

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        console = self.console if self._progress is None else self._progress.console
        console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def busy(self, what: str, *, plain: bool = True) -> Iterator[Callable[[str], None]]:
        """Shows what the run waits for, on a terminal beside a clock.

        Args:
          plain: whether to show it without a terminal too, in a line that stays.
        Yields:
          A function that shows how far it is.
        """
        if not self.console.is_terminal:
            if plain:
                self.note(f"{what} ...")
            yield lambda _: None
        elif self._progress is not None:
            live, task = self._progress, self._task
            before = live.tasks[task].description
            live.update(task, description=what)
            yield lambda far: live.update(task, description=f"{what}, {far}")
            live.update(task, description=before)
        else:
            columns = (SpinnerColumn(), text_column(), TimeElapsedColumn())
            with Progress(*columns, console=self.console, transient=True) as alone:
                task = alone.add_task(what)
                yield lambda far: alone.update(task, description=f"{what}, {far}")
