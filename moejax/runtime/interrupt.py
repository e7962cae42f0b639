"""Ctrl-C and SIGTERM: the first asks the loop to save and stop, the second stops at once.

Before the first step there is nothing to save, so SIGTERM stops at once, with one line
(`stops_at_sigterm`).
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from moejax.errors import STOPPED

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

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            _restore(number, handler)


@contextmanager
def stops_at_sigterm(where: Callable[[], str | None]) -> Iterator[None]:
    """Lets SIGTERM end the process where no other handler takes it.

    Python's handlers do not run while C++ compiles, so a thread is told of the signal: it ends the
    process at once where that loses nothing. Elsewhere the main thread gets a KeyboardInterrupt, as
    from Ctrl-C.

    Args:
      where: returns the process's stage in words; None while it must not be ended at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop() -> None:
        if (doing := where()) is not None:
            print(
                f"moejax: stopped by SIGTERM during {doing}; nothing was lost, and the same "
                "command goes on",
                file=sys.stderr,
                flush=True,
            )
            os._exit(STOPPED)

    def interrupt(number: int, frame: FrameType | None) -> None:
        stop()
        raise KeyboardInterrupt

    def listen() -> None:
        # Other signals, and the end of the context, write other bytes.
        while (received := os.read(reading, 1)) not in (b"", b"\0"):
            if received[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is interrupt:
                stop()

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.signal(signal.SIGTERM, interrupt)
    fd_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="SIGTERM", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd_before)
        _restore(signal.SIGTERM, before)
        os.write(writing, b"\0")
        thread.join()
        os.close(reading)
        os.close(writing)


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
