"""Evaluation on held-out text during a run and at its end, and a sampled text."""

import math
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import jax
import numpy as np

from moejax.data.corpus import baselines
from moejax.data.tokenizer import Tokenizer, begin_of_document
from moejax.data.tokens import TokenSource
from moejax.runtime.processes import ALONE, Processes
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep
from moejax.train.inputs import held_out_batches
from moejax.train.records.metrics import held_out_text
from moejax.train.run import Run

ASK_EVERY = 8  # batches, after which the processes agree on whether to go on
TEMPERATURE = 0.7  # of the sample


class Score(NamedTuple):
    """The likelihood of held-out text."""

    nats: float  # summed over the targets
    targets: int

    @property
    def nats_per_token(self) -> float:
        """Mean over the targets; NaN if there were none."""
        return self.nats / self.targets if self.targets else math.nan

    def bits_per_byte(self, source: TokenSource) -> float | None:
        """Returns bits per byte of the text behind the targets; None if its size is unknown.

        Args:
          source: the whole stream; perhaps only a part of it was scored.
        """
        if not source.target_bytes:
            return None
        return self.nats_per_token / math.log(2) * (source.num_targets / source.target_bytes)


def score(
    train_step: TrainStep,
    state: TrainState,
    source: TokenSource,
    *,
    limit: int | None = None,
    processes: Processes = ALONE,
    progress: Callable[[], None] = lambda: None,
    compiling: AbstractContextManager[None] | None = None,
) -> Score:
    """Returns the likelihood of a stream, or of batches spread over it.

    Args:
      limit: number of batches; None for all.
      progress: called after each batch.
      compiling: context that is entered while the evaluation is compiled.
    """
    nats, targets = 0.0, 0
    with compiling or nullcontext():
        processes.compile(
            train_step.evaluate, train_step.abstract, train_step.abstract_batch(training=False)
        )
    for batch, count in held_out_batches(train_step, source, limit):
        nats += float(train_step.evaluate(state, batch))
        targets += count
        progress()
    return Score(nats, targets)


class _AskedToStopError(Exception):
    """Some process was asked to stop while all evaluate."""


def evaluate(
    run: Run,
    state: TrainState,
    step: int,
    limit: int | None,
    asked: Callable[[], bool] = lambda: False,
) -> None:
    """Evaluates on held-out text; shows and records nats per token and bits per byte.

    All processes give it up when one of them was asked to stop.
    """
    held_out = run.inputs.held_out
    if held_out is None:
        return
    done, whole = 0, limit is None

    def progress() -> None:
        nonlocal done
        run.watch.enter("evaluate", step)  # the deadline is of one batch
        done += 1
        show_far(f"{done} batches")
        if done % ASK_EVERY == 0 and any(run.processes.gather(asked())):
            raise _AskedToStopError

    run.watch.enter("evaluate", step)
    busy = run.display.busy(f"evaluating {'all ' * whole}held-out text", plain=whole)
    try:
        with busy as show_far:
            found = score(
                run.train_step,
                state,
                held_out,
                limit=limit,
                processes=run.processes,
                progress=progress,
                compiling=run.watch.during("compile", step),
            )
    except _AskedToStopError:
        run.display.note(f"step {step}  the evaluation is given up: asked to stop")
        return
    values = {"nats_per_token": found.nats_per_token} | ({} if found.targets else {"targets": 0})
    if (bits := found.bits_per_byte(held_out)) is not None:
        values["bits_per_byte"] = bits
    part = "all" if whole else f"{found.targets:,} tokens"
    run.display.note(f"step {step}  held-out ({part}): {held_out_text(values)}")
    run.records.event("final_eval" if whole else "eval", step, **values)


def finish(run: Run, state: TrainState) -> None:
    """Ends a finished run: scores all held-out text beside compressors, and shows a sample."""
    last, run_dir = run.cfg.train.num_steps, shlex.quote(run.cfg.run_dir)
    if run.inputs.held_out is None:
        run.display.note("nothing was held out, so nothing is scored: data.eval_files names files")
    evaluate(run, state, last, limit=None)
    for name, bits in baselines().items() if run.cfg.data.source == "stdlib" else ():
        run.console.print(f"  for the same files {name} needs {bits:.3f} bits per byte")
    run.watch.enter("save", last)
    run.record_saved(run.checkpoints.wait())
    run.watch.enter("sample", last)
    if run.cfg.train.sample_tokens and run.inputs.tokenizer is not None:
        _show_sample(run, state, run.inputs.tokenizer)
    run.display.note(
        f"done: {run_dir} at step {last}; look at it: moejax report {run_dir} --out report.html"
    )


def _show_sample(run: Run, state: TrainState, tokenizer: Tokenizer) -> None:
    length = run.cfg.train.sample_tokens
    prompt = [begin_of_document(tokenizer), *tokenizer.encode(run.cfg.train.sample_prompt)]
    with run.display.busy("sampling a text"):
        tokens = sample(
            run.train_step,
            state,
            prompt,
            length=length,
            allowed=run.inputs.vocab_size,
            seed=run.cfg.train.seed,
            processes=run.processes,
        )
    run.console.rule("sample", align="left")
    run.console.print(tokenizer.decode(tokens), highlight=False)
    if len(tokens) < len(prompt) + length:
        run.console.print("warning: the sample ends early: logits are not finite")


def sample(
    train_step: TrainStep,
    state: TrainState,
    prompt: list[int],
    *,
    length: int,
    allowed: int,
    seed: int,
    processes: Processes = ALONE,
) -> list[int]:
    """Returns the prompt and `length` sampled tokens, fewer where logits are not finite.

    Runs the whole model on the last T - 1 tokens for each new one, on the training mesh.

    Args:
      allowed: ids from this one on are never sampled: the vocabulary's padding.
    """
    rows, T = train_step.abstract_prompt()[0].shape
    tokens, next_logits = list(prompt), train_step.next_logits
    draw = np.random.default_rng(seed)
    for _ in range(length):
        seen = tokens[-T:]
        window_BT = np.zeros((rows, T), np.int32)
        window_BT[:, : len(seen)] = seen
        placed = jax.make_array_from_callback(
            window_BT.shape, train_step.batch_sharding, lambda index, w=window_BT: w[index]
        )
        if len(tokens) == len(prompt):
            processes.compile(next_logits, state, (placed, len(seen)))
        logits_BV = next_logits(state, (placed, len(seen)))
        logit_V = np.asarray(logits_BV.addressable_data(0))[0, :allowed].astype(np.float64)
        # Each process has its own rows' logits, which may differ in the last bits.
        token = processes.gather(_drawn(logit_V, draw))[0]
        if token is None:
            break
        tokens.append(token)
    return tokens


def _drawn(logit_V: np.ndarray, draw: np.random.Generator) -> int | None:
    """Draws a token from softmax; None if a logit is not finite."""
    if not np.isfinite(logit_V.max()):
        return None
    chance_V = np.exp((logit_V - logit_V.max()) / TEMPERATURE)
    return int(draw.choice(len(logit_V), p=chance_V / chance_V.sum()))
