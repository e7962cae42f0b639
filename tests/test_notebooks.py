"""Notebooks are kept as they are written: no outputs, nothing of the machine they were written on.

`make notebooks` executes them.
"""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
LARGEST = 50_000  # bytes of a notebook without outputs; one picture in it would be more
# Folders of a user or of a machine. Those of the system, as /dev, are the same everywhere.
OF_A_MACHINE = re.compile(r"(?<![\w.])(/(home|root|Users|tmp|content|mnt|work)/|[A-Z]:\\)")

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def sources(path):
    """Returns the text of each cell."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]


def test_there_are_notebooks_and_the_guide_names_each():
    guide = (REPOSITORY / "docs/guide/first_run.md").read_text()
    assert NOTEBOOKS
    assert [path.name for path in NOTEBOOKS if f"notebooks/{path.name}" not in guide] == []


@notebooks
def test_a_notebook_has_no_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    for cell in code:
        assert cell["outputs"] == [], f"cell {cell['id']}: clear the outputs before you commit"
        assert cell["execution_count"] is None, cell["id"]
        assert cell["metadata"] == {}, cell["id"]
    assert path.stat().st_size < LARGEST


@notebooks
def test_a_notebook_names_no_path_of_a_machine(path):
    for source in sources(path):
        assert OF_A_MACHINE.search(source) is None, source


@pytest.mark.parametrize("text", ["open('/home/me/x')", "cd /tmp/run", "C:\\Users", "/content/a"])
def test_paths_of_machines_are_found(text):
    assert OF_A_MACHINE.search(text)


@notebooks
def test_a_notebook_begins_with_a_title_and_runs_in_any_python_kernel(path):
    assert sources(path)[0].startswith("# ")
    kernel = json.loads(path.read_text())["metadata"]["kernelspec"]
    assert kernel == {"display_name": "Python 3", "language": "python", "name": "python3"}


@notebooks
def test_what_a_notebook_imports_of_moejax_is_there(path):
    cells = json.loads(path.read_text())["cells"]
    imports = [
        node
        for cell in cells
        if cell["cell_type"] == "code" and "%" not in "".join(cell["source"])
        for node in ast.walk(ast.parse("".join(cell["source"])))
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "moejax"
    ]
    for node in imports:
        module = importlib.import_module(node.module)
        missing = [name.name for name in node.names if not hasattr(module, name.name)]
        assert missing == [], f"{node.module} of {path.name}"


@notebooks
def test_cells_have_different_names(path):
    """Names come from whoever writes a cell; two that are the same break tools that compare."""
    names = [cell["id"] for cell in json.loads(path.read_text())["cells"]]
    assert len(set(names)) == len(names)
