"""A model in pipeline stages: loss, gradients, steps and evaluation as on one device."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from moejax.checkpoint.find import newest
from moejax.checkpoint.restore import restore_state
from moejax.checkpoint.writer import Checkpoints
from moejax.comm.links import build_link
from moejax.comm.weights.adapters import Adapter
from moejax.comm.weights.stage_weights import gather_stage_weights
from moejax.config.compression import build_compression
from moejax.config.schema import CompressionConfig, IndexerConfig, LinearConfig, LoraConfig
from moejax.errors import InputError
from moejax.layout.layout import build_layout
from moejax.plan.price.candidate import trace_config
from moejax.plan.trace.reader import collectives
from moejax.step.model import check_adapters, layouts_of
from moejax.step.pipeline.stage import Layers
from tests.annotations import without_annotations
from tests.cases import CERTAIN, GEMMA, MIMO, few, random_batch, small_config, step_for

ANY = pytest.mark.exhaustive
NO_BALANCE = {"balance_loss": 0.0}
INTERLEAVED = {"stage_chunks": 2}
AHEAD = {"predict_ahead": 1}
LATENT = {"attention": "latent", "kv_latent": 16, "q_latent": 8, "rope_width": 4}
SPARSE = LATENT | {"attention": "sparse", "indexer": IndexerConfig(heads=6, width=8, keys=5)}
SPARSE |= {"head_width": 8}
UNTIED = {"tie_embeddings": False}
DELTA = LinearConfig("gated_delta", 4, 8, key_width=6, value_width=4)
# What a state answers at first is small; a larger epsilon keeps its norm from scaling rounding up.
DELTA = {"linear": DELTA, "full_attention_every": 2, "norm_epsilon": 1e-2}
MAMBA = DELTA | {"linear": LinearConfig("mamba2", 4, 8, key_width=6, value_width=8)}
MAMBA |= {"layer_attention": ("linear", "none") * 4, "layer_mlps": ("none", "experts") * 4}
MAMBA |= {"activation": "relu2", "full_attention_every": None}
KIMI = DELTA | {"linear": LinearConfig("kimi_delta", 4, 4, key_width=6, value_width=8)}


def config(mesh, stages, micro_batches, *, layers=None, rows=1, axis=None, lora=None, **changes):
    """`mesh` is of one stage; each of its devices has `rows` sequences of a micro-batch.

    Args:
      layers: by default two of each stage, after those that lead.
      axis: more settings of the mesh.
    """
    own = changes.pop("model", {})
    leading = own.get("layers_before_stages", 0) + own.get("first_dense_layers", 0)
    model = {"num_layers": layers or 2 * stages + leading, **own}
    context = (axis or {}).get("context", 1)
    train = {
        "batch_sequences": rows * math.prod(mesh[:3]) // context * micro_batches,
        "micro_batches": micro_batches,
        **changes.pop("train", {}),
    }
    cfg = small_config(mesh, model=model, train=train, **{"moe": CERTAIN, **changes})
    cfg = dataclasses.replace(cfg, lora=LoraConfig(**(lora or {})))
    return with_mesh(cfg, stage=stages, **(axis or {}))


def with_mesh(cfg, **changes):
    return dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **changes))


def on_one_device(cfg):
    return with_mesh(cfg, stage=1, replica=1, fsdp=1, expert=1, tensor=1, stage_slices=1, context=1)


def as_one_device_sees_it(cfg, batch):
    """The rows of a batch in an order whose micro-batches are those of the stages.

    Balance is counted over a micro-batch, so it matters which rows are in one.
    """
    mesh, count = cfg.mesh, cfg.train.micro_batches
    ranks = mesh.replica * mesh.fsdp * mesh.expert // mesh.context
    each = count // mesh.stage
    rows = np.arange(cfg.train.batch_sequences).reshape(mesh.stage, ranks, each, -1)
    order = rows.swapaxes(1, 2).reshape(-1)
    return jax.tree.map(lambda x: x[order], batch)


def biased(state, layers, experts, bias):
    """The state with another selection bias of some experts in some layers."""

    def change(bias_LE):
        changed_LE = np.array(bias_LE)
        changed_LE[layers, experts] = bias
        return jax.device_put(changed_LE, bias_LE.sharding)

    return state._replace(router_bias=jax.tree.map(change, state.router_bias))


def gradients(cfg, batch, change=lambda state: state):
    """Gradients of the first state, and the loss's parts."""
    step = step_for(cfg)
    return step.gradients(change(step.init()), batch)


