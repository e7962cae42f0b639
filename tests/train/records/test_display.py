"""What a run shows while it waits, on a terminal and without one."""

import io

import pytest
from rich.console import Console

from moejax.train.records.display import Display


def display(*, terminal):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=80, _environ={"TERM": "xterm"})
    return Display(console, 20, 4), shown


@pytest.mark.parametrize(("plain", "said"), [(True, "saving ...\n"), (False, "")])
def test_without_a_terminal_waiting_is_a_line_or_nothing(plain, said):
    one, shown = display(terminal=False)
    with one, one.busy("saving", plain=plain) as tell:
        tell("half of it")
        one.step(7)
    assert shown.getvalue() == said


def test_on_a_terminal_the_bar_counts_steps_and_says_what_is_waited_for():
    one, _ = display(terminal=True)
    with one:
        task = one._progress.tasks[0]
        assert (task.description, task.total, task.completed) == ("step 4/20", 20, 4)
        one.step(7)
        assert (task.description, task.completed) == ("step 7/20", 7)
        with one.busy("evaluating") as tell:
            assert task.description == "evaluating"
            tell("3 batches")
            assert task.description == "evaluating, 3 batches"
        assert task.description == "step 7/20"
    assert one._progress is None


def test_before_the_steps_waiting_has_a_clock_of_its_own_which_leaves_no_line():
    one, shown = display(terminal=True)
    with one.busy("planning") as tell:
        tell("3 of 9")
    assert "planning, 3 of 9" in shown.getvalue()
    one.note("ready")
    assert shown.getvalue().endswith("ready\n")
