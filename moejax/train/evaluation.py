"""Evaluation on held-out text during a run and at its end, and a sampled text."""

import math

from moejax.step.state import TrainState
from moejax.train.metrics import held_out_text
from moejax.train.run import Run
from moejax.train.sample import sample

LN2 = math.log(2)


def evaluate(run: Run, state: TrainState, step: int, limit: int | None) -> None:
    """Evaluates on held-out text; shows and records nats per token and bits per byte."""
    if run.inputs.held_out is None:
        return
    nats = targets = 0.0
    shapes = run.train_step.abstract, run.train_step.abstract_batch()
    run.processes.compile(run.train_step.evaluate, *shapes)
    for batch, count in run.inputs.eval_batches(run.train_step, limit):
        nats += float(run.train_step.evaluate(state, batch))
        targets += count
    nats_per_token = nats / targets
    values = {"nats_per_token": nats_per_token}
    if (density := run.inputs.eval_tokens_per_byte) is not None:
        values["bits_per_byte"] = nats_per_token / LN2 * density
    part = "all" if limit is None else f"{int(targets):,} tokens"
    run.display.note(f"step {step}  held-out ({part}): {held_out_text(values)}")
    run.records.event("eval" if limit is not None else "final_eval", step, **values)


def finish(run: Run, state: TrainState) -> None:
    """After the last step: all held-out text, compressors' results beside it, and a sample."""
    evaluate(run, state, run.cfg.train.num_steps, limit=None)
    for name, bits in run.inputs.baselines().items():
        run.console.print(f"  for the same files {name} needs {bits:.3f} bits per byte")
    run.record_saved(run.checkpoints.wait())
    length = run.cfg.train.sample_tokens
    if length:
        # The prompt starts with eos, as a training document does.
        tokenizer = run.inputs.tokenizer
        prompt = [tokenizer.eos_id, *tokenizer.encode(run.cfg.train.sample_prompt)]
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
        run.console.print(tokenizer.decode(tokens), markup=False, highlight=False)
        if len(tokens) < len(prompt) + length:
            run.console.print("warning: the sample ends early: logits are not finite")
