"""Wheel and sdist hold every file, and what is installed from either works without the sources.

The environments are empty but for moejax: its dependencies are those of the environment that runs
these tests, found by a path file. So nothing is downloaded but the build's own tools.
"""

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import moejax
from tests.cases import some_of

pytestmark = pytest.mark.package
REPOSITORY = Path(__file__).parents[2]
ROOT = f"moejax-{moejax.__version__}"
# An sdist has these of the sources: tests need benchmarks/ and launch/, and texts link to docs/.
FOLDERS = ("benchmarks", "configs", "docs", "launch", "moejax", "notebooks", "tests")
# One layer on one device: what is tested is the package.
QUICK = (
    "mesh.simulated_devices=none",
    "mesh.expert=1",
    "mesh.tensor=1",
    "model.num_layers=1",
    "train.num_steps=3",
    "train.sample_tokens=0",
)
# Variables that the tests of this checkout set, and that would change what is installed.
OURS = ("PYTHONPATH", "XLA_FLAGS")


class Built(NamedTuple):
    """The two files of a release."""

    wheel: Path
    sdist: Path


def run(*command, cwd, **more):
    """Runs a command where no path leads to the sources; returns what it prints."""
    env = {name: value for name, value in os.environ.items() if name not in OURS} | more
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    pins = {"PIP_CONSTRAINT": str(REPOSITORY / "constraints.txt")}
    run(sys.executable, "-m", "build", "--outdir", folder, REPOSITORY, cwd=folder, **pins)
    wheel, sdist = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(*wheel, *sdist)


@pytest.fixture(scope="module", params=some_of(Built._fields, "wheel"))
def installed(built, request, tmp_path_factory):
    """An environment with moejax from one of the files; returns its folder of programs."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    pins = {"PIP_CONSTRAINT": str(REPOSITORY / "constraints.txt")}
    run(*pip, getattr(built, request.param), cwd=folder, **pins)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    # Python reads no path files of a folder that a path file names: not that of the sources either.
    dependencies = [path for path in sys.path if Path(path).name == "site-packages"]
    (Path(site.strip()) / "dependencies.pth").write_text("\n".join(dependencies))
    return folder / "bin"


@pytest.fixture(scope="module")
def trained(installed, tmp_path_factory):
    """A folder without sources in which `moejax train` has run."""
    folder = tmp_path_factory.mktemp("elsewhere")
    settings = [f"--config.{setting}" for setting in ("run_dir=run", *QUICK)]
    run(installed / "moejax", "train", "--config", "tiny", *settings, cwd=folder)
    return folder


def files_of(folder):
    """Returns the paths of a folder's files in the repository, without what Python compiles."""
    paths = (path for path in (REPOSITORY / folder).rglob("*") if path.is_file())
    return {
        path.relative_to(REPOSITORY).as_posix() for path in paths if "__pycache__" not in path.parts
    }


def in_wheel(built):
    with zipfile.ZipFile(built.wheel) as archive:
        return {name for name in archive.namelist() if not name.startswith(f"{ROOT}.dist-info/")}


def in_sdist(built):
    with tarfile.open(built.sdist) as archive:
        return {member.name.removeprefix(f"{ROOT}/") for member in archive if member.isfile()}


def test_the_wheel_has_the_package_and_the_configs_and_nothing_else(built):
    wanted = files_of("moejax") | {f"moejax/{path}" for path in files_of("configs")}
    wanted |= {
        f"moejax/{path}" for name in ("formats", "guide") for path in files_of(f"docs/{name}")
    }
    wanted |= {"moejax/docs/architecture.md", "moejax/docs/rates.md"}
    assert in_wheel(built) == wanted
    assert {"moejax/py.typed", "moejax/configs/tiny.py"} <= wanted
    assert {"moejax/comm/cpu/exchange.cc", "moejax/kernels/experts/few_rows.cc"} <= wanted


def test_the_sdist_has_what_its_tests_and_texts_need(built):
    found = in_sdist(built)
    for folder in FOLDERS:
        assert {path for path in found if path.startswith(f"{folder}/")} == files_of(folder)
    links = re.findall(r"\]\(([^):#]+)", (REPOSITORY / "README.md").read_text())
    missing = [link for link in links if not any(path.startswith(link) for path in found)]
    assert not missing, "links of the README"
    assert {"Makefile", "constraints.txt", "pyproject.toml", "LICENSE"} <= found


def test_metadata_name_extras_licenses_and_python(built):
    with zipfile.ZipFile(built.wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"{ROOT}.dist-info/METADATA"))
        names = archive.namelist()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert metadata["Version"] == moejax.__version__
    assert metadata["Requires-Python"] == project["requires-python"]
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    # Apache ECharts comes along, so its notice must too.
    for name in ("LICENSE", "moejax/report/echarts.NOTICE"):
        assert f"{ROOT}.dist-info/licenses/{name}" in names


# pip asks markers about the Python that runs it; of 3.11, `make test-311` installs everything.
@pytest.mark.skipif(sys.version_info < (3, 12), reason="older versions of JAX are pinned")
@pytest.mark.parametrize("minor", some_of([12, 13, 14], 14))
def test_every_dependency_has_a_wheel_for_each_python_that_is_named(built, tmp_path, minor):
    metadata = (REPOSITORY / "pyproject.toml").read_text()
    assert f'"Programming Language :: Python :: 3.{minor}"' in metadata
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    pip += ["--python-version", f"3.{minor}", "--only-binary=:all:", "--target", tmp_path]
    pip += ["--constraint", REPOSITORY / "constraints.txt", f"{built.wheel}[hf,data]"]
    run(*pip, cwd=tmp_path)


def test_what_is_installed_is_imported_not_the_sources(installed, tmp_path):
    where = run(installed / "python", "-c", "import moejax; print(moejax.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    version = run(installed / "moejax", "--version", cwd=tmp_path)
    assert version == f"moejax {moejax.__version__}\n"


def test_a_run_trains_and_its_page_and_export_are_written(installed, trained):
    command = installed / "moejax"
    assert (trained / "run" / "checkpoints" / "3").is_dir()
    run(command, "report", "run", "--out", "report.html", cwd=trained)
    assert "echarts" in (trained / "report.html").read_text()
    run(command, "hf", "export", "run", "--out", "exported", cwd=trained)
    assert (trained / "exported" / "model.safetensors").is_file()


def test_pages_that_a_help_names_are_there(installed, tmp_path):
    """A wheel's help pointed at `docs/formats/exit.md` of a checkout."""
    for words in ((), ("train",), ("eval",), ("report",), ("plan", "probe"), ("prepare",)):
        text = run(installed / "moejax", *words, "--help", cwd=tmp_path)
        pages = re.findall(r"[^\s(]*docs/[\w/]+\.md", text)
        assert pages, words
        assert [page for page in pages if not Path(page).is_file()] == [], words


def test_a_packaged_config_is_planned_on_a_known_cluster(installed, tmp_path):
    outputs = ["--out", "plan.json", "--report", "plan.html"]
    plan = [installed / "moejax", "plan", "--config", "olmoe_1b_7b", "--topology", "h200:2"]
    run(*plan, "--free", "mesh", "--traces", "2", *outputs, cwd=tmp_path)
    assert "<script>" in (tmp_path / "plan.html").read_text()
