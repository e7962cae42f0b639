"""Decoding with a cache computes what the whole forward pass does, position by position."""

import dataclasses

import jax
import numpy as np
import pytest

from moejax.comm.host import is_on_host
from moejax.comm.jaxprs import inner_jaxprs, opened
from moejax.config.schema import (
    IndexerConfig,
    LinearConfig,
    LoraConfig,
    MemoryConfig,
    MeshConfig,
    RopeConfig,
)
from moejax.kernels.attention.cached_attention import KEYS
from moejax.layout.layout import build_layout
from moejax.layout.route import ROUTES
from moejax.model.cached import cache_shapes
from moejax.moe.sizes import usual_sizes
from moejax.serve import programs as serve_programs
from moejax.serve.batch import Batch, Request
from moejax.serve.programs import LONG, SHORT, no_tokens
from moejax.serve.samples import draw_samples
from moejax.step.state import flat
from tests.cases import (
    CERTAIN,
    GEMMA,
    MIMO,
    NEMOTRON,
    TRINITY,
    small_config,
    some_of,
    step_for,
)
from tests.hf.golden import cases_of, loaded
from tests.serve.models import on_mesh, programs_for, random_state, weights_of

CLOSE = 1e-5  # of the largest logit
GROUPED = {"num_kv_heads": 2, "attention_bias": True, "qk_norm": "head", "num_layers": 2}
WINDOW = {"num_layers": 5, "sliding_window": 3, "full_attention_every": 2, "moe_every": 2}
WINDOW |= {"attention_sinks": True, "rope_width": 2, "attention_output_bias": True}
YARN = RopeConfig(scaling="yarn", factor=4.0, trained_length=8, mscale=1.0, mscale_all_dim=0.7)
YARN = dataclasses.replace(YARN, query_growth=0.3)
LATENT = {"attention": "latent", "head_width": 6, "rope_width": 2, "value_width": 4}
LATENT |= {"kv_latent": 16, "num_layers": 2, "first_dense_layers": 1, "rope": YARN}
DELTA = LinearConfig("gated_delta", 2, 4, key_width=6, value_width=4, convolution=3)
DELTA = {"linear": DELTA, "full_attention_every": 2, "num_layers": 2, "num_kv_heads": 2}
DELTA |= {"attention_gate": True}
KIMI = LinearConfig("kimi_delta", 4, 4, key_width=6, value_width=4, convolution=3)
KIMI = LATENT | {"linear": KIMI, "full_attention_every": 2, "positions": "none"}
KIMI.pop("rope")
# Texts of which pieces begin where all keys are chosen, and end where not.
SPARSE = LATENT | {"attention": "sparse", "q_latent": 8, "indexer": IndexerConfig(6, 8, keys=5)}
FULL = {"num_kv_heads": 4, "qk_norm": "full", "num_layers": 2}
CASES = {
    "window and sinks": ((1, 1, 1, 1), "sequence", WINDOW),
    "gated delta net": ((1, 1, 1, 1), "sequence", DELTA),
    "sparse on all axes": ((1, 2, 2, 2), "sequence", SPARSE),
    "latent on all axes": ((1, 2, 2, 2), "replicated", LATENT | {"q_latent": 8}),
}
MANY = {
    "grouped on expert and tensor": ((1, 1, 2, 2), "sequence", FULL),
    "latent": ((1, 1, 1, 1), "sequence", LATENT),
    "grouped": ((1, 1, 1, 1), "sequence", GROUPED),
    "latent of queries too": ((1, 1, 1, 1), "sequence", LATENT | {"q_latent": 8}),
    "sparse": ((1, 1, 1, 1), "sequence", SPARSE),
    "sparse, activations replicated": ((1, 1, 1, 2), "replicated", SPARSE),
    "sinks on tensor": ((1, 1, 1, 4), "sequence", WINDOW | {"num_kv_heads": 4}),
    "gated delta net on expert and tensor": ((1, 1, 2, 2), "sequence", DELTA),
    "Kimi's delta attention on tensor": ((1, 1, 1, 2), "sequence", KIMI),
    "Mamba-2 on expert and tensor": ((1, 1, 2, 2), "sequence", NEMOTRON["model"]),
    "latent on expert and tensor": ((1, 1, 2, 2), "sequence", LATENT),
    "heads of MiMo-V2 on tensor": ((1, 1, 1, 2), "sequence", MIMO),
    "some positions, a gate": ((1, 1, 1, 1), "sequence", TRINITY),
}


@pytest.fixture(autouse=True, scope="module")
def annotations(unchecked_annotations):
    """Leaves annotations unchecked; the other files of this folder check them."""


