"""Hosts keep copies for each other, which serve where one of them vanishes."""

import json
import shutil
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.checkpoint.digests import add_up
from moejax.train.memory import checkpoints
from moejax.train.memory.checkpoints import MemoryCheckpoints
from moejax.train.memory.exchange import Server
from moejax.train.memory.find import find
from moejax.train.memory.members import Members
from moejax.train.memory.placement import holders_of
from moejax.train.memory.restore import _Reader
from moejax.train.memory.slots import names_in
from tests.threads import everywhere


def _tell(events, event, step, **values):
    events.append((event, step, values))


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


def saved_on_hosts(tmp_path, processes, arrays):
    """This process's members and copies, after a state was kept at step 2."""
    members, state = member(tmp_path, processes), Of(arrays, processes.index)
    kept = MemoryCheckpoints(members, state, {}, partial(_tell, []))
    save_in_turn(kept, state, 2)
    return members, kept


@pytest.mark.parametrize("gone", [None, 0, 1])
def test_a_state_is_read_from_the_host_that_is_left(tmp_path, monkeypatch, gone):
    arrays = two_hosts(monkeypatch)

    def run(processes):
        members, kept = saved_on_hosts(tmp_path, processes, arrays)
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
        members, kept = saved_on_hosts(tmp_path, processes, arrays)
        kept.close()
        (members.folder / f"{processes.index}-from-{1 - processes.index}-0.json").unlink()
        if processes.first:
            (members.folder / "0-0.json").unlink()
        processes.gather("lost")
        return find(members, 0)

    lost = "step 2 in memory is not whole: no host holds what process 0 of 2 saved"
    assert everywhere(2, run) == [(None, [lost])] * 2
