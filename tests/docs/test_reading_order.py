"""The reading order at the top of a room names what is in it."""

import re
from pathlib import Path

import pytest

import moejax

PACKAGE = Path(moejax.__file__).parent
OTHERS = (PACKAGE,)  # names what users import
ROOMS = sorted({path.parent for path in PACKAGE.rglob("__init__.py")} - {*OTHERS})


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(PACKAGE)))
def test_every_module_and_folder_of_a_room_is_named_in_its_first_lines(room):
    named = re.findall(r"`(\w+)/?`", (room / "__init__.py").read_text())
    modules = {path.stem for path in room.glob("*.py")} - {"__init__"}
    rooms = {path.parent.name for path in room.glob("*/__init__.py")}
    assert sorted((modules | rooms) - {*named}) == []