def errors(got, wanted):
    """For each array of gradients, by name: norm of the difference over that of what is wanted."""
    found = {}
    for (path, g), w in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(wanted), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if "['indexer']" in name:  # what it chooses is not differentiated
            np.testing.assert_array_equal(g, 0)
            continue
        assert np.linalg.norm(w) > 0, f"{name} has no gradient"
        found[name] = np.linalg.norm(np.asarray(g) - np.asarray(w)) / np.linalg.norm(w)
    return found


def assert_same_gradients(cfg, change=lambda state: state, within=2e-5):
    """Returns the loss's parts."""
    batch = random_batch(cfg)
    got, parts = gradients(cfg, batch, change)
    with without_annotations():
        one = gradients(on_one_device(cfg), as_one_device_sees_it(cfg, batch), change)
    wanted, wanted_parts = one
    wrong = {name: error for name, error in errors(got, wanted).items() if not error < within}
    assert not wrong
    counted = ["balance"] if cfg.mesh.stage_slices == 1 else []  # over a slice, not a sequence
    for name in ("nll", "entropy", *counted):
        np.testing.assert_allclose(getattr(parts, name), getattr(wanted_parts, name), rtol=1e-5)
    if parts.ahead is not None:
        np.testing.assert_allclose(parts.ahead, wanted_parts.ahead, rtol=1e-5)
    np.testing.assert_array_equal(parts.load_LE, wanted_parts.load_LE)
    np.testing.assert_array_equal(parts.uneven_L3, wanted_parts.uneven_L3)
    return parts


# Stages, micro-batches of each, and the mesh of a stage.
SHAPES = [
    pytest.param(4, 2, (2, 1, 1, 1), {"schedule": "combined_1f1b"}, marks=ANY),
    pytest.param(4, 1, (1, 2, 1, 1), {"schedule": "combined_1f1b"}, marks=ANY),
    pytest.param(2, 4, (1, 2, 1, 2), {}, marks=ANY),
    pytest.param(4, 4, (1, 2, 1, 1), {}, marks=ANY),
    pytest.param(2, 1, (1, 1, 2, 2), {"stage_keeps": "input"}, marks=ANY),
]


@pytest.mark.parametrize(("stages", "times", "mesh", "axis"), SHAPES)
def test_gradients_are_those_of_one_device(stages, times, mesh, axis):
    assert_same_gradients(config(mesh, stages, stages * times, axis=axis))


@pytest.mark.parametrize(
    ("stages", "chunks", "times", "mesh", "keeps"),
    [
        pytest.param(2, 2, 2, (1, 1, 2, 1), "residuals", marks=ANY),
        pytest.param(2, 3, 4, (2, 1, 1, 2), "residuals", marks=ANY),
        pytest.param(4, 3, 1, (1, 2, 1, 1), "input", marks=ANY),
    ],
)
def test_gradients_of_interleaved_stages_are_those_of_one_device(
    stages, chunks, times, mesh, keeps
):
    options = {"model": {"stage_chunks": chunks}, "axis": {"stage_keeps": keeps}}
    assert_same_gradients(config(mesh, stages, stages * times, layers=stages * chunks, **options))


@pytest.mark.exhaustive
def test_gradients_of_interleaved_stages_that_save_inputs_after_leading_layers():
    """The cheapest case with virtual stages, saved inputs, and gradients of leading layers."""
    model = {"moe_every": None, "stage_chunks": 2, "layers_before_stages": 1}
    cfg = config((1, 1, 1, 1), 2, 4, layers=5, model=model, axis={"stage_keeps": "input"})
    assert_same_gradients(cfg)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "slices", "mesh", "model"),
    [
        (2, 2, (1, 1, 2, 1), {"tie_embeddings": False, "remat": "attention"}),
        pytest.param(2, 8, (1, 1, 1, 1), {"remat": "full"}, marks=ANY),
        pytest.param(4, 4, (2, 1, 1, 1), {"moe_every": None, "remat": "dots"}, marks=ANY),
        pytest.param(
            *(2, 4, (1, 1, 2, 1), {"sliding_window": 5, "full_attention_every": 2}), marks=ANY
        ),
        pytest.param(4, 2, (1, 1, 1, 2), {"first_dense_layers": 2, **LATENT}, marks=ANY),
    ],
)
def test_gradients_of_slices_are_those_of_one_device(stages, slices, mesh, model):
    options = {"router": {**NO_BALANCE, "z_loss": 0.1}, "axis": {"stage_slices": slices}}
    layers = 8 if "full_attention_every" in model else None
    cfg = config(mesh, stages, 2 * stages, layers=layers, model=model, **options)
    assert_same_gradients(cfg)


