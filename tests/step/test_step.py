"""Properties of the step that need no oracle; test_step_together has one.

Of step.per_device, step.train_step, and train.checkpoint for what a restored state is.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.checkpoint.find import newest
from moejax.checkpoint.writer import Checkpoints, restore_state
from moejax.step import per_device
from tests.cases import (
    CERTAIN,
    assert_close,
    one_device_state,
    place,
    random_batch,
    skew,
    small_config,
    spread,
    step_for,
)
from tests.step.against_oracle import TERMS

pytestmark = pytest.mark.usefixtures("unchecked_annotations")


@pytest.mark.slow
def test_accumulation_gives_the_gradient_of_the_whole_batch():
    # Without router losses: those are defined per micro-batch.
    router = {"balance_loss": 0.0, "z_loss": 0.0}
    whole = small_config((1, 1, 1, 1), moe=CERTAIN, router=router)
    cut = small_config((2, 1, 2, 2), moe=CERTAIN, router=router, train={"micro_batches": 2})
    state, batch = one_device_state(whole), random_batch(whole)
    one, two = step_for(whole), step_for(cut)
    wanted, _ = one.gradients(state, place(one, batch))
    gradients, _ = two.gradients(spread(state, two), place(two, batch))
    assert_close(gradients, jax.tree.map(np.asarray, wanted), terms=TERMS)


@pytest.mark.slow
def test_no_position_sees_later_tokens_or_other_documents():
    cfg = small_config((1, 1, 2, 2), moe=CERTAIN)
    train_step = step_for(cfg)
    state, batch = train_step.init(), random_batch(cfg)
    segment_BT = np.repeat([[0] * 6 + [1] * 10], len(batch.segment_BT), axis=0)
    batch = batch._replace(target_BT=np.abs(batch.target_BT), segment_BT=segment_BT)

    def nats(changed=None):
        token_BT = batch.token_BT.copy()
        if changed is not None:
            token_BT[0, changed] = (token_BT[0, changed] + 1) % cfg.model.vocab_size
        return train_step.target_nll(state, place(train_step, batch._replace(token_BT=token_BT)))[0]

    before, late, early = nats(), nats(10), nats(2)
    np.testing.assert_array_equal(late[:10], before[:10])
    np.testing.assert_array_equal(early[6:], before[6:])
    assert late[10] != before[10], "position 10 did not see itself"
    assert late[13] != before[13], "position 13 did not see position 10"
    assert early[4] != before[4], "position 4 did not see position 2"


@pytest.mark.exhaustive
def test_the_routers_entropy_is_that_of_one_device_on_any_mesh_and_in_parts():
    """Devices report shares of it, which must add up whoever holds which tokens."""
    router, found = {"score": "sigmoid", "jitter": 0.1}, []
    for mesh, layout, parts in [
        ((1, 1, 1, 1), "sequence", 1),
        ((1, 2, 2, 2), "sequence", 2),
        ((2, 1, 2, 2), "replicated", 1),
    ]:
        train = {"micro_batches": parts}
        cfg = small_config(mesh, activations=layout, router=router, train=train)
        train_step = step_for(cfg)
        _, metrics = train_step.step(train_step.init(), place(train_step, random_batch(cfg)))
        found.append(float(metrics.router_entropy))
    assert 0.5 < found[0] <= 1
    assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-5)


def test_first_weights_do_not_depend_on_the_mesh():
    one = one_device_state(small_config())
    eight = step_for(small_config((1, 2, 2, 2))).init()
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), one.params, eight.params)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("mesh", [(1, 1, 8, 1), (1, 2, 2, 2)])
def test_nothing_that_shards_is_whole_on_a_device(mesh):
    train_step = step_for(small_config(mesh, moe=CERTAIN))
    state = train_step.init()
    for moments in jax.tree.leaves(state.optimizer):
        if moments.ndim < 3:
            continue  # counters, norm scales and the router
        assert moments.addressable_shards[0].data.size <= moments.size // 2
    largest = max(jax.tree.leaves(state.params), key=lambda p: p.size)
    assert largest.addressable_shards[0].data.size == largest.size // 8


@pytest.mark.exhaustive
def test_an_update_that_is_not_finite_is_counted_and_not_applied():
    cfg = small_config((1, 1, 2, 2), moe=CERTAIN)
    train_step = step_for(cfg)
    state, batch = train_step.init(), place(train_step, random_batch(cfg))
    bad = jax.tree.map(lambda p: p, state.params)
    bad["norm"]["scale"] = bad["norm"]["scale"].at[0].set(jnp.inf)
    state = spread(state._replace(params=bad), train_step)
    before = jax.tree.map(np.asarray, (state.params, state.optimizer))
    state, metrics = train_step.step(state, batch)
    assert int(metrics.skipped) == 1
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("place_of_one", [None, 0, -1])
def test_a_step_tells_whether_there_was_a_target_anywhere(place_of_one):
    """On one device of four at most."""
    cfg = small_config((1, 1, 2, 2), moe=CERTAIN)
    train_step, batch = step_for(cfg), random_batch(cfg)
    target_BT = np.full_like(batch.target_BT, -1)
    if place_of_one is not None:
        target_BT[place_of_one, -1] = 3
    _, metrics = train_step.step(
        train_step.init(), place(train_step, batch._replace(target_BT=target_BT))
    )
    assert np.asarray(metrics.has_targets).tolist() == [place_of_one is not None]
    assert (float(metrics.loss) > 0) == (place_of_one is not None)


@pytest.mark.slow
def test_a_step_compiled_for_shapes_is_not_compiled_again():
    """Processes compile first and meet then; a second compilation would part them again."""
    cfg = small_config((1, 1, 2, 2), moe=CERTAIN)
    train_step = step_for(cfg)
    state, batch = train_step.init(), place(train_step, random_batch(cfg))
    train_step.step.lower(train_step.abstract, train_step.abstract_batch()).compile()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name)
    )
    jax.block_until_ready(train_step.step(state, batch))
    jax.monitoring.clear_event_listeners()
    assert not [name for name in compiled if "backend_compile" in name]


@pytest.mark.slow
def test_a_runs_step_is_traced_once(tmp_path, monkeypatch):
    """For shapes, for the first state, for the step's own results, and for a restored state."""
    chex.clear_trace_counter()
    once = chex.assert_max_traces(per_device.train_step, n=1)
    monkeypatch.setattr("moejax.step.train_step.train_step", once)
    cfg = small_config((1, 1, 2, 2), moe=CERTAIN)
    train_step = step_for(cfg)
    batch = place(train_step, random_batch(cfg))
    train_step.step.lower(train_step.abstract, train_step.abstract_batch())
    state, _ = train_step.step(train_step.init(), batch)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, {})
    checkpoints.close()
    state, _ = train_step.step(state, batch)
    saved, _ = newest(tmp_path, "size")
    restored = restore_state(saved, train_step.abstract)
    again, _ = train_step.step(restored, batch)
    chex.assert_trees_all_equal(again, state)


@pytest.mark.slow
def test_capacity_drops_and_counts_what_does_not_fit():
    cfg = small_config((1, 1, 4, 2), moe={"capacity_factor": 1.0, "experts_per_token": 1})
    train_step = step_for(cfg)
    state = train_step.init()
    state = spread(state._replace(router_bias=skew(state.router_bias, {3: 10.0})), train_step)
    _, parts = train_step.gradients(state, place(train_step, random_batch(cfg)))
    # Every device may send a share of 1 / E of its tokens to each expert.
    assert int(parts.uneven_L3[0, 0]) == TERMS - TERMS // 8
