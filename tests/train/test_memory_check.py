import pytest

from moejax.errors import InputError
from moejax.model.count import Counts
from moejax.runtime.processes import ALONE
from moejax.train.records.summary import Summary, check_memory, memory_warnings
from tests.cases import small_config, step_for

DEVICES = 8  # that the tests simulate


def with_memory(monkeypatch, size):
    monkeypatch.setattr("moejax.runtime.memory.machine_memory", lambda: size * DEVICES)


@pytest.mark.parametrize(
    ("gradients", "held"),
    [(True, "weights, optimizer state and gradients"), (False, "weights")],  # an evaluation
)
def test_what_a_device_holds_must_fit_its_share(monkeypatch, gradients, held):
    train_step = step_for(small_config((1, 1, 2, 2)))
    train_step = train_step if gradients else train_step.of_weights()
    given = train_step.argument_bytes()
    needed = sum(given.values()) + given["weights"] * gradients
    assert (given["optimizer"] > 0) == gradients
    with_memory(monkeypatch, needed)
    assert check_memory(train_step, ALONE, gradients=gradients) == needed
    with_memory(monkeypatch, needed - 1)
    with pytest.raises(InputError, match=f"the model does not fit.* of {held}, and has"):
        check_memory(train_step, ALONE, gradients=gradients)


def test_the_least_device_of_all_processes_counts(monkeypatch):
    train_step = step_for(small_config())
    with_memory(monkeypatch, 2**30)
    two = ALONE  # of which the second is on the same machine, and has half the room
    monkeypatch.setattr(type(two), "gather", lambda _, x: [x, x // 2 if isinstance(x, int) else x])
    assert check_memory(train_step, two) == 2**30 // 2 // 2


def test_an_estimate_above_the_room_is_a_warning():
    peaks = {"step": 3 * 2**30, "evaluation": 2**20}
    summary = Summary(Counts(1, 1, 1, 1, 1), {}, peaks, 1, [])
    assert memory_warnings(summary, 3 * 2**30) == []
    (said,) = memory_warnings(summary, 2 * 2**30)
    assert "peak memory (step) is about 3.0 GiB" in said
    assert "has 2.0 GiB" in said
