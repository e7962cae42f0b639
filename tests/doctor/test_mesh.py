"""`moejax doctor --mesh`: what holds, what is found, and who is named."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from moejax.config.schema import MeshConfig
from moejax.doctor import mesh as mesh_doctor
from moejax.doctor import mesh_checks as checks
from moejax.doctor.command import main
from moejax.doctor.mesh_checks import WrongError, check_exchange, differing, groups_of, numbers
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_mesh
from moejax.runtime.processes import ALONE
from tests.integration.runs import REPOSITORY, describe, environment, write_config

MESH = MeshConfig(replica=1, fsdp=2, expert=2, tensor=2, nodes=2)


def mesh_of(mesh=MESH):
    layout = build_layout(mesh)
    return layout, build_mesh(layout, jax.devices()[:8])


def said(text):
    """What the table says, without its lines."""
    return " ".join(text.replace("│", " ").split())


def broken(receiver, sender):
    """An all-to-all in which one device gets one wrong bit of one number from one peer."""
    right = checks.wire.all_to_all

    def run(x, axes, *, tag=None):
        y = right(x, axes, tag=tag)
        place = sender, y.shape[1] // 2
        here = (jax.lax.axis_index(axes) == receiver) & (y.dtype == jnp.uint32)
        return jnp.where(here, y.at[place].set(y[place] + jnp.ones((), y.dtype)), y)

    return run


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_every_axis_exchanges_every_pair(nodes):
    layout, mesh = mesh_of(MeshConfig(replica=1, fsdp=1, expert=4, tensor=2, nodes=nodes))
    found = groups_of(layout)
    assert list(found) == ["expert", "tensor", "all devices"]
    pairs = [check_exchange(mesh, axes, ALONE).split()[0] for axes in found.values()]
    assert pairs == ["24", "8", "56"]


def test_one_axis_is_checked_once_and_one_device_not_at_all():
    one = MeshConfig(replica=1, fsdp=1, expert=8, tensor=1)
    assert list(groups_of(build_layout(one))) == ["expert"]
    assert groups_of(build_layout(MeshConfig())) == {}


def test_every_sender_peer_and_place_sends_other_numbers():
    known = np.stack([numbers(sender, peer, 512) for sender in range(16) for peer in range(16)])
    assert len(np.unique(known)) == known.size


def test_a_pair_with_one_wrong_bit_is_named_and_no_other(monkeypatch):
    layout, mesh = mesh_of()
    monkeypatch.setattr(checks.wire, "all_to_all", broken(receiver=5, sender=3))
    with pytest.raises(WrongError) as error:
        check_exchange(mesh, layout.mesh_axes, ALONE)
    ids = [device.id for device in mesh.devices.flat]
    wanted = f"device {ids[3]} of process 0 to device {ids[5]} of process 0: other numbers than"
    assert str(error.value) == f"{wanted} were sent"


def test_rows_that_come_from_another_device_are_found(monkeypatch):
    layout, mesh = mesh_of()
    right = checks.wire.all_to_all
    monkeypatch.setattr(
        checks.wire, "all_to_all", lambda x, axes, **tag: right(x, axes, **tag)[::-1]
    )
    with pytest.raises(WrongError, match="60 pairs more"):
        check_exchange(mesh, layout.mesh_axes, ALONE)


def test_processes_that_differ_are_named():
    assert differing([{"jax": "1"}, {"jax": "1"}]) is None
    found = differing([{"jax": "1"}, {"jax": "1"}, {"jax": "2", "libtpu": "3"}])
    assert found == (
        "process 2 has jax 2, process 0 has 1; process 2 has libtpu 3, process 0 has none"
    )
    assert differing([{"jax": n} for n in range(9)]).endswith("and 4 differences more")


@pytest.fixture
def config(tmp_path):
    text = describe(10, simulated_devices=8, fsdp=2)
    return str(write_config(tmp_path, text, tmp_path / "run") / "config.yaml")


@pytest.mark.slow
def test_the_command_gives_a_verdict_and_leaves_nothing(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checks, "SIZES", (2**14,))
    monkeypatch.setattr(checks, "AIM_S", 0.001)
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["--mesh", "--config", config]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "ready"
    for check in ("versions", "8 x cpu", "attention: blocked", "over all devices (8)", "GB/s"):
        assert check in said(out)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(checks.wire, "all_to_all", broken(receiver=1, sender=0))
    (tmp_path / "run").write_text("a file in the place of the directory")
    assert main(["--mesh", "--config", config]) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith(f"not ready: run directory {tmp_path / 'run'}, all-to-all over fsdp")
    assert verdict.count("all-to-all over") == 4, "the others are tried all the same"


def test_what_follows_a_check_that_breaks_is_left_out(config, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")

    def breaks(*_):
        raise RuntimeError("gloo: connection closed\nmore")

    monkeypatch.setattr(mesh_doctor, "check_exchange", breaks)
    assert main(["--mesh", "--config", config]) == 1
    out = said(capsys.readouterr().out)
    why = "process 0: RuntimeError: gloo: connection closed; checks after it were left out"
    assert why in out
    assert out.endswith("not ready: all-to-all over fsdp (2), in a node")


def test_a_check_that_hangs_is_ended_with_a_line(capsys, monkeypatch):
    ended, found = threading.Event(), []

    def hangs(*_):
        assert ended.wait(60)
        return "came back"

    def end(text):
        found.append(text)
        ended.set()

    monkeypatch.setattr(mesh_doctor, "check_exchange", hangs)
    monkeypatch.setattr(mesh_doctor, "measure_exchange", lambda *_: "not measured")
    monkeypatch.setattr(mesh_doctor, "end_process", end)
    mesh_doctor.check_mesh(None, None, 3.0, Console(width=200))
    assert len(found) == 1
    assert "s in expert" in found[0]
    assert "not ready: no process hangs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mesh", "--smoke"], "Leave out the others"),
        (["--mesh", "--coordinator", "a:1"], "Leave out the others"),
        (["--deadline", "5"], "It is for --mesh"),
        (["--mesh", "--deadline", "0"], "from 1 on"),
        (["--mesh", "--deadline", "nan"], "from 1 on"),
        (["--mesh", "--config.mesh.expert=2"], "Add --config FILE"),
        (["--mesh", "--config", "no_such.yaml"], "no_such.yaml"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(capsys, flags, words):
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


# In process 1 alone, before its check of the first axis.
FAULTS = {
    "none": "pass",
    "wrong": "checks.numbers = lambda *place: right(*place) + 1",
    "version": "mesh_doctor.versions = lambda: {'jax': str(rank)}",
    "stop": "mesh_doctor.check_exchange = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)",
}
PROGRAM = """
import os, signal, sys
from moejax.doctor import command as doctor
from moejax.doctor import mesh_checks as checks
from moejax.doctor import mesh as mesh_doctor
rank, right = int(os.environ["MOEJAX_PROCESS"]), checks.numbers
checks.SIZES = (2**14,)
mesh_doctor.SILENT_S = 6
if rank == 1:
    FAULT
