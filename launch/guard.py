"""Runs on another host for a launcher of this folder: checks that host, or runs a command there.

A launcher sends this text to the host's own Python, so nothing of moejax must be there for it:

    python -c TEXT check NAME   prints what must be the same on all hosts; NAME must be known there
    python -c TEXT run WORDS    runs a command, and ends it with the launcher

A command's processes get the signals whose names arrive on standard input, a line each. When
standard input ends, the launcher is gone or the link is lost: the command is asked to stop, so that
it can save, and killed some time later. Standard library only.
"""

import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from importlib import import_module

GRACE_SECONDS = 60  # to save and stop
STOP = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
FLUSH_SECONDS = 5  # for the last lines, when a process of the command has kept its output open


def check(name: str) -> int:
    """Prints, as a line of JSON, what this host would run, and the error of looking up `name`."""
    found = {"Python": platform.python_version(), "unknown": None}
    try:
        found["moejax"] = import_module("moejax.version").__version__
    except ImportError:
        found["moejax"] = "none"
    try:
        found["JAX"] = import_module("importlib.metadata").version("jax")
    except ImportError:  # a package that is missing is one, too
        found["JAX"] = "none"
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        found["unknown"] = str(error)
    print(json.dumps(found))
    return 0


def run(command: list) -> int:
    """Runs a command until it ends. Returns its exit code, or 128 + N after signal N."""
    for number in STOP:  # a command that starts with one ignored cannot be asked to stop
        signal.signal(number, signal.SIG_DFL)
    # A thread waits for this host's own signals. A handler of Python would run in this thread, and
    # a signal just before this thread waits for the command would lie until the next one.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP),
    )
    threading.Thread(target=_pass_on, args=(process,), daemon=True).start()
    shown = threading.Thread(target=_show, args=(process,), daemon=True)
    shown.start()
    threading.Thread(target=_obey, args=(process,), daemon=True).start()
    code = process.wait()
    _signal(process, signal.SIGKILL)  # what the command left behind
    shown.join(FLUSH_SECONDS)
    return code if code >= 0 else 128 - code


def _show(process: subprocess.Popen) -> None:
    """Copies the command's output, and reads on when nobody listens, so that it can save."""
    assert process.stdout is not None
    to = sys.stdout.buffer
    for line in process.stdout:
        with contextlib.suppress(OSError, ValueError):
            to.write(line)
            to.flush()


def _obey(process: subprocess.Popen) -> None:
    """Passes on signals that are asked for, and ends the command when the launcher is gone."""
    for line in sys.stdin:
        _signal(process, signal.Signals[line.strip()])
    _signal(process, signal.SIGTERM)
    threading.Event().wait(GRACE_SECONDS)
    _signal(process, signal.SIGKILL)


def _pass_on(process: subprocess.Popen) -> None:
    """Passes on the signals that this host itself sends."""
    while True:
        _signal(process, signal.sigwait(STOP))


def _signal(process: subprocess.Popen, number: int) -> None:
    # Its session is its own, so the group's number stays taken while any of its processes runs.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def main() -> int:
    """Does what the first word says."""
    return check(sys.argv[2]) if sys.argv[1] == "check" else run(sys.argv[2:])


if __name__ == "__main__":
    _code = main()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(_code)  # Python would wait for the threads' locks, and complain of a closed output
