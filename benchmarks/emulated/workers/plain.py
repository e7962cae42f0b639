"""The layer of chunks.py as a small program of numpy, sockets and threads: one host of it.

Each device is a thread that computes. Other threads send and receive its rows, for dispatch and for
combine apart, so that no transfer stands behind another that it does not need. Bytes that arrive
are not copied anywhere: where devices of a host would gather or sum rows, they only meet.
Rows go to experts in the order in which they come; a chunk meets the experts that its rows span.
"""

import json
import os
import queue
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, SLACK = 512, 1.25  # of the model; a bucket over the rows that come at balanced load
UNEVEN = 0.03  # experts' rows differ by so much, so that chunks straddle


class Wire:
    """Connections of one device to the same device of each other host, for dispatch or combine."""

    def __init__(self, peers: list[socket.socket]):
        self.peers, self.sends = peers, queue.SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        while (part := self.sends.get()) is not None:
            threads = [threading.Thread(target=peer.sendall, args=(part,)) for peer in self.peers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def receive(self, into: list[memoryview]) -> None:
        """Fills a part from each peer."""
        for peer, part in zip(self.peers, into, strict=True):
            while len(part):
                part = part[peer.recv_into(part) :]


class Device:
    """One device: its rows, its share of the experts' weights, and its wires."""

    def __init__(self, case: dict[str, Any], wires: dict[str, Wire]):
        self.case, self.wires = case, wires
        hosts, devices = case["hosts"], case["devices"]
        draw = np.random.default_rng(0)
        self.rows = 2 * 2048 // hosts  # of its host, which all devices of the host compute
        hidden = case["hidden"] // devices
        shapes = ((WIDTH, 2 * hidden), (hidden, WIDTH))
        self.weights = [
            [draw.standard_normal(s, np.float32) / 32 for s in shapes] for _ in range(4)
        ]
        self.sums = [[np.zeros_like(w) for w in pair] for pair in self.weights]
        x, gate, y = WIDTH, 2 * hidden, WIDTH
        self.x, self.gate, self.y = (np.zeros((self.rows, n), np.float32) for n in (x, gate, y))
        self.back, self.d_gate = np.zeros_like(self.x), np.zeros_like(self.gate)
        share = np.array([1 + UNEVEN, 1 - UNEVEN, 1 + UNEVEN, 1 - UNEVEN]) / 4
        self.ends = np.rint(np.cumsum(share) * self.rows).astype(int)
        self.bytes = int(SLACK * self.rows / devices / hosts) * WIDTH * 4  # to a peer
        self.buffer = np.zeros(self.bytes, np.uint8)
        self.inbox = [np.zeros(self.bytes, np.uint8) for _ in range(hosts - 1)]

    def transfer(self, way: str, chunks: int) -> list[threading.Event]:
        """Starts to receive a pass's chunks in their order; an event for each that has come."""
        come = [threading.Event() for _ in range(chunks)]
        size = self.bytes // chunks

        def receive() -> None:
            for event in come:
                self.wires[way].receive([memoryview(box)[:size] for box in self.inbox])
                event.set()

        threading.Thread(target=receive, daemon=True).start()
        return come

    def send(self, way: str, chunks: int) -> None:
        """Queues a chunk's rows for all peers."""
        self.wires[way].sends.put(memoryview(self.buffer)[: self.bytes // chunks])

    def run(self, passes: int, chunks: int, meet: threading.Barrier) -> None:
        """Forward, or forward and backward (2 passes): chunk by chunk, as rows come."""
        for number in range(passes):
            come = self.transfer("dispatch", chunks)
            back = self.transfer("combine", chunks)
            for _ in range(chunks):
                self.send("dispatch", chunks)
            for chunk in range(chunks):
                come[chunk].wait()
                meet.wait()  # rows of the host's devices are gathered
                self.experts(chunk, chunks, backward=number == 1)
                meet.wait()  # and their results are summed
                self.send("combine", chunks)
            back[-1].wait()

    def experts(self, chunk: int, chunks: int, *, backward: bool) -> None:
        """The products of a chunk's rows, each expert's that it meets."""
        if self.case["idle"]:
            return
        start, stop = (self.rows * n // chunks for n in (chunk, chunk + 1))
        for expert, end in enumerate(self.ends):
            first, last = max(start, self.ends[expert - 1] if expert else 0), min(stop, end)
            if first < last:
                (self._backward if backward else self._forward)(expert, slice(first, last))

    def _forward(self, expert: int, rows: slice) -> None:
        up, down = self.weights[expert]
        gate = np.matmul(self.x[rows], up, out=self.gate[rows])
        half = gate.shape[1] // 2
        np.maximum(gate[:, :half], 0, out=gate[:, :half])
        np.matmul(gate[:, :half], down, out=self.y[rows])

    def _backward(self, expert: int, rows: slice) -> None:
        """Recomputes the hidden layer, then gradients of rows and weights."""
        up, down = self.weights[expert]
        up_sum, down_sum = self.sums[expert]
        gate = np.matmul(self.x[rows], up, out=self.gate[rows])
        half, d_gate = gate.shape[1] // 2, self.d_gate[rows]
        np.matmul(self.y[rows], down.T, out=d_gate[:, :half])
        down_sum += gate[:, :half].T @ self.y[rows]
        np.matmul(d_gate, up.T, out=self.back[rows])
        up_sum += self.x[rows].T @ d_gate


def connect(case: dict[str, Any], host: int) -> list[dict[str, Wire]]:
    """Connects each device to the same device of the other hosts, twice; wires by device."""
    address, port = os.environ["MOEJAX_COORDINATOR"].rsplit(":", 1)
    own = socket.gethostbyname(socket.gethostname())
    server = socket.create_server((own, int(port) + 1), backlog=256)
    network = address.rsplit(".", 1)[0]
    last = int(address.rsplit(".", 1)[1])
    found: dict[tuple[int, int, str], socket.socket] = {}
    for device in range(case["devices"]):
        for way in ("dispatch", "combine"):
            for peer in range(host):
                peer_address = f"{network}.{last + peer}"
                found[device, peer, way] = _connect(peer_address, int(port) + 1)
                found[device, peer, way].sendall(json.dumps([device, host, way]).encode().ljust(64))
    for _ in range(2 * case["devices"] * (case["hosts"] - 1 - host)):
        connection, _ = server.accept()
        device, peer, way = json.loads(connection.recv(64, socket.MSG_WAITALL))
        found[device, peer, way] = connection
    others = [n for n in range(case["hosts"]) if n != host]
    return [
        {
            way: Wire([found[device, peer, way] for peer in others])
            for way in ("dispatch", "combine")
        }
        for device in range(case["devices"])
    ]


def _connect(address: str, port: int) -> socket.socket:
    for _ in range(200):
        try:
            return socket.create_connection((address, port))
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{address}:{port} does not answer")


def timed(devices: list[Device], passes: int, chunks: int) -> float:
    """Seconds of all devices of this host, which starts when all hosts are ready."""
    meet = threading.Barrier(len(devices))
    threads = [
        threading.Thread(target=device.run, args=(passes, chunks, meet)) for device in devices
    ]
    for way in ("dispatch", "combine"):  # a byte from every host to every other
        devices[0].wires[way].sends.put(memoryview(b"1"))
        devices[0].wires[way].receive([memoryview(bytearray(1)) for _ in devices[0].inbox])
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def main() -> None:
    """Runs the variants in turns and writes their seconds."""
    sys.setswitchinterval(1e-4)
    path, host = Path(sys.argv[1]), int(os.environ["MOEJAX_PROCESS"])
    case = json.loads(path.read_text())
    devices = [Device(case | {"idle": False}, wires) for wires in connect(case, host)]
    found: dict[str, list[float]] = {}
    for _ in range(case["rounds"] + 1):
        for passes in (1, 2):
            for idle in (False, True):
                for chunks in case["chunks"]:
                    for device in devices:
                        device.case["idle"] = idle
                    name = f"{passes}, {'idle' if idle else 'working'}, {chunks}"
                    found.setdefault(name, []).append(timed(devices, passes, chunks))
    seconds = {name: taken[1:] for name, taken in found.items()}  # the first round warms up
    path.with_suffix(f".h{host}").write_text(json.dumps(seconds))
    for device in devices:
        for wire in device.wires.values():
            wire.sends.put(None)


if __name__ == "__main__":
    main()
