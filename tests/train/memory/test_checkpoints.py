"""States that are kept in memory come back to the same bits, on any mesh, or are not taken."""

import dataclasses
import json
import os
import threading
import time
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from moejax.checkpoint.compatible import describe_run
from moejax.checkpoint.find import Saved
from moejax.checkpoint.writer import arrays_of
from moejax.config.schema import CheckpointConfig
from moejax.data.skipped import SkippedData
from moejax.errors import InputError
from moejax.runtime.processes import ALONE, Processes
from moejax.step.state import TrainState
from moejax.train.memory import checkpoints, find, members, start
from moejax.train.memory.checkpoints import MemoryCheckpoints
from moejax.train.memory.exchange import Inbox
from moejax.train.memory.members import open_members
from moejax.train.memory.placement import neighbours
from moejax.train.memory.restore import read_state
from moejax.train.memory.slots import Slot, names_in
from moejax.train.memory.start import Memory
from moejax.train.records.skipped_data import to_json
from tests.cases import drawn_state, small_config, step_for
from tests.threads import everywhere

MESHES = [(1, 1, 1, 1), (1, 2, 2, 2), (2, 1, 4, 1)]
CONTENT = {"train": [], "held_out": []}


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setenv("MOEJAX_HOST", "host-0")


FACTS = {"skipped_data": []}  # of a run that never went back


def configured(tmp_path, mesh, **model):
    cfg = small_config(mesh, model={"num_layers": 2, **model})
    kept = CheckpointConfig(memory_every=2, memory_dir=str(tmp_path / "memory"))
    return dataclasses.replace(cfg, run_dir=str(tmp_path / "run"), checkpoint=kept)


def case(tmp_path, mesh=MESHES[1]):
    """A step on a mesh and a state of it."""
    train_step = step_for(configured(tmp_path, mesh))
    return train_step, drawn_state(train_step)


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


def saved(tmp_path, *steps):
    """A step, a state that was kept as of some steps, and the members of the run that has ended."""
    train_step, state = case(tmp_path)
    members, kept = saving(train_step)
    save(kept, state, *steps)
    kept.close()
    return train_step, state, members


def resumed(tmp_path, mesh=MESHES[1], saved=None, skipped=(), **model):
    """What a start goes on with, and what it says."""
    train_step, said = step_for(configured(tmp_path, mesh, **model)), []
    memory = Memory(train_step.cfg, ALONE, saved)
    said += memory.notes
    found = memory.resume(train_step, CONTENT, skipped, None, lambda text: None, said.append)
    return found and found.state, said


def bits(state):
    return {key: np.asarray(x).tobytes() for key, x in arrays_of(state).items()}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_state_comes_back_to_the_same_bits_on_any_mesh(tmp_path, mesh):
    _, state, _ = saved(tmp_path, 2, 4)
    found, said = resumed(tmp_path, mesh)
    assert bits(found) == bits(at_step(state, 4))
    assert [note for note in said if "setting changed" not in note] == []
    abstract = arrays_of(step_for(configured(tmp_path, mesh)).abstract)
    for key, x in arrays_of(found).items():
        assert x.sharding.is_equivalent_to(abstract[key].sharding, x.ndim)


def test_a_step_that_is_older_than_the_checkpoint_is_not_looked_at(tmp_path):
    saved(tmp_path, 2, 4)
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
        (lambda slot: os.truncate(slot.with_suffix(".json"), 100), "record cannot be read"),
        (lambda slot: slot.with_suffix(".json").unlink(), None),  # a save that was not finished
    ],
)
def test_a_damaged_step_is_removed_and_the_one_before_it_is_taken(tmp_path, damage, said_of_it):
    _, state, members = saved(tmp_path, 2, 4)
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


