"""The train command where the loss of some batches is not finite, or jumps.

  python -m tests.train.poisoned --bad 12,13 [--jump] [--seen FILE] [--die MOMENT] -- --config ...

Batches are named by their position in the data, from 0. With `--seen` process 0 adds a line a step
to a file: the step, and the digest of the batch it was given. With `--die` it is killed while it
goes back, once: `before` the list of what is left out is written, or `after` that.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

MARK = 250  # a token that bad batches have, and no others


def poison(bad, replace, *, jump=False, seen=None):
    """Has steps on some batches measure what is not finite.

    Args:
      bad: positions of batches in the data.
      replace: (object, name, value), such as `setattr`.
      jump: whether their loss is a hundred instead.
      seen: is told of each step and the tokens of its batch.
    """
    from moejax.data.batches import Batches
    from moejax.step import per_device
    from moejax.train import steps

    rows, gradients = Batches.rows, per_device.loss_gradients

    def marked(self, position, start, stop):
        found = rows(self, position, start, stop)
        found.token_BT[:, 0] = MARK if position in bad else 0
        return found

    def measured(model, state, batch):
        found, parts, reduction = gradients(model, state, batch)
        wrong = 100.0 if jump else jnp.nan
        nll = jnp.where(jnp.any(batch.token_BT == MARK), wrong, parts.nll)
        return found, parts._replace(nll=nll), reduction

    class Telling(steps.CodecSchedule):
        def step_for(self, step):
            run_step, text = super().step_for(step)

            def told(state, batch):
                if seen is not None:
                    seen(step + 1, np.asarray(batch.token_BT.addressable_shards[0].data))
                return run_step(state, batch)

            return told, text

    replace(Batches, "rows", marked)
    replace(per_device, "loss_gradients", measured)
    replace(steps, "CodecSchedule", Telling)


def digest(tokens):
    """What stands for a batch."""
    return hashlib.sha256(tokens.tobytes()).hexdigest()[:16]


def dying(moment, replace, die):
    """Has a run die while it goes back, once."""
    from moejax.train import rollback

    write = rollback.write_skipped

    def wrapped(run_dir, skipped):
        if moment == "after":
            write(run_dir, skipped)
        die()
        write(run_dir, skipped)

    replace(rollback, "write_skipped", wrapped)


def main() -> int:
    """Runs the command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bad", required=True)
    parser.add_argument("--jump", action="store_true")
    parser.add_argument("--seen", type=Path)
    parser.add_argument("--die", choices=("before", "after"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    first = os.environ.get("MOEJAX_PROCESS", "0") == "0"

    def seen(step, tokens):
        with args.seen.open("a") as file:
            file.write(json.dumps([step, digest(tokens)]) + "\n")

    told = seen if args.seen and first else None
    poison(set(map(int, args.bad.split(","))), setattr, jump=args.jump, seen=told)
    if args.die and first:
        dying(args.die, setattr, lambda: os.kill(os.getpid(), signal.SIGKILL))
    from moejax.train.__main__ import main as train

    return train(args.command[1:])


if __name__ == "__main__":
    sys.exit(main())
