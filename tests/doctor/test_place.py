"""What `moejax doctor` says of a run's directory and of the way to process 0."""

import fcntl
import os
import socket

import pytest

from moejax.doctor import place as place_checks
from moejax.doctor.command import main
from moejax.doctor.place import check_coordinator, check_directory


def test_a_good_directory_holds_and_nothing_is_left(tmp_path):
    findings = check_directory(tmp_path / "a" / "b")
    assert len(findings) == 5
    assert all(one.holds for one in findings), findings
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").write_text("")
    check_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("name", "broken", "check"),
    [
        (
            "fsync",
            lambda number: (_ for _ in ()).throw(OSError(5, "Input/output error")),
            "written",
        ),
        ("flock", lambda *_: None, "lock"),
    ],
)
def test_what_a_file_system_lacks_is_named(tmp_path, monkeypatch, name, broken, check):
    monkeypatch.setattr({"fsync": os, "flock": fcntl}[name], name, broken)
    failed = [one for one in check_directory(tmp_path) if not one.holds]
    assert len(failed) == 1
    assert check in failed[0].check
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (finding,) = check_directory(tmp_path / "file" / "run")
    assert not finding.holds
    assert finding.text == "Not a directory"


def test_the_way_to_process_0(monkeypatch):
    monkeypatch.setattr(place_checks, "PATIENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert check_coordinator(f"127.0.0.1:{port}")[0].text == "answers"
    assert "the port is free" in check_coordinator(f"127.0.0.1:{port}")[0].text
    for wrong in ("127.0.0.1", "127.0.0.1:0", "no-such-host.invalid:29400", ":1"):
        assert not check_coordinator(wrong)[0].holds


def test_the_command_gives_a_verdict(tmp_path, capsys):
    assert main(["--run_dir", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ready"
    (tmp_path / "file").write_text("")
    assert main(["--run_dir", str(tmp_path / "file" / "run"), "--coordinator", "x"]) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict == "not ready: directory is made, process 0 at x"


@pytest.mark.parametrize(
    ("error", "holds", "said"),
    [
        (ConnectionRefusedError(111, "Connection refused"), True, "its machine answers; nobody"),
        (OSError(113, "No route to host"), False, "No route to host: a firewall, or the wrong"),
        (TimeoutError(), False, "no answer within "),
    ],
)
def test_why_process_0_cannot_be_reached_is_said(monkeypatch, error, holds, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(place_checks.socket, "create_server", _refuse)
    monkeypatch.setattr(place_checks.socket, "create_connection", fail)
    (finding,) = check_coordinator("127.0.0.1:9")
    assert finding.holds == holds
    assert finding.text.startswith(said)


def _refuse(*_, **__):
    raise OSError("of another machine")
