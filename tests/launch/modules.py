"""The programs and modules of launch/, which is no package."""

import importlib.util
import sys
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
