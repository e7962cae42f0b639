"""The train command in two processes that go back together, are killed there, and go on."""

import json
import signal

import pytest

from moejax.checkpoint.manifest import finished_steps, read_manifest
from tests.integration.runs import (
    REPOSITORY,
    assert_same_end,
    describe,
    records,
    run,
)

STEPS = 30
CONFIG = describe(STEPS, sample=0, simulated_devices=4)
LOCAL = (REPOSITORY / "launch" / "local", "--processes", 2)
BAD = "13,14,15"  # the batches of steps 14 to 16: back to step 10, without six batches
WORDS = ("--config.train.max_skipped=3", "--config.train.eval_every=none")


def poisoned(place, name, *flags, words=()):
    """Runs the command on two processes. Returns what `run` does."""
    program = ("tests.train.poisoned", "--bad", BAD, *flags, "--")
    words = (f"--config.run_dir={place / name}", *WORDS, *words)
    return run(place, *words, launcher=LOCAL, program=program)


@pytest.fixture(scope="module")
def whole(place):
    """The output of a run of two processes that went back once."""
    code, out, err = poisoned(place, "straight", "--seen", place / "seen")
    assert code == 0, out + err
    return out


@pytest.mark.slow
@pytest.mark.faults
def test_two_processes_go_back_together_and_to_the_same_bits_after_a_kill(place, whole):
    said = "The run goes back to step 10, and leaves out 6 batches: those of steps 11 to 16"
    assert said in whole
    seen = [json.loads(line) for line in (place / "seen").read_text().splitlines()]
    assert [step for step, _ in seen] == [*range(1, 18), *range(11, STEPS + 1)]
    assert seen[17][1] == seen[16][1], "the batch of step 17 is that of step 11 now"
    assert len({batch for _, batch in seen}) == len(seen) - 1, "no other is seen again"
    ended = read_manifest(place / "straight" / "checkpoints" / str(STEPS))
    assert ended["data_position"] == STEPS + 6
    # The first process alone is killed, right after it has written what is left out.
    code, out, _ = poisoned(place, "killed", "--die", "after")
    assert code == 128 + signal.SIGKILL, out
    assert max(finished_steps(place / "killed" / "checkpoints")) == 10
    code, out, err = poisoned(place, "killed")
    assert code == 0, out + err
    assert [e["step"] for e in records(place / "killed", "rolled_back")] == []
    assert_same_end(place / "straight", place / "killed")


@pytest.mark.slow
@pytest.mark.faults
def test_two_processes_run_a_step_again_and_one_process_may_not(place, whole):
    code, out, err = poisoned(place, "straight", words=["--replay_step", STEPS])
    assert code == 0, out + err
    assert out.count("equals the logged one") == 2
    assert "arrays equal" in out
    words = [f"--config.run_dir={place / 'straight'}", "--replay_step", str(STEPS)]
    code, _, err = run(place, *words, *WORDS)
    assert code == 2
    assert "mesh.nodes is 1, was 2" in err
    assert err.count("\n") == 1
