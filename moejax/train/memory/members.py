"""The processes of a run that keep its state in memory: their hosts and addresses."""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from moejax.config.schema import Config
from moejax.errors import write_whole
from moejax.runtime.processes import Processes
from moejax.runtime.start import own_address
from moejax.train.memory.exchange import Server
from moejax.train.memory.folder import folder_of, host_name, machine_of, open_folder

# In `checkpoints`, so that a run whose checkpoints somebody has removed is another run.
IDENTITY = "memory.json"


@dataclass(frozen=True)
class Members:
    """The processes of a run. Each of them has the same facts of all.

    Attributes:
      hosts: the host of each process, by name and identity: names may be equal.
      addresses: (host, port) where each process listens. A program of one process does not listen.
      server: of this process; None in a program of one.
      token: the secret of this start, with which every connection begins.
      folder: of this host, for this run.
      run: identity of the run. Slots of other runs in the same folder are ignored.
      start_id: identity of this start. Slots of one step from two starts are not mixed.
    """

    processes: Processes
    hosts: list[str]
    addresses: list[tuple[str, int]]
    token: str
    server: Server | None
    folder: Path
    run: str
    start_id: str

    @property
    def beside(self) -> list[int]:
        """The processes of this host, in order."""
        return self.on_host_of(self.processes.index)

    def on_host_of(self, holder: int) -> list[int]:
        """Returns the processes of the host of a process, in order."""
        return [process for process, host in enumerate(self.hosts) if host == self.hosts[holder]]

    @property
    def turn(self) -> tuple[int, int]:
        """The position of this process among those of its host, and their number."""
        return self.beside.index(self.processes.index), len(self.beside)

    def close(self) -> None:
        """Stops listening."""
        if self.server is not None:
            self.server.close()


def open_members(cfg: Config, processes: Processes) -> Members:
    """Opens this host's folder and a port. All processes call it, before a device is touched.

    Raises:
      InputError: in all processes, if some folder cannot be written or is open to others.
    """
    checkpoints = Path(cfg.run_dir).resolve() / "checkpoints"
    facts = processes.from_first(lambda: _identities(checkpoints))

    def opened() -> Path:
        folder = folder_of(cfg.checkpoint.memory_dir, facts["run_dir"])
        open_folder(folder)
        return folder

    folder = processes.together(opened)
    server, address = None, ("", 0)
    if processes.count > 1:
        server = Server((own_address(), 0), facts["token"], folder)
        address = (own_address(), server.port)
    known = processes.gather([f"{host_name()} {machine_of(folder)}", *address])
    return Members(
        processes,
        [host for host, *_ in known],
        [(name, port) for _, name, port in known],
        facts["token"],
        server,
        folder,
        facts["run"],
        facts["begun"],
    )


def _identities(checkpoints: Path) -> dict[str, str]:
    """Returns the run's directory and identity, and identity and token of this start.

    The first start of the run draws its identity. The run directory is locked, so nobody else does.
    """
    path = checkpoints / IDENTITY
    try:
        run = str(json.loads(path.read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        run = secrets.token_hex(8)
        checkpoints.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"run": run}) + "\n")
    return {
        "run_dir": str(checkpoints.parent),
        "run": run,
        "begun": secrets.token_hex(8),
        "token": secrets.token_hex(16),
    }
