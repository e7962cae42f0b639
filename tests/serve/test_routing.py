"""Recorded experts are those that a router in plain numbers chooses, on every axis of a mesh."""

import dataclasses
import functools

import numpy as np
import pytest

from moejax.errors import InputError
from moejax.serve import programs as serve_programs
from moejax.serve.batch import Batch, Request
from moejax.serve.samples import check_routing_file, draw_samples, write_routing
from moejax.serve.sampling import Sampling
from moejax.step.state import Batch as Sequences
from tests import oracle
from tests.cases import CERTAIN, small_config, some_of
from tests.serve.models import on_mesh, programs_for, random_state

# The first layer is dense: experts of layers 1 and 2 are recorded.
LAYERS = {"num_layers": 3, "first_dense_layers": 1, "num_kv_heads": 4, "qk_norm": "head"}
GROUPS = {"score": "sigmoid", "num_groups": 4, "groups_per_token": 2}
PROMPTS = [[5], list(range(20, 39)), [9, 8, 7, 6, 5, 4, 3, 2, 1, 1]]  # one, three, two pieces
TOKENS, LONGEST = 4, 24
CASES = {
    "one device": ((1, 1, 1, 1), {}, {}),
    "all axes": ((1, 2, 2, 2), {}, {}),
    "context": ((1, 2, 2, 1), {"context": 4}, {}),
    "replicated, merge": ((2, 1, 2, 2), {"activations": "replicated"}, {"route": "merge"}),
    "duplicate": ((1, 1, 2, 2), {}, {"route": "duplicate"}),
}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch, unchecked_annotations):
    """Pieces of 8 tokens and stripes of two positions; annotations are checked elsewhere."""
    for name, value in {"SHORT": 8, "LONG": 8, "STRIPE": 2}.items():
        monkeypatch.setattr(serve_programs, name, value)


def config(name="one device"):
    shape, mesh, more = CASES[name]
    cfg = small_config(shape, model=LAYERS, moe=CERTAIN, router=GROUPS)
    return dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **mesh), **more)


def chosen_by_oracle(ids):
    """Experts of each token, the likeliest first, by a forward pass without a cache: [T, L, K]."""
    return _chosen((*ids, *[0] * (LONGEST - len(ids))))[: len(ids)]


@functools.cache
def _chosen(ids):
    weights, reference, cfg = [], oracle.moe_reference, config()

    def recorded(*arguments, **options):
        y_ND, weight_NE = reference(*arguments, **options)
        weights.append(np.asarray(weight_NE))
        return y_ND, weight_NE

    state, token_BT = random_state(cfg), np.array([ids], np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "moe_reference", recorded)
        batch = Sequences(token_BT, token_BT, np.zeros_like(token_BT))
        oracle.oracle_loss(state.params, state.router_bias, batch, cfg)
    return np.stack([np.argsort(-weight_TE)[:, :2] for weight_TE in weights], axis=1)


@pytest.mark.parametrize("name", some_of(CASES, "context"))
def test_experts_are_those_that_a_plain_router_chooses(name):
    cfg = config(name)
    state, programs = random_state(cfg), programs_for(cfg, 8, LONGEST)
    batch = Batch(programs, on_mesh(state, programs))
    rule = Sampling(1.0, seed=3)
    requests = [
        Request(ids, TOKENS, rule, number=number, scored=number == 1, routing=True)
        for number, ids in enumerate(PROMPTS)
    ]
    # A text beside them whose experts nobody asks for.
    requests.append(Request([60, 61], TOKENS))
    *samples, unasked = draw_samples(batch, requests)
    assert unasked.expert_TLK is None
    for sample, prompt in zip(samples, PROMPTS, strict=True):
        ids = [*prompt, *sample.ids]
        assert (len(sample.ids), sample.ended) == (TOKENS, "length")
        wanted_TLK = chosen_by_oracle(ids[:-1])
        assert sample.expert_TLK.shape == (len(ids), 2, 2)
        assert sample.expert_TLK.dtype == np.int16
        np.testing.assert_array_equal(sample.expert_TLK[:-1], wanted_TLK)
        assert (sample.expert_TLK[-1] == -1).all()
    assert len(samples[1].prompt_logprobs) == len(PROMPTS[1]) - 1


def test_a_text_that_a_stop_ends_ran_on_every_token():
    cfg = config()
    state, programs = random_state(cfg), programs_for(cfg, 1, LONGEST)
    weights = on_mesh(state, programs)
    (free,) = draw_samples(Batch(programs, weights), [Request([5], TOKENS)])
    stop = frozenset([free.ids[2]])
    kept = free.ids[: free.ids.index(free.ids[2])]
    request = Request([5], TOKENS, stops=stop, routing=True)
    (sample,) = draw_samples(Batch(programs, weights), [request])
    assert (sample.ids, sample.ended) == (kept, "stop")
    wanted_TLK = chosen_by_oracle([5, *kept])
    np.testing.assert_array_equal(sample.expert_TLK, wanted_TLK)


def test_nothing_is_computed_where_nobody_asks():
    programs = programs_for(config("all axes"), 8, 24)
    tokens = serve_programs.no_tokens(programs, programs.slots, 1)
    arguments = programs.train_step.abstract, tokens, programs.empty_cache()
    plain, routing = (
        programs.extend(True, routing).lower(*arguments).as_text() for routing in (False, True)
    )
    assert routing.count("all_gather") > plain.count("all_gather")
    assert len(programs.extend(True).eval_shape(*arguments)) == 2


def test_a_file_of_routing_holds_tokens_and_experts(tmp_path):
    cfg = config()
    programs = programs_for(cfg, 2, LONGEST)
    batch = Batch(programs, on_mesh(random_state(cfg), programs))
    samples = draw_samples(batch, [Request(ids, 2, routing=True) for ids in PROMPTS[:2]])
    path = tmp_path / "routing.npz"
    write_routing(str(path), samples, layers=[1, 2], num_experts=8)
    with np.load(path, allow_pickle=False) as found:
        assert (int(found["format"]), int(found["num_experts"])) == (1, 8)
        assert found["layer_L"].tolist() == [1, 2]
        assert found["tokens_N"].tolist() == [3, 21]
        assert found["prompt_tokens_N"].tolist() == [1, 19]
        assert found["id_T"].tolist() == [5, *samples[0].ids, *PROMPTS[1], *samples[1].ids]
        np.testing.assert_array_equal(found["expert_TLK"][:3], samples[0].expert_TLK)
        np.testing.assert_array_equal(found["expert_TLK"][3:], samples[1].expert_TLK)


def test_routing_that_cannot_be_is_refused(tmp_path):
    programs = programs_for(small_config(model={"moe_every": None}), 1, 8)
    batch = Batch(programs, programs.train_step.abstract)
    with pytest.raises(InputError, match="routing of a model without experts"):
        batch.submit(Request([1], 1, routing=True))
    with pytest.raises(InputError, match="`--routing` has no effect"):
        check_routing_file(str(tmp_path / "a.npz"), has_experts=False)
    for name in ("a.json", "nowhere/a.npz"):
        with pytest.raises(InputError, match="routing cannot be written"):
            check_routing_file(str(tmp_path / name), has_experts=True)
