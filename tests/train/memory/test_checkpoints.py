"""States that are kept in memory come back to the same bits, on any mesh, or are not taken."""

import dataclasses
import io
import json
import os
import shutil
import time
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from moejax.config.schema import CheckpointConfig
from moejax.errors import InputError
from moejax.runtime.processes import ALONE
from moejax.train.checkpoint import arrays_of
from moejax.train.digests import add_up
from moejax.train.memory import checkpoints
from moejax.train.memory.checkpoints import MemoryCheckpoints
from moejax.train.memory.exchange import Server
from moejax.train.memory.find import find
from moejax.train.memory.members import Members, open_members
from moejax.train.memory.placement import holders_of
from moejax.train.memory.restore import _Reader
from moejax.train.memory.slots import names_in
from moejax.train.memory.start import Memory
from moejax.train.resume import describe_run
from moejax.train.saved import Saved
from tests.cases import one_device_state, small_config, spread, step_for
from tests.threads import everywhere

MESHES = [(1, 1, 1, 1), (1, 2, 2, 2), (2, 1, 4, 1)]
CONTENT = {"train": [], "held_out": []}


@pytest.fixture(autouse=True, scope="module")
def annotations(unchecked_annotations):
    """Leaves annotations unchecked: whole steps are traced."""


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setenv("MOEJAX_HOST", "host-0")


FACTS = {"skipped_data": []}  # of a run that never went back


def configured(tmp_path, mesh, **model):
    cfg = small_config(mesh, model={"num_layers": 2, **model})
    kept = CheckpointConfig(memory_every=2, memory_dir=str(tmp_path / "memory"))
    return dataclasses.replace(cfg, run_dir=str(tmp_path / "run"), checkpoint=kept)


def case(tmp_path, mesh=MESHES[1]):
    """A step on a mesh and a state of it, which differs from the first one."""
    cfg = configured(tmp_path, mesh)
    train_step = step_for(cfg)
    state = jax.tree.map(lambda x: x + 1, one_device_state(cfg))
    return train_step, spread(state, train_step)


def saving(train_step, events=None):
    """What keeps its states in memory, after looking for what is there."""
    memory = Memory(train_step.cfg, ALONE, None)
    facts = describe_run(train_step, CONTENT)
    told = partial(_tell, [] if events is None else events)
    members = memory._members
    return members, MemoryCheckpoints(members, arrays_of(train_step.abstract), facts, told)


def _tell(events, event, step, **values):
    events.append((event, step, values))


def at_step(state, step):
    """The state as of another step, with other numbers in one array."""
    norm = state.params["norm"]["scale"]
    params = state.params | {"norm": {"scale": norm + step}}
    return state._replace(step=np.int32(step) * (state.step * 0 + 1), params=params)


def save(kept, state, *steps):
    """Saves the state as of some steps, each complete before the next."""
    for step in steps:
        kept.save(step, arrays_of(at_step(state, step)), FACTS)
        kept._pending.result()


def resumed(tmp_path, mesh=MESHES[1], saved=None, **model):
    """What a start goes on with, and what it says."""
    train_step, said = step_for(configured(tmp_path, mesh, **model)), []
    memory = Memory(train_step.cfg, ALONE, saved)
    said += memory.notes
    console = Console(file=io.StringIO())
    return memory.resume(train_step, CONTENT, (), None, console, said.append), said


def bits(state):
    return {key: np.asarray(x).tobytes() for key, x in arrays_of(state).items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_state_comes_back_to_the_same_bits_on_any_mesh(tmp_path, mesh):
    train_step, state = case(tmp_path)
    _, kept = saving(train_step)
    save(kept, state, 2, 4)
    kept.close()
    found, said = resumed(tmp_path, mesh)
    assert bits(found) == bits(at_step(state, 4))
    assert [note for note in said if "setting changed" not in note] == []
    abstract = arrays_of(step_for(configured(tmp_path, mesh)).abstract)
    for key, x in arrays_of(found).items():
        assert x.sharding.is_equivalent_to(abstract[key].sharding, x.ndim)


def test_a_step_that_is_older_than_the_checkpoint_is_not_looked_at(tmp_path):
    train_step, state = case(tmp_path)
    _, kept = saving(train_step)
    save(kept, state, 2, 4)
    kept.close()
    assert resumed(tmp_path, saved=Saved(4, tmp_path, {})) == (None, [])


def slot_of(members, step):
    """The file of the slot that holds a step."""
    for name in names_in(members.folder):
        if json.loads((members.folder / f"{name}.json").read_text())["step"] == step:
            return members.folder / f"{name}.slot"
    raise AssertionError(step)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "said_of_it"),
    [
        (flip, "removed: it has digest"),
        (lambda slot: os.truncate(slot, 100), "removed: its file has 100 bytes"),
        (lambda slot: os.truncate(slot.with_suffix(".json"), 100), "record cannot be read"),
        (lambda slot: slot.with_suffix(".json").unlink(), None),  # a save that was not finished
    ],
)
def test_a_damaged_step_is_removed_and_the_one_before_it_is_taken(tmp_path, damage, said_of_it):
    train_step, state = case(tmp_path)
    members, kept = saving(train_step)
    save(kept, state, 2, 4)
    kept.close()
    slot = slot_of(members, 4)
    damage(slot)
    found, said = resumed(tmp_path)
    assert bits(found) == bits(at_step(state, 2))
    assert said_of_it is None or said_of_it in " ".join(said)
    assert said_of_it is None or not slot.exists()


