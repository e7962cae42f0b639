"""Steps, evaluation and sampling of sequences that devices share, beside those of one device."""

import dataclasses
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from moejax.checkpoint.find import newest
from moejax.checkpoint.writer import Checkpoints, restore_state
from moejax.plan.price.candidate import trace_config
from tests.cases import (
    CERTAIN,
    one_device_state,
    place,
    random_batch,
    small_config,
    spread,
    step_for,
)
from tests.step.against_oracle import MESH_OF_ONE, check_against_oracle
from tests.step.pipeline.test_stages import (
    DELTA,
    MAMBA,
    SPARSE,
    assert_same_gradients,
    config,
)
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
    shared((1, 2, 2, 1), 4, 1, nodes=2, rows=1, kinds=(8,), exchange="ring"),
    shared((1, 2, 2, 2), 4, 2, nodes=4, rows=2, kinds=(5, 13), exchange="ring"),
    shared((1, 1, 2, 1), 2, 4),
    shared((1, 1, 4, 1), 4, 2, rows=1),
    shared((1, 2, 4, 1), 8, 1, nodes=2, rows=1),
    shared((1, 2, 2, 2), 4, 2, nodes=2, rows=2, kinds=(9,)),
    shared((1, 2, 2, 2), 4, 2, nodes=2, rows=2, kinds=(8, 6)),
    shared((1, 2, 2, 2), 2, 4, nodes=4, rows=2, kinds=(10, 13)),
    shared((1, 1, 4, 2), 4, 4, nodes=4, rows=2, length=64, kinds=(8, 12), activations="replicated"),
    shared((1, 1, 4, 2), 4, 4, nodes=2, rows=2, length=64, kinds=(10, 7), activations="replicated"),
    shared((1, 2, 4, 1), 8, 1, nodes=2, rows=1, kinds=(9, 13)),
    shared((1, 8, 1, 1), 8, 1, nodes=4, rows=2, kinds=(10, 6), train={"micro_batches": 2}),
    shared(
        *((1, 1, 8, 1), 8, 1),
        **{"nodes": 2, "rows": 2, "kinds": (5, 6), "exchange": "ring"},
        train={"micro_batches": 2},
    ),
    shared((1, 2, 4, 1), 8, 4, nodes=2, rows=1, length=64, kinds=(8,)),
    # States that pass from stripe to stripe, and keys that an indexer chooses among all.
    shared((1, 2, 1, 2), 2, 2, rows=2, kinds=(15,)),
    shared((1, 2, 2, 2), 4, 2, nodes=2, rows=2, kinds=(16,)),
    shared((1, 2, 2, 2), 4, 2, nodes=2, rows=2, kinds=(19,), activations="replicated"),
    shared((1, 1, 4, 2), 4, 2, nodes=2, rows=2, kinds=(18,)),
    shared((1, 2, 2, 2), 2, 2, rows=4, kinds=(18, 13), activations="replicated"),
    # Values narrower than keys, and sinks, beside a window (MiMo-V2).
    shared((1, 1, 4, 2), 4, 2, rows=2, kinds=(20,)),
    shared((1, 2, 2, 2), 4, 2, rows=2, kinds=(20,), exchange="ring"),
]


def how_often(number):
    """The marks of a case: those that run hold each value, together."""
    if number == 9:
        return [pytest.mark.slow]
    return [] if number == 0 else [pytest.mark.exhaustive]


@pytest.mark.parametrize(
    "cfg",
    [pytest.param(cfg, marks=how_often(n), id=str(n)) for n, cfg in enumerate(CASES)],
)
def test_shared_sequences_give_the_oracles_loss_and_gradients(cfg):
    check_against_oracle(cfg, path="certain", terms=1e-5 / np.finfo(np.float32).eps)


