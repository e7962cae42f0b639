"""Runs a worker script on every host of an emulated cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT


def run_case(case: dict[str, Any], worker: Path, folder: Path) -> list[dict[str, Any]]:
    """Starts `worker CASE.json` on each host; returns what each wrote beside it.

    Args:
      case: at least hosts, devices (of each host) and rate (Mbit/s; None: not shaped); own_cores:
        whether each host has cores of its own; delay: from a host to another.
      folder: for the case, logs and compiled programs.
    """
    path = folder / "case.json"
    path.write_text(json.dumps(case))
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "PYTHONPATH": str(ROOT),
    }
    command = [ROOT / "launch" / "emulate", "--hosts", case["hosts"]]
    command += ["--devices-per-host", case["devices"], "--logs", folder]
    command += ["--link", f"{case['rate']}mbit"] if case["rate"] else []
    command += ["--delay", case["delay"]] if case.get("delay") else []
    command += ["--own-cores"] if case.get("own_cores") else []
    command += ["--", sys.executable, worker, path]
    subprocess.run(list(map(str, command)), env=environment, check=True)
    return [json.loads(path.with_suffix(f".h{n}").read_text()) for n in range(case["hosts"])]
