"""What launch/hosts.py finds wrong with hosts: a stand-in for ssh runs here what it is given."""

import json
import platform
import sys

import pytest

from moejax.version import __version__
from tests.launch.modules import module

hosts = module("hosts")
# Before the line it does what a file with the host's name says, as a shell's start-up files do.
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
folder="{folder}"
[ -e "$folder/$2" ] && . "$folder/$2"
exec /bin/sh -c "$3"
"""


@pytest.fixture
def ask(tmp_path):
    """Checks hosts a and b. Returns what is wrong; None if nothing is."""
    (tmp_path / "ssh").write_text(SSH.format(folder=tmp_path))
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")

    def ask(on_b="", command=(sys.executable,), directory=tmp_path, coordinator="localhost"):
        (tmp_path / "b").write_text(on_b)
        there = hosts.Reach((str(tmp_path / "ssh"), "-T"), str(directory), command)
        try:
            hosts.check(there, ["a", "b"], coordinator)
        except hosts.BadHostsError as error:
            return str(error)
        return None

    return ask


def test_hosts_that_have_the_same_are_fine_whatever_their_shells_print(ask):
    assert ask() is None
    assert ask("echo welcome") is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"directory": "/nowhere"}, "2 of 2 hosts cannot run this. a: no directory /nowhere; b: "),
        ({"command": ("no-such",)}, "2 of 2 hosts cannot run this. a: no program no-such; b: "),
        (
            {"on_b": "PATH=$folder/bin", "command": ("/bin/sh",)},
            "1 of 2 hosts cannot run this. b: no python3. Each",
        ),
        (
            {"on_b": "echo first >&2; echo 'Connection refused.' >&2; exit 255"},
            "1 of 2 hosts cannot run this. b: ssh says: Connection refused. Each",
        ),
        ({"on_b": "exit 255"}, "b: ssh says: nothing. Each"),
        ({"on_b": "echo one; echo what; echo; exit 0"}, "b: its Python says: what. Each"),
        (
            {"coordinator": "no-such.invalid"},
            "a: does not know the coordinator's host no-such.invalid: ",
        ),
    ],
)
def test_each_host_that_cannot_run_it_is_named_with_the_reason(ask, given, said):
    assert said in ask(**given)


def test_a_host_that_does_not_answer_in_time_is_named(ask, monkeypatch):
    assert hosts.CHECK_SECONDS == 60
    monkeypatch.setattr(hosts, "CHECK_SECONDS", 2)
    assert "b: no answer within 2 seconds. Each" in ask("exec sleep 20")


@pytest.mark.parametrize("other", ["moejax", "Python", "JAX"])
def test_hosts_that_have_other_versions_are_named(ask, tmp_path, other):
    (tmp_path / "moejax").mkdir()
    (tmp_path / "moejax" / "__init__.py").touch()
    (tmp_path / "moejax" / "version.py").write_text(f"__version__ = '{__version__}'")
    own = {"moejax": __version__, "Python": platform.python_version(), "JAX": "0.1"}
    (tmp_path / "jax-0.1.dist-info").mkdir()
    (tmp_path / "jax-0.1.dist-info" / "METADATA").write_text("Name: jax\nVersion: 0.1\n")
    (tmp_path / "a").write_text(f"export PYTHONPATH={tmp_path}")
    (tmp_path / "answer").write_text(json.dumps({**own, other: "9", "unknown": None}))
    said = ask(f"cat {tmp_path / 'answer'}; exit 0")
    assert said.startswith(f"hosts differ. {other} is {own[other]} on a, 9 on b. ")


@pytest.mark.parametrize(
    ("command", "python"),
    [
        (["a/python", "-m", "moejax"], "a/python"),
        (["env", "python3.12", "x.py"], "python3.12"),
        (["/a/bin/moejax", "train"], "/a/bin/python"),
        (["moejax", "train"], ""),
        (["sh", "-c", "pythonic"], ""),
    ],
)
def test_the_python_of_a_command_is_its_own_word_or_beside_moejax(command, python):
    assert hosts.python_of(command) == python


def test_of_what_was_said_the_last_line_that_is_not_empty_is_shown():
    assert hosts.one_line("first\n last. \n\n") == "last"
    assert hosts.one_line("\n") == "nothing"


def test_a_file_of_hosts_has_a_name_a_line_and_comments(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# all\nnode1 # the first\n\n user@10.0.0.2\nfe80::1\n")
    assert hosts.names(None, file) == ["node1", "user@10.0.0.2", "fe80::1"]
    assert hosts.names(" a, b", None) == ["a", "b"]
    for listed, given in ((None, None), ("a", file)):
        with pytest.raises(hosts.BadHostsError, match="both given or both missing"):
            hosts.names(listed, given)
    file.write_text("# nobody\n")
    with pytest.raises(hosts.BadHostsError, match="host is ``"):
        hosts.names(None, file)


def test_the_users_options_of_ssh_come_before_those_that_are_always_set():
    words = hosts.reach(["User=me", "BatchMode=no"], 77)
    assert words[:6] == ("ssh", "-T", "-p", "77", "-oUser=me", "-oBatchMode=no")
    assert words[6:] == tuple(f"-o{option}" for option in hosts.ALWAYS)
    assert "-p" not in hosts.reach([], None)
    with pytest.raises(hosts.BadHostsError, match="--ssh_option is `User`"):
        hosts.reach(["User"], None)
