"""A real sshd for tests: on loopback, with keys and settings of its own."""

import getpass
import os
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.modules import wait_for

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="needs sshd and ssh (openssh-server)"
)
# On Linux all of 127.0.0.0/8 is this machine, so two hosts are two addresses.
HOSTS = ("127.0.0.1", "127.0.0.2")


@contextmanager
def serving(folder):
    """Serves both hosts. Gives the launcher's flags that lead to them."""
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    with socket.socket() as free:
        free.bind((HOSTS[0], 0))
        port = free.getsockname()[1]
    known = (folder / "host.pub").read_text().split()[:2]
    (folder / "known").write_text("".join(f"[{h}]:{port} {' '.join(known)}\n" for h in HOSTS))
    settings = [
        *(f"ListenAddress {host}" for host in HOSTS),
        f"Port {port}",
        f"HostKey {folder / 'host'}",
        f"AuthorizedKeysFile {folder / 'user.pub'}",
        f"AllowUsers {getpass.getuser()}",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "StrictModes no",  # the test's folder is below one that all may write to
        "PidFile none",
        "PrintMotd no",
    ]
    (folder / "sshd_config").write_text("\n".join(settings) + "\n")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, and its package makes it at boot
    daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")])
    options = {
        "IdentityFile": folder / "user",
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": folder / "known",
        "StrictHostKeyChecking": "yes",
    }
    try:
        wait_for(lambda: _listens(port, daemon))
        yield ["--port", port, *(f"--ssh_option={name}={v}" for name, v in options.items())]
    finally:
        daemon.terminate()
        daemon.wait(timeout=30)


def _listens(port, daemon):
    assert daemon.poll() is None, "sshd has ended"
    with socket.socket() as trial:
        return trial.connect_ex((HOSTS[0], port)) == 0
