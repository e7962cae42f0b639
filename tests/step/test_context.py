"""Sequences that several devices share, against the one-device oracle."""

import dataclasses

import pytest

from tests.cases import CERTAIN, small_config
from tests.step.against_oracle import check_against_oracle
from tests.step.test_step_together import join_kinds, routed


def shared(mesh, context, stripe, *, nodes=1, kinds=(), length=16, rows=8, **more):
    """The small model whose sequences are shared; arguments of `small_config` besides."""
    changes = join_kinds(kinds)
    changes["moe"] = CERTAIN | {"implementation": "reference"} | changes["moe"] | more.pop("moe", {})
    changes["train"] = {"batch_sequences": rows} | changes["train"] | more.pop("train", {})
    cfg = small_config(mesh, **changes, **more)
    mesh = dataclasses.replace(cfg.mesh, context=context, context_stripe=stripe, nodes=nodes)
    data = dataclasses.replace(cfg.data, sequence_length=length)
    return dataclasses.replace(cfg, mesh=mesh, data=data)


@pytest.mark.parametrize(
    "cfg",
    [
        shared((1, 1, 2, 1), 2, 4),
        shared((1, 1, 4, 1), 4, 2, rows=1),
        shared((1, 2, 4, 1), 8, 1, nodes=2, rows=1),
        shared((1, 2, 2, 2), 4, 2, nodes=2, rows=2, kinds=(9,)),
        shared((1, 2, 2, 2), 4, 2, nodes=2, rows=2, kinds=(8, 6)),
        shared((1, 2, 2, 2), 2, 4, nodes=4, rows=2, kinds=(10, 13)),
        shared((1, 1, 4, 2), 4, 4, nodes=4, rows=2, length=64, kinds=(8, 12), activations="replicated"),
        shared((1, 1, 4, 2), 4, 4, nodes=2, rows=2, length=64, kinds=(10, 7), activations="replicated"),
    ],
)
def test_shared_sequences_give_the_oracles_loss_and_gradients(cfg):
    check_against_oracle(cfg, path="certain")