def test_what_a_run_went_back_behind_does_not_hide_a_newer_copy(tmp_path):
    """Step 8 was kept, then the run went back to 4 and kept 6, and was killed."""
    train_step, state = case(tmp_path)
    members, kept = saving(train_step)
    save(kept, state, 8)
    back = [SkippedData(4, 5)]
    kept.save(6, arrays_of(at_step(state, 6)), {"skipped_data": to_json(back)})
    kept._pending.result()
    kept.close()
    found, said = resumed(tmp_path, saved=Saved(4, tmp_path, {}), skipped=back)
    assert bits(found) == bits(at_step(state, 6))
    assert "step 8 in memory is not taken: the run went back to before it" in said
    assert slot_of(members, 6).name == "0-1.slot"


def test_processes_of_a_host_look_at_every_slot_whatever_others_remove_meanwhile(tmp_path):
    """The second looks when the first has removed what is not as it was written."""
    members, _ = saving(case(tmp_path)[0])
    names = [f"{process}-{slot}" for process in range(3) for slot in (0, 1)]

    def look(turn):
        beside = dataclasses.replace(members, hosts=["one"] * 2, processes=Processes(turn, 2))
        return set(find._survey(beside)[0])

    for name in names:
        Slot(members.folder, name).commit({"run": members.run if name != "0-0" else "another"})
    assert look(0) | look(1) == {*names} - {"0-0"}


def test_memory_of_other_settings_is_not_taken_and_stops_no_start(tmp_path):
    saved(tmp_path, 2)
    found, said = resumed(tmp_path, init_deviation=0.5)
    assert found is None
    assert "is not taken: config differs from the checkpoint's" in said[-1]


BASE = {"path": "/weights", "weights": "a" * 64}


def taken_up(tmp_path, *, content=CONTENT, base=BASE, **changes):
    """What a start with other settings goes on with from step 2 of adapters, and what it says."""
    train_step, state = case(tmp_path)
    facts = describe_run(train_step, CONTENT, BASE)
    found = open_members(train_step.cfg, ALONE)
    kept = MemoryCheckpoints(found, arrays_of(train_step.abstract), facts, partial(_tell, []))
    save(kept, state, 2)
    kept.close()
    cfg = train_step.cfg
    for group, values in changes.items():
        cfg = dataclasses.replace(
            cfg, **{group: dataclasses.replace(getattr(cfg, group), **values)}
        )
    memory, said = Memory(cfg, ALONE, None), []
    resumed = memory.resume(step_for(cfg), content, (), base, lambda text: None, said.append)
    return resumed, said


OTHER_DATA = {"train": [{"name": "a", "digest": "1", "tokens": 1}], "held_out": []}


def test_changes_that_may_be_made_are_told_where_a_step_in_memory_is_taken(tmp_path):
    resumed, said = taken_up(
        tmp_path,
        content=OTHER_DATA,
        checkpoint={"allow_changed_data": True},
        optimizer={"learning_rate": 0.5, "warmup_steps": 0},
    )
    assert int(resumed.state.step) == 2
    assert [text for text in said if "optimizer.learning_rate: " in text] != []
    assert [text for text in said if text.startswith("learning rate after step 2: ")] != []
    assert "data changed since the checkpoint: data.train_files: a is new" in said


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"content": OTHER_DATA}, "data differs from the checkpoint's"),
        ({"base": {**BASE, "weights": "b" * 64}}, "base weights differ from the checkpoint's"),
        ({"train": {"seed": 7}}, "config differs from the checkpoint's"),
    ],
)
def test_a_step_in_memory_of_another_run_is_not_taken(tmp_path, changes, why):
    resumed, said = taken_up(tmp_path, **changes)
    assert resumed is None
    assert said[-1].startswith(f"step 2 in memory is not taken: {why}")


@pytest.mark.parametrize("remembered", [True, False])
def test_codec_state_that_is_not_valid_is_new_and_told_where_there_was_some(remembered):
    kinds = {"weights/a": [[2], "float32"]} | ({"reduction/b": [[2], "int8"]} if remembered else {})
    state, said = small_state(reduction=None), []
    train_step = SimpleNamespace(first_reduction=lambda: "new")
    found = SimpleNamespace(kinds=kinds)
    assert start._with_reduction(state, train_step, found, said.append).reduction == "new"
    assert len(said) == remembered
    own = small_state(reduction="own")
    assert start._with_reduction(own, train_step, found, said.append) is own
    assert len(said) == remembered