@pytest.mark.exhaustive
def test_balance_is_counted_over_slices():
    """Of fewer tokens loads are less even."""
    cfg = config((1, 1, 1, 1), 2, 2, axis={"stage_slices": 2})
    batch = random_batch(cfg)
    _, parts = gradients(cfg, batch)
    _, wanted = gradients(on_one_device(cfg), as_one_device_sees_it(cfg, batch))
    assert float(parts.balance) > 1.05 * float(wanted.balance)
    np.testing.assert_allclose(parts.nll, wanted.nll, rtol=1e-5)


# What `make compose` does not have.
CASES = {
    "untied, z-loss": {"model": UNTIED, "router": {"z_loss": 0.1}},
    "dense before": {"model": {"first_dense_layers": 1, **UNTIED}},
    "a table of layers": {
        "model": {"layer_mlps": ("experts", "dense", "dense", *("experts", "dense") * 4)},
        "layers": 11,
    },
    "overflow rounds": {"moe": {}},
    "interleaved, dense": {"model": {"moe_every": None, **INTERLEAVED}, "layers": 4},
    "interleaved, overflow rounds": {"moe": {}, "model": INTERLEAVED},
    "interleaved, ahead": {
        "model": {"layers_before_stages": 1, "remat": "full", **AHEAD, **INTERLEAVED},
        "layers": 9,
    },
    "gated delta net": {"model": DELTA, "layers": 4},
    "Kimi's delta attention": {"model": KIMI, "layers": 4},
    "sparse": {"model": SPARSE},
    "Mamba-2, then experts": {"model": MAMBA, "moe": {"latent": 8, **CERTAIN}, "layers": 8},
    # Without the constants of blocks, which have no gradient.
    "norms and heads of Gemma 4": {
        "model": {**GEMMA["model"], "num_layers": 4, "layer_scale": False},
        "moe": {**GEMMA["moe"], **CERTAIN},
    },
    "heads of MiMo-V2": {"model": {**MIMO, "num_layers": 4}, "layers": 4},
    "ahead, dense before, latent": {
        "model": {"first_dense_layers": 1, **UNTIED, **LATENT, **AHEAD},
        "router": {"balance_over": "sequence", "z_loss": 0.1},
        "train": {"predict_ahead_loss": 0.7},
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_other_models_are_those_of_one_device(case):
    assert_same_gradients(config((1, 1, 2, 2), 2, 4, **CASES[case]))


def with_adapters(state):
    """The state with adapters that are not zero."""
    rng = np.random.default_rng(1)

    def moved(adapter):
        b = rng.normal(0, 0.2, adapter.b.shape).astype(np.float32)
        return adapter._replace(b=jax.device_put(b, adapter.b.sharding))

    params = jax.tree.map(moved, state.params, is_leaf=lambda x: isinstance(x, Adapter))
    return state._replace(params=params)


ADAPTED = [
    ((1, 2, 1, 1), ("*",), {"first_dense_layers": 1, **LATENT, **AHEAD}, {}),
    pytest.param((1, 2, 2, 1), ("attention.*",), {**UNTIED, **INTERLEAVED}, {}, marks=ANY),
    pytest.param(
        *((1, 1, 2, 1), ("groups.0.*",), {"layers_before_stages": 1}, {"stage_keeps": "input"}),
        marks=ANY,
    ),
    pytest.param((1, 1, 2, 1), ("moe.*",), {"remat": "full"}, {"stage_slices": 2}, marks=ANY),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "targets", "model", "axis"), ADAPTED)
def test_gradients_of_adapters_are_those_of_one_device(mesh, targets, model, axis):
    lora = {"rank": 4, "alpha": 6.0, "targets": targets}
    cfg = config(mesh, 2, 4, axis=axis, model=model, router=NO_BALANCE, lora=lora)
    assert_same_gradients(cfg, with_adapters)


def test_adapters_of_one_chunk_alone_are_refused():
    lora = {"rank": 4, "targets": ("groups.1.*",)}
    cfg = config((1, 1, 1, 1), 2, 4, layers=4, model=INTERLEAVED, lora=lora)
    with pytest.raises(InputError, match=r"some of the 2 chunks of .*set model.stage_chunks=1"):
        check_adapters(cfg)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "combined_1f1b"])
