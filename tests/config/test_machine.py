"""Memory of a machine and of the container around a process, from files laid out as Linux's."""

import pytest

from moejax.config.checks import machine

KIB, GIB = 2**10, 2**30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")
NO_LIMIT = {V1: "9223372036854771712", V2: "max"}


class FakeLinux:
    """A machine of 64 GiB, of which 40 are available."""

    def __init__(self, folder):
        self.proc, self.groups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.groups.mkdir()
        text = f"MemTotal: {64 * GIB // KIB} kB\nMemFree: 1024 kB\n"
        (self.proc / "meminfo").write_text(f"{text}MemAvailable:   {40 * GIB // KIB} kB\n")

    def within(self, *lines):
        """Says which groups the process is in."""
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def group(self, place, version, limit, use=0, inactive=0, active=0):
        """Makes a control group."""
        folder = self.groups / place
        folder.mkdir(parents=True, exist_ok=True)
        limits, uses, prefix = version
        (folder / limits).write_text(f"{NO_LIMIT[version] if limit is None else limit}\n")
        (folder / uses).write_text(f"{use}\n")
        held = f"{prefix}inactive_file {inactive}\n{prefix}active_file {active}\n"
        (folder / "memory.stat").write_text(f"anon 5\n{held}slab 7\n")


@pytest.fixture
def linux(monkeypatch, tmp_path):
    fake = FakeLinux(tmp_path)
    monkeypatch.setattr(machine, "PROC", fake.proc)
    monkeypatch.setattr(machine, "CGROUPS", fake.groups)
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}
    monkeypatch.setattr(machine.os, "sysconf", sizes.__getitem__)
    return fake


def seen():
    return machine.machine_memory() / GIB, machine.memory_left() / GIB


def test_a_machine_without_groups_has_all_its_memory(linux):
    assert seen() == (64, 40)


def test_what_is_available_is_not_known_everywhere(linux):
    (linux.proc / "meminfo").unlink()
    assert seen() == (64, 64)


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_a_container_has_its_limit_less_its_use(linux, version):
    """Pages of files count as used, and are given back: 16 - 10 + 1 + 2."""
    linux.group(
        "memory" if version is V1 else "", version, 16 * GIB, 10 * GIB, inactive=GIB, active=2 * GIB
    )
    linux.within("4:memory:/" if version is V1 else "0::/")
    assert seen() == (16, 9)


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_no_limit_is_none(linux, version):
    linux.group("memory" if version is V1 else "", version, None, 60 * GIB)
    assert seen() == (64, 40)


def test_a_limit_above_the_machine_is_none(linux):
    linux.group("", V2, 128 * GIB, 100 * GIB)
    assert seen() == (64, 28)


@pytest.mark.parametrize(
    ("version", "top", "line"),
    [(V1, "memory/", "7:cpu,memory:/pods/one"), (V2, "", "0::/pods/one")],
)
def test_limits_of_all_groups_around_a_process_hold(linux, version, top, line):
    """The outer group has the lower limit, the inner one less left: 20 GiB, and 24 - 21."""
    linux.group(f"{top}pods", version, 20 * GIB, 15 * GIB)
    linux.group(f"{top}pods/one", version, 24 * GIB, 21 * GIB)
    linux.group(f"{top}pods/two", version, GIB, GIB)
    linux.within("1:cpuset:/elsewhere", line)
    assert seen() == (20, 3)


@pytest.mark.parametrize("path", ["/docker/0123", "/../../outside"])
def test_a_container_that_is_told_its_path_outside_sees_its_group_as_the_top(linux, path):
    linux.group("memory", V1, 8 * GIB, 6 * GIB)
    linux.within(f"4:memory:{path}", f"0::{path}")
    assert seen() == (8, 2)


def test_more_used_than_allowed_leaves_nothing(linux):
    linux.group("", V2, 8 * GIB, 9 * GIB)
    assert seen() == (8, 0)
