"""Evaluation and sampling: as much at a time as the step, and no more."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from rich.console import Console

from moejax.plan.price.candidate import sampling_peak, trace_step
from moejax.train.records.summary import human_bytes, print_summary, summarize
from tests.cases import place, random_batch, small_config, step_for

# Wide enough that activations are most of what is needed beside the state.
WIDE = {"model": {"width": 64, "mlp_hidden": 256, "num_layers": 2}, "moe": {"capacity_factor": 2.0}}


def config(parts, **changes):
    train = {"batch_sequences": 64, "micro_batches": parts}
    return small_config((2, 1, 1, 1), train=train, **changes)


@functools.cache
def compiled(parts):
    """Evaluation of 64 sequences, and what the compiler says of it."""
    train_step = step_for(config(parts, **WIDE))
    program = train_step.evaluate.lower(train_step.abstract, train_step.abstract_batch()).compile()
    return train_step, program.memory_analysis()


@pytest.mark.slow
def test_evaluation_is_cut_as_the_step_is():
    """Of 16 parts each has a 16th of the rows, and so of the activations."""
    weights = compiled(1)[0].argument_bytes()["weights"]
    whole, part = (compiled(parts)[1].temp_size_in_bytes for parts in (1, 16))
    assert part <= whole / 16 + weights


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="with JAX 0.10 XLA:CPU takes 1.6 times the temporaries for the same program",
)
@pytest.mark.parametrize("parts", [1, 16])
def test_what_evaluation_needs_is_what_the_compiler_says(parts):
    train_step, said = compiled(parts)
    found = trace_step(train_step).evaluation_peak()
    # The compiler drops what evaluation does not read of the state; on a device it stays.
    given = sum(train_step.argument_bytes().values())
    assert given <= found.arguments <= 1.01 * given
    assert found.arguments >= said.argument_size_in_bytes
    # XLA:CPU copies weights that a loop reads, and fuses less than the reader of schedules does.
    room = train_step.argument_bytes()["weights"] + said.temp_size_in_bytes / 4
    assert found.temporary == pytest.approx(said.temp_size_in_bytes, abs=room)


@pytest.mark.slow
def test_sampling_needs_no_more_than_evaluation():
    """Of a part of one sequence, which is the least that there is."""
    train_step = step_for(small_config((2, 1, 1, 1), train={"batch_sequences": 2}, **WIDE))
    found = sampling_peak(train_step), trace_step(train_step).evaluation_peak()
    assert 0 < found[0].bytes <= found[1].bytes


@pytest.mark.slow
def test_a_dry_run_counts_all_three():
    train_step = compiled(16)[0]
    peaks = summarize(train_step).peaks
    read = trace_step(train_step)
    assert peaks["step"] == read.peak(read.schedule()).bytes
    assert peaks["evaluation"] == read.evaluation_peak().bytes
    assert peaks["sampling"] == sampling_peak(train_step).bytes
    with (shown := Console(width=200)).capture() as text:
        print_summary(summarize(train_step), train_step, shown)
    words = next(line for line in text.get().splitlines() if "peak memory" in line)
    assert all(f"{name} {human_bytes(size)}" in words for name, size in peaks.items())


@pytest.mark.slow
def test_the_sum_does_not_depend_on_the_parts():
    cfg = config(1)
    train = dataclasses.replace(cfg.train, micro_batches=4)
    trainers = step_for(cfg), step_for(dataclasses.replace(cfg, train=train))
    state, batch = trainers[0].init(), random_batch(cfg)
    whole, parts = (float(one.evaluate(state, place(one, batch))) for one in trainers)
    # Sums of so many rounded numbers, in another order.
    bound = batch.target_BT.size * float(np.finfo(np.float32).eps)
    assert parts == pytest.approx(whole, rel=bound)


def test_the_next_logits_are_those_after_the_last_token_of_the_prompt():
    """They depend on it, and on none that stands behind it."""
    train_step = step_for(small_config((2, 1, 1, 1)))
    state, (shape, _) = train_step.init(), train_step.abstract_prompt()
    token_BT = np.arange(np.prod(shape.shape), dtype=np.int32).reshape(shape.shape) % 60
    length = 5

    def after(changed=None):
        prompt_BT = token_BT.copy()
        if changed is not None:
            prompt_BT[:, changed] += 1
        return np.asarray(train_step.next_logits(state, (prompt_BT, length)))

    np.testing.assert_array_equal(after(changed=length), after())
    assert np.all(np.abs(after(changed=length - 1) - after()).max(axis=1) > 1e-3)


BYTES = {999: "999 B", 1000: "1000 B", 1024: "1.0 KiB", 1023 * 1024: "1023.0 KiB"}
BYTES |= {3 * 2**20: "3.0 MiB", 2**40: "1.0 TiB"}


@pytest.mark.parametrize(("size", "words"), BYTES.items())
def test_bytes_are_told_in_binary_units(size, words):
    assert human_bytes(size) == words