def test_an_expert_that_nobody_chooses_changes_no_gradient(schedule):
    cfg = config((1, 1, 2, 2), 2, 4, axis={"schedule": schedule})
    parts = assert_same_gradients(cfg, lambda state: biased(state, slice(None), 0, -10))
    assert not np.any(parts.load_LE[:, 0])
    assert np.all(np.sum(parts.load_LE, axis=1) > 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "schedule"), [(0, "1f1b"), (1, "combined_1f1b")])
def test_rounds_in_one_stage_alone_change_no_gradient(stage, schedule):
    """All its tokens choose the experts of one device, which its buckets do not hold."""
    cfg = config((1, 1, 4, 1), 2, 4, moe={}, axis={"schedule": schedule})
    layers, half = slice(2 * stage, 2 * stage + 2), cfg.moe.num_experts // 4
    parts = assert_same_gradients(cfg, lambda state: biased(state, layers, slice(half), 10))
    chosen = np.sum(parts.load_LE[:, :half], axis=1) / np.sum(parts.load_LE, axis=1)
    assert np.all(chosen[layers] > 0.9)
    assert np.all(np.delete(chosen, range(*layers.indices(4))) < 0.6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "slices"),
    [(INTERLEAVED, 1), ({"layers_before_stages": 1}, 4), (AHEAD, 1)],
)
def test_jitter_is_that_of_one_device(model, slices):
    """It goes by a token's place in the batch, so rows have to lie as they do there."""
    router, axis = {"jitter": 0.1, **NO_BALANCE}, {"stage_slices": slices}
    cfg = config((1, 1, 2, 2), 2, 4, axis=axis, router=router, model=model)
    batch = random_batch(cfg)
    got, wanted = (gradients(one, batch)[0] for one in (cfg, on_one_device(cfg)))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(g, w, atol=2e-5 * np.abs(w).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunks"),
    [("adamw", 1), pytest.param("muon", 1, marks=ANY), pytest.param("adamw", 2, marks=ANY)],
)
def test_steps_are_those_of_one_device(name, chunks):
    """Clipping, moments and selection biases see all stages."""
    cfg = config(
        (1, 2, 1, 2),
        2,
        4,
        model={"stage_chunks": chunks},
        optimizer={"name": name, "clip_norm": 0.5},
        router={"bias_update_rate": 0.01},
    )
    batch = random_batch(cfg)
    staged, reference = step_for(cfg), step_for(on_one_device(cfg))
    got, wanted = staged.init(), reference.init()
    for _ in range(3):
        got, metrics = staged.step(got, batch)
        wanted, wanted_metrics = reference.step(wanted, as_one_device_sees_it(cfg, batch))
        np.testing.assert_allclose(metrics.loss, wanted_metrics.loss, rtol=1e-5)
        np.testing.assert_allclose(metrics.gradient_norm, wanted_metrics.gradient_norm, rtol=1e-4)
    for g, w in zip(jax.tree.leaves(got.params), jax.tree.leaves(wanted.params), strict=True):
        np.testing.assert_allclose(g, w, atol=2e-3)
    for g, w in zip(
        jax.tree.leaves(got.router_bias), jax.tree.leaves(wanted.router_bias), strict=True
    ):
        assert np.any(w)
        np.testing.assert_array_equal(g, w)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("activations", "model", "slices"),
    [
        ("replicated", {}, 1),
        pytest.param("sequence", INTERLEAVED, 1, marks=ANY),
        pytest.param("sequence", {}, 2, marks=ANY),
        pytest.param("sequence", {"layers_before_stages": 1, **AHEAD}, 1, marks=ANY),
    ],
)
def test_evaluation_and_sampling_are_those_of_one_device(activations, model, slices):
    """Without noise: jitter is of training alone."""
    changes = {"activations": activations, "model": model, "axis": {"stage_slices": slices}}
    cfg = config((1, 1, 2, 2), 2, 4, router={"jitter": 0.3}, **changes)
    batch = random_batch(cfg)
    staged, reference = step_for(cfg), step_for(on_one_device(cfg))
    got, wanted = staged.init(), reference.init()
    np.testing.assert_allclose(
        staged.evaluate(got, batch), reference.evaluate(wanted, batch), rtol=1e-5
    )
    np.testing.assert_allclose(
        staged.target_nll(got, batch), reference.target_nll(wanted, batch), rtol=1e-4, atol=1e-5
    )
    prompt = batch.token_BT[:4]
    logits = staged.next_logits(got, (prompt, jnp.int32(5)))
    one = np.concatenate(
        [reference.next_logits(wanted, (row[None], jnp.int32(5))) for row in prompt]
    )
    np.testing.assert_allclose(logits, one, rtol=1e-4, atol=1e-4)


