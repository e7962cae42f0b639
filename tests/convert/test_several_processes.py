"""Import and export by two processes of one program: the same bits, and bad input ends both."""

import os
import subprocess
import sys

import pytest
from safetensors.numpy import load_file

from moejax.checkpoint.manifest import read_manifest, weights_digest
from moejax.convert.command import main
from tests.convert.test_command import assert_same_tensors, one_step, tensors_of
from tests.hf.golden import cases_of, golden_folder
from tests.integration.runs import REPOSITORY, write_tokens
from tests.integration.test_several_processes import assert_one_line_each

LAUNCH = [sys.executable, str(REPOSITORY / "launch" / "local"), "--processes", "2"]
# Files of 60 kB, so that each process has some.
SMALL_FILES = """
import sys
from moejax.hf import writer
from moejax.convert.command import main
writer.plan_files.__defaults__ = (60_000,)
sys.exit(main(sys.argv[1:]))
"""


def run(place, *words):
    """Runs the command as two processes of two devices. Returns the exit code and the output."""
    return launch(place, "-c", SMALL_FILES, *words)


def launch(place, *words):
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    env |= {
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        "COLUMNS": "200",
        "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry",
    }
    command = [sys.executable, *map(str, words)]
    launched = [*LAUNCH, "--devices", "2", "--logs", str(place / "logs"), "--", *command]
    done = subprocess.run(
        launched, env=env, cwd=place, text=True, capture_output=True, timeout=900, check=False
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a model's folder, which has experts that two processes share."""
    place = tmp_path_factory.mktemp("place")
    golden_folder(place / "model", cases_of("mixtral")["even, llama3 positions"], files=2)
    return place


@pytest.fixture(scope="module")
def imported(place):
    code, out = run(place, "import", "model", "--out", "imported")
    assert code == 0, out
    assert "[p0] imported 40,440 parameters" in out
    assert not [line for line in out.splitlines() if line.startswith("[p1] imported")]
    return place / "imported"


@pytest.fixture(scope="module")
def alone(place, imported, unchecked_annotations):
    """What one process writes of what two imported."""
    before = os.getcwd()
    os.chdir(place)
    try:
        for dtype in ("float32", "bfloat16"):
            words = ["export", "imported", "--out", f"alone-{dtype}", "--dtype", dtype]
            assert main(words) == 0
        assert main(["import", "model", "--out", "imported-alone"]) == 0
        assert main(["export", "imported-alone", "--out", "alone", "--dtype", "float32"]) == 0
    finally:
        os.chdir(before)
    return place


@pytest.mark.exhaustive
def test_two_processes_import_what_one_does(alone):
    one, two = (
        (alone / name / "model.safetensors").read_bytes() for name in ("alone", "alone-float32")
    )
    assert one == two
    digests = [
        weights_digest(read_manifest(alone / name / "0")) for name in ("imported", "imported-alone")
    ]
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)]
)
def test_two_processes_export_what_one_does(alone, dtype):
    code, out = run(alone, "export", "imported", "--out", f"two-{dtype}", "--dtype", dtype)
    assert code == 0, out
    files = sorted(path.name for path in (alone / f"two-{dtype}").glob("*.safetensors"))
    assert len(files) == (2 if dtype == "bfloat16" else 3)
    wanted = load_file(alone / f"alone-{dtype}" / "model.safetensors")
    assert_same_tensors(alone / f"two-{dtype}", wanted)
    assert (alone / f"two-{dtype}" / "model.safetensors.index.json").is_file()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_processes_begin_with_a_folder(place):
    """One step at a learning rate of zero: the weights that are exported are those that came."""
    golden_folder(place / "olmoe", cases_of("olmoe")["top 3"])
    code, out = run(place, "import", "olmoe", "--out", "imported-olmoe")
    assert code == 0, out
    more = {"init_from": "olmoe", "train.batch_sequences": 4, "mesh.fsdp": 4}
    flags = one_step(write_tokens(place / "tokens.bin"), "run", **more)
    code, out = launch(
        place, "-m", "moejax.train", "--config", "imported-olmoe/config.json", *flags
    )
    assert code == 0, out
    assert "weights from olmoe" in out
    code, out = run(place, "export", "run", "--out", "exported-olmoe", "--dtype", "float32")
    assert code == 0, out
    assert_same_tensors(place / "exported-olmoe", tensors_of(place / "olmoe"))


@pytest.mark.slow
def test_bad_input_ends_both_with_one_line_each(place):
    code, out = run(place, "import", "nowhere", "--out", "refused")
    assert code == 2, out
    assert_one_line_each(out, "no folder of weights")
    assert not (place / "refused").exists()
    assert not (place / "refused.partial").exists()