def small_state(*, reduction):
    return TrainState(np.int32(2), np.int32(0), None, None, None, reduction)


def test_a_run_is_told_once_that_its_state_is_not_kept(tmp_path):
    train_step = step_for(configured(tmp_path, MESHES[0]))
    recorded, shown = [], []
    memory = Memory(train_step.cfg, ALONE, None)
    on_event = partial(_tell, recorded)
    kept = memory.begin_saves(train_step, CONTENT, BASE, on_event, shown.append)
    assert (kept._facts["jax"], kept._facts["base"]) == (jax.__version__, BASE)
    assert (kept._newest, kept._next) == (None, 0)
    kept._on_event("memory_saved", 2, bytes=3)
    assert shown == []
    kept._on_event("memory_failed", 4, text="no room")
    kept._on_event("memory_failed", 6, text="again")
    kept.close()
    assert recorded == [
        ("memory_saved", 2, {"bytes": 3}),
        ("memory_failed", 4, {"text": "no room"}),
        ("memory_failed", 6, {"text": "again"}),
    ]
    assert shown == ["warning: step 4 is not kept in memory: no room"]


def test_without_the_setting_nothing_is_kept_in_memory(tmp_path):
    train_step = step_for(configured(tmp_path, MESHES[0]))
    cfg = dataclasses.replace(train_step.cfg, checkpoint=CheckpointConfig())
    memory = Memory(cfg, ALONE, None)
    assert not memory.found
    assert memory.begin_saves(train_step, CONTENT, None, None, None) is None


def test_a_run_whose_checkpoints_were_removed_begins_anew(tmp_path):
    *_, members = saved(tmp_path, 2)
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


def full(size):
    raise OSError("no room")


@pytest.mark.parametrize(
    ("method", "fails", "text"),
    [
        ("commit", lambda _: 1 / 0, "ZeroDivisionError: division by zero"),
        ("prepare", full, "no room"),
    ],
)
def test_a_failed_save_is_told_and_does_not_replace_a_whole_one(
    tmp_path, monkeypatch, method, fails, text
):
    train_step, state = case(tmp_path)
    events = []
    members, kept = saving(train_step, events)
    save(kept, state, 2)
    with monkeypatch.context() as patch:
        patch.setattr(kept._slots[1], method, fails)
        save(kept, state, 4)
    save(kept, state, 6)
    assert [event[:2] for event in events] == [("memory_saved", 2), ("memory_failed", 4)]
    assert events[1][2] == {"text": f"process 0: {text}"}
    kept.close()
    # 6 went where 4 had failed, not over 2.
    assert slot_of(members, 2).name == "0-0.slot"
    assert slot_of(members, 6).name == "0-1.slot"


@pytest.mark.parametrize("steps", [(2,), (2, 4), (2, 4, 6)])
def test_what_a_start_resumed_is_kept_until_a_newer_step_is_whole(tmp_path, steps):
    train_step, state, members = saved(tmp_path, *steps)
    memory = Memory(train_step.cfg, ALONE, None)
    shown, notes = [], []
    assert memory.resume(train_step, CONTENT, (), None, shown.append, notes.append) is not None
    assert shown == [f"resuming at step {steps[-1]} from the memory of hosts"]
    arrays, told = arrays_of(train_step.abstract), partial(_tell, [])
    again = MemoryCheckpoints(memory._members, arrays, {}, told, held=memory._held_slot)
    again._slots[again._next].forget()  # a save that is killed at once
    again.close()
    assert bits(resumed(tmp_path)[0]) == bits(at_step(state, steps[-1]))
    assert slot_of(members, steps[-1]).name == f"0-{(len(steps) - 1) % 2}.slot"


