import signal
import threading

import pytest

from moejax.runtime.interrupt import STOP_SIGNALS, Interrupt


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


def test_a_loop_in_another_thread_runs_without_handlers():
    seen = []

    def loop():
        with Interrupt() as interrupt:
            seen.append(interrupt.requested)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert seen == [False]
