"""Faults of links, on a cluster of two hosts that launch/emulate makes: cut, and slowed."""

import subprocess
import threading
from collections.abc import Callable

from tests.launch.modules import module

PACKET = module("namespaces").PACKET
FAST, SLOW = 20, 1  # Mbit/s; a step of the lab's model sends about 100 KB
HOSTS = ("emulate", "--hosts", "2", "--devices-per-host", "2")
LINKED = (*HOSTS, "--link", f"{FAST}mbit")


def cut(host: int) -> Callable[[int], None]:
    """Returns a fault: the cable between a host and the switch is pulled."""
    return lambda launcher: _cable(launcher, host, "down")


def plug_in(host: int, after_s: float) -> Callable[[int], None]:
    """Returns what undoes it, a while after it was called."""

    def later(launcher: int) -> None:
        threading.Timer(after_s, _cable, (launcher, host, "up")).start()

    return later


def slow(host: int) -> Callable[[int], None]:
    """Returns a fault: a host's link has a twentieth of its rate, in both directions."""

    def fault(launcher: int) -> None:
        sizes = ("rate", f"{SLOW}mbit", "burst", str(PACKET), "limit", str(256 * PACKET))
        for namespace, device in ((f"h{host}", "net0"), ("switch", f"port{host}")):
            where = ("-n", f"moejax-{launcher}-{namespace}")
            _run("tc", *where, "qdisc", "change", "dev", device, "root", "tbf", *sizes)

    return fault


def _cable(launcher: int, host: int, state: str) -> None:
    switch = ("-n", f"moejax-{launcher}-switch")
    _run("ip", *switch, "link", "set", f"port{host}", state)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
