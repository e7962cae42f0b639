"""The programs and modules of launch/, which is no package; and a wait for what they do."""

import importlib.util
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from unittest.mock import patch

LAUNCH = Path(__file__).parents[2] / "launch"


def module(name):
    """Imports a file of launch/, with the modules beside it."""
    path = next(p for p in (LAUNCH / name, LAUNCH / f"{name}.py") if p.exists())
    spec = importlib.util.spec_from_loader(name, SourceFileLoader(name, str(path)))
    found = importlib.util.module_from_spec(spec)
    with (
        patch.object(sys, "path", [str(LAUNCH), *sys.path]),
        patch.object(sys, "dont_write_bytecode", True),
    ):
        spec.loader.exec_module(found)
    return found


def is_gone(pid):
    """Whether a process has ended; one that nobody waits for stays as a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for(condition, seconds=30, told=lambda: "nothing happened"):
    """Waits until a condition holds, and fails with what `told` returns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)