sys.exit(doctor.main(sys.argv[1:]))
"""


def two_processes(folder, fault):
    """Runs the command in two processes of two devices, with a fault in process 1."""
    (folder / "program.py").write_text(PROGRAM.replace("FAULT", FAULTS[fault]))
    words = [sys.executable, str(REPOSITORY / "launch" / "local"), "--devices", "2"]
    words += ["--logs", str(folder / "logs"), "--", sys.executable, str(folder / "program.py")]
    text = describe(10, simulated_devices=4)
    path = write_config(folder, text, folder / "run") / "config.yaml"
    return subprocess.run(
        [*words, "--mesh", "--config", str(path), "--deadline", "25"],
        env=environment(COLUMNS="250"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "verdict"),
    [
        ("none", 0, "ready"),
        ("version", 1, "not ready: versions are the same"),
        # Both ends of the tensor axis are in process 1, which expects what it sends.
        (
            "wrong",
            1,
            "not ready: all-to-all over expert (2), across nodes, all-to-all over all devices (4), "
            "across nodes",
        ),
    ],
)
def test_two_processes_agree_on_a_verdict(tmp_path, fault, code, verdict):
    done = two_processes(tmp_path, fault)
    assert done.returncode == code, done.stdout + done.stderr
    out = done.stdout.replace("[p0] ", "")
    assert f"\n{verdict}" in out
    assert ("process 1" in said(out)) == (fault != "none")


@pytest.mark.faults
def test_a_process_that_is_stopped_is_named_and_all_end(tmp_path):
    done = two_processes(tmp_path, "stop")
    out = done.stdout + done.stderr
    assert done.returncode == 124, out
    assert "moejax: hang: process 1 is behind: it is in" in out
    assert "not ready: no process hangs" in out
