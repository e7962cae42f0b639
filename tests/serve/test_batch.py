"""Texts that run together: each is as it is alone, on any mesh, whatever comes and goes."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.errors import InputError, RunError
from moejax.runtime.processes import Processes
from moejax.serve import programs as serve_programs
from moejax.serve.batch import Batch, Request
from moejax.serve.samples import draw_samples
from moejax.serve.sampling import Sampling
from tests.cases import small_config
from tests.serve.models import on_mesh, programs_for, random_state

LATENT = {"attention": "latent", "head_width": 6, "rope_width": 2, "value_width": 4}
LATENT |= {"kv_latent": 16}
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8], [40, 41, 42, 43]]
TOKENS = 6


@functools.cache
def engine_and_state(mesh=(1, 1, 1, 1), slots=4):
    """A random latent model."""
    cfg = small_config(mesh, model=LATENT)
    programs = programs_for(cfg, slots, 64)
    return programs, on_mesh(random_state(cfg), programs)


def requests_of(prompts, sampling=None, tokens=TOKENS, stops=()):
    sampling = sampling or Sampling()
    return [
        Request(ids, tokens, sampling, frozenset(stops), number)
        for number, ids in enumerate(prompts)
    ]


def texts(programs, state, requests):
    return [sample.ids for sample in draw_samples(Batch(programs, state), requests)]


@functools.cache
def greedy():
    return texts(*engine_and_state(), requests_of(PROMPTS))


def test_prompts_of_different_lengths_are_continued_as_each_alone():
    programs, state = engine_and_state()
    together = greedy()
    assert [len(ids) for ids in together] == [TOKENS] * 4
    assert [texts(programs, state, requests_of([prompt]))[0] for prompt in PROMPTS] == together
    # More prompts than slots: a free slot takes the next one.
    assert texts(programs, state, requests_of(PROMPTS + PROMPTS[:2])) == together + together[:2]


def test_a_text_ends_at_a_stop_and_the_others_go_on():
    programs, state = engine_and_state()
    together = greedy()
    stop = together[0][2]
    cut = [ids[: ids.index(stop)] if stop in ids else ids for ids in together]
    assert len(cut[0]) <= 2
    assert texts(programs, state, requests_of(PROMPTS, stops=[stop])) == cut
    every = {ids[0] for ids in together}
    assert texts(programs, state, requests_of(PROMPTS, stops=every)) == [[]] * 4
    assert texts(programs, state, requests_of(PROMPTS, tokens=1)) == [ids[:1] for ids in together]


def test_a_seed_decides_the_texts():
    programs, state = engine_and_state()
    drawn = functools.partial(requests_of, sampling=Sampling(1.0, seed=5))
    found = texts(programs, state, drawn(PROMPTS))
    assert texts(programs, state, drawn(PROMPTS)) == found
    assert texts(programs, state, requests_of(PROMPTS, Sampling(1.0, seed=6))) != found
    assert texts(programs, state, drawn(PROMPTS[:1])) == found[:1]
    assert greedy() != found
    both = texts(programs, state, drawn(PROMPTS + PROMPTS))
    assert both[:4] == found
    assert all(one != other for one, other in zip(both[4:], found, strict=True))


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_seed_decides_the_texts_on_any_mesh():
    requests = requests_of(PROMPTS, Sampling(1.0, seed=5))
    found = texts(*engine_and_state(), requests)
    assert texts(*engine_and_state((1, 1, 2, 2)), requests) == found


def test_a_request_waits_for_a_free_slot_and_not_for_the_end_of_all():
    """Two slots, a long text and three short ones, which follow each other in the other slot."""
    programs, state = engine_and_state(slots=2)
    batch = Batch(programs, state)
    long = batch.submit(Request([1, 2, 3], 30))
    short = [batch.submit(Request([n], 3)) for n in range(4, 7)]
    ended = []
    while batch.running or batch.waiting:
        ended += [event.key for event in batch.step() if event.ended]
        assert batch.running <= 2
    assert ended == [*short, long]


def test_a_prompt_in_pieces_lets_others_grow_between_them(monkeypatch):
    """A text that has begun gets a token at every step while a prompt of five pieces enters."""
    for name in ("SHORT", "LONG"):
        monkeypatch.setattr(f"moejax.serve.batch.{name}", 8)
        monkeypatch.setattr(serve_programs, name, 8)
    programs, state = engine_and_state()
    batch = Batch(programs, state)
    first = batch.submit(Request([3], 20))
    batch.step()
    prompt = (np.arange(40) % 50).tolist()
    second = batch.submit(Request(prompt, 4))
    news = [batch.step() for _ in range(5)]
    assert [[event.key for event in events] for events in news] == [[first]] * 4 + [[second, first]]
    whole = texts(programs, state, [Request(prompt, 4)])
    found = [token.id for event in news[-1] if event.key == second for token in event.tokens]
    while batch.running:
        found += [t.id for event in batch.step() if event.key == second for t in event.tokens]
    assert [found] == whole


def test_chances_are_those_of_the_logits():
    """Of prompt and continuation, by the forward pass without a cache."""
    programs, state = engine_and_state()
    prompt = PROMPTS[1]
    batch = Batch(programs, state)
    key = batch.submit(Request(prompt, 3, likeliest=4, scored=True))
    batch.submit(Request([9], 3))
    found = []
    while batch.running or batch.waiting:
        for event in batch.step():
            found += [*event.scored, *event.tokens] if event.key == key else []
    ids = prompt + [token.id for token in found[len(prompt) - 1 :]]
    assert [token.id for token in found] == ids[1:]
    token_BT = np.zeros(programs.train_step.batch_shape, np.int32)
    token_BT[0, : len(ids)] = ids
    logit_BTV = programs.logits(state, programs.place_batch(token_BT))
    logit_TV = np.asarray(logit_BTV)[0].astype(np.float64)
    log_TV = logit_TV - np.log(np.exp(logit_TV).sum(-1, keepdims=True))
    for place, token in enumerate(found):
        log_V = log_TV[place]
        assert token.logprob == pytest.approx(log_V[token.id], abs=1e-5)
        wanted = np.sort(log_V)[::-1][:4]
        np.testing.assert_allclose([chance for _, chance in token.likeliest], wanted, atol=1e-5)
        assert [log_V[id] for id, _ in token.likeliest] == pytest.approx(wanted, abs=1e-5)


def test_a_prompt_is_scored_without_a_token_behind_it():
    programs, state = engine_and_state()
    batch = Batch(programs, state)
    batch.submit(Request([1, 2, 3], 0, scored=True))
    (event,) = batch.step()
    assert (event.ended, event.tokens, len(event.scored)) == ("length", (), 2)
    assert batch.running == 0


def test_a_text_that_no_slot_holds_is_refused():
    """64 positions; the last token that is drawn needs none."""
    programs, state = engine_and_state()
    batch = Batch(programs, state)
    for ids, tokens in (([], 3), ([1] * 65, 0), ([1] * 64, 2), ([1], 65)):
        with pytest.raises(InputError, match=r"no token|too long"):
            batch.submit(Request(ids, tokens))
    assert batch.waiting == 0
    assert len(texts(programs, state, [Request([1] * 63, 2)])[0]) == 2
    assert len(texts(programs, state, [Request([1], 64)])[0]) == 64


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.lists(st.integers(0, 63), min_size=1, max_size=9)),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
        st.tuples(st.just("step"), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(EVENTS)
def test_a_text_is_the_same_whatever_comes_and_goes(events):
    """Requests are made and given up at any time; every text that ends is as it is alone."""
    programs, state = engine_and_state(slots=2)
    batch, keys, found, gone, ended = Batch(programs, state), [], {}, set(), set()

    def step():
        for event in batch.step():
            assert event.key not in gone | ended, "a text that ended has no news"
            found[event.key] += [token.id for token in event.tokens]
            ended.update([event.key] if event.ended else [])

    for kind, value in events:
        if kind == "submit":
            keys.append((batch.submit(Request(value, 4)), tuple(value)))
            found[keys[-1][0]] = []
        elif kind == "cancel" and value < len(keys):
            batch.cancel(keys[value][0])
            gone |= {keys[value][0]} - ended
        elif kind == "step":
            for _ in range(value):
                step()
    while batch.running or batch.waiting:
        step()
    assert ended == {key for key, _ in keys} - gone
    for key, prompt in keys:
        whole = alone(prompt)
        assert found[key] == (whole if key in ended else whole[: len(found[key])])


@functools.cache
def alone(prompt):
    return texts(*engine_and_state(slots=2), [Request(prompt, 4)])[0]


def test_several_processes_compile_a_function_before_it_is_called(monkeypatch):
    """One that compiles while the others are in a collective lets them wait."""
    programs, state = engine_and_state()
    monkeypatch.setattr(Processes, "gather", lambda self, value: [value] * self.count)
    processes = Processes(0, 2)
    batch = Batch(programs, state, processes)
    (found,) = draw_samples(batch, requests_of([[5]]))
    assert found.ids == greedy()[0]
    assert set(processes._compiled) == {
        programs.extend(False),
        programs.draw("greedy", 0),
    }


def test_logits_that_are_not_finite_are_told():
    programs, state = engine_and_state()
    broken = state._replace(params=jax.tree.map(lambda x: x * np.float32(np.nan), state.params))
    with pytest.raises(RunError, match=r"logits are not finite\. They continue prompt 0"):
        texts(programs, broken, requests_of(PROMPTS[:1]))