def test_the_state_of_a_stage_lies_on_it():
    staged = step_for(config((1, 2, 1, 1), 4, 4))
    state = staged.init()
    layers = jax.tree.leaves(state.params["groups"])
    for leaf in layers:
        assert len(leaf) == 8
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {2}
    table = state.params["embedding"]["table"]
    assert {shard.data.shape for shard in table.addressable_shards} == {(64, 32 // 8)}
    reference = step_for(on_one_device(staged.cfg)).init()
    for g, w in zip(jax.tree.leaves(state.params), jax.tree.leaves(reference.params), strict=True):
        np.testing.assert_array_equal(g, w)


@functools.cache
def resumed_case(stages, chunks):
    model, router = {"stage_chunks": chunks}, {"bias_update_rate": 0.01}
    cfg = config((1, 2, 1, 1), stages, 4, layers=4 * chunks, model=model, router=router)
    return step_for(cfg)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "chunks"),
    [
        (4, 1),
        pytest.param(1, 1, marks=ANY),
        pytest.param(4, 2, marks=ANY),
        pytest.param(1, 2, marks=ANY),
    ],
)
def test_a_checkpoint_of_two_stages_restores_on_any_number_of_them(tmp_path, stages, chunks):
    before, train_step = resumed_case(2, chunks), resumed_case(stages, chunks)
    state, _ = before.step(before.init(), random_batch(before.cfg))
    writer = Checkpoints(tmp_path, keep=1)
    writer.save(1, state, {})
    writer.close()
    restored = restore_state(newest(tmp_path, "full")[0], train_step.abstract)
    for got, wanted, abstract in zip(
        *map(jax.tree.leaves, (restored, state, train_step.abstract)), strict=True
    ):
        assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()
        assert got.sharding == abstract.sharding


BETWEEN = ("stage", "stage_gradient")


def between_nodes(cfg, stage="none", stage_gradient="none"):
    """A config whose stages lie on two nodes, with these codecs between them."""
    policy = CompressionConfig(stage=stage, stage_gradient=stage_gradient, block=16)
    return dataclasses.replace(with_mesh(cfg, nodes=2), compression=policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codecs", "case"),
    [
        pytest.param(("bfloat16", "e4m3"), "untied, z-loss", marks=ANY),
        pytest.param(("int8", "int8+feedback"), "dense before", marks=ANY),
        pytest.param(("int8", "int8+feedback"), "interleaved, dense", marks=ANY),
        pytest.param(("int8", "int8+feedback"), "slices", marks=ANY),
    ],
)
def test_codecs_between_stages_change_gradients_by_their_error(codecs, case):
    changes = {"axis": {"stage_slices": 4}} if case == "slices" else CASES[case]
    plain = config((1, 1, 2, 2), 2, 4, **changes)
    batch = random_batch(plain)
    (wanted, _), (got, _) = (gradients(c, batch) for c in (plain, between_nodes(plain, *codecs)))
    # A token near the border between two experts may change sides.
    assert 1e-5 < max(errors(got, wanted).values()) < 0.1