def test_wrong_numbers_with_right_digests_are_not_taken(tmp_path, monkeypatch):
    """What went wrong between the devices and the slot is seen on the devices again."""
    train_step, state = case(tmp_path)
    members, kept = saving(train_step)
    save(kept, state, 2)
    real = checkpoints.fill

    def wrong(slot, rooms, arrays):
        real(slot, rooms, arrays)
        slot.bytes[0] ^= 1

    monkeypatch.setattr(checkpoints, "fill", wrong)
    save(kept, state, 4)
    kept.close()
    found, said = resumed(tmp_path)
    assert bits(found) == bits(at_step(state, 2))
    assert "step 4 in memory is not taken: its numbers are not" in said[0]
    assert len(names_in(members.folder)) == 1


def test_memory_of_other_settings_is_not_taken_and_stops_no_start(tmp_path):
    train_step, state = case(tmp_path)
    _, kept = saving(train_step)
    save(kept, state, 2)
    kept.close()
    found, said = resumed(tmp_path, init_deviation=0.5)
    assert found is None
    assert "is not taken: config differs from the checkpoint's" in said[-1]


def test_a_run_whose_checkpoints_were_removed_begins_anew(tmp_path):
    train_step, state = case(tmp_path)
    members, kept = saving(train_step)
    save(kept, state, 2)
    kept.close()
    (tmp_path / "run" / "checkpoints" / "memory.json").unlink()
    assert resumed(tmp_path) == (None, [])
    assert names_in(members.folder) == []


def test_saves_alternate_and_the_end_leaves_nothing(tmp_path):
    train_step, state = case(tmp_path)
    events = []
    members, kept = saving(train_step, events)
    save(kept, state, 2, 4, 6)
    files = {path.name for path in members.folder.glob("*.slot")}
    assert files == {"0-0.slot", "0-1.slot"}
    kept.end()
    assert not members.folder.parent.exists()
    assert [(event, step) for event, step, _ in events] == [("memory_saved", n) for n in (2, 4, 6)]
    size = sum(x.nbytes for x in arrays_of(state).values())
    assert events[-1][2]["bytes"] >= size
    assert 0 < events[-1][2]["stall_s"] <= events[-1][2]["whole_s"]


def test_a_save_that_is_due_too_early_is_skipped(tmp_path, monkeypatch):
    train_step, state = case(tmp_path)
    events = []
    _, kept = saving(train_step, events)
    real = kept._complete
    monkeypatch.setattr(kept, "_complete", lambda *a: (time.sleep(0.5), real(*a)))
    began = time.monotonic()
    kept.save(2, arrays_of(state), FACTS)
    kept.save(4, arrays_of(state), FACTS)
    assert events == [("memory_skipped", 4, {})]
    assert time.monotonic() - began < 10  # and does not wait for the one under way
    kept.end()
    assert events[-1][:2] == ("memory_saved", 2)


def test_a_failed_save_is_told_and_does_not_replace_a_whole_one(tmp_path, monkeypatch):
    train_step, state = case(tmp_path)
    events = []
    members, kept = saving(train_step, events)
    save(kept, state, 2)
    with monkeypatch.context() as patch:
        patch.setattr(kept._slots[1], "commit", lambda _: 1 / 0)
        save(kept, state, 4)
    save(kept, state, 6)
    assert events[1] == (
        "memory_failed",
        4,
        {"text": "process 0: ZeroDivisionError: division by zero"},
    )
    kept.close()
    # 6 went where 4 had failed, not over 2.
    assert slot_of(members, 2).name == "0-0.slot"
    assert slot_of(members, 6).name == "0-1.slot"


def test_what_a_start_resumed_is_kept_until_a_newer_step_is_whole(tmp_path):
    train_step, state = case(tmp_path)
    members, kept = saving(train_step)
    save(kept, state, 2, 4)
    kept.close()
    memory = Memory(train_step.cfg, ALONE, None)
    console, records = Console(file=io.StringIO()), []
    assert memory.resume(train_step, CONTENT, (), None, console, records.append) is not None
    again = MemoryCheckpoints(
        memory._members, arrays_of(train_step.abstract), {}, partial(_tell, []), held=memory._held
    )
    again._slots[again._next].forget()  # a save that is killed at once
    again.close()
    assert bits(resumed(tmp_path)[0]) == bits(at_step(state, 4))
    assert slot_of(members, 4).name == "0-1.slot"


