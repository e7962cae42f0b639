"""What SECURITY.md promises of the code: nothing that is read can run."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("moejax", "launch")
    for path in (ROOT / folder).rglob("*")
    if path.is_file()
    and (path.suffix == ".py" or path.read_bytes()[:40].startswith(b"#!/usr/bin/env python"))
)
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "torch"}
CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "np.load"}
LOADS = "spec.loader.exec_module"
# Python config files run, as SECURITY.md says.
MAY = {("moejax/config/files.py", LOADS)}


def dotted(node):
    """The name of what is called, such as `os.system`; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def dangers(path):
    """What in a file could run what it reads."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.module
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in CALLS or name == LOADS:
                yield name
            shell = [k.value for k in node.keywords if k.arg == "shell"]
            if any(not (isinstance(v, ast.Constant) and v.value is False) for v in shell):
                yield f"{name} with a shell"


def test_nothing_that_is_read_can_run():
    found = {(str(path.relative_to(ROOT)), what) for path in SOURCES for what in dangers(path)}
    assert found == MAY


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from torch import load",
        "eval(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=flag)",
        "x = np.load(path)",
    ],
)
def test_the_check_sees_it(tmp_path, text):
    (tmp_path / "a.py").write_text(text)
    assert list(dangers(tmp_path / "a.py"))


def test_all_programs_are_looked_at():
    names = {path.name for path in SOURCES}
    assert {"ssh", "local", "emulate", "processes.py", "checkpoint.py"} <= names
    assert len(SOURCES) > 200
