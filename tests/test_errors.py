import ast
import errno
import io
import os
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from moejax.__main__ import usage
from moejax.config.load import describe_fields
from moejax.errors import (
    STOPPED,
    DivergedError,
    HostAllocationError,
    HostMemoryError,
    InputError,
    MeetingError,
    ReplicasError,
    StorageFullError,
    exit_code,
    located,
    write_whole,
)
from moejax.runtime.watch import HANG

CRASH_LOOP = 7  # of launch/processes.py
PAGE = Path(__file__).parents[1] / "docs" / "formats" / "exit.md"


def documented():
    """Exit code -> meaning, of the page's table."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    return {int(code): meaning for code, meaning in rows}


@pytest.mark.parametrize(
    ("error", "code", "meaning"),
    [
        (InputError("bad"), 2, "bad input"),
        (HostMemoryError("full"), 2, "memory of a host is almost full"),
        (HostAllocationError("refused"), 2, "could not be taken"),
        (DivergedError("NaN"), 4, "diverged"),
        (StorageFullError("full"), 5, "no space"),
        (MeetingError("alone"), 6, "not all processes"),
        (ReplicasError("device 3"), 8, "different numbers"),
        (OSError(errno.ENOSPC, "No space left on device", "x.bin"), 5, "no space"),
        (KeyboardInterrupt(), 130, "stopped at once"),
    ],
)
def test_every_early_end_has_the_documented_code_and_one_line(capsys, error, code, meaning):
    def run():
        raise error

    assert exit_code(run, stopped="all is safe") == code
    assert meaning in documented()[code]
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_apart_and_leaves_what_was_there(tmp_path, monkeypatch, number):
    path = tmp_path / "routing.json"
    write_whole(path, "before")

    def fill(self, text, **_):
        self.touch()
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(StorageFullError, match=r"no space left.*routing\.json: .*Free"):
        write_whole(path, "after")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]


def test_another_error_of_the_file_system_stays_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none/x\.json'$"):
        write_whole(tmp_path / "none" / "x.json", "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder'$"):
        write_whole(tmp_path / "folder", "")


def test_a_file_error_is_one_line_without_its_number(tmp_path, capsys):
    missing = tmp_path / "none.txt"
    assert exit_code(lambda: print(missing.read_text()), stopped="", files=True) == 2
    said = f"moejax: error: no access to a file. {missing}: No such file or directory. It must"
    assert capsys.readouterr().err.startswith(said)


def test_what_a_command_returns_is_its_code():
    assert exit_code(lambda: None, stopped="") == 0
    assert exit_code(lambda: STOPPED, stopped="") == STOPPED
    assert "asked to stop" in documented()[STOPPED]
    assert set(documented()) == {0, 1, 2, 3, 4, 5, 6, CRASH_LOOP, 8, 9, HANG, 130}


HELPS = ("train.__main__", "plan.command", "plan.probe.command", "evaluate.command")
HELPS += ("report.command", "report.goodput", "data.prepare.flags", "serve.command")


def test_pages_that_helps_name_can_be_opened_from_anywhere(tmp_path, monkeypatch):
    """`docs/formats/exit.md` is no path where somebody runs an installed moejax."""
    root = Path(__file__).parents[1]
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    shipped = wheel["targets"]["wheel"]["force-include"]
    monkeypatch.chdir(tmp_path)
    texts = [import_module(f"moejax.{name}").parser().format_help() for name in HELPS]
    texts += [located(text) for _, _, _, text, _ in describe_fields()] + [located(usage())]
    pages = {page for text in texts for page in re.findall(r"[^\s(]*docs/[\w/]+\.md", text)}
    assert len(pages) > 4
    for page in pages:
        assert Path(page).is_file(), page
        name = Path(page).relative_to(root).as_posix()
        assert any(name == one or name.startswith(f"{one}/") for one in shipped), name
    assert located("see docs/nowhere.md") == "see docs/nowhere.md"
    monkeypatch.chdir(root)
    assert located("docs/rates.md") == "docs/rates.md"


def test_a_command_prints_letters_that_the_output_has_not(monkeypatch):
    raw, errors = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii", "strict"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(errors, "latin-1", "strict"))

    def run():
        print("r\u00e9sum\u00e9 \u2028")
        raise InputError("no file. \u00e9\u2028 is missing.")

    assert exit_code(run, stopped="all is safe") == 2
    sys.stdout.flush(), sys.stderr.flush()
    assert raw.getvalue() == b"r\\xe9sum\\xe9 \\u2028\n"
    assert errors.getvalue() == b"moejax: error: no file. \xe9\\u2028 is missing.\n"


def narrows_a_type(condition):
    """Whether a condition tells a type checker what the next line would find out anyway."""
    if isinstance(condition, ast.Call):
        return isinstance(condition.func, ast.Name) and condition.func.id == "isinstance"
    none = isinstance(condition, ast.Compare) and isinstance(condition.ops[0], ast.IsNot)
    return none and isinstance(condition.comparators[0], ast.Constant)


PACKAGE = Path(__file__).parents[1] / "moejax"


def test_no_number_depends_on_an_assertion():
    """Under `python -O` there are none, so what guards numbers raises by itself."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert) and not narrows_a_type(node.test):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node.test)}")
    assert found == []
