"""What a damaged or swapped checkpoint directory is taken for; a few small files, no device."""

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moejax.checkpoint import manifest
from moejax.checkpoint.find import newest
from moejax.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    finished_steps,
    stored_bytes,
    write_manifest,
)
from moejax.config.load import to_dict
from moejax.config.schema import Config
from moejax.errors import InputError
from moejax.train.memory import slots

ITEMS = ("counters", "weights", "optimizer")
OLDEST, NEWEST = 55, 60


def write_step(directory, step, **facts):
    """A finished step of one small file an item."""
    path = directory / str(step)
    for item in ITEMS:
        (path / item).mkdir(parents=True)
        (path / item / "data").write_bytes(f"{item} of {step}".encode())
    write_manifest(path, {"step": step, "config": to_dict(Config()), **facts})
    return path


@pytest.fixture
def directory(tmp_path):
    """Two whole steps."""
    for step in (OLDEST, NEWEST):
        write_step(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def assert_set_aside(directory, word, step=NEWEST):
    """The newest step is set aside for what `word` says, and the older one is taken."""
    saved, notes = newest(directory, "full")
    assert saved is not None
    assert saved.step == OLDEST
    assert len(notes) == 1
    assert notes[0].startswith(f"checkpoint {step} set aside as {step}.corrupt: ")
    assert word in notes[0]


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Two whole steps, and the bytes of the newer one's manifest, for many examples."""
    directory = tmp_path_factory.mktemp("apart") / "checkpoints"
    for step in (OLDEST, NEWEST):
        write_step(directory, step)
    return directory, (directory / str(NEWEST) / MANIFEST).read_bytes()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 2**20))
@example(place=0)
def test_a_bit_flipped_anywhere_in_the_manifest_is_seen(apart, place):
    directory, whole = apart
    file, aside = directory / str(NEWEST) / MANIFEST, directory / f"{NEWEST}.corrupt"
    offset, bit = divmod(place % (8 * len(whole)), 8)
    flipped = bytearray(whole)
    flipped[offset] ^= 1 << bit
    file.write_bytes(bytes(flipped))
    saved, notes = newest(directory, "full")
    if saved.step == NEWEST:  # "e" and "E" of a number are one: nothing was lost
        assert saved.manifest == json.loads(whole)
    else:
        assert (saved.step, len(notes)) == (OLDEST, 1)
        aside.rename(file.parent)
    file.write_bytes(whole)


@pytest.mark.parametrize("number", "09:")
def test_a_version_that_was_changed_is_damage_and_not_a_newer_moejax(directory, number):
    file = directory / str(NEWEST) / MANIFEST
    text = file.read_text()
    assert f'"format_version": {FORMAT_VERSION}' in text
    file.write_text(
        text.replace(f'"format_version": {FORMAT_VERSION}', f'"format_version": {number}')
    )
    assert_set_aside(directory, "manifest")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format_version": 1e999, "digest": ""}',
        b'{"format_version": "x", "step": 60, "files": {}}',
        b'{"format_version": 1, "step": 60, "files": {}}',
        b'{"format_version": 1, "step": true, "files": {}}',
        b'{"format_version": 1, "step": 60, "files": {"weights": {"bytes": 3}}}',
    ],
)
def test_a_manifest_that_is_none_is_set_aside(directory, content):
    (directory / str(NEWEST) / MANIFEST).write_bytes(content)
    assert_set_aside(directory, "")


def test_a_step_under_another_name_is_set_aside(directory):
    (directory / str(NEWEST)).rename(directory / "70")
    assert_set_aside(directory, "its manifest is of step 60", step=70)


def test_a_file_that_the_manifest_does_not_list_is_damage(directory):
    (directory / str(NEWEST) / "weights" / "more").write_bytes(b"more")
    assert_set_aside(directory, "weights/more is not in the manifest")


@pytest.mark.parametrize("name", [".nfs000000012", ".DS_Store", "._data"])
def test_what_a_file_system_leaves_is_no_damage(directory, name):
    (directory / str(NEWEST) / "weights" / name).write_bytes(b"left")
    assert newest(directory, "full")[0].step == NEWEST


def test_the_first_format_is_still_read(directory):
    """It has no digest of its own."""
    file = directory / str(NEWEST) / MANIFEST
    facts = json.loads(file.read_text()) | {"format_version": 1}
    del facts["digest"]
    file.write_text(json.dumps(facts, indent=1))
    saved, notes = newest(directory, "full")
    assert (saved.step, notes) == (NEWEST, [])
    (directory / str(NEWEST) / "weights" / "data").write_bytes(b"weights of 61")
    assert_set_aside(directory, "has digest")


def test_a_newer_format_asks_for_an_upgrade_where_its_digest_is_right(directory):
    (directory / str(NEWEST) / MANIFEST).unlink()
    write_manifest(directory / str(NEWEST), {"step": NEWEST}, version=99)
    with pytest.raises(InputError, match=r"newer moejax. .*format 99.*Upgrade"):
        newest(directory, "full")


def test_names_that_are_no_steps_are_left_alone(directory):
    for name in ("007", "²", "notes"):
        shutil.copytree(directory / str(OLDEST), directory / name)
    assert sorted(finished_steps(directory)) == [OLDEST, NEWEST]
    assert newest(directory, "full")[0].step == NEWEST


def test_files_take_whole_blocks_of_a_disk():
    sizes = {"a": 0, "b": 1, "c": 4096, "d": 4097}
    manifest = {"files": {name: {"bytes": size} for name, size in sizes.items()}}
    assert stored_bytes(manifest) == (0 + 1 + 1 + 2) * 4096


def test_formats_are_those_of_their_pages():
    """Whoever changes one reads the old one too, and says so there."""
    pages = Path(__file__).parents[2] / "docs" / "formats"
    row = re.compile(r"^\| `format_version` \| (\d+)", re.MULTILINE)
    written = {"checkpoint": FORMAT_VERSION, "memory": slots.FORMAT_VERSION}
    for name, version in written.items():
        assert int(row.search((pages / f"{name}.md").read_text())[1]) == version


def test_a_manifest_that_is_far_too_large_is_not_read(tmp_path, monkeypatch):
    path = write_step(tmp_path, 60)
    size = (path / MANIFEST).stat().st_size
    monkeypatch.setattr(manifest, "MANIFEST_BYTES", size)
    assert manifest.read_manifest(path)["step"] == 60
    monkeypatch.setattr(manifest, "MANIFEST_BYTES", size - 1)
    with pytest.raises(manifest.DamagedError, match=f"manifest has more than {size - 1:,} bytes"):
        manifest.read_manifest(path)


def test_weights_are_told_apart_by_their_numbers_and_in_older_formats_by_their_files():
    files = {"weights/a": {"bytes": 1, "sha256": "x"}, "optimizer/b": {"bytes": 2, "sha256": "y"}}
    assert manifest.weights_digest({"numbers": "n", "files": files}) == "n"
    known = manifest.weights_digest({"files": files})
    trained = {**files, "optimizer/b": {"bytes": 3, "sha256": "z"}}
    assert manifest.weights_digest({"files": trained}) == known, "the moments are no weights"
    other = {**files, "weights/a": {"bytes": 1, "sha256": "z"}}
    assert manifest.weights_digest({"files": other}) != known
    assert manifest.digest_of_pieces([1, 2]) == manifest.digest_of_pieces([2, 1]) == f"{3:064x}"
    assert manifest.digest_of_pieces([1 << 256, 5]) == f"{5:064x}"
