"""Sparse attention: when it is latent attention, what its indexer learns, and what it counts.

tests/step holds its loss and gradients against the oracle, tests/hf against transformers.
"""

from functools import cache

import jax
import numpy as np
import pytest

from moejax.config.fields import change
from moejax.config.schema import IndexerConfig
from moejax.layout.layout import build_layout
from moejax.model.mixers.interface import CacheSize
from moejax.model.mixers.latent import LatentAttention
from moejax.model.mixers.sparse import SparseAttention
from moejax.plan.trace.reader import collectives
from tests.cases import place, random_batch, small_config, spread, step_for
from tests.oracle_attention import divergence

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

LATENT = {"attention": "latent", "head_width": 10, "rope_width": 6, "value_width": 4}
LATENT |= {"q_latent": 8, "kv_latent": 16, "moe_every": None}
INDEX = "groups.0.blocks.0.attention.indexer."
COEFFICIENT = 3.0


def sparse(keys, **changes):
    return LATENT | {"attention": "sparse", "indexer": IndexerConfig(6, 8, keys)} | changes


def flat(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in leaves
    }


def first(cfg):
    return jax.tree.map(np.asarray, step_for(cfg).init())


def gradients(cfg, state):
    train_step = step_for(cfg)
    batch = place(train_step, random_batch(cfg))
    found, parts = train_step.gradients(spread(state, train_step), batch)
    return flat(found), float(parts.nll)


@pytest.mark.slow
def test_up_to_as_many_keys_as_are_chosen_it_is_latent_attention():
    """The same numbers, to the bit: it is the same program."""
    cfg = small_config(model=sparse(16))
    state = first(cfg)
    found, loss = gradients(cfg, state)
    plain = small_config(model=LATENT)
    params = jax.tree.map(lambda x: x, state.params)
    params["groups"][0]["blocks"][0]["attention"].pop("indexer")
    wanted, wanted_loss = gradients(plain, first(plain)._replace(params=params))
    assert loss == wanted_loss
    for name, gradient in wanted.items():
        np.testing.assert_array_equal(found[name], gradient, err_msg=name)
    assert {name for name in found if name not in wanted} == {
        INDEX + name for name in ("k_bias", "k_scale", "w_k", "w_q", "w_weights")
    }


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_without_its_loss_an_indexer_stays_as_it_is(name):
    """No gradient, and no decay of weights either."""
    cfg = small_config(model=sparse(5), optimizer={"name": name, "weight_decay": 0.5})
    train_step, state = step_for(cfg), first(cfg)
    batch = place(train_step, random_batch(cfg))
    after = flat(train_step.step(spread(state, train_step), batch)[0].params)
    for path, before in flat(state.params).items():
        assert np.array_equal(after[path], before) == path.startswith(INDEX), path


@cache
def wanted_of_loss():
    """Gradients of the indexer's loss in float64, and all of a step without it."""
    cfg = small_config(model=sparse(5))
    state, batch = first(cfg), random_batch(cfg)
    params = state.params
    block = jax.tree.map(lambda w: np.float64(w[0]), params["groups"][0]["blocks"][0])
    x = np.float64(params["embedding"]["table"])[batch.token_BT]
    x /= np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + cfg.model.norm_epsilon)
    T = x.shape[1]
    same = batch.segment_BT[:, None, :, None] == batch.segment_BT[:, None, None]
    seen = np.tril(np.ones((T, T), bool)) & same

    def loss(indexer):
        own = block["attention"] | {"indexer": indexer}
        return COEFFICIENT * divergence(own, x, seen, cfg).mean()

    with jax.enable_x64(True):
        of_loss = jax.tree.map(np.asarray, jax.grad(loss)(block["attention"]["indexer"]))
    return of_loss, gradients(cfg, state)[0], state


