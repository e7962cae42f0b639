"""A real Slurm of two nodes for tests: its daemons on this machine, with settings of its own.

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge, whose build lets several
nodes run on one machine. Nothing outside the folder is written to: the nodes' names are known to
the nodes alone, which have a file of hosts of their own.
"""

import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.modules import wait_for

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or not all(shutil.which(name, path=PATH) for name in PROGRAMS),
    reason="needs root, slurmctld, slurmd, slurm-client and munge",
)
# Jobs of `urgent` put those of `batch` back into the queue, and give them a while to save.
SETTINGS = """
ClusterName=moejax
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
InactiveLimit=0
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000
PartitionName=batch Nodes=node[1-2] Default=YES MaxTime=60 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=node[1-2] MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""


@dataclass
class Slurm:
    """A cluster that runs."""

    folder: Path

    def command(self, *words, check=True, environment=os.environ):
        """Runs one of Slurm's commands, and returns what it printed."""
        done = subprocess.run(
            [*map(str, words)],
            env={**environment, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")},
            capture_output=True,
            text=True,
            timeout=60,
            cwd=self.folder,
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    def submit(self, *words, environment=os.environ):
        """Submits a job with the variables of `environment`, and returns its id."""
        return self.command("sbatch", "--parsable", *words, environment=environment).strip()

    def field(self, job, name):
        """A field of `scontrol show job`."""
        shown = self.command("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in shown if word.startswith(f"{name}="))

    def wait(self, job, *states, seconds=120):
        """Waits until a job is in one of the states, which it returns."""
        deadline = time.monotonic() + seconds
        while (state := self.field(job, "JobState")) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}\n{self.logs()}"
            time.sleep(0.2)
        return state

    def logs(self):
        """The end of what each daemon has said."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}\n{log.read_text()[-3000:]}" for log in logs)


def _ports(count):
    """Ports that are free now."""
    with ExitStack() as kept:
        sockets = [kept.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def running(folder):
    """Starts munge, the controller and two nodes, and ends them."""
    host = socket.gethostname().partition(".")[0]
    settings = SETTINGS.format(folder=folder, host=host, ports=_ports(3))
    (folder / "slurm.conf").write_text(settings)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", "spool.node1", "spool.node2"):
        (folder / name).mkdir()
    munge = {"key-file": "munge.key", "pid-file": "munge.pid", "socket": "munge.socket"}
    munge |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    flags = [f"--{name}={folder / file}" for name, file in munge.items()]
    known = Path("/etc/hosts").read_text() + "127.0.0.1 node1\n127.0.0.2 node2\n"
    (folder / "hosts").write_text(known)
    apart = f'mount --bind {folder / "hosts"} /etc/hosts && exec "$@"'
    node = ["unshare", "--mount", "sh", "-c", apart, "sh", "slurmd", "-D"]
    conf = str(folder / "slurm.conf")
    daemons = [
        ["munged", "--foreground", "--force", *flags],
        ["slurmctld", "-D", "-f", conf],
        [*node, "-f", conf, "-N", "node1"],
        [*node, "-f", conf, "-N", "node2"],
    ]
    started = []
    try:
        for words in daemons:
            path = shutil.which(words[0], path=PATH)
            with (folder / f"daemon{len(started)}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        [path, *words[1:]],
                        stdout=log,
                        stderr=log,
                        cwd=folder,
                        env={**os.environ, "PATH": PATH},
                    )
                )
            time.sleep(0.5)
        slurm = Slurm(folder)
        wait_for(lambda: _are_idle(slurm, started), 60, slurm.logs)
        yield slurm
    finally:
        for daemon in reversed(started):
            daemon.terminate()
        for daemon in started:
            daemon.wait(timeout=60)


def _are_idle(slurm, daemons):
    """Whether both nodes wait for jobs."""
    assert all(daemon.poll() is None for daemon in daemons), slurm.logs()
    states = slurm.command("sinfo", "-h", "-N", "-p", "batch", "-o", "%T", check=False)
    return states.split() == ["idle", "idle"]