@pytest.fixture
def short_pieces(monkeypatch):
    """Pieces of at most 8 tokens, so that layers with a window start anew in their cache."""
    monkeypatch.setattr(serve_programs, "SHORT", 8)
    monkeypatch.setattr(serve_programs, "LONG", 8)


def whole_logits(cfg, state, token_BT):
    """Logits of each position by the forward pass, [T, B, V]."""
    train_step = step_for(cfg)
    state = on_mesh(state, train_step)._replace(
        optimizer=train_step.abstract.optimizer, reduction=train_step.abstract.reduction
    )
    next_logits = train_step.of_weights().next_logits
    state = weights_of(state)
    lengths = range(1, token_BT.shape[1] + 1)
    return np.stack([np.asarray(next_logits(state, (token_BT, length))) for length in lengths])


def cached_logits(cfg, state, token_BT, pieces):
    """Logits behind each piece of each row, [pieces, B, V].

    Args:
      pieces: tokens of each row in one call after the other, [pieces, B].
    """
    programs = programs_for(cfg, len(token_BT), token_BT.shape[1])
    assert programs.slots * programs.devices == len(token_BT)
    state, cache = on_mesh(state, programs), programs.empty_cache()
    start_B, found = np.zeros(len(token_BT), np.int32), []
    for count_B in np.asarray(pieces, np.int32):
        tokens = no_tokens(programs, programs.slots, max(count_B))
        tokens.start_R[:], tokens.count_R[:] = start_B, count_B
        for row, (start, count) in enumerate(zip(start_B, count_B, strict=True)):
            tokens.token_RT[row, :count] = token_BT[row, start : start + count]
        logits, cache = programs.extend(every=True)(state, programs.place(tokens), cache)
        found.append(np.asarray(logits))
        start_B = start_B + count_B
    return np.stack(found)


@pytest.mark.parametrize(
    ("mesh", "activations", "model"),
    [pytest.param(*case, id=name) for name, case in CASES.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.exhaustive) for name, case in MANY.items()],
)
@pytest.mark.usefixtures("short_pieces")
def test_cached_decoding_is_the_forward_pass(mesh, activations, model):
    check_cached(small_config(mesh, activations=activations, model=model, moe=CERTAIN))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", some_of([(1, 1, 1, 2), (1, 1, 2, 2)], (1, 1, 1, 2)), ids=str)
@pytest.mark.usefixtures("short_pieces")
def test_cached_decoding_has_other_heads_without_a_window(mesh):
    """Rows with a window, and rows of all positions of fewer and wider heads (Gemma 4)."""
    cfg = small_config(mesh, model=GEMMA["model"], moe=GEMMA["moe"] | CERTAIN)
    check_cached(cfg)
    groups = cache_shapes(cfg.model, build_layout(cfg.mesh), slots=2, positions=40, chunk=8)
    found = [array.shape for block in groups[0] for array in block]
    assert found == [(2, 4, 12, 4)] * 2 + [(2, 2, 40, 10)] * 2


