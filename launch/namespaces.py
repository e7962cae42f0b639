"""An emulated cluster: hosts as network namespaces, joined by shaped links through a switch.

Standard library, `ip` and `tc`. Every name starts with `moejax-` and the number of the process that
made it, so that nothing else is ever touched. A process of its own removes them when a launcher is
killed, and the next launcher what even that left behind. A delay is made by `delay.py`. The
devices `ifb0` and `ifb1` of a machine are not made here: a kernel with that driver has them.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import delay

PREFIX = "moejax-"
HOSTS_FILES = Path("/etc/netns")  # `ip netns exec` mounts these over /etc
TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s)$")
RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)$")
# The largest: 64 KiB and headers.
PACKET = 2**16 + 2**12
# What a bucket holds at least. The loopback sends a packet whole and never one that is larger; for
# a network card the kernel cuts it into frames.
FRAMES = 4 * 1514
DELAYED = 4 * (delay.FRAME + delay.HEADER)  # the same of links with a delay
# A training network neither forgets its rate between messages nor drops packets to find it.
LIKE_A_FABRIC = {"tcp_slow_start_after_idle": 0, "tcp_congestion_control": "reno"}
LONGEST = 60.0  # seconds of a delay
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def missing() -> list[str]:
    """Programs and rights that an emulated cluster needs and this machine lacks."""
    found = [] if os.geteuid() == 0 else ["root"]
    return found + [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]


def bits_per_second(rate: str) -> float:
    """Reads `200mbit`.

    Raises:
      ValueError: if it is not a number with kbit, mbit or gbit.
    """
    match = RATE.match(rate)
    if match is None or not float(match[1]):
        raise ValueError(f"rate is `{rate}`. It must be a number and kbit, mbit or gbit: 200mbit.")
    return float(match[1]) * UNITS[match[2]]


def seconds(time: str) -> float:
    """Reads `50ms`.

    Raises:
      ValueError: if it is not a number with ms or s, or longer than a minute.
    """
    match = TIME.match(time)
    found = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0) if match is not None else 0.0
    if not 0 < found <= LONGEST:
        raise ValueError(
            f"delay is `{time}`. It must be a number and ms or s, up to {LONGEST:g} s: 50ms."
        )
    return found


def remove_left_over() -> None:
    """Removes the namespaces of launchers that are gone."""
    for name in _namespaces():
        owner = name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove(name)


class Cluster:
    """Hosts and their links; a context manager that leaves nothing behind."""

    def __init__(
        self, hosts: int, link: str | None, fast_link: str | None, late: str | None = None
    ):
        """Takes the rate of each host's link to the switch, both directions, and inside a host.

        Args:
          late: how long a packet takes from a host to another; None: no time.
        """
        self.link, self.fast_link, self.late = link, fast_link, late
        self._carrier: subprocess.Popen | None = None
        self.switch = f"{PREFIX}{os.getpid()}-switch"
        self.hosts = [f"{PREFIX}{os.getpid()}-h{number}" for number in range(hosts)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(hosts)]

    def __enter__(self) -> "Cluster":
        # Outlives a kill -9 of this process, and then removes what it could not.
        self._remover = subprocess.Popen(
            [sys.executable, __file__, *self.hosts, self.switch],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*self.hosts, self.switch]:
            _remove(name)
        for process in filter(None, (self._carrier,)):
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        assert self._remover.stdin is not None
        self._remover.stdin.close()
        self._remover.wait()

    def prefix(self, host: int) -> tuple[str, ...]:
        """Words before a command that run it on a host, under that host's name."""
        name = self.hosts[host]
        shell = f'hostname {name}; exec "$@"'
        return ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", shell, "sh")

    def bytes_sent(self) -> list[int]:
        """Bytes that each host has put on its link, by the kernel's counter."""
        counted = []
        for name in self.hosts:
            shown = json.loads(_run("ip", "-n", name, "-s", "-j", "link", "show", "dev", "net0"))
            counted.append(int(shown[0]["stats64"]["tx"]["bytes"]))
        return counted

    def _build(self) -> None:
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        listed = "".join(
            f"{address} {name}\n" for address, name in zip(self.addresses, self.hosts, strict=True)
        )
        for name in self.hosts:
            _run("ip", "netns", "add", name)
        if self.late is not None:
            self._carrier = _carrier(seconds(self.late) / 2, self.switch, self.hosts)
        for number, (name, address) in enumerate(zip(self.hosts, self.addresses, strict=True)):
            files = HOSTS_FILES / name
            files.mkdir(parents=True)
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{listed}")
            port = f"port{number}"
            if self.late is None:
                peer = ("peer", "name", "net0", "netns", name)
                _run("ip", "-n", self.switch, "link", "add", port, "type", "veth", *peer)
            else:
                for where, device in ((name, "net0"), (self.switch, port)):
                    _run("ip", "-n", where, "link", "set", device, "mtu", str(delay.FRAME))
            _run("ip", "-n", self.switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "net0")
            for device in ("lo", "net0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            for setting, value in LIKE_A_FABRIC.items():
                write = f"echo {value} > /proc/sys/net/ipv4/{setting}"
                _run("ip", "netns", "exec", name, "sh", "-c", write)
            for where, device, rate in (
                (name, "net0", self.link),
                (self.switch, port, self.link),
                (name, "lo", self.fast_link),
            ):
                if rate is not None:
                    _shape(where, device, rate, FRAMES if self.late is None else DELAYED)


def _shape(namespace: str, device: str, rate: str, frames: int = FRAMES) -> None:
    """Limits what leaves a device. The bucket holds 4 ms, the queue 4 s, or a few packets."""
    bytes_per_second = bits_per_second(rate) / 8
    burst = max(int(0.004 * bytes_per_second), PACKET if device == "lo" else frames)
    limit = max(int(4 * bytes_per_second), 256 * PACKET)
    sizes = ("rate", rate, "burst", str(burst), "limit", str(limit))
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *sizes)


def _carrier(late: float, switch: str, hosts: list[str]) -> subprocess.Popen:
    """Starts the process that makes the links of a delay, and waits until they are there."""
    command = [sys.executable, delay.__file__, str(late), switch, *hosts]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    if not process.stdout.readline():
        raise RuntimeError(f"`{' '.join(command)}` failed")
    return process


def _namespaces() -> list[str]:
    names = [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.split()]
    return [name for name in names if name.startswith(PREFIX)]


def _remove(name: str) -> None:
    """Kills what runs in a namespace and deletes it, its devices and its files."""
    if name in _namespaces():
        for number in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
        _run("ip", "netns", "delete", name)
    shutil.rmtree(HOSTS_FILES / name, ignore_errors=True)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _main() -> None:
    """Waits until the launcher has ended, whatever ended it, and removes its namespaces."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for name in sys.argv[1:]:
        _remove(name)


if __name__ == "__main__":
    _main()