def test_no_room_is_refused(tmp_path, monkeypatch):
    train_step, _ = case(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": 1000}))
    with pytest.raises(InputError, match="memory is too small for the state"):
        saving(train_step)


class Of(dict):
    """The arrays of one of two processes, which are threads here and see all devices."""

    def __init__(self, arrays, index):
        super().__init__(arrays)
        self.index = index


class NoSums:
    """Process 1's part of the digests: none, because process 0 adds up what all devices hold."""

    def here(self):
        return {}


def two_hosts(monkeypatch):
    """An array in halves on two hosts and one that lies on both, as both processes see them."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    values = {"w": np.arange(64, dtype=np.float32).reshape(8, 8), "b": np.ones(5, np.float32)}
    specs = {"w": PartitionSpec("x"), "b": PartitionSpec()}
    arrays = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in values.items()}

    def holders(state):
        return {
            piece: {0, 1} if piece.key == "b" else {piece.start[0] // 4}
            for piece in holders_of(state)
        }

    monkeypatch.setattr(checkpoints, "holders_of", holders)
    sums = {0: add_up, 1: lambda _: NoSums()}
    monkeypatch.setattr(checkpoints, "add_up", lambda state: sums[state.index](state))
    return arrays


def member(tmp_path, processes):
    """One of two processes, each on a host of its own."""
    folder = tmp_path / f"host-{processes.index}"
    folder.mkdir(exist_ok=True)
    server = Server(("127.0.0.1", 0), "token", folder)
    addresses = processes.gather(["127.0.0.1", server.port])
    hosts, addresses = ["host-0", "host-1"], [tuple(one) for one in addresses]
    return Members(processes, hosts, addresses, "token", server, folder, "run", "start")


def test_hosts_keep_copies_for_each_other(tmp_path, monkeypatch):
    arrays, events = two_hosts(monkeypatch), []

    def run(processes):
        members = member(tmp_path, processes)
        told = partial(_tell, events if processes.first else [])
        state = Of(arrays, processes.index)
        kept = MemoryCheckpoints(members, state, {}, told)
        save_in_turn(kept, state, 2)
        if not processes.first:
            members.server.inboxes = {}  # takes nothing
        save_in_turn(kept, state, 4)
        if not processes.first:
            members.server.inboxes = kept._inboxes
        save_in_turn(kept, state, 6)
        kept.close()

    done = everywhere(2, run)
    assert done == [None, None]
    assert [event[:2] for event in events] == [("memory_saved", 2), ("memory_failed", 4)]
    assert "process 0: ExchangeError: nothing is expected" in events[1][2]["text"]
    # Each host has its own half and that of the other; what lies on both is not sent.
    assert names_in(tmp_path / "host-0") == ["0-0", "0-1", "0-from-1-0", "0-from-1-1"]
    record = json.loads((tmp_path / "host-1" / "1-from-0-1.json").read_text())
    assert (record["step"], [piece[0] for piece in record["pieces"]]) == (6, ["w", "w"])


def save_in_turn(kept, state, step):
    kept.save(step, state, {})
    kept._pending.result()
    kept._members.processes.gather(step)  # as the steps of a run hold processes together


@pytest.mark.parametrize("gone", [None, 0, 1])
def test_a_state_is_read_from_the_host_that_is_left(tmp_path, monkeypatch, gone):
    arrays = two_hosts(monkeypatch)

    def run(processes):
        members = member(tmp_path, processes)
        state = Of(arrays, processes.index)
        kept = MemoryCheckpoints(members, state, {}, partial(_tell, []))
        save_in_turn(kept, state, 2)
        if processes.first and gone is not None:
            shutil.rmtree(tmp_path / f"host-{gone}")
            (tmp_path / f"host-{gone}").mkdir()
        processes.gather("gone")
        found, notes = find(members, 0)
        reader = _Reader(found, members)
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
        other = NamedSharding(mesh, PartitionSpec("y", "x"))
        like = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=other)
        read = reader.array("w", like)
        np.testing.assert_array_equal(read, arrays["w"])
        asked = len(reader._remote)
        processes.gather("read")
        reader.close()
        kept.close()
        return found.step, notes, asked

    # Each host has all of it here, unless it is new.
    fetched = [int(gone == index) * 2 for index in (0, 1)]
    assert everywhere(2, run) == [(2, [], count) for count in fetched]


def test_what_two_hosts_of_two_lost_is_not_whole(tmp_path, monkeypatch):
    arrays = two_hosts(monkeypatch)

    def run(processes):
        members = member(tmp_path, processes)
        state = Of(arrays, processes.index)
        kept = MemoryCheckpoints(members, state, {}, partial(_tell, []))
        save_in_turn(kept, state, 2)
        kept.close()
        (members.folder / f"{processes.index}-from-{1 - processes.index}-0.json").unlink()
        if processes.first:
            (members.folder / "0-0.json").unlink()
        processes.gather("lost")
        return find(members, 0)

    lost = "step 2 in memory is not whole: no host holds what process 0 of 2 saved"
    assert everywhere(2, run) == [(None, [lost])] * 2


def test_members_agree_and_keep_the_identity_of_the_run(tmp_path):
    cfg = configured(tmp_path, MESHES[0])
    first, second = open_members(cfg, ALONE), open_members(cfg, ALONE)
    assert first.run == second.run
    assert first.begun != second.begun
    assert first.folder == second.folder
    assert first.server is None
