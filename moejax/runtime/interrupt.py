"""Ctrl-C and SIGTERM: the first asks the loop to save and stop, the second stops at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """A context manager; `requested` is true after Ctrl-C or SIGTERM."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupt":
        # Handlers can only be set in the main thread; a loop driven from another has no Ctrl-C.
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            _restore(number, handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process while it waits in C++, where Python's handler does not run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        _restore(signal.SIGINT, before)


def _restore(number: signal.Signals, before: Any) -> None:
    """Restores a signal's handler, unless C code installed it, which Python reports as None."""
    signal.signal(number, signal.SIG_DFL if before is None else before)
