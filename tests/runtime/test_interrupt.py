import signal
import subprocess
import sys
import threading
import time

import pytest

from moejax.errors import STOPPED
from moejax.runtime.interrupt import STOP_SIGNALS, Interrupt, interruptible, stops_at_sigterm


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_asks_and_the_second_stops(number):
    with Interrupt() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(number)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_the_handlers_from_before_come_back():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with Interrupt():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_handler_of_c_code_gives_way_to_the_default(monkeypatch):
    set_signal, before = signal.signal, {n: signal.getsignal(n) for n in STOP_SIGNALS}

    def of_c_code(number, handler):
        """Python answers None where C code had installed the handler, and takes no None."""
        known = set_signal(number, handler)
        return known if handler == signal.SIG_DFL else None

    monkeypatch.setattr(signal, "signal", of_c_code)
    try:
        with Interrupt():
            pass
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == [signal.SIG_DFL] * 2
    finally:
        for number, handler in before.items():
            set_signal(number, handler)


PROGRAM = """
import contextlib, ctypes, sys, time
from moejax.runtime.interrupt import STOP_SIGNALS, Interrupt, interruptible, stops_at_sigterm

doing, body = sys.argv[1], sys.argv[2]
try:
    with stops_at_sigterm(lambda: doing or None):
        inner = Interrupt() if body == "loop" else contextlib.nullcontext()
        with inner as interrupt:
            print("up", flush=True)
            if body == "in C":  # as a compilation: no handler of Python runs meanwhile
                ctypes.PyDLL(None).usleep(500_000)
                ctypes.CDLL(None).sleep(20)
            until = time.monotonic() + 20
            while time.monotonic() < until and not (interrupt and interrupt.requested):
                time.sleep(0.01)
            print("asked")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("doing", "body", "code", "said"),
    [
        ("compile", "wait", STOPPED, ""),
        ("compile", "in C", STOPPED, ""),
        ("", "wait", 0, "interrupted"),  # where something may be lost
        ("compile", "loop", 0, "asked"),  # whose own handler takes it
    ],
)
def test_sigterm_stops_at_once_only_where_nothing_is_lost(doing, body, code, said):
    command = [sys.executable, "-c", PROGRAM, doing, body]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "up\n"
        time.sleep(0.7 if body == "in C" else 0.05)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert (process.returncode, out.strip()) == (code, said)
    assert ("stopped by SIGTERM during compile; nothing was lost" in errors) == (code == STOPPED)


def test_sigterm_is_as_before_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with stops_at_sigterm(lambda: "start"):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert "SIGTERM" not in {thread.name for thread in threading.enumerate()}


def test_ctrl_c_ends_the_process_while_it_waits_in_cpp_and_asks_again_afterwards():
    before = signal.getsignal(signal.SIGINT)
    with interruptible():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(RuntimeError, match="inside"), interruptible():
        raise RuntimeError("inside")
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_waits_and_is_stopped_by_no_signal():
    """Only the main thread can set handlers."""
    done = []

    def wait():
        with interruptible(), stops_at_sigterm(lambda: "waiting"), Interrupt() as interrupt:
            done.append(interrupt.requested)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert done == [False]
