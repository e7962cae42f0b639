"""Run by every process of a program: process 0 prints where its coordinator listens."""

import ipaddress
import os
from pathlib import Path

from moejax.runtime.start import join

LISTENING = "0A"


def listening_at(table, port):
    """The addresses in a table of the kernel's at which somebody listens at a port."""
    for row in table.read_text().splitlines()[1:]:
        words = row.split()
        address, _, its_port = words[1].partition(":")
        if words[3] == LISTENING and int(its_port, 16) == port:
            # Words of four bytes, each in the machine's order.
            raw = bytes.fromhex(address)
            packed = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
            found = ipaddress.ip_address(packed)
            yield getattr(found, "ipv4_mapped", None) or found


processes = join()
if processes.first:
    port = int(os.environ["MOEJAX_COORDINATOR"].rpartition(":")[2])
    tables = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
    found = {str(address) for table in tables for address in listening_at(table, port)}
    print(
        "listens at", *sorted({str(one) for table in tables for one in listening_at(table, port)})
    )
processes.gather("seen")
