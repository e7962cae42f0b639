"""The probe: a small run here, its parts, and the emulated cluster."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.plan import __main__ as plan
from moejax.plan.cluster.file import from_json, load_topology, read_topology, to_text
from moejax.plan.cluster.topology import KINDS, Host, Link, Tier
from moejax.plan.probe import device as rates_of_device
from moejax.plan.probe import links as probe_links
from moejax.plan.probe import measure as probe_module
from moejax.plan.probe import program as probe_program
from moejax.plan.probe.command import main
from moejax.plan.probe.device import CACHED, MEMORY, VALUES, probe_device
from moejax.plan.probe.links import collective, probe_pairs, tournament
from moejax.plan.probe.measure import Effort, probe
from moejax.plan.probe.nodes import find_nodes
from moejax.plan.probe.timer import AXES, Stopwatch, build_probe_mesh, loop
from moejax.runtime.processes import Processes
from tests.plan.clusters import cluster
from tests.plan.probe.test_nodes import device

ROOT = Path(__file__).parents[3]
EMULATE = ROOT / "launch" / "emulate"
LACKING = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
LACKING += [] if os.geteuid() == 0 else ["root"]
needs_namespaces = pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)}")


@given(st.integers(2, 17))
def test_in_a_tournament_everyone_meets_everyone_once(count):
    rounds = list(tournament(count))
    for games in rounds:
        players = [player for game in games for player in game]
        assert len(set(players)) == len(players)
    met = sorted(tuple(sorted(game)) for games in rounds for game in games)
    assert met == [(a, b) for a in range(count) for b in range(a + 1, count)]


# -- a run here, where both tiers are this machine's memory


# A model that compiles quickly.
TINY_PROGRAM = probe_program.SMALL | {
    "model.width": 32,
    "model.num_layers": 1,
    "moe.expert_hidden": 32,
}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_quick_probe_of_simulated_devices_can_be_read_back(monkeypatch):
    monkeypatch.setitem(probe_program.MODELS, "cpu", TINY_PROGRAM)
    timed = Stopwatch.seconds
    monkeypatch.setattr(Stopwatch, "seconds", lambda *args, **_: timed(*args, aim_s=0.0))
    said = []
    found, odd = probe(
        Processes(),
        jax.devices()[:4],
        name="here",
        nodes=2,
        effort=Effort(seconds=1, quick=True),
        progress=said.append,
    )
    assert found.devices == 4
    assert found.nodes == 2 or any("one node of 4" in line for line in odd)
    assert from_json(json.loads(to_text(found)), "t.json") == found
    assert found.device.platform == "cpu"
    for tier in found.tiers:
        for kind in KINDS:
            link = tier.links[kind]
            assert len(link.points) >= 3
            # Memory of any machine: not a loop that was optimised away, nor one that hung.
            assert 1e5 < link.bytes_per_s < 4e12
    assert 1e6 < found.device.copy_bytes_per_s < 1e13
    assert found.host is not None
    assert found.device.program_overhead > 0
    assert found.device.program_overhead != 1, "what every step is priced with was not measured"
    assert any("all_to_all" in words for words in said)


def test_a_cpu_is_timed_with_arrays_that_caches_hold_and_with_exponentials_and_sums():
    class Watch:
        """Two seconds for everything: arrays are read and written at their size a second."""

        def seconds(self, *_):
            return 2.0

    facts = {"name": "toy", "memory_bytes": 1, "progress": lambda _: None}
    found = probe_device(Watch(), platform="cpu", quick=False, **facts)
    assert found.copies == tuple((2.0 * size, size) for size in CACHED["cpu"])
    assert found.copy_bytes_per_s == MEMORY["cpu"] > found.copies[-1][0] / 2
    assert found.exponentials_per_s == found.reductions_per_s == VALUES / 2
    for other in ({"platform": "cpu", "quick": True}, {"platform": "gpu", "quick": False}):
        device = probe_device(Watch(), **other, **facts)
        assert not device.copies
        assert device.exponentials_per_s == device.reductions_per_s == math.inf


def test_copies_to_the_host_are_timed_on_all_devices_at_once(monkeypatch):
    """32 MiB of each device: in an eighth of a second from it, in a quarter to it."""
    clock = iter([time for call in range(14) for time in (call, call + (0.125, 0.25)[call > 6])])
    timer = types.SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr(rates_of_device, "time", timer)
    watch = Stopwatch(Processes(), [jax.devices()[:2], jax.devices()[2:4]])
    found = rates_of_device.probe_host(watch, "cpu", 10**9, lambda _: None)
    assert found == Host(to_device=2**27, from_device=2**28, memory_bytes=10**9)


@pytest.mark.exhaustive
def test_a_whole_program_runs_beside_its_price(monkeypatch):
    monkeypatch.setitem(probe_program.MODELS, "cpu", TINY_PROGRAM)
    watch = Stopwatch(Processes(), np.array(jax.devices()[:4]).reshape(2, 2))
    device = dataclasses.replace(cluster().device, copies=((1e4, 4e9), (1e7, 2e9)))
    found = probe_program.probe_program(watch, device)
    assert 0 < found < 1e6
    monkeypatch.setattr(Stopwatch, "seconds", lambda *_, **__: 1.0)
    of_a_second = probe_program.probe_program(watch, device)
    twice = {
        "products": {"float32": tuple((n, 2 * rate) for n, rate in device.products["float32"])},
        "copy_bytes_per_s": 2 * device.copy_bytes_per_s,
        "gather_bytes_per_s": 2 * device.gather_bytes_per_s,
        "copies": tuple((size, 2 * rate) for size, rate in device.copies),
        "startup_s": device.startup_s / 2,
    }
    faster = dataclasses.replace(device, **twice)
    assert probe_program.probe_program(watch, faster) == pytest.approx(2 * of_a_second)


@pytest.mark.parametrize(
    ("startup_s", "seconds", "sizes"),
    [
        (1e-3, 1e3, [2**n for n in range(14, 27, 2)]),  # time for all
        (1e-3, 5, [2**14, 2**18, 2**22, 2**26]),  # a second each: no time for all
        (1e-1, 3, [2**14, 2**16, 2**18]),  # little time, but calls that tell something
    ],
)
def test_a_curve_that_has_no_time_for_all_sizes_leaves_out_small_ones(
    startup_s, seconds, sizes, monkeypatch
):
    passed = []

    def timed(_self, operate, start, *, aim_s):
        size = 4 * start().size
        passed.append(1 + 20 * (startup_s + size / 1e11))
        return startup_s + size / 1e11

    monkeypatch.setattr(Stopwatch, "seconds", timed)
    monkeypatch.setattr(Stopwatch, "elapsed", lambda _self: sum(passed))
    watch = Stopwatch(Processes(), [jax.devices()[:2]])
    kept = list(probe_links._curve(watch, AXES[1], "all_to_all", seconds=seconds, quick=False))
    assert [2 * sent for sent, _ in kept] == sizes


def test_how_late_a_collective_starts_is_what_computations_of_both_lengths_share(monkeypatch):
    watch = Stopwatch(Processes(), np.array(jax.devices()[:4]).reshape(2, 2))
    rounds = [[7.0, 9.0], [7.0, 11.0], [8.0, 9.0]]  # 5, 3 and 7 beside the computations

    def found(_self, operations, aim_s):
        assert len(operations) == 2
        return rounds

    real = Stopwatch.in_turns
    monkeypatch.setattr(Stopwatch, "in_turns", found)
    slow = Link(1.0, 512.0)  # two seconds for the 512 bytes that leave a device
    assert probe_links._late(watch, AXES[0], slow, oversubscription=2) == pytest.approx(4.0)
    assert probe_links._late(watch, AXES[0], Link(9.0, 512.0), oversubscription=1) == 0
    monkeypatch.setattr(Stopwatch, "in_turns", real)
    assert 0 <= probe_links._late(watch, AXES[1], Link(0.0, 1e9), oversubscription=1) < 1


@pytest.mark.exhaustive
def test_devices_that_share_cores_take_longer_together(monkeypatch):
    watch = Stopwatch(Processes(), np.array(jax.devices()[:4]).reshape(1, 4))
    assert 1 <= probe_links.probe_oversubscription(watch) <= 4
    # The meeting takes 5 s, the shorter work 2 s alone and 6 s together, once held up.
    rounds = [[7.0, 9.0, 11.0, 17.0], [7.0, 9.0, 11.0, 17.0], [7.0, 9.0, 11.0, 40.0]]
    monkeypatch.setattr(Stopwatch, "in_turns", lambda *_: rounds)
    assert probe_links.probe_oversubscription(watch) == 3
    # Work that is lost in noise: as many as there are.
    monkeypatch.setattr(Stopwatch, "in_turns", lambda *_: [[7.0, 7.0, 11.0, 17.0]])
    assert probe_links.probe_oversubscription(watch) == 4
    alone = Stopwatch(Processes(), np.array(jax.devices()[:2]).reshape(2, 1))
    assert probe_links.probe_oversubscription(alone) == 1


def test_what_a_collective_takes_of_compute_is_what_its_threads_work(monkeypatch):
    watch = Stopwatch(Processes(), np.array(jax.devices()[:4]).reshape(1, 4))
    links = dict.fromkeys(KINDS, Link(0.0, 1e9, points=((4096, 0.01),)))
    monkeypatch.setattr(probe_links, "_curve", lambda *_, **__: [(4096, 0.01), (8192, 0.02)])
    monkeypatch.setattr(probe_links, "fit_link", lambda _: links["all_to_all"])
    monkeypatch.setattr(probe_links, "_late", lambda *_: 0.0)
    monkeypatch.setattr(Stopwatch, "seconds", lambda *_, **__: 0.01)
    monkeypatch.setattr(Stopwatch, "core_share", lambda *_, **__: 0.2)

    def share(beside, oversubscription):
        monkeypatch.setattr(probe_links.gloo, "computes_beside", lambda _: beside)
        wanted = {"seconds": 1.0, "quick": False, "progress": lambda _: None}
        tier = probe_links.probe_tier(
            watch, AXES[1], "host", oversubscription=oversubscription, **wanted
        )
        return tier.compute_share

    # Four devices a core have a quarter of it each.
    assert share(True, 1.0) == pytest.approx(0.2)
    assert share(True, 4.0) == pytest.approx(0.8)
    assert share(True, 6.0) == 1.0
    assert share(False, 4.0) == 0.0  # products take no longer beside it


def test_a_core_is_as_busy_as_all_threads_over_time_and_devices(monkeypatch):
    watch = Stopwatch(Processes(), np.array(jax.devices()[:2]).reshape(1, 2))
    clock = iter([10.0, 13.0])
    monkeypatch.setattr(Stopwatch, "_time", lambda *_: 2.0)
    monkeypatch.setattr("moejax.plan.probe.timer.time.process_time", lambda: next(clock))
    # Three seconds of work in two, on all devices of the process.
    share = watch.core_share(lambda x: x + 1, lambda: jnp.zeros(()), seconds=1.0)
    assert share == pytest.approx(3 / (2 * len(watch.mesh.local_devices)))


@pytest.mark.parametrize(
    ("inside", "sizes", "warning"),
    [
        ((9, 9, 9, 9), (4, 2), None),
        ((9, 1, 9, 9), (4, 2), "all_gather inside a node"),
        ((1, 1, 1, 1), (8,), "one node of 8"),
    ],
)
def test_what_is_measured_may_contradict_what_was_seen(inside, sizes, warning, monkeypatch):
    rates = {AXES[1]: (4, inside), AXES[0]: (2, (5, 5, 5, 5))}

    def measured(watch, axis, name, **_):
        size, by_kind = rates[axis]
        links = {kind: Link(1e-3, float(r)) for kind, r in zip(KINDS, by_kind, strict=True)}
        return Tier(name, size, links)

    monkeypatch.setattr(probe_module, "probe_tier", measured)
    devices = [device(n // 4) for n in range(8)]
    found = find_nodes(devices, ["a", "b"])
    watch = Stopwatch(Processes(), np.array(jax.devices()[:8]).reshape(2, 4))
    tiers, odd = probe_module._probe_tiers(watch, found, 1.0, Effort(), lambda _: None)
    assert tuple(tier.size for tier in tiers) == sizes
    assert [warning in line for line in odd] == ([True] if warning else [])


def test_pairs_of_nodes_are_all_measured():
    devices = np.array(jax.devices()[:6]).reshape(3, 2)
    pairs, starts = probe_pairs(devices, Processes(), 1e7, progress=lambda _: None)
    for a in range(3):
        for b in range(3):
            assert (pairs[a][b] > 0) == (starts[a][b] > 0) == (a != b)
            assert starts[a][b] == starts[b][a]  # half of there and back


def test_only_starts_that_differ_clearly_are_kept():
    def starts(*late):
        """Of three nodes, in milliseconds."""
        a, b, c = (1e-3 * ms for ms in late)
        return ((0.0, a, b), (a, 0.0, c), (b, c, 0.0))

    assert probe_module.differ(starts(1, 50, 50))
    assert not probe_module.differ(starts(0.2, 1.9, 0.3)), "less than 2 ms is noise"
    assert not probe_module.differ(starts(30, 50, 45)), "and so is less than twice"


def test_a_timed_loop_holds_the_collective_that_it_times():
    devices = np.array(jax.devices()).reshape(2, 4)
    for kind in KINDS:
        operate, start, sent = collective(kind, AXES[1], 2**14, 4)
        assert sent == 2**14 * 3 // 4 * (2 if kind == "all_reduce" else 1)
        text = loop(operate, start, build_probe_mesh(devices)).lower(1).compile().as_text()
        assert kind.replace("_", "-") in text
        assert " while(" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "t.json", "--name", ""], "no name"),
        (["--out", "nowhere/t.json"], "folder that exists"),
        (["--out", "."], "must name a file"),
        (["--out", "t.json", "--seconds", "0"], "--seconds is 0"),
        (["--out", "t.json", "--nodes", "-1"], "--nodes is -1"),
        (["--out", "t.json", "--nodes", "3", "--quick"], "share them evenly"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if "error" in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "t.json").exists()


def test_the_plan_command_knows_its_words(capsys):
    assert plan.main([]) == 2
    assert "--config FILE" in capsys.readouterr().err
    assert plan.main(["probe", "--out", "nowhere/t.json"]) == 2


# -- the emulated cluster


def emulate(folder, *words, flags=(), before=""):
    """Probes an emulated cluster; returns the topology and all output."""
    environment = {name: v for name, v in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    out = folder / "topology.json"
    probing = f'{before} exec "$@"'
    command = [sys.executable, "-m", "moejax.plan", "probe", "--out", str(out), *words]
    line = [sys.executable, EMULATE, *flags, "--logs", folder, "--", "sh", "-c", probing, "sh"]
    done = subprocess.run(
        [*map(str, line), *command], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_topology(out), done.stdout + done.stderr


@needs_namespaces
@pytest.mark.exhaustive
def test_the_probe_finds_the_rate_of_shaped_links(tmp_path):
    flags = ("--hosts", 2, "--devices-per-host", 2, "--link", "100mbit")
    found, output = emulate(tmp_path, flags=flags)
    assert found.sizes == (2, 2), output
    assert [tier.name for tier in found.tiers] == ["host", "network"]
    assert 0.5 < found.device.program_overhead < 30, output
    assert 1 <= found.device.oversubscription <= 2, output
    assert 0 < found.tiers[1].compute_share < 0.5, output  # its threads wait for the link
    rates = [2 * 8 * link.bytes_per_s for link in found.tiers[1].links.values()]
    assert 80e6 < np.median(rates) < 120e6, output
    for row, column in ((0, 1), (1, 0)):
        assert 60e6 < 2 * 8 * found.pairs[row][column] < 130e6
    assert load_topology(str(tmp_path / "topology.json")) == found
    assert "Gbit/s" in output
    assert "all_reduce over all devices" in output


@needs_namespaces
@pytest.mark.exhaustive
def test_the_probe_names_a_slowed_host(tmp_path):
    """Host 2 sends at a fifth of the others' rate; the bucket holds the largest packet."""
    tbf = "tbf rate 10mbit burst 69632 limit 17825792"
    slow = f'if [ "$MOEJAX_PROCESS" = 2 ]; then tc qdisc replace dev net0 root {tbf}; fi;'
    flags = ("--hosts", 3, "--devices-per-host", 1, "--link", "50mbit")
    found, output = emulate(tmp_path, "--seconds", "4", flags=flags, before=slow)
    assert found.sizes == (1, 3)
    (one,) = found.slow_nodes()
    assert one.node == 2
    assert one.name.endswith("-h2")
    assert 3 < one.times_slower < 8
    assert found.asymmetric
    assert f"({one.name}) is" in output