@pytest.mark.exhaustive
def test_between_stages_encoded_bytes_travel_and_nothing_else():
    plain = config((1, 1, 2, 2), 2, 4)
    sent = {}
    for name, cfg in (("plain", plain), ("int8", between_nodes(plain, "int8", "int8"))):
        sent[name] = [
            (one.dtype, one.bytes, one.calls, one.kind)
            for one in collectives(trace_config(cfg, "cpu").jaxpr)
            if one.traffic in BETWEEN
        ]
    assert {dtype for dtype, *_ in sent["plain"]} == {"float32"}
    assert {dtype for dtype, *_ in sent["int8"]} == {"uint8"}
    for (_, before, calls, kind), (_, after, *same) in zip(*sent.values(), strict=True):
        assert [calls, kind] == same
        assert after == before * (16 + 4) / 64, "16 values share a scale of float32"


@pytest.mark.exhaustive
def test_one_micro_batch_that_is_not_finite_skips_the_update():
    """In bubbles stages compute with it too, which must neither hide nor spread it."""
    cfg = config((1, 1, 2, 1), 2, 4)
    staged, batch = step_for(cfg), random_batch(cfg)
    state = staged.init()
    token = np.minimum(batch.token_BT, 30)
    token[0, 3] = 31
    table = np.array(state.params["embedding"]["table"])
    table[31] = np.nan
    sharding = state.params["embedding"]["table"].sharding
    state.params["embedding"]["table"] = jax.device_put(table, sharding)
    before = [np.asarray(x).tobytes() for x in jax.tree.leaves(state.params)]
    state, metrics = staged.step(state, batch._replace(token_BT=token))
    assert not np.isfinite(metrics.loss)
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(state.params)] == before


@pytest.mark.exhaustive
def test_codecs_reduce_once_a_step_and_keep_their_errors_by_stage():
    """Four nodes: the weights of a stage cross two of them, all others cross four."""
    cfg = with_mesh(config((1, 2, 1, 1), 2, 8), nodes=4)
    policy = CompressionConfig(
        dense_gradient="int8+feedback", expert_gradient="int8+feedback", block=16
    )
    batch = random_batch(cfg)
    plain, coded = step_for(cfg), step_for(dataclasses.replace(cfg, compression=policy))
    wanted, _ = plain.gradients(plain.init(), batch)
    got, _ = coded.gradients(coded.init(), batch)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(np.asarray(g) - np.asarray(w)) < 0.02 * np.linalg.norm(w)
    state, _ = coded.step(coded.init(), batch)
    kept = jax.tree_util.tree_flatten_with_path(state.reduction)[0]
    assert {"groups" in jax.tree_util.keystr(path) for path, _ in kept} == {True, False}
    for path, residual in kept:
        devices = {shard.data.shape for shard in residual.addressable_shards}
        if "groups" in jax.tree_util.keystr(path):
            assert residual.shape[:2] == (4, 2), "layers, and the devices of a stage"
            assert {shape[:2] for shape in devices} == {(2, 1)}
        else:
            assert residual.shape[0] == 4, "all devices"
        assert np.any(np.asarray(residual))


def link_between_nodes(codec, like):
    cfg = between_nodes(config((1, 1, 1, 1), 2, 2), stage_gradient=codec)
    codecs = build_compression(cfg.compression).at(0)
    return build_link("stage_gradient", build_layout(cfg.mesh), codecs, like)


@few(12)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_the_error_of_an_encoding_is_added_to_the_next(count, seed):
    """So the sum of what arrived and the last error is the sum of what was to be sent."""
    drawn = np.random.default_rng(seed).normal(size=(count, 1, 2, 32))
    x_MBtD = jnp.asarray(drawn, jnp.float32)
    link = link_between_nodes("int4+feedback", x_MBtD[0])
    arrived, error = np.zeros_like(x_MBtD[0]), link.first_error(x_MBtD[0])
    for number, x_BtD in enumerate(x_MBtD):
        skipped = link.encode(x_BtD, error, jnp.bool_(False))[1]
        np.testing.assert_array_equal(skipped, error, "a bubble leaves the error as it is")
        encoded, error = link.encode(x_BtD, error, jnp.bool_(True))
        arrived += link.decode(encoded, jnp.float32)
        assert np.any(np.asarray(error)), number
    np.testing.assert_allclose(arrived + error, x_MBtD.sum(0), atol=1e-5)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_feedback_between_stages_makes_gradients_of_weights_worse(codec):
    """The error of one micro-batch meets the tokens of the next: twice the noise, 1.41 the error.

    Weights' gradients are sums over micro-batches of x^T dy; rounding has mean zero without it.
    """
    x_MBtD, dy_MBtD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 2, 16, 32)), "f4")
    off = {}
    for flag in ("", "+feedback"):
        link = link_between_nodes(codec + flag, dy_MBtD[0])
        arrived, error = [], link.first_error(dy_MBtD[0])
        for dy_BtD in dy_MBtD:
            encoded, error = link.encode(dy_BtD, error, jnp.bool_(True))
            arrived.append(link.decode(encoded, jnp.float32))
        off[flag] = np.linalg.norm(
            jnp.einsum("mbtd,mbte->de", x_MBtD, jnp.stack(arrived) - dy_MBtD)
        )
    assert 1.25 < off["+feedback"] / off[""] < 1.5