def test_slots_of_another_size_are_reserved_anew_but_for_those_of_the_step_that_is_held(tmp_path):
    """Also those that it keeps for another host: without them that host's part would be lost."""
    found = open_members(configured(tmp_path, MESHES[0]), ALONE)
    own, others = (
        [Slot(found.folder, f"{name}-{n}") for n in (0, 1)] for name in ("0", "0-from-1")
    )
    for slot in (*own, *others):
        slot.prepare(1000)
        slot.commit({})
    kept = object.__new__(MemoryCheckpoints)
    kept._members, kept._newest, kept._bytes, kept._slots = found, 0, 2000, own
    kept._inboxes = {1: Inbox(500, others, threading.Lock())}
    kept._reserve()
    assert names_in(found.folder) == ["0-0", "0-from-1-0"]
    assert [slot.stored for slot in (*own, *others)] == [1000, 2000, 1000, 500]


def test_no_room_is_refused(tmp_path, monkeypatch):
    train_step, _ = case(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": 1000}))
    with pytest.raises(InputError, match="memory is too small for the state"):
        saving(train_step)


@pytest.mark.parametrize("machines", [1, 2])
def test_machines_of_one_name_are_hosts_of_their_own(tmp_path, monkeypatch, machines):
    """As with nodes that are all called localhost."""
    cfg = configured(tmp_path, MESHES[0])
    real, local = members.machine_of, threading.local()

    def machine_of(folder):
        return real(folder).replace(" ", f" on machine {local.process % machines} ", 1)

    monkeypatch.setattr(members, "machine_of", machine_of)

    def run(processes):
        local.process = processes.index
        found = open_members(cfg, processes)
        found.close()
        return found.beside, neighbours(found.hosts)

    apart = [([index], [1, 0]) for index in (0, 1)]
    assert everywhere(2, run) == ([([0, 1], [None, None])] * 2 if machines == 1 else apart)


def test_members_agree_and_keep_the_identity_of_the_run(tmp_path):
    cfg = configured(tmp_path, MESHES[0])
    first, second = open_members(cfg, ALONE), open_members(cfg, ALONE)
    assert first.run == second.run
    assert first.start_id != second.start_id
    assert first.folder == second.folder
    assert first.server is None


WHOLE = [[4, 0.1, 0.98765, 10, 5, None], [4, 0.12344, 0.4, 20, 6, None]]
FULL, GONE = [4, 0.3, 0.1, 20, 6, "full"], [4, 0, 0, 0, 0, "gone"]


@pytest.mark.parametrize(
    ("ends", "values"),
    [  # the slowest process counts, bytes are added; of several that failed the first is named
        (WHOLE, {"bytes": 30, "sent": 11, "stall_s": 0.1234, "whole_s": 0.9877}),
        ([WHOLE[0], FULL], {"text": "process 1: full"}),
        ([WHOLE[0], FULL, GONE], {"text": "process 1: full, and 1 processes more"}),
    ],
)
def test_processes_agree_on_how_a_save_ended(ends, values):
    events = []
    kept = object.__new__(MemoryCheckpoints)
    processes = SimpleNamespace(gather=lambda here: ends)
    kept._members = SimpleNamespace(processes=processes, turn=(1, 2))
    kept._on_event, kept._newest, kept._next = partial(_tell, events), 0, 1
    kept._pending = SimpleNamespace(result=lambda: checkpoints.SaveResult(*ends[0]))
    kept._settle()
    whole = "text" not in values
    assert events == [("memory_saved" if whole else "memory_failed", 4, values)]
    assert (kept._newest, kept._next, kept._pending) == ((1, 0, None) if whole else (0, 1, None))


def test_arrays_of_another_kind_and_copies_that_are_not_whole_are_not_taken(tmp_path):
    train_step, *_ = saved(tmp_path, 2)
    memory = Memory(train_step.cfg, ALONE, None)
    found = memory.found
    key = "weights/params.norm.scale"
    for kinds in ({**found.kinds, key: [[3], "float32"]}, {**found.kinds, key: None}):
        other = read_state(found._replace(kinds=kinds), train_step, memory._members)
        assert other == (None, f"{key} has another shape")
    held = found.held[0]
    fewer = held._replace(rooms=[room for room in held.rooms if room[0].key != key])
    _, why = read_state(found._replace(held=[fewer]), train_step, memory._members)
    assert why.startswith("process 0: ")
