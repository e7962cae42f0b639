"""Sequences that several devices share, against the one-device oracle."""

import dataclasses

import pytest

from tests.cases import CERTAIN, small_config
from tests.step.against_oracle import check_against_oracle
from tests.step.test_step_together import join_kinds


def shared(mesh, context, stripe, *, exchange="gather", nodes=1, kinds=(), **more):
    """The small model whose sequences are shared; `more`: rows, length, and of `small_config`."""
    changes, rows, length = join_kinds(kinds), more.pop("rows", 8), more.pop("length", 16)
    changes["moe"] = CERTAIN | {"implementation": "reference"} | changes["moe"]
    changes["train"] = {"batch_sequences": rows} | changes["train"]
    for part in ("moe", "train", "model", "router"):
        changes[part] = changes[part] | more.pop(part, {})
    cfg = small_config(mesh, **changes, **more)
    own = {"context": context, "context_stripe": stripe, "context_exchange": exchange}
    return dataclasses.replace(
        cfg,
        mesh=dataclasses.replace(cfg.mesh, nodes=nodes, **own),
        data=dataclasses.replace(cfg.data, sequence_length=length),
    )


CASES = [
    shared((1, 2, 4, 1), 8, 1, nodes=2, rows=1, kinds=(8,), exchange="ring"),
    shared((1, 2, 2, 2), 4, 2, nodes=4, rows=2, kinds=(5, 13), exchange="ring"),
    shared((1, 1, 2, 1), 2, 4),
    shared((1, 1, 4, 1), 4, 2, rows=1),
    shared((1, 2, 4, 1), 8, 1, nodes=2, rows=1),
    shared((1, 2, 2, 2), 4, 2, nodes=2, rows=2, kinds=(9,)),
    shared((1, 2, 2, 2), 4, 2, nodes=2, rows=2, kinds=(8, 6)),
    shared((1, 2, 2, 2), 2, 4, nodes=4, rows=2, kinds=(10, 13)),
    shared((1, 1, 4, 2), 4, 4, nodes=4, rows=2, length=64, kinds=(8, 12), activations="replicated"),
    shared((1, 1, 4, 2), 4, 4, nodes=2, rows=2, length=64, kinds=(10, 7), activations="replicated"),
]


@pytest.mark.parametrize("cfg", CASES)
def test_shared_sequences_give_the_oracles_loss_and_gradients(cfg):
    check_against_oracle(cfg, path="certain")
