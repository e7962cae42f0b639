"""A slot is what its record says, or it counts for nothing."""

import json
import os
import stat

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.errors import InputError
from moejax.train.memory import folder as folders
from moejax.train.memory.folder import check_room, folder_of, host_name, open_folder, remove
from moejax.train.memory.placement import holders_of, offsets_of
from moejax.train.memory.slots import (
    Slot,
    SlotError,
    check_slot,
    discard_others,
    fill,
    listed,
    names_in,
    open_slot,
    pieces_of,
    read_record,
    sha256_of,
    view_of,
)

NAME = "0-1"


def arrays():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    spread = NamedSharding(mesh, PartitionSpec("a"))
    return {
        "w": jax.device_put(np.arange(24, dtype=np.float32).reshape(4, 6), spread),
        "half": jax.device_put(np.arange(6).astype("bfloat16"), spread),
        "step": jax.device_put(np.int32(7), NamedSharding(mesh, PartitionSpec())),
    }


def written(folder):
    """A slot with all pieces of some arrays, and its record."""
    held = arrays()
    pieces = list(holders_of(held))
    offsets, size = offsets_of(pieces)
    rooms = list(zip(pieces, offsets, strict=True))
    slot = Slot(folder, NAME)
    slot.prepare(size)
    fill(slot, rooms, held)
    facts = {"pieces": listed(rooms), "bytes": size, "sha256": sha256_of(slot.bytes)}
    slot.commit(facts)
    return slot, held


def test_what_is_written_is_read(tmp_path):
    _, held = written(tmp_path)
    record = read_record(tmp_path, NAME)
    check_slot(tmp_path, NAME, record)
    data = open_slot(tmp_path, NAME, record)
    for piece, offset in pieces_of(record):
        cut = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
        wanted = np.asarray(held[piece.key])[cut]
        np.testing.assert_array_equal(view_of(data, piece, offset), wanted)
    assert {path.stat().st_mode & 0o077 for path in tmp_path.glob("*.slot")} == {0}


def test_a_slot_is_reused_without_a_new_file(tmp_path):
    slot, _ = written(tmp_path)
    file = next(tmp_path.glob("*.slot"))
    before = file.stat().st_ino
    again = Slot(tmp_path, NAME)
    again.prepare(slot.bytes.size)
    np.testing.assert_array_equal(again.bytes, slot.bytes)  # as an earlier start left it
    assert names_in(tmp_path) == [NAME]
    again.forget()
    assert names_in(tmp_path) == []
    again.prepare(slot.bytes.size * 2)
    assert file.stat().st_ino == before
    assert again.bytes.size == file.stat().st_size == slot.bytes.size * 2


def test_another_size_loses_the_record(tmp_path):
    slot, _ = written(tmp_path)
    Slot(tmp_path, NAME).prepare(slot.bytes.size + 64)
    assert names_in(tmp_path) == []


def test_a_step_does_not_keep_the_memory_of_the_devices(tmp_path):
    """A view that lives on would make the next step copy the state that it is given."""
    state = jax.device_put(np.zeros((512, 512), np.float32))
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = step(state)
    pieces = list(holders_of({"x": state}))
    slot = Slot(tmp_path, NAME)
    slot.prepare(pieces[0].nbytes)
    before = state.unsafe_buffer_pointer()
    fill(slot, [(pieces[0], 0)], {"x": state})
    assert step(state).unsafe_buffer_pointer() == before


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (lambda slot, record: flip(slot, 70), "it has digest"),
        (lambda slot, record: os.truncate(slot, 40), "its file has 40 bytes"),
        (lambda slot, record: slot.unlink(), "its file has 0 bytes"),
        (lambda slot, record: os.truncate(record, 100), "cannot be read"),
        (lambda slot, record: record.write_text("[]"), "no object"),
        (lambda slot, record: record.write_text("[" * 100_000), "cannot be read"),
        (lambda slot, record: record.unlink(), "cannot be read"),
        (lambda slot, record: record.write_text('{"format_version": 2}'), "format 2"),
        (
            lambda slot, record: record.write_text(
                json.dumps(json.loads(record.read_text()) | {"bytes": 1})
            ),
            "another digest",
        ),
    ],
)
def test_damage_is_named(tmp_path, damage, seen):
    written(tmp_path)
    damage(tmp_path / f"{NAME}.slot", tmp_path / f"{NAME}.json")
    with pytest.raises(SlotError, match=seen):
        check_slot(tmp_path, NAME, read_record(tmp_path, NAME))


def test_slots_of_another_start_are_removed(tmp_path):
    for name in ("0-0", "3-1", "0-from-3-1"):
        slot = Slot(tmp_path, name)
        slot.prepare(64)
        slot.commit({"bytes": 64})
    (tmp_path / "other").touch()
    discard_others(tmp_path, ["0-0"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0-0.json", "0-0.slot", "other"]


def test_a_folder_is_of_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEJAX_HOST", "host-1")
    folder = folder_of(str(tmp_path), "/runs/a")
    assert folder != folder_of(str(tmp_path), "/runs/b")
    open_folder(folder)
    open_folder(folder)  # as a second process does
    assert (
        stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    )
    assert list(folder.iterdir()) == []
    remove(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_can_reach_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEJAX_HOST", "h")
    folder, elsewhere = folder_of(str(tmp_path), "/runs/a"), tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.parent.symlink_to(elsewhere)
    with pytest.raises(InputError, match="no folder of user"):
        open_folder(folder)
    folder.parent.unlink()
    folder.parent.mkdir(mode=0o755)
    with pytest.raises(InputError, match="with mode 755"):
        open_folder(folder)
    folder.parent.chmod(0o700)
    monkeypatch.setattr(folders.os, "geteuid", lambda: 12345)
    with pytest.raises(InputError, match=r"a folder of user \d+"):
        open_folder(folder)
    monkeypatch.undo()
    tmp_path.chmod(0o777)
    with pytest.raises(InputError, match="others may rename"):
        open_folder(folder)
    tmp_path.chmod(0o700)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEJAX_HOST", "h")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="state cannot be kept in memory") as error:
        open_folder(folder_of(str(tmp_path / "file"), "/runs/a"))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["a/b", "..", "", "-x", "a" * 200])
def test_a_host_has_a_plain_name(monkeypatch, name):
    monkeypatch.setenv("MOEJAX_HOST", name)
    monkeypatch.setattr("socket.gethostname", lambda: "bad name")
    with pytest.raises(InputError, match="host has no plain name"):
        host_name()


def test_too_little_memory_is_refused(tmp_path):
    check_room(tmp_path, 1, 0)
    with pytest.raises(InputError, match="memory is too small for the state"):
        check_room(tmp_path, 1 << 60, 0)
    check_room(tmp_path, 1 << 60, 1 << 60)
