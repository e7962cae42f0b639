"""Joins hosts of an emulated cluster to its switch by links with a delay.

    python launch/delay.py SECONDS SWITCH HOST HOST ...

Kernels may lack `netem`, so each link is a pair of TAP devices, `net0` in the host's namespace and
`portN` in the switch's, and this process carries each frame from one to the other so many seconds
after it came. It prints a line when the devices are there, and ends with its standard input.
Shaping is left to `tc` on either device. Frames are large, so that few have to be carried.
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from pathlib import Path

NAMESPACES = Path("/run/netns")
TUN = "/dev/net/tun"
FRAME = 4000  # bytes of a packet: 12,500 a second of 400 Mbit/s
HEADER = 14  # bytes of an Ethernet header
SET_DEVICE = 0x400454CA  # TUNSETIFF
TAP, PLAIN = 0x0002, 0x1000  # IFF_TAP, IFF_NO_PI
AT_ONCE = 64  # frames that are read from a device before another has its turn


def missing() -> list[str]:
    """Devices that a delay needs and this machine lacks."""
    return [] if Path(TUN).exists() else [TUN]


def open_device(namespace: str, name: str) -> int:
    """Returns the file of a new TAP device in a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(NAMESPACES / namespace, os.O_RDONLY)
    try:
        if libc.setns(there, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, SET_DEVICE, struct.pack("16sH22x", name.encode(), TAP | PLAIN))
        if libc.setns(here, 0):
            raise OSError(ctypes.get_errno(), "cannot leave a namespace")
    finally:
        os.close(here)
        os.close(there)
    return device


def carry(pairs: dict[int, int], seconds: float, until: int) -> None:
    """Carries frames until a file ends.

    All wait equally long, so those that came first leave first.

    Args:
      pairs: each device, and where its frames go.
      until: the file.
    """
    poll, waiting = select.poll(), collections.deque()
    for device in (*pairs, until):
        poll.register(device, select.POLLIN)
    while True:
        left = 1e3 * (waiting[0][0] - time.monotonic()) if waiting else None
        for device, _ in poll.poll(None if left is None else max(0, left)):
            if device == until:
                if not os.read(until, 1):
                    return
                continue
            with contextlib.suppress(BlockingIOError):
                for _ in range(AT_ONCE):
                    frame = os.read(device, FRAME + HEADER)
                    waiting.append((time.monotonic() + seconds, pairs[device], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, device, frame = waiting.popleft()
            # A device that is not up, or full, loses frames as a network does.
            with contextlib.suppress(OSError):
                os.write(device, frame)


def main() -> None:
    """Makes the devices and carries frames."""
    seconds, switch, *hosts = sys.argv[1:]
    pairs: dict[int, int] = {}
    for number, host in enumerate(hosts):
        inside, port = open_device(host, "net0"), open_device(switch, f"port{number}")
        pairs |= {inside: port, port: inside}
    print("ready", flush=True)
    carry(pairs, float(seconds), sys.stdin.fileno())


if __name__ == "__main__":
    main()
