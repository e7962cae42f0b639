"""The memory of a host runs out under a run that keeps moments there: it saves and goes on."""

import re
import sys

import pytest

from moejax.checkpoint.find import newest
from tests.faults.lab import Lab
from tests.integration.runs import assert_same_end, records

pytestmark = [pytest.mark.slow, pytest.mark.faults]

ON_HOST = ["--config.memory.optimizer=host"]


def short(lab: Lab, name: str, member: int, step: int) -> tuple[str, ...]:
    """The train command, in which a process's container is almost full after a step."""
    words = ("--process", str(member), "--step", str(step), "--groups", str(lab.folder / name))
    return (sys.executable, "-m", "tests.faults.short_memory", *words, "--")


@pytest.mark.parametrize(("member", "step"), [(0, 13), (1, 17)])
def test_a_run_ends_in_time_and_goes_on_when_there_is_memory(lab, member, step):
    name = f"short-{member}"
    done = lab.run(name, short(lab, f"groups-{member}", member, step), words=ON_HOST, restarts=1)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    assert "launcher: restart" not in done.stdout, done.stdout
    said = re.search(
        r"\[p0\] moejax: error: the memory of a host is almost full\. \S+ has 100.0 MiB left of "
        r"8.0 GiB\. Step (\d+) is saved\. .*memory\.optimizer",
        done.stdout,
    )
    assert said, done.stdout
    # A process that is not alone stops two steps after the others know.
    assert step <= int(said[1]) <= step + 4
    saved, notes = newest(lab.folder / name / "checkpoints", "full")
    assert (saved.step, notes) == (int(said[1]), [])
    assert [one["step"] for one in records(lab.folder / name, "memory_full")] == [saved.step]
    done = lab.run(name, words=ON_HOST)
    assert done.returncode == 0, done.stdout
    assert f"resuming at step {saved.step} from" in done.stdout
    assert_same_end(lab.folder / "straight", lab.folder / name)