STAGED = {"context": 2, "context_stripe": 4}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "stages", "axis", "changes"),
    [
        ((1, 2, 1, 2), 2, STAGED, {"router": {"balance_over": "sequence"}}),
        pytest.param(
            *((2, 1, 2, 1), 2, STAGED | {"context_exchange": "ring"}),
            {"model": {"sliding_window": 7}},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *((1, 2, 1, 1), 4, STAGED | {"stage_keeps": "input"}),
            {"router": {"jitter": 0.3}},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_stages_share_sequences_too(mesh, stages, axis, changes):
    cfg = config(mesh, stages, 2 * stages, axis=axis, rows=2, **changes)
    assert_same_gradients(cfg, within=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("keeps", "changes"),
    [
        ("residuals", {"model": DELTA, "layers": 4}),
        ("input", {"model": MAMBA, "layers": 8}),
        ("residuals", {"model": SPARSE}),
    ],
    ids=["gated delta net", "Mamba-2", "sparse"],
)
def test_stages_pass_states_and_choose_keys_of_shared_sequences(keeps, changes):
    cfg = config((1, 2, 1, 2), 2, 4, axis=STAGED | {"stage_keeps": keeps}, rows=2, **changes)
    assert_same_gradients(cfg)


SIXTEEN = """
import tests.conftest
from tests.step.test_context import check_against_oracle, shared
from tests.step.pipeline.test_stages import assert_same_gradients, config
check_against_oracle(shared((1, 2, 4, 2), 8, 1, nodes=2, rows=1, kinds=(9, 13)), path="certain")
axis = {"context": 8, "context_stripe": 1}
assert_same_gradients(config((1, 2, 4, 1), 2, 4, axis=axis, rows=2))
"""


@pytest.mark.exhaustive
def test_eight_share_beside_tensor_ranks_and_beside_stages():
    """In a process of its own, as the tests' has eight devices."""
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=16", "PJRT_NPROC": "64"}
    subprocess.run([sys.executable, "-c", SIXTEEN], env=os.environ | devices, check=True)


def alone(cfg):
    """The config on one device."""
    mesh = dataclasses.replace(MESH_OF_ONE, context_stripe=cfg.mesh.context_stripe)
    return dataclasses.replace(cfg, mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "targets"),
    [
        ((1, 2, 2, 1), []),
        pytest.param((1, 2, 2, 1), [2, 3, 12, 13], marks=pytest.mark.exhaustive),  # of one device
        pytest.param((1, 2, 4, 1), [5], marks=pytest.mark.exhaustive),
        pytest.param((1, 2, 2, 1), range(16), marks=pytest.mark.exhaustive),
        pytest.param((1, 2, 1, 1), [5], marks=pytest.mark.exhaustive),
        pytest.param((1, 2, 4, 1), [0, 1, 2, 9], marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_loss_gradients_and_metrics_do_not_depend_on_which_device_has_the_targets(mesh, targets):
    c = mesh[1] * mesh[2]
    cfg = shared(mesh, c, 2 if c < 8 else 1, rows=2, router={"jitter": 0.3}, kinds=(13,))
    batch = random_batch(cfg)
    target_BT = np.full_like(batch.target_BT, -1)
    target_BT[:, targets] = batch.target_BT[:, targets]
    batch, found, pulled = batch._replace(target_BT=target_BT), [], []
    for one in (cfg, alone(cfg)):
        step = step_for(one)
        state, rows = spread(one_device_state(alone(cfg)), step), place(step, batch)
        pulled.append(step.gradients(state, rows)[0])
        found.append(step.step(state, rows)[1])
    assert bool(found[0].has_targets[0]) == (len(targets) > 0)
    for name, have in found[0]._asdict().items():
        want = getattr(found[1], name)
        assert (have is None) == (want is None), name
        if have is not None:
            np.testing.assert_allclose(have, want, rtol=2e-5, atol=1e-6, err_msg=name)
    for have, want in zip(*map(jax.tree.leaves, pulled), strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=2e-5 * max(1, np.abs(want).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "kinds"),
    [
        pytest.param(1, (), marks=pytest.mark.exhaustive),
        (2, ()),
        (1, (15,)),
        pytest.param(1, (18,), marks=pytest.mark.exhaustive),
    ],
)
def test_nats_by_target_and_the_next_logits_are_those_of_one_device(stages, kinds):
    form = {"rows": 4, "model": {"num_layers": 2}, "train": {"micro_batches": 2}}
    cfg = shared((1, 1, 4, 1), 4, 2, kinds=kinds, **form)
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, stage=stages))
    batch, found = random_batch(cfg), []
    for one in (cfg, alone(cfg)):
        step = step_for(one)
        state = spread(one_device_state(alone(cfg)), step)
        nll_BT = step.target_nll(state, place(step, batch))
        rows = step.abstract_prompt()[0].shape[0]
        prompt = jax.device_put(batch.token_BT[:1].repeat(rows, axis=0), step.batch_sharding)
        logits = [step.next_logits(state, (prompt, length))[0] for length in (1, 7, 16)]
        found.append((nll_BT, step.evaluate(state, place(step, batch)), *logits))
    for have, want in zip(*found, strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6)


@pytest.mark.exhaustive
def test_a_state_is_read_bit_by_bit_where_other_numbers_of_devices_share(tmp_path):
    cfg = shared((1, 2, 2, 1), 4, 2, rows=2)
    step = step_for(cfg)
    state, _ = step.step(step.init(), place(step, random_batch(cfg)))
    for saved, context in ((1, 2), (2, 1), (3, 4)):
        writer = Checkpoints(tmp_path, keep=3)
        writer.save(saved, state, {})
        writer.close()
        mesh = dataclasses.replace(cfg.mesh, context=context)
        other = step_for(dataclasses.replace(cfg, mesh=mesh))
        read = restore_state(newest(tmp_path, "full")[0], other.abstract)
        for have, want in zip(jax.tree.leaves(read), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(have, want)
        state = read


def transient(one):
    """Predicted bytes of a step beside its state, as a dry run tells."""
    read = trace_config(one, "cpu")
    peak = read.peak(read.schedule())
    return peak.bytes - peak.arguments


@pytest.mark.exhaustive
def test_devices_along_a_ring_need_as_much_memory_however_many_they_are():
    """Each with 64 positions; where keys are gathered it needs more with all others' keys."""
    grown = {}
    for exchange in ("ring", "gather"):
        four, eight = (
            transient(shared((1, 1, c, 1), c, 8, rows=1, length=64 * c, exchange=exchange))
            for c in (4, 8)
        )
        grown[exchange] = eight / four
    assert grown["ring"] < 1.02 < grown["gather"]


@pytest.mark.slow
def test_devices_that_share_a_sequence_keep_their_part_of_its_activations():
    """Four keep a quarter, and beside it keys and values of all: predicted, as a dry run tells."""
    cfg = shared((1, 1, 4, 1), 4, 16, rows=1, length=256)
    assert 1 / 4 < transient(cfg) / transient(alone(cfg)) < 1 / 2


def test_state_and_batches_lie_as_without_shared_sequences():
    """So that a run goes on with another number of devices that share, from the same bits."""
    cfg = shared((1, 2, 4, 1), 4, 2, rows=2)
    plain = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, context=1))
    assert step_for(cfg).abstract == step_for(plain).abstract
    rows = step_for(cfg).batch_sharding.shard_shape((2, 16))
    assert rows == (1, 16), "rows over the two groups that share"
