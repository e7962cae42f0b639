"""Stands between a launcher and a program that reaches other hosts: `ssh`, or `gcloud`.

    python launch/relay.py ssh HOST ...

That program would die of a signal without telling the other host. So it runs in a session of its
own, and a signal goes to its standard input as a line with the signal's name, for `guard.py`, which
reads it there. When the launcher is killed, its end of our standard output closes: then standard
input ends, and the guard ends what runs on the other host.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
LOST = 255  # exit code of ssh when it cannot connect, or loses the connection
POLL_MILLISECONDS = 200


def prefix() -> tuple[str, ...]:
    """Words that start a program through this file."""
    return (sys.executable, str(Path(__file__).resolve()))


def relay(command: list[str]) -> int:
    """Runs the command until it ends. Returns its exit code."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def ask(number: int, _: object) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            process.stdin.write(f"{signal.Signals(number).name}\n".encode())
            process.stdin.flush()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    readers = select.poll()
    readers.register(sys.stdout.fileno(), select.POLLERR)
    while process.poll() is None:
        if readers.poll(POLL_MILLISECONDS):
            return _leave(process)
    return process.returncode


def _leave(process: subprocess.Popen) -> int:
    """Lets the other host end its processes. Nobody is left to be told how they ended."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait()


def main() -> int:
    """Runs the command, and ends as the program on the other host did."""
    code = relay(sys.argv[1:])
    if code == LOST:
        print("the connection failed or was lost; ssh's message, if any, stands above")
        return 1
    # A shell's 128 + N is a signal again, which says more than an exit code.
    if code in (128 + signal.SIGKILL, 128 + signal.SIGABRT):
        os.kill(os.getpid(), code - 128)
    return code


if __name__ == "__main__":
    sys.exit(main())
