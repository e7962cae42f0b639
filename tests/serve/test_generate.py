"""Tokens that continue prompts: the same alone and in a batch, on any mesh, from a seed."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moejax.errors import RunError
from moejax.runtime.processes import Processes
from moejax.serve.generate import generate
from moejax.serve.sampling import Sampling
from tests.cases import small_config
from tests.serve.models import engine_for, on_mesh, random_state

LATENT = {"attention": "latent", "head_width": 6, "rope_width": 2, "value_width": 4}
LATENT |= {"kv_latent": 16}
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8], [40, 41, 42, 43]]
TOKENS = 6


@functools.cache
def engine_and_state(mesh=(1, 1, 1, 1)):
    """A random latent model, whose programs take four rows."""
    cfg = small_config(mesh, model=LATENT)
    engine = engine_for(cfg, PROMPTS, TOKENS, Sampling(1.0, seed=5))
    return engine, on_mesh(random_state(cfg), engine)


def texts(engine, state, prompts, stops=(), tokens=TOKENS):
    found = [[] for _ in prompts]
    for token in generate(engine, state, prompts, tokens=tokens, stops=frozenset(stops)):
        found[token.prompt].append(token.id)
    return found


@functools.cache
def greedy():
    """The engine that draws nothing, and what it continues."""
    engine, state = engine_and_state()
    engine = with_sampling(engine, Sampling())
    return engine, state, texts(engine, state, PROMPTS)


def with_sampling(engine, sampling):
    """The engine with another draw, and the programs that do not depend on it."""
    other = dataclasses.replace(engine, sampling=sampling)
    other.__dict__.update({name: getattr(engine, name) for name in ("prefill", "decode")})
    return other


def test_prompts_of_different_lengths_are_continued_as_each_alone():
    engine, state, together = greedy()
    assert [len(ids) for ids in together] == [TOKENS] * 4
    assert [texts(engine, state, [prompt])[0] for prompt in PROMPTS] == together
    # More prompts than rows go in two batches.
    assert texts(engine, state, PROMPTS + PROMPTS[:2]) == together + together[:2]


def test_a_text_ends_at_a_stop_and_the_others_go_on():
    engine, state, together = greedy()
    stop = together[0][2]
    cut = [ids[: ids.index(stop)] if stop in ids else ids for ids in together]
    assert len(cut[0]) <= 2
    assert texts(engine, state, PROMPTS, stops=[stop]) == cut
    every = {ids[0] for ids in together}
    assert texts(engine, state, PROMPTS, stops=every) == [[]] * 4
    assert texts(engine, state, PROMPTS, tokens=1) == [ids[:1] for ids in together]


def test_a_seed_decides_the_texts():
    engine, state = engine_and_state()
    found = texts(engine, state, PROMPTS)
    assert texts(engine, state, PROMPTS) == found
    assert texts(with_sampling(engine, Sampling(1.0, seed=6)), state, PROMPTS) != found
    assert texts(engine, state, PROMPTS[:1]) == found[:1]
    assert greedy()[2] != found
    # A second batch draws by the numbers of its own prompts, not by those of the first.
    both = texts(engine, state, PROMPTS + PROMPTS)
    assert both[:4] == found
    assert all(one != other for one, other in zip(both[4:], found, strict=True))


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_seed_decides_the_texts_on_any_mesh():
    found = texts(*engine_and_state(), PROMPTS)
    assert texts(*engine_and_state((1, 1, 2, 2)), PROMPTS) == found


def test_several_processes_compile_all_functions_before_the_first_is_called(monkeypatch):
    """One that compiles while the others are in a collective lets them wait."""
    engine, state, together = greedy()
    monkeypatch.setattr(Processes, "gather", lambda self, value: [value] * self.count)
    processes = Processes(0, 2)
    found = generate(engine, state, PROMPTS, tokens=TOKENS, stops=frozenset(), processes=processes)
    first = next(found)
    assert (first.prompt, first.id) == (0, together[0][0])
    assert set(processes._compiled) == {engine.prefill, engine.decode, engine.draw}


def test_logits_that_are_not_finite_are_told():
    engine, state, _ = greedy()
    broken = state._replace(params=jax.tree.map(lambda x: x * np.float32(np.nan), state.params))
    with pytest.raises(RunError, match=r"logits are not finite\. They continue prompt 0"):
        texts(engine, broken, PROMPTS[:1])
