"""What must hold on a GPU or TPU before anything is trained there: `make test-hardware`.

Each check is a process of its own, because one that goes wrong may take the device with it. Where
there is no such device, the tests fail with JAX's own line.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.accelerator


def run(*words: str) -> str:
    """Runs a module on the devices that JAX_PLATFORMS names. Returns what it printed."""
    # What tests/conftest.py asks of a compiler is for CPUs.
    cpu = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in cpu}
    assert environment["JAX_PLATFORMS"] != "cpu", "set JAX_PLATFORMS to cuda or tpu"
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_a_run_is_made_of_works():
    shown = run("moejax", "doctor", "--smoke")
    assert "failed" not in shown
    assert " ok" in shown


@pytest.mark.skipif(os.environ["JAX_PLATFORMS"] == "tpu", reason="checks kernels of GPUs")
def test_every_kernel_computes_its_plain_form(tmp_path):
    run("benchmarks.gpu", "--only", "check", "--out", str(tmp_path))
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    wrong = [row for row in rows if not row.get("ok")]
    assert rows
    assert wrong == []
