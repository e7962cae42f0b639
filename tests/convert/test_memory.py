"""Peak memory of a conversion: of an import some pieces, of an export a few tensors.

The model has 479 million parameters: 0.96 GB in two bytes, 1.9 GB in four. Its largest parameter,
the experts' first matrices of all layers, has 1.07 GB of those, its largest tensor 0.13 GB.
"""

import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.cpu.mixtral import config_of, elements, write_mixtral
from moejax.checkpoint.arrays import FILE_BYTES, PIECE_BYTES
from moejax.hf.in_flight import LIMIT_BYTES
from moejax.hf.reader import Folder
from tests.integration.runs import REPOSITORY

WIDTH, VOCABULARY = 1024, 32_000
CONFIG = config_of(layers=4, width=WIDTH, heads=16, experts=16, hidden=2048, vocabulary=VOCABULARY)
GB = 1e9
PYTHON = 0.45 * GB  # of Python, JAX and Orbax, with nothing loaded
# Both embeddings at once: pieces of the checkpoint and numbers read in float32, and bfloat16.
TENSORS = 2 * VOCABULARY * WIDTH * (4 + 4 + 2)
# An import holds what threads work on, and a file of the checkpoint, twice while it is written.
PIECES = LIMIT_BYTES + 2 * (FILE_BYTES + PIECE_BYTES)
CHILD = """
import resource, sys
from moejax.convert.command import main
code = main(sys.argv[1:])
print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with the model's folder, written a tensor at a time."""
    place = tmp_path_factory.mktemp("large")
    write_mixtral(place / "model", CONFIG, "BF16")
    yield place
    shutil.rmtree(place)  # gigabytes, which pytest would keep


def peak(place, *words):
    """Runs the command in a process of its own. Returns its largest resident size in bytes."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    env |= {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", CHILD, *map(str, words)]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("PEAK")[1])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_conversions_do_not_hold_the_model(place):
    assert 4 * elements(CONFIG) > 1.5 * (PYTHON + PIECES)
    for dtype in ("float32", "bfloat16"):
        imported = peak(place, "import", "model", "--out", dtype, "--dtype", dtype)
        assert imported < PYTHON + PIECES, f"{imported / GB:.2f} GB"
    exported = peak(place, "export", "float32", "--out", "exported")
    assert exported < PYTHON + TENSORS, f"{exported / GB:.2f} GB"
    with Folder(place / "model") as one, Folder(place / "exported") as other:
        assert set(one.weights) == set(other.weights)
        for name, weight in one.weights.items():
            whole = tuple((0, size) for size in weight.shape)
            assert one.read(name, whole).tobytes() == other.read(name, whole).tobytes(), name
