"""Names of other trainers' settings, read again from the packages, where they are.

They are in no extra: MaxText needs two hundred packages, and Megatron-LM a GPU to be imported. The
variable MOEJAX_TRAINERS names a folder of unpacked wheels (tests/golden/trainers.py says how).
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.golden.trainers import FILES, GOLDEN, READERS

pytestmark = pytest.mark.parity


def folder_of(file: str) -> Path:
    """The folder from which a package is imported; skips the test if there is none."""
    named = os.environ.get("MOEJAX_TRAINERS")
    places = [Path(place) for place in ([named] if named else sys.path) if place]
    for place in places:
        if (place / file).is_file():
            return place
    pytest.skip(f"no {file} in {named or 'this environment'}: set MOEJAX_TRAINERS")


@pytest.mark.parametrize("trainer", READERS)
def test_recorded_names_are_those_of_the_package(trainer):
    folder, recorded = folder_of(FILES[trainer]), json.loads(GOLDEN.read_text())[trainer]
    read = READERS[trainer](folder)
    if read["package"] != recorded["package"]:
        pytest.skip(f"here is {read['package']}, recorded is {recorded['package']}")
    assert read == recorded


@pytest.mark.parametrize("trainer", READERS)
def test_a_later_package_still_knows_what_is_emitted(trainer):
    """What translations set must exist in whatever version is here."""
    from tests.plan.others.plans import every_mesh
    from tests.plan.others.test_translations import TO

    known = READERS[trainer](folder_of(FILES[trainer]))["names"]
    for cfg in every_mesh("DeepSeek-V3"):
        assert {option.name for option in TO[trainer](cfg).options} <= set(known)
