"""Multi-token prediction: what it predicts, what it does not see, and what it leaves alone.

That loss and gradients are the oracle's, on one device and on meshes: tests/step/.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.comm.jaxprs import inner_jaxprs, opened
from moejax.config.pattern import ahead_kind
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.model.ahead import next_tokens, targets_ahead
from moejax.step.train_step import build_step
from tests.cases import CERTAIN, assert_close, place, random_batch, small_config, spread, step_for

pytestmark = pytest.mark.usefixtures("unchecked_annotations")  # tests/step/ checks them


def config(mesh=(1, 1, 1, 1), *, ahead=1, **changes):
    """Without experts, which take long to compile; `with_experts` has them."""
    model = {"predict_ahead": ahead, "moe_every": None} | changes.pop("model", {})
    cfg = small_config(mesh, model=model, **changes)
    return dataclasses.replace(cfg, moe=type(cfg.moe)())


def with_experts(mesh=(1, 1, 1, 1), *, ahead=1, **changes):
    model = {"predict_ahead": ahead} | changes.pop("model", {})
    return small_config(mesh, model=model, moe=CERTAIN, **changes)


def test_a_document_is_predicted_to_its_end_and_no_further():
    """An eos (9) opens the next document; it is the last token that a document predicts."""
    stream = np.array([[1, 2, 3, 9, 4, 9, 5, 6, 7]], np.int32)
    token_BT, target_BT = jnp.asarray(stream[:, :-1]), jnp.asarray(stream[:, 1:])
    segment_BT = jnp.array([[0, 0, 0, 1, 1, 2, 2, 2]])
    assert next_tokens(token_BT, segment_BT).tolist() == [[2, 3, 3, 4, 4, 5, 6, 6]]
    assert targets_ahead(target_BT, segment_BT).tolist() == [[3, 9, -1, 9, -1, 6, 7, -1]]
    # Where documents are not kept apart, all but the last position have two tokens ahead.
    one = jnp.zeros_like(segment_BT)
    assert targets_ahead(target_BT, one).tolist() == [[3, 9, 4, 9, 5, 6, 7, -1]]
    assert next_tokens(token_BT, one).tolist() == [[2, 3, 9, 4, 9, 5, 6, 6]]


def test_the_embedding_is_joined_before_the_hidden_state():
    """Against the formula in NumPy: [norm(embedding), norm(hidden)] @ w, in this order."""
    cfg = config()
    train_step = step_for(cfg)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), train_step.abstract.params
    )
    module = train_step.model.merge(params, train_step.abstract.router_bias).predict_ahead
    embedding_BtD, h_BtD = rng.normal(size=(2, 1, 3, 32)).astype(np.float32)
    own = jax.tree.map(np.asarray, params["predict_ahead"])

    def norm(x_BtD, scale_D):
        squares = np.mean(x_BtD**2, axis=-1, keepdims=True)
        return x_BtD / np.sqrt(squares + cfg.model.norm_epsilon) * scale_D

    wanted = norm(embedding_BtD, own["embedding_norm"]["scale"]) @ own["w_join"][0]
    wanted += norm(h_BtD, own["hidden_norm"]["scale"]) @ own["w_join"][1]
    np.testing.assert_allclose(module.join(embedding_BtD, h_BtD), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_evaluation_and_sampling_and_first_weights_are_those_without_it():
    with_it, without = (step_for(with_experts((1, 1, 2, 2), ahead=ahead)) for ahead in (1, 0))
    state, plain = with_it.init(), without.init()
    for tree, same in ((state.params, plain.params), (state.router_bias, plain.router_bias)):
        kept = {name: value for name, value in tree.items() if name != "predict_ahead"}
        jax.tree.map(np.testing.assert_array_equal, kept, same)
    batch = place(without, random_batch(without.cfg))
    assert float(with_it.evaluate(state, batch)) == float(without.evaluate(plain, batch))
    prompt = np.zeros(without.abstract_prompt()[0].shape, np.int32), 3
    logits = [np.asarray(s.next_logits(x, prompt)) for s, x in ((with_it, state), (without, plain))]
    np.testing.assert_array_equal(*logits)


@pytest.mark.exhaustive
def test_accumulation_divides_by_the_targets_of_the_whole_batch():
    whole, cut = step_for(config()), step_for(config((2, 1, 1, 1), train={"micro_batches": 2}))
    state, batch = whole.init(), random_batch(whole.cfg)
    wanted, told = whole.gradients(state, place(whole, batch))
    got, parts = cut.gradients(spread(state, cut), place(cut, batch))
    assert float(parts.ahead) == pytest.approx(float(told.ahead), rel=1e-5)
    assert_close(got, jax.tree.map(np.asarray, wanted), terms=8 * 16)


@pytest.mark.slow
def test_a_step_tells_the_loss_and_moves_the_bias_of_its_experts_last():
    model = {"num_layers": 3, "first_dense_layers": 1}
    cfg = with_experts(model=model, router={"bias_update_rate": 0.5})
    train_step = step_for(cfg)
    state, metrics = train_step.step(train_step.init(), place(train_step, random_batch(cfg)))
    assert metrics.load_LE.shape == (3, 8)
    assert np.isfinite(metrics.ahead)
    load_LE = np.asarray(metrics.load_LE, np.float64)
    wanted = 0.5 * np.sign(load_LE.mean(axis=1, keepdims=True) - load_LE)
    biases = jax.tree.leaves(state.router_bias["groups"])
    (ahead,) = jax.tree.leaves(state.router_bias["predict_ahead"])
    np.testing.assert_array_equal(np.concatenate([*biases, ahead]), wanted)


@pytest.mark.parametrize(
    ("model", "experts"),
    [
        ({}, True),
        ({"moe_every": None}, False),
        ({"num_layers": 2, "moe_every": 2}, True),
        ({"num_layers": 3, "moe_every": 2}, False),
    ],
)
def test_its_block_is_like_the_last(model, experts):
    cfg = with_experts(model=model)
    assert ahead_kind(cfg.model).mlp == ("moe" if experts else "dense")
    train_step = build_step(cfg, build_abstract_mesh(build_layout(cfg.mesh)), "cpu")
    (block,) = train_step.abstract.params["predict_ahead"]["group"]["blocks"].values()
    assert ("moe" in block) == experts


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_gathered_once_and_their_gradients_reduced_once(tied):
    def moved(ahead):
        cfg = config((1, 2, 2, 2), ahead=ahead, model={"tie_embeddings": tied, "vocab_size": 96})
        train_step = build_step(cfg, build_abstract_mesh(build_layout(cfg.mesh)), "cpu")
        traced = train_step.step.trace(train_step.abstract, train_step.abstract_batch())
        v, D = cfg.model.vocab_size // 2, cfg.model.width
        tables = {(v, D), (D, v), (v, D // 4), (D // 4, v)}
        return [name for name, shape in collectives(traced.jaxpr) if shape in tables]

    assert moved(1) == moved(0) != []


def collectives(jaxpr):
    """Names and shapes of what gathers or reduces to shards, however deep inside."""
    found = []
    for eqn in opened(jaxpr).eqns:
        if eqn.primitive.name in ("all_gather", "reduce_scatter"):
            found.append((eqn.primitive.name, eqn.outvars[0].aval.shape))
        for inner in inner_jaxprs(eqn):
            found += collectives(inner)
    return found
