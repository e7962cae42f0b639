import json
import os
import signal
import sys

import pytest

from tests.launch.modules import module

namespaces = module("namespaces")


@pytest.mark.parametrize(
    ("rate", "bits"), [("200mbit", 2e8), ("1.5gbit", 1.5e9), ("64kbit", 64e3), ("2gbit", 2e9)]
)
def test_rates_are_bits_a_second(rate, bits):
    assert namespaces.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["0mbit", "200", "mbit", "-1gbit", "1e3kbit", "1gbit "])
def test_what_is_no_rate_is_told(rate):
    with pytest.raises(ValueError, match="It must be a number and kbit, mbit or gbit"):
        namespaces.bits_per_second(rate)


@pytest.mark.parametrize(
    ("device", "rate", "burst", "limit"),
    # 4 ms and 4 s of bytes; at least four frames, or a packet, and 256 packets.
    [
        ("net0", "1gbit", 500_000, 500_000_000),
        ("net0", "8mbit", 6_056, 256 * 69_632),
        ("lo", "8mbit", 69_632, 256 * 69_632),
    ],
)
def test_a_bucket_holds_some_milliseconds_or_a_packet(monkeypatch, device, rate, burst, limit):
    ran = []
    monkeypatch.setattr(namespaces, "_run", lambda *words: ran.append(words))
    namespaces._shape("there", device, rate)
    sizes = ("rate", rate, "burst", str(burst), "limit", str(limit))
    assert ran == [("tc", "-n", "there", "qdisc", "add", "dev", device, "root", "tbf", *sizes)]


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """The commands that would be run; what namespaces there are is in `ran.there`."""

    class Ran(list):
        there = ()
        pids = ""

    ran = Ran()

    def run(*words):
        ran.append(" ".join(words))
        if words == ("ip", "netns", "list"):
            return "".join(f"{name} (id: 0)\n" for name in ran.there) + "\n"
        return ran.pids if words[:3] == ("ip", "netns", "pids") else ""

    monkeypatch.setattr(namespaces, "_run", run)
    monkeypatch.setattr(namespaces, "HOSTS_FILES", tmp_path)
    return ran


def test_what_a_machine_lacks_is_listed(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert namespaces.missing() == ["root", "tc"]
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: tool)
    assert namespaces.missing() == []


def test_only_namespaces_of_launchers_that_are_gone_are_removed(ran, tmp_path):
    ran.there = (f"moejax-{os.getpid()}-h0", "moejax-4194999-h1", "moejax-x-h2", "other-4194999")
    for name in ran.there:
        (tmp_path / name).mkdir()
    namespaces.remove_left_over()
    assert [line for line in ran if "delete" in line] == ["ip netns delete moejax-4194999-h1"]
    assert not (tmp_path / "moejax-4194999-h1").exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_what_runs_in_a_namespace_is_killed_with_it(ran, monkeypatch):
    killed = []
    monkeypatch.setattr(namespaces.os, "kill", lambda *what: killed.append(what))
    ran.there, ran.pids = ("moejax-1-h0",), "12\n34\n"
    namespaces._remove("moejax-1-h0")
    assert killed == [(12, signal.SIGKILL), (34, signal.SIGKILL)]
    namespaces._remove("moejax-1-h1")  # of a host that was not made
    assert "ip netns delete moejax-1-h1" not in ran


def test_hosts_are_joined_by_a_switch_and_each_link_has_its_rate(ran, tmp_path):
    cluster = namespaces.Cluster(2, "8mbit", "80mbit")
    cluster._build()
    switch, hosts = cluster.switch, cluster.hosts
    assert hosts == [f"moejax-{os.getpid()}-h{number}" for number in (0, 1)]
    for number, host in enumerate(hosts):
        peer = f"port{number} type veth peer name net0 netns {host}"
        assert f"ip -n {switch} link add {peer}" in ran
        assert f"ip -n {switch} link set port{number} master bridge up" in ran
        assert f"ip -n {host} address add 10.77.0.{number + 1}/24 dev net0" in ran
        listed = "".join(f"10.77.0.{n + 1} {name}\n" for n, name in enumerate(hosts))
        written = (tmp_path / host / "hosts").read_text()
        assert written == f"127.0.0.1 localhost\n{listed}"
    assert sum("> /proc/sys/net/ipv4/tcp_" in line for line in ran) == 2 * len(hosts)
    shaped = [line.partition(" burst")[0] for line in ran if line.startswith("tc")]
    assert shaped == [
        f"tc -n {there} qdisc add dev {device} root tbf rate {rate}"
        for number, host in enumerate(hosts)
        for there, device, rate in (
            (host, "net0", "8mbit"),
            (switch, f"port{number}", "8mbit"),
            (host, "lo", "80mbit"),
        )
    ]


def test_links_without_a_rate_are_not_shaped(ran):
    namespaces.Cluster(1, None, None)._build()
    assert not [line for line in ran if line.startswith("tc")]


def test_a_host_has_a_name_and_counts_what_it_sent(monkeypatch):
    cluster = namespaces.Cluster(2, None, None)
    words = cluster.prefix(1)
    assert words[:6] == ("ip", "netns", "exec", cluster.hosts[1], "unshare", "--uts")
    assert words[6:] == ("sh", "-c", f'hostname {cluster.hosts[1]}; exec "$@"', "sh")
    shown = {name: 100 + number for number, name in enumerate(cluster.hosts)}

    def run(*words):
        assert words[3:] == ("-s", "-j", "link", "show", "dev", "net0")
        return json.dumps([{"stats64": {"tx": {"bytes": shown[words[2]]}, "rx": {"bytes": 7}}}])

    monkeypatch.setattr(namespaces, "_run", run)
    assert cluster.bytes_sent() == [100, 101]


def test_a_command_that_fails_is_told_with_what_it_said():
    assert namespaces._run("sh", "-c", "echo out; echo err >&2") == "out\n"
    with pytest.raises(RuntimeError, match="`sh -c echo why >&2; exit 3` failed: why"):
        namespaces._run("sh", "-c", "echo why >&2; exit 3")


def test_a_cluster_that_cannot_be_built_is_taken_down_and_its_remover_ends(ran, monkeypatch):
    """The remover is a process of its own, which acts once its input ends."""
    begun = []
    start = namespaces.subprocess.Popen
    replaced = [sys.executable, "-c", "import sys; sys.stdin.read()"]

    def popen(words, **settings):
        begun.append(words)
        return start(replaced, **settings)

    monkeypatch.setattr(namespaces.subprocess, "Popen", popen)
    cluster = namespaces.Cluster(2, "fast", None)  # no rate
    ran.there = (*cluster.hosts, cluster.switch)
    with pytest.raises(ValueError, match="rate is `fast`"):
        cluster.__enter__()
    assert begun == [[sys.executable, namespaces.__file__, *cluster.hosts, cluster.switch]]
    assert cluster._remover.returncode == 0
    deleted = [line for line in ran if "delete" in line]
    assert deleted == [f"ip netns delete {name}" for name in ran.there]
