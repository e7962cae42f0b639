"""The reading order at the top of a room names what is in it."""

import re
from pathlib import Path

import pytest

from moejax import train

ROOM = Path(train.__file__).parent


@pytest.mark.parametrize("folder", [path.parent for path in sorted(ROOM.rglob("__init__.py"))])
def test_every_module_and_folder_of_a_room_is_named_in_its_first_lines(folder):
    named = re.findall(r"`(\w+)/?`", (folder / "__init__.py").read_text())
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    rooms = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert sorted((modules | rooms) - {*named}) == []