@pytest.mark.parametrize(
    ("mesh", "activations", "model", "context"),
    [
        pytest.param((1, 2, 2, 1), "sequence", WINDOW, 4, marks=pytest.mark.exhaustive),
        ((1, 2, 2, 2), "sequence", LATENT, 2),
        pytest.param((1, 1, 2, 2), "replicated", LATENT, 2, marks=pytest.mark.exhaustive),
        pytest.param((1, 1, 4, 1), "sequence", GROUPED, 4, marks=pytest.mark.exhaustive),
        pytest.param((1, 2, 2, 1), "sequence", DELTA, 4, marks=pytest.mark.slow),
        pytest.param((1, 2, 2, 2), "sequence", SPARSE, 2, marks=pytest.mark.slow),
        pytest.param((1, 1, 2, 2), "replicated", KIMI, 2, marks=pytest.mark.exhaustive),
        pytest.param((1, 1, 2, 2), "sequence", NEMOTRON["model"], 2, marks=pytest.mark.exhaustive),
        pytest.param((1, 1, 4, 1), "sequence", MIMO, 4, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.usefixtures("short_pieces")
def test_devices_share_a_cache(monkeypatch, mesh, activations, model, context):
    """Two positions a stripe, so that prompts and what follows lie on all of them."""
    monkeypatch.setattr(serve_programs, "STRIPE", 2)
    cfg = small_config(mesh, activations=activations, model=model, moe=CERTAIN)
    check_cached(dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, context=context)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "model", "targets"),
    [
        pytest.param(
            *((1, 1, 2, 2), GROUPED | {"num_kv_heads": 4}, ("moe.w_*", "*.w_q")), id="grouped"
        ),
        pytest.param(
            *((1, 1, 1, 1), LATENT | {"num_layers": 3}),
            ("attention.*", "groups.1.*", "embedding.*"),
            id="latent, by group",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
@pytest.mark.usefixtures("short_pieces")
def test_adapters_stay_beside_their_weights(mesh, model, targets):
    cfg = small_config(mesh, model=model, moe=CERTAIN)
    check_cached(dataclasses.replace(cfg, lora=LoraConfig(rank=2, targets=targets)))


@pytest.mark.parametrize("adapted", some_of([False, True], True))
@pytest.mark.usefixtures("short_pieces")
def test_experts_come_from_the_host_layer_by_layer(adapted):
    """The forward pass beside it has them there too, stacked."""
    cfg = small_config((1, 2, 2, 1), model=GROUPED | {"num_layers": 3}, moe=CERTAIN)
    cfg = dataclasses.replace(cfg, memory=MemoryConfig(experts="host"))
    if adapted:
        cfg = dataclasses.replace(cfg, lora=LoraConfig(rank=2, targets=("moe.w_*", "*.w_q")))
    check_cached(cfg)
    programs = programs_for(cfg, 8, 8)
    for step in (programs.stored, programs.train_step):
        weights = step.abstract.frozen if adapted else step.abstract.params
        away = {name.split(".")[-1] for name, x in flat(weights).items() if is_on_host(x)}
        assert away == {"w_in", "w_out"}


@pytest.mark.parametrize(
    ("slots", "mesh", "own"),
    [(3, (1, 1, 1, 1), 3), (20, (1, 1, 1, 1), 20), (3, (1, 1, 2, 2), 2), (20, (1, 2, 2, 2), 6)],
)
def test_slots_are_rounded_up_to_what_devices_share(slots, mesh, own):
    assert programs_for(small_config(mesh), slots, 1).slots == own


PLACES = -(-5000 // KEYS) * KEYS


@pytest.mark.parametrize(
    ("model", "numbers"),
    # A tensor rank has half of 4 heads, of keys and values of 4 channels; but the whole latent.
    # Half of 4 states, and of what 2 positions have for the convolution.
    [
        (FULL, PLACES * 2 * 2 * 2 * 4),
        (LATENT, PLACES * 2 * (16 + 2)),
        (DELTA, PLACES * 2 * 1 * 4 + 2 * 6 * 4 + 2 * (2 * 6 + 2 * 4)),
    ],
)
def test_bytes_of_a_cache_are_those_of_one_device(model, numbers):
    """Of two blocks; 8 slots on two devices of the expert axis, and two of the tensor axis."""
    programs = programs_for(small_config((1, 1, 2, 2), model=model), 8, 5000)
    assert programs.bytes_beside_weights() == 4 * numbers * 4


def test_a_layer_with_a_window_keeps_what_a_piece_sees():
    """A query sees three positions, itself included: those of a piece, and two before it."""
    programs = programs_for(small_config(model=WINDOW), 2, 512)
    rooms = {x.shape[2] for x in jax.tree.leaves(programs.empty_cache())}
    assert rooms == {2 + LONG, 512}
    # Whole blocks of attention: of 599 and 256 places, and of 1,600.
    programs = programs_for(small_config(model=WINDOW | {"sliding_window": 600}), 2, 1600)
    assert {x.shape[2] for x in jax.tree.leaves(programs.empty_cache())} == {2 * KEYS, 4 * KEYS}


@pytest.mark.exhaustive
def test_logits_of_all_positions_are_those_of_the_forward_pass_with_adapters_too():
    cfg = small_config((1, 1, 2, 2), model=GROUPED | {"num_kv_heads": 4}, moe=CERTAIN)
    cfg = dataclasses.replace(cfg, lora=LoraConfig(rank=2, targets=("moe.w_*", "embedding.*")))
    state = random_state(cfg)
    token_BT = np.random.default_rng(1).integers(0, 64, (8, 16), dtype=np.int32)
    programs = programs_for(cfg, 8, 16)
    token_BS = np.pad(token_BT, ((0, 0), (0, SHORT - 16)))
    found_BSV = programs.logits(on_mesh(state, programs), programs.place_batch(token_BS))
    found_BTV = found_BSV[:, :16]
    wanted_TBV = whole_logits(cfg, state, token_BT)
    bound = CLOSE * np.abs(wanted_TBV).max()
    np.testing.assert_allclose(np.swapaxes(found_BTV, 0, 1), wanted_TBV, rtol=0, atol=bound)


def test_logits_in_bfloat16_are_summed_in_float32():
    """Rounded, the largest of some rows would be equal, and the lowest id would win.

    Read from the programs: what is rounded between two operations, CPUs may leave unrounded.
    """
    V = 1000
    cfg = small_config(model=GROUPED | {"dtype": "bfloat16", "vocab_size": V}, moe=CERTAIN)
    programs = programs_for(cfg, 8, 2)
    state, cache, whole = programs.train_step.abstract, programs.empty_cache(), step_for(cfg)
    programs = [
        *(
            programs.extend(True).trace(state, no_tokens(programs, 8, length), cache)
            for length in (1, 4)
        ),
        whole.next_logits.trace(whole.abstract, whole.abstract_prompt()),
    ]
    for program in programs:
        logits = [
            e.outvars[0].aval for e in products(program.jaxpr) if e.outvars[0].aval.shape[-1] == V
        ]
        assert [str(x.dtype) for x in logits] == ["float32"]


def products(jaxpr):
    """Every matrix product of a program, those of loops and calls too."""
    for eqn in opened(jaxpr).eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in inner_jaxprs(eqn):
            yield from products(inner)


def test_no_row_loses_tokens_to_a_training_capacity():
    """A capacity drops what an expert has too much of, so a row's text would hang on the others."""
    cfg = small_config(moe={"capacity_factor": 1.0})
    programs = programs_for(cfg, 4, 5)
    assert programs.train_step.cfg.moe.capacity_factor is None
    assert programs.train_step.plain.cfg.moe.capacity_factor is None


def check_cached(cfg):
    """Compares logits with a cache to those of whole forward passes.

    Prompts enter in two pieces, in the second of which some rows have no token.
    """
    state = random_state(cfg)
    token_BT = np.random.default_rng(1).integers(0, 64, (8, 16), dtype=np.int32)
    prompts = [[3, 1, 8, 5, 6, 2, 7, 4], [2, 6, 0, 1, 0, 3, 1, 0]]
    pieces = np.array([*prompts, *[[1] * 8] * 8])
    alone = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, context=1))
    whole_TBV = whole_logits(alone, state, token_BT)
    found = cached_logits(cfg, state, token_BT, pieces)
    for piece, (logit_BV, end_B) in enumerate(zip(found, pieces.cumsum(0), strict=True)):
        has = pieces[piece] > 0
        wanted_BV = whole_TBV[end_B - 1, np.arange(8)]
        bound = CLOSE * np.abs(whole_TBV).max()
        np.testing.assert_allclose(
            logit_BV[has], wanted_BV[has], rtol=0, atol=bound, err_msg=f"{piece=}"
        )


GOLDEN = [
    ("gpt_oss", "top 3", MeshConfig()),
    ("deepseek_v3", "even, groups, yarn", MeshConfig(expert=2, tensor=2)),
    ("qwen3_moe", None, MeshConfig()),
]
REST = ["deepseek_v2", "glm4_moe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_next"]
REST += ["llama", "mistral", "qwen2", "qwen3", "glm4_moe_lite", "solar_open", "dots1", "hy_v3"]
REST += ["ernie4_5_moe", "hunyuan_v1_moe", "flex_olmo", "granitemoe", "qwen3_5_moe_text"]
REST += ["gemma4_text", "kimi_linear", "nemotron_h", "deepseek_v32", "glm_moe_dsa"]
REST += ["afmoe", "mimo_v2_flash", "mistral4"]
GOLDEN += [pytest.param(name, None, MeshConfig(), marks=pytest.mark.exhaustive) for name in REST]


@pytest.mark.parametrize(("family", "name", "mesh"), GOLDEN)
def test_greedy_texts_are_those_of_transformers(tmp_path, family, name, mesh):
    cases = cases_of(family)
    case = cases[name or next(iter(cases))]
    train_step, state = loaded(tmp_path, case, mesh)
    prompt, tokens = case["tokens"][0][:8], len(case["greedy"])
    programs = programs_for(train_step.cfg, 1, len(prompt) + tokens)
    batch = Batch(programs, programs.take(weights_of(state)))
    (found,) = draw_samples(batch, [Request(prompt, tokens)])
    assert found.ids == case["greedy"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("tokens", some_of([1, 3, 8], 3))
def test_buckets_of_single_tokens_hold_any_routing(route, tokens):
    cfg = small_config((1, 2, 2, 2), moe={"experts_per_token": 3, "num_experts": 8})
    mesh = dataclasses.replace(cfg.mesh, nodes=2)
    cfg = dataclasses.replace(cfg, mesh=mesh, route=route)
    single = programs_for(cfg, 8, 8).single
    sizes = usual_sizes(single.spec.route, single.layout, single.cfg.moe, tokens=tokens)
    assert sizes.certain