@pytest.mark.exhaustive
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_feedback_between_stages_makes_gradients_of_a_step_worse(codec):
    """By the mean over leaves that they reach. Dense, so that no choice of experts changes."""
    cfg = config((1, 1, 1, 1), 2, 16, model={"moe_every": None, "tie_embeddings": False})
    batch, norms = random_batch(cfg), {}
    reference = step_for(cfg)
    wanted, _ = reference.gradients(reference.init(), batch)
    for flag in ("", "+feedback"):
        coded = step_for(between_nodes(cfg, stage_gradient=codec + flag))
        got, _ = coded.gradients(coded.init(), batch)
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
        # Of stacked layers those of the first stage.
        norms[flag] = np.array([np.linalg.norm((np.asarray(g) - w)[:2]) for g, w in pairs])
    reached = norms[""] > 1e-6
    ratio = norms["+feedback"][reached] / norms[""][reached]
    assert np.sum(reached) > 5
    assert 1.1 < np.exp(np.mean(np.log(ratio))) < 1.6


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("model", "lora"),
    [
        pytest.param({"remat": "dots"}, {}, marks=ANY),
        pytest.param({"remat": "full"}, {}, marks=ANY),
        ({"remat": "dots", "dtype": "bfloat16"}, {"rank": 4}),
    ],
)
def test_a_stage_saves_no_weights_among_its_residuals(model, lora, monkeypatch):
    """`vjp` returns the weights as the same array objects, trained or frozen."""
    seen = []
    forward = Layers.forward

    def noted(self, *arguments):
        found = forward(self, *arguments)
        weights = jax.tree_util.tree_leaves_with_path(self.staged.weights.layer(jnp.int32(0)))
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in weights]
        matrices = {n for n, name in enumerate(names) if ".w_" in name and "adapter" not in name}
        assert len(matrices) == 7  # of attention, router and experts
        seen.append(matrices - set(self.weight_index))
        return found

    monkeypatch.setattr(Layers, "forward", noted)
    trace_config(config((1, 1, 2, 1), 2, 4, model=model, lora=lora), "cpu")
    assert seen
    assert not any(seen), "a matrix would be saved for each micro-batch"


def test_adapters_and_routers_are_gathered_in_float32():
    """Gradients of adapters are sums over micro-batches; other weights are in bfloat16."""
    model = {"dtype": "bfloat16", "attention_bias": True}
    lora = {"rank": 4, "targets": ("*",)}
    train_step = step_for(config((1, 2, 1, 1), 2, 4, model=model, lora=lora))
    model, abstract = train_step.model, train_step.abstract

    def gather(params, frozen):
        layouts = layouts_of(frozen, model.cfg, model.spec)
        adapters = gather_stage_weights(params, model.dims, model.layouts, model.spec)
        return adapters, gather_stage_weights(frozen, model.frozen_dims, layouts, model.spec)

    both = abstract.params, abstract.frozen
    specs = jax.tree.map(lambda x: x.sharding.spec, both)
    mapped = jax.shard_map(
        gather, mesh=train_step.mesh, in_specs=specs, out_specs=P(), check_vma=False
    )
    adapters, frozen = jax.eval_shape(mapped, *both)
    assert {str(x.dtype) for x in jax.tree.leaves(adapters)} == {"float32"}
    for path, x in jax.tree_util.tree_leaves_with_path(frozen):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        narrow = (".w_" in name or "table" in name) and "w_router" not in name
        assert str(x.dtype) == ("bfloat16" if narrow else "float32"), name