@pytest.mark.parametrize(("call", "empty"), [(1e-4, 0.02), (0.5, 0.02), (1e-6, 0.0)])
def test_a_calls_seconds_are_those_of_the_loop_less_an_empty_one(monkeypatch, call, empty):
    times = []

    def clock(_self, _run, turns):
        times.append(turns)
        return empty + turns * call

    monkeypatch.setattr(Stopwatch, "_time", clock)
    watch = Stopwatch(Processes(), np.array(jax.devices()[:2]).reshape(1, 2))
    seconds = watch.seconds(lambda x: x + 1, lambda: jnp.zeros(()))
    assert seconds == pytest.approx(call, rel=1e-6)
    # As long as the empty loop twice over, and as was aimed for, if so many turns are allowed.
    assert max(times) * call >= min(max(2 * empty, 0.02), 4096 * call)


@pytest.mark.parametrize("word_s", [0.001, 0.008])
def test_a_collective_does_not_hold_up_the_word_to_start(monkeypatch, word_s):
    """Process 0 has the word at once, the other by the link on which process 0 sends 50 ms.

    Sent ahead of the data, the word is there when both start: 50 ms. Behind them: 100 ms.
    """

    class TwoProcesses:
        count = 2

        def __init__(self):
            self.now, self.word_leaves = 0.0, 0.0

        def gather(self, value):
            self.word_leaves = self.now + word_s
            return [value, value]

        def sleep(self, seconds):
            self.now += seconds

        def run(self, times):
            other_starts = self.word_leaves + (0.05 if self.now < self.word_leaves else 0.0)
            self.now = max(self.now, other_starts) + 0.05

    processes = TwoProcesses()
    monkeypatch.setattr("moejax.plan.probe.timer.time.sleep", processes.sleep)
    monkeypatch.setattr("moejax.plan.probe.timer.time.perf_counter", lambda: processes.now)
    watch = Stopwatch(processes, [jax.devices()[:1]])
    assert watch._time(processes.run, 1) == pytest.approx(0.05)
