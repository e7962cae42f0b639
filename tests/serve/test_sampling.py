"""Draws against NumPy: which tokens are kept, how often each is drawn, and what decides a draw."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.errors import InputError
from moejax.serve.sampling import NOT_FINITE, Sampling, draw, kept

LOGITS = np.log(np.array([0.05, 0.3, 0.2, 0.02, 0.3, 0.13]))


def kept_by_numpy(logit_V, top_k, top_p):
    """The ids that are kept, likeliest first."""
    order = sorted(range(len(logit_V)), key=lambda v: (-logit_V[v], v))[:top_k]
    chances = np.exp(logit_V[order]) / np.exp(logit_V[order]).sum()
    found, mass = [], 0.0
    for token, chance in zip(order, chances, strict=True):
        if mass >= top_p:
            break
        found.append(token)
        mass += chance
    return found


@pytest.mark.parametrize("top_k", [None, 1, 2, 6, 9])
# 0.45 tells the mass of the top_k from that of all tokens: of two equal ones it keeps one.
@pytest.mark.parametrize("top_p", [0.01, 0.45, 0.9, 1.0])
def test_kept_tokens_are_those_of_numpy(top_k, top_p):
    rows = np.stack([LOGITS, LOGITS[::-1], LOGITS * 3]).astype(np.float32)
    found = np.asarray(kept(jnp.asarray(rows), top_k, top_p))
    for logit_V, keep_V in zip(rows, found, strict=True):
        wanted = kept_by_numpy(logit_V.astype(np.float64), top_k, top_p)
        assert np.flatnonzero(keep_V).tolist() == sorted(wanted)


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.6, seed=3), Sampling(1.5, 4), Sampling(0.8, 5, 0.7)]
)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(sampling):
    draws = 20_000
    rows = jnp.tile(jnp.asarray(LOGITS, jnp.float32), (draws, 1))
    # As if 200 prompts were continued by 100 tokens.
    number, position = np.divmod(np.arange(draws, dtype=np.int32), 100)
    token_B = np.asarray(draw(rows, jnp.asarray(number), jnp.asarray(position), sampling, 6))
    scaled = LOGITS / sampling.temperature
    ids = kept_by_numpy(scaled, sampling.top_k, sampling.top_p)
    chance_V = np.zeros(6)
    chance_V[ids] = np.exp(scaled[ids]) / np.exp(scaled[ids]).sum()
    count_V = np.bincount(token_B, minlength=6)
    deviation_V = np.sqrt(draws * chance_V * (1 - chance_V))
    assert np.all(np.abs(count_V - draws * chance_V) <= 4 * deviation_V)


def test_a_draw_depends_on_seed_row_and_position_alone():
    logits = np.random.default_rng(0).standard_normal((64, 40)).astype(np.float32)
    row, position = np.arange(64, dtype=np.int32), np.arange(64, dtype=np.int32) % 5

    def drawn(order, seed=1, rows=row, positions=position):
        chosen = (jnp.asarray(x[order]) for x in (logits, rows, positions))
        return np.asarray(draw(*chosen, Sampling(1.0, seed=seed), 40))

    own, back = np.arange(64), np.arange(64)[::-1]
    np.testing.assert_array_equal(drawn(back), drawn(own)[back])
    np.testing.assert_array_equal(drawn(own[:7]), drawn(own)[:7])
    assert np.mean(drawn(own, seed=2) != drawn(own)) > 0.5
    assert np.mean(drawn(own, rows=row + 64) != drawn(own)) > 0.5
    assert np.mean(drawn(own, positions=position + 5) != drawn(own)) > 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_is_never_drawn(temperature):
    logits = jnp.asarray(np.tile([0.0, 1.0, 9.0, 9.0], (50, 1)), jnp.float32)
    number = jnp.arange(50, dtype=jnp.int32)
    token_B = np.asarray(draw(logits, number, number, Sampling(temperature), 2))
    assert set(token_B.tolist()) <= {0, 1}
    assert temperature > 0 or np.all(token_B == 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_token(temperature):
    logits = jnp.asarray([[0.0, np.nan], [0.0, np.inf], [1.0, 0.0]], jnp.float32)
    number = jnp.zeros(3, jnp.int32)
    token_B = np.asarray(draw(logits, number, number, Sampling(temperature), 2))
    assert token_B[:2].tolist() == [NOT_FINITE] * 2
    assert token_B[2] >= 0


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(-1.0), "`--temperature` is out of range. Got -1.0"),
        (Sampling(float("nan")), "`--temperature` is out of range"),
        (Sampling(1.0, 0), "`--top-k` is out of range. Got 0"),
        (Sampling(1.0, None, 0.0), "`--top-p` is out of range. Got 0.0"),
        (Sampling(1.0, None, 1.5), "`--top-p` is out of range. Got 1.5"),
        (Sampling(1.0, seed=-1), "`--seed` is out of range"),
        (Sampling(0.0, 5), "have no effect"),
        (Sampling(0.0, None, 0.5), "have no effect"),
    ],
)
def test_what_is_out_of_range_is_refused(sampling, said):
    with pytest.raises(InputError, match=said):
        sampling.check()