@pytest.mark.parametrize(
    ("mesh", "activations", "micro_batches", "context"),
    [
        pytest.param((1, 1, 1, 1), "sequence", 1, 1, marks=pytest.mark.slow),
        pytest.param((1, 2, 1, 2), "sequence", 2, 1, marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 4), "replicated", 1, 1, marks=pytest.mark.slow),
        pytest.param((1, 2, 2, 2), "sequence", 1, 4, marks=pytest.mark.slow),
        pytest.param((1, 1, 2, 2), "replicated", 2, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_the_loss_trains_the_indexer_alone(mesh, activations, micro_batches, context):
    of_loss, without, state = wanted_of_loss()
    train = {"indexer_loss": COEFFICIENT, "micro_batches": micro_batches}
    cfg = small_config(mesh, activations=activations, model=sparse(5), train=train)
    shared = {"mesh.context": context, "mesh.context_stripe": 2}
    found, _ = gradients(change(cfg, shared if context > 1 else {}), state)
    for name, gradient in found.items():
        want = of_loss[name.removeprefix(INDEX)] if name.startswith(INDEX) else without[name]
        bound = 2e-5 * np.abs(want).max()
        np.testing.assert_allclose(gradient.reshape(want.shape), want, atol=bound, err_msg=name)
        assert np.abs(want).max() > 0


@pytest.mark.slow
def test_the_loss_is_over_all_keys_where_all_are_chosen():
    """A sequence no longer than the keys has no choice, and its indexer is trained nevertheless."""
    cfg = small_config(model=sparse(16), train={"indexer_loss": COEFFICIENT})
    found, _ = gradients(cfg, first(cfg))
    assert all(np.abs(found[name]).max() > 0 for name in found if name.startswith(INDEX))


def test_a_cache_has_the_indexers_keys_where_there_is_room_to_choose():
    cfg = small_config(model=sparse(20)).model
    layout = build_layout(small_config().mesh)
    shapes = {
        room: [array.shape for array in SparseAttention.cache(cfg, CacheSize(2, room), layout)]
        for room in (20, 21)
    }
    assert shapes == {20: [(2, 1, 20, 22)], 21: [(2, 1, 21, 22), (2, 1, 21, 8)]}


def test_flops_are_those_of_chosen_pairs_and_of_the_indexer_forward():
    cfg = small_config(model=sparse(5)).model
    pairs = sum(min(t + 1, 5) for t in range(16))
    attention = 2 * 8 * (16 + 6 + 16) * pairs  # heads; score and mean in the latent
    indexer = 2 * 6 * 8 * (16 * 17 // 2)
    assert SparseAttention.flops(cfg, 16, None) == attention + indexer / 3
    assert SparseAttention.flops(cfg, 5, None) == LatentAttention.flops(cfg, 5, None)


def traffic(cfg):
    train_step = step_for(cfg)
    traced = train_step.gradients.trace(train_step.abstract, train_step.abstract_batch())
    found = collectives(traced.jaxpr.jaxpr)
    positions = cfg.train.batch_sequences * cfg.data.sequence_length
    return sorted(
        one.bytes / (4 * positions)
        for one in found
        if one.traffic == "activations" and one.kind == "all_gather" and one.calls
    )


def test_keys_of_the_indexer_and_places_cross_the_tensor_axis():
    """With the latents go 8 channels of the indexer's key; then 5 places, of four bytes each."""
    latent = traffic(small_config((1, 1, 1, 4), model=LATENT))
    found = traffic(small_config((1, 1, 1, 4), model=sparse(5)))
    assert sorted([*(n for n in latent if n != 8 + 22), 8 + 22 + 8, 5]) == found


@pytest.mark.slow
def test_a_document_chooses_no_key_of_another():
    """Tokens of the first document change nothing in the second."""
    cfg = small_config(model=sparse(3))
    train_step, batch = step_for(cfg), random_batch(cfg)
    segment = np.repeat([[0] * 9 + [1] * 7], len(batch.token_BT), axis=0).astype(np.int32)
    target = np.where(segment == 1, batch.target_BT, -1).astype(np.int32)
    other = np.where(segment == 1, batch.token_BT, (batch.token_BT + 1) % 64).astype(np.int32)
    state = spread(first(cfg), train_step)
    losses = []
    for token in (batch.token_BT, other):
        rows = batch._replace(token_BT=token, segment_BT=segment, target_BT=target)
        losses.append(float(train_step.gradients(state, place(train_step, rows))[1].nll))
    assert losses[0] == losses[1]
