"""A random model behind the server: it says the texts and logprobs of the model alone."""

import dataclasses
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from moejax.serve.batch import Batch, Request
from moejax.serve.endpoint.worker import warm_up
from moejax.serve.samples import draw_samples
from moejax.serve.sampling import Sampling
from tests.cases import CERTAIN, small_config
from tests.serve.endpoint.serving import NAME, POSITIONS, VOCABULARY, served_model, serving
from tests.serve.models import on_mesh, programs_for, random_state

pytestmark = pytest.mark.usefixtures("unchecked_annotations")
PROMPTS = ["def ", "x", "a longer prompt of more tokens", "\u20ac"]


@functools.cache
def model():
    """Programs and weights; small, with two layers."""
    cfg = small_config(model={"vocab_size": VOCABULARY, "num_layers": 2}, moe=CERTAIN)
    programs = programs_for(cfg, slots=4, positions=POSITIONS)
    programs = dataclasses.replace(programs, allowed=257)
    return programs, on_mesh(random_state(cfg), programs)


@pytest.fixture(scope="module")
def served(unchecked_annotations):
    programs, state = model()
    cases = []

    def prepare(batch):
        warm_up(batch, programs, lambda case, of: cases.append((case, of)))

    with serving(Batch(programs, state), warm_up=prepare) as found:
        assert found.ready.wait(120)
        assert cases == [(case + 1, len(cases)) for case in range(len(cases))]
        yield found


def wanted(prompts, tokens, sampling=None, ids=False):
    """The texts of a batch alone."""
    programs, state = model()
    vocabulary = served_model().vocabulary
    encoded = [vocabulary.encode(prompt) for prompt in prompts]
    requests = [
        Request(prompt, tokens, sampling or Sampling(), vocabulary.stops, number)
        for number, prompt in enumerate(encoded)
    ]
    found = [sample.ids for sample in draw_samples(Batch(programs, state), requests)]
    if ids:
        return encoded, found
    return [vocabulary.continuation(*pair) for pair in zip(encoded, found, strict=True)]


def compiled():
    """Programs that were compiled, by function."""
    return {key: made._cache_size() for key, made in model()[0]._made.items()}


def test_no_request_compiles_anything(served):
    """Whatever number of texts of whatever rules runs together."""
    before = compiled()
    rules = [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "top_p": 0.5}]
    for count in (1, 2, 3, 4, 7):
        for rule in rules:
            for more in ({}, {"logprobs": 3}, {"logprobs": 3, "echo": True}):
                served.openai.completions.create(
                    model=NAME, prompt=["x" * (10 + count)] * count, max_tokens=3, **rule, **more
                )
    assert compiled() == before


def test_texts_are_those_of_the_batch_alone(served):
    found = served.openai.completions.create(
        model=NAME, prompt=PROMPTS, max_tokens=12, temperature=0
    )
    texts = [choice.text for choice in found.choices]
    assert texts == wanted(PROMPTS, 12)
    assert len(set(texts)) > 1
    sampling = Sampling(0.8, top_k=50, top_p=0.9, min_p=0.01, seed=11)
    found = served.openai.completions.create(
        model=NAME,
        prompt=PROMPTS,
        max_tokens=12,
        temperature=0.8,
        top_p=0.9,
        seed=11,
        extra_body={"top_k": 50, "min_p": 0.01},
    )
    assert [choice.text for choice in found.choices] == wanted(PROMPTS, 12, sampling)


def test_a_seed_repeats_texts_and_none_does_not(served):
    def ask(**more):
        found = served.openai.completions.create(
            model=NAME, prompt="def ", max_tokens=20, n=3, **more
        )
        return [choice.text for choice in found.choices]

    assert ask(seed=5) == ask(seed=5) == wanted(["def "] * 3, 20, Sampling(1.0, seed=5))
    assert len({*ask(seed=5), *ask(seed=6), *ask(), *ask()}) == 12


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_logits(served, stream):
    """Of prompt and continuation, by the forward pass without a cache."""
    programs, state = model()
    prompts, continued = wanted(PROMPTS, 6, ids=True)
    found = served.openai.completions.create(
        model=NAME,
        prompt=prompts,
        max_tokens=6,
        temperature=0,
        logprobs=5,
        echo=True,
        stream=stream,
    )
    logprobs, tops = [[] for _ in PROMPTS], [[] for _ in PROMPTS]
    for answer in found if stream else [found]:
        for choice in answer.choices:
            logprobs[choice.index] += choice.logprobs.token_logprobs
            tops[choice.index] += choice.logprobs.top_logprobs
    names = served_model().token_texts
    for index, ids in enumerate(p + c for p, c in zip(prompts, continued, strict=True)):
        token_BT = np.zeros(programs.train_step.batch_shape, np.int32)
        token_BT[0, : len(ids)] = ids
        logit_BTV = programs.logits(state, programs.place_batch(token_BT))
        logit_TV = np.asarray(logit_BTV)[0].astype(np.float64)
        log_TV = logit_TV - np.log(np.exp(logit_TV).sum(-1, keepdims=True))
        assert (logprobs[index][0], tops[index][0]) == (None, None)
        own = [log_TV[place, id] for place, id in enumerate(ids[1:])]
        np.testing.assert_allclose(logprobs[index][1:], own, atol=1e-5)
        for place, top in enumerate(tops[index][1:]):
            order = np.argsort(-log_TV[place, :257])[:5]
            best = {names(int(id)): log_TV[place, id] for id in order}
            best.setdefault(names(ids[place + 1]), own[place])
            assert top == pytest.approx(best, abs=1e-5)


def test_clients_at_the_same_time_get_the_texts_that_they_get_alone(served):
    rules = [
        {"prompt": prompt, "max_tokens": 10 + 7 * number, "temperature": temperature, "seed": 3}
        for number, prompt in enumerate(PROMPTS)
        for temperature in (0, 1)
    ]

    def ask(rule):
        found = served.openai.completions.create(model=NAME, logprobs=2, echo=True, **rule)
        return found.choices[0].text, found.choices[0].logprobs.tokens

    alone = [ask(rule) for rule in rules]
    assert len(set(map(str, alone))) == len(rules)
    barrier = threading.Barrier(len(rules))

    def ask_together(rule):
        barrier.wait()
        return ask(rule)

    with ThreadPoolExecutor(len(rules)) as pool:
        assert list(pool.map(ask_together, rules)) == alone


def test_a_chat_is_the_prompt_that_the_template_writes(served):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    found = served.openai.chat.completions.create(
        model=NAME, messages=messages, max_tokens=12, temperature=0
    )
    ids = list(b"<s>s<u>u<a>")
    same = served.openai.completions.create(model=NAME, prompt=ids, max_tokens=12, temperature=0)
    assert found.choices[0].message.content == same.choices[0].text
    assert found.usage.prompt_tokens == len(ids)


def test_the_longest_text_fits(served):
    found = served.openai.completions.create(
        model=NAME, prompt=[5] * (POSITIONS - 3), max_tokens=3, temperature=0
    )
    assert found.usage.total_tokens == POSITIONS
