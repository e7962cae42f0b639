"""Sites that are runs of their own: their hub, links to it that can be cut, and what they end with.

  python -m tests.faults.sites --spoil ROUND -- --config ...
  python -m tests.faults.sites --slow SECONDS -- --config ...

are the train commands of a site that sends no numbers in one round, and of one whose steps take so
much longer.
"""

import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.integration.runs import REPOSITORY, begin, environment, final_state, records

STEPS, EVERY = 16, 3
TOKENS = 4 * 32  # of a step of a site
LONGEST_S = 900
DELAY_S = 0.1  # of each connection: rounds take long enough for a fault to fall into one
TOKEN = "the secret of a test"
CONFIG = f"""
run_dir: RUN
model: {{vocab_size: 264, width: 16, num_layers: 1, num_heads: 4, num_kv_heads: 2, head_width: 4}}
moe: {{num_experts: 4, expert_hidden: 8, capacity_factor: 16}}
mesh: {{simulated_devices: 2, expert: 2}}
data: {{source: tokens, train_files: [TRAIN], eval_files: [EVAL], sequence_length: 32}}
optimizer: {{warmup_steps: 2}}
outer: {{every: {EVERY}, sites: 2, hub: "127.0.0.1:1"}}
train: {{num_steps: {STEPS}, batch_sequences: 4, log_every: 1, sample_tokens: 0}}
checkpoint: {{save_every: 5, keep: 3}}
"""


class Relay:
    """A link to the hub, which can be cut and mended. Its port stays."""

    def __init__(self, port: int):
        self.to, self.cut, self._ends = port, threading.Event(), []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def sever(self) -> None:
        """Ends connections, and lets no further ones through."""
        self.cut.set()
        while self._ends:
            with suppress(OSError):
                self._ends.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stops listening."""
        self.sever()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the accept that waits
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._socket.accept()
            except OSError:
                return
            time.sleep(DELAY_S)
            far = None
            with suppress(OSError):
                far = (
                    None if self.cut.is_set() else socket.create_connection(("127.0.0.1", self.to))
                )
            if far is None:
                near.close()
                continue
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        """Carries bytes both ways, until both ended."""
        with near, far:
            self._ends += [near, far]
            back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
            back.start()
            self._pump(near, far)
            back.join()
            for end in (near, far):
                with suppress(ValueError):  # `sever` took it out
                    self._ends.remove(end)

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with source:  # the other pump closes the sink
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    sink.sendall(data)
            for end in (source, sink):  # each connection is one question and one answer
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


class Sites:
    """Two sites and their hub. A context manager: whatever still runs at its end is killed."""

    def __init__(self, place: Path, name: str, patience_s: float = 600, most_steps: int = 1):
        self.place, self.folder = place, place / name
        self._hub = ("--patience", str(patience_s), "--most-steps", str(most_steps))
        self.running: dict[object, subprocess.Popen] = {}
        self.shown: list[list[str]] = [[], []]
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> "Sites":
        self.start_hub(0)
        self.links = [Relay(self.port) for _ in range(2)]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        for read in self._readers:
            read.join(10)
        for link in self.links:
            link.close()
        self.running["hub"].stdout.close()

    def start_hub(self, port: int) -> None:
        """Starts the hub; port 0: a free one."""
        command = [sys.executable, "-m", "moejax", "sites", self.folder / "hub", "--port", port]
        pipe = subprocess.PIPE
        variables = environment(MOEJAX_SITES_TOKEN=TOKEN)
        words = [str(word) for word in (*command, *self._hub)]
        process = subprocess.Popen(words, stdout=pipe, text=True, env=variables, cwd=REPOSITORY)
        said = process.stdout.readline()
        assert said.startswith("sites meet at"), said
        self.port, self.running["hub"] = int(said.split(",")[0].rpartition(":")[2]), process

    def kill_hub(self) -> None:
        """Kills it as a lost machine would."""
        self.running["hub"].kill()
        self.running["hub"].wait()
        self.running["hub"].stdout.close()

    def start(self, site: int, *words: str, **how: Any) -> None:
        """Starts a site, whose lines `shown` then has. Further arguments are those of `begin`."""
        settings = {"outer.hub": f"127.0.0.1:{self.links[site].port}", "outer.site": site}
        settings["run_dir"] = self.run_dir(site)
        flags = [f"--config.{key}={value}" for key, value in settings.items()]
        process = begin(self.place, *flags, *words, MOEJAX_SITES_TOKEN=TOKEN, **how)
        self.running[site], self.shown[site] = process, []
        for stream in (process.stdout, process.stderr):
            read = threading.Thread(target=_read, args=(stream, self.shown[site]), daemon=True)
            self._readers.append(read)
            read.start()

    def start_together(self) -> None:
        """Starts both sites under a patient hub, and the impatient one once both have begun."""
        hub, self._hub = self._hub, ("--patience", "600")
        self.restart_hub()
        for site in range(2):
            self.start(site)
        for site in range(2):
            self.wait_for(site, "step 3/")
        self._hub = hub
        self.restart_hub()

    def restart_hub(self) -> None:
        """Kills the hub, and starts it at the same port."""
        self.kill_hub()
        self.start_hub(self.port)

    def run_dir(self, site: int) -> Path:
        """Where a site's run is."""
        return self.folder / str(site)

    def wait_for(self, site: int, text: str, within_s: float = LONGEST_S) -> None:
        """Waits until a site has shown a text."""
        until = time.monotonic() + within_s
        while not any(text in line for line in list(self.shown[site])):
            ended = self.running[site].poll() is not None
            assert not ended, "".join(self.shown[site])
            assert time.monotonic() < until, "".join(self.shown[site])
            time.sleep(0.02)

    def kill(self, site: int) -> None:
        """Kills a site as a lost machine would."""
        self.running[site].kill()
        self.running[site].wait()

    def end(self) -> None:
        """Waits until both sites have ended well."""
        for site in range(2):
            code = self.running[site].wait(timeout=LONGEST_S)
            time.sleep(0.2)
            assert code == 0, "".join(self.shown[site])

    def rounds(self, site: int) -> list[dict]:
        """The rounds that a site recorded, in order."""
        return records(self.run_dir(site), "round")

    def outer(self, site: int) -> list[np.ndarray]:
        """Outer weights, selection biases and momentum of a site's last checkpoint."""
        return final_state(self.run_dir(site), lambda s: (s.params, s.router_bias, s.momentum))[1]


def _read(stream, lines: list[str]) -> None:
    with stream:
        lines.extend(stream)


def spoil(number: float) -> None:
    """Lets this program's site send no numbers in one round."""
    from moejax.train.sites.site import Site

    begin_round = Site._begin

    def spoiled(site, state, steps):
        if site.number != number:
            return begin_round(site, state, steps)
        rows = site._programs.to_send
        site._programs.to_send = lambda x: {
            row: np.full_like(data, 255) if x.dtype == np.uint8 else data
            for row, data in rows(x).items()
        }
        found = begin_round(site, state, steps)
        jax.block_until_ready(found.pending)
        time.sleep(1)  # the thread has sent them
        site._programs.to_send = rows
        return found

    Site._begin = spoiled


def slow(seconds: float) -> None:
    """Lets each step of this program's site take so much longer."""
    from moejax.train.sites.site import Site

    after = Site.after

    def slowed(site, step, state):
        time.sleep(seconds)
        return after(site, step, state)

    Site.after = slowed


if __name__ == "__main__":
    from moejax.train.__main__ import main

    {"--spoil": spoil, "--slow": slow}[sys.argv[1]](float(sys.argv[2]))
    sys.exit(main(sys.argv[4:]))
