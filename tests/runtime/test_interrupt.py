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


def test_a_loop_in_another_thread_runs_without_handlers():
    seen = []

    def loop():
        with Interrupt() as interrupt:
            seen.append(interrupt.requested)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert seen == [False]
