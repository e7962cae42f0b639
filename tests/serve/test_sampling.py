"""Draws against NumPy: which tokens are kept, how often each is drawn, and what decides a draw."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.errors import InputError
from moejax.serve.sampling import NOT_FINITE, Draws, Sampling, draw, kept

LOGITS = np.log(np.array([0.05, 0.3, 0.2, 0.02, 0.3, 0.13]))


def drawn(logit_RV, number_R, position_R, samplings, allowed):
    """Tokens of rows, each by its own rule or all by one."""
    rows = len(logit_RV)
    samplings = [samplings] * rows if isinstance(samplings, Sampling) else samplings
    columns = zip(
        *((s.temperature, s.top_k or rows + 99, s.top_p, s.min_p, s.seed) for s in samplings),
        strict=True,
    )
    dtypes = (np.float32, np.int32, np.float32, np.float32, np.uint32)
    rules = (np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True))
    draws = Draws(*rules, np.asarray(number_R, np.int32), np.asarray(position_R, np.int32))
    kinds = [s.temperature > 0 and 1 + s.filters for s in samplings]
    kind = ("greedy", "all", "filtered")[max(kinds)]
    logit_RV = jnp.asarray(logit_RV, jnp.float32)
    draws = Draws(*map(jnp.asarray, draws))
    return np.asarray(draw(logit_RV, draws, kind=kind, allowed=allowed, likeliest=0).token_R)


def kept_by_numpy(logit_V, top_k, top_p, min_p=0.0):
    """The ids that are kept, likeliest first."""
    order = sorted(range(len(logit_V)), key=lambda v: (-logit_V[v], v))[:top_k]
    chances = np.exp(logit_V[order]) / np.exp(logit_V[order]).sum()
    found, mass = [], 0.0
    for token, chance in zip(order, chances, strict=True):
        if mass >= top_p:
            break
        if chance >= min_p * chances[0]:
            found.append(token)
        mass += chance
    return found


@pytest.mark.parametrize("top_k", [None, 1, 2, 6, 9])
# 0.45 tells the mass of the top_k from that of all tokens: of two equal ones it keeps one.
@pytest.mark.parametrize("top_p", [0.01, 0.45, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.5, 1.0])
def test_kept_tokens_are_those_of_numpy(top_k, top_p, min_p):
    rows = np.stack([LOGITS, LOGITS[::-1], LOGITS * 3]).astype(np.float32)
    rules = (np.full(3, top_k or 6), np.full(3, top_p), np.full(3, min_p, np.float32))
    found = np.asarray(kept(jnp.asarray(rows), *map(jnp.asarray, rules)))
    for logit_V, keep_V in zip(rows, found, strict=True):
        wanted = kept_by_numpy(logit_V.astype(np.float64), top_k, top_p, min_p)
        assert np.flatnonzero(keep_V).tolist() == sorted(wanted)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.6, seed=3),
        Sampling(1.5, 4),
        Sampling(0.8, 5, 0.7),
        Sampling(1.0, min_p=0.5),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(sampling):
    draws = 20_000
    rows = np.tile(LOGITS, (draws, 1))
    # As if 200 prompts were continued by 100 tokens.
    number, position = np.divmod(np.arange(draws, dtype=np.int32), 100)
    token_B = drawn(rows, number, position, sampling, 6)
    scaled = LOGITS / sampling.temperature
    ids = kept_by_numpy(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    chance_V = np.zeros(6)
    chance_V[ids] = np.exp(scaled[ids]) / np.exp(scaled[ids]).sum()
    count_V = np.bincount(token_B, minlength=6)
    deviation_V = np.sqrt(draws * chance_V * (1 - chance_V))
    assert np.all(np.abs(count_V - draws * chance_V) <= 4 * deviation_V)


def test_a_draw_depends_on_seed_row_and_position_alone():
    logits = np.random.default_rng(0).standard_normal((64, 40)).astype(np.float32)
    row, position = np.arange(64, dtype=np.int32), np.arange(64, dtype=np.int32) % 5

    def found(order, seed=1, rows=row, positions=position):
        chosen = (x[order] for x in (logits, rows, positions))
        return drawn(*chosen, Sampling(1.0, seed=seed), 40)

    own, back = np.arange(64), np.arange(64)[::-1]
    np.testing.assert_array_equal(found(back), found(own)[back])
    np.testing.assert_array_equal(found(own[:7]), found(own)[:7])
    assert np.mean(found(own, seed=2) != found(own)) > 0.5
    assert np.mean(found(own, rows=row + 64) != found(own)) > 0.5
    assert np.mean(found(own, positions=position + 5) != found(own)) > 0.5


def test_rows_with_rules_of_their_own_are_drawn_as_alone():
    """A row that takes the likeliest token beside one that draws, and one that filters."""
    logits = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    rules = [Sampling(), Sampling(1.0, seed=4), Sampling(1.5, 5, 0.9, 0.1, seed=7)]
    number, position = np.array([0, 3, 9]), np.array([5, 6, 7])
    together = drawn(logits, number, position, rules, 40)
    for row, rule in enumerate(rules):
        own = slice(row, row + 1)
        assert drawn(logits[own], number[own], position[own], rule, 40) == together[own]
    assert together[0] == logits[0].argmax()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_is_never_drawn(temperature):
    logits = jnp.asarray(np.tile([0.0, 1.0, 9.0, 9.0], (50, 1)), jnp.float32)
    number = jnp.arange(50, dtype=jnp.int32)
    token_B = drawn(logits, number, number, Sampling(temperature), 2)
    assert set(token_B.tolist()) <= {0, 1}
    assert temperature > 0 or np.all(token_B == 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_token(temperature):
    logits = jnp.asarray([[0.0, np.nan], [0.0, np.inf], [1.0, 0.0]], jnp.float32)
    number = jnp.zeros(3, jnp.int32)
    token_B = drawn(logits, number, number, Sampling(temperature), 2)
    assert token_B[:2].tolist() == [NOT_FINITE] * 2
    assert token_B[2] >= 0


def test_the_likeliest_token_stays_however_small_top_p_is():
    """1e-46 is zero in float32."""
    logit_RV = np.log(np.array([[0.2, 0.1, 0.6, 0.1]] * 8, np.float32))
    samplings = [Sampling(1.0, None, 1e-46, seed=seed) for seed in range(8)]
    token_R = drawn(logit_RV, range(8), range(8), samplings, 4)
    assert np.asarray(token_R).tolist() == [2] * 8


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(-1.0), "`--temperature` is out of range. Got -1.0"),
        (Sampling(float("nan")), "`--temperature` is out of range"),
        (Sampling(1.0, 0), "`--top-k` is out of range. Got 0"),
        (Sampling(1.0, None, 0.0), "`--top-p` is out of range. Got 0.0"),
        (Sampling(1.0, None, 1.5), "`--top-p` is out of range. Got 1.5"),
        (Sampling(1.0, min_p=-0.1), "`--min-p` is out of range. Got -0.1"),
        (Sampling(float("inf")), "`--temperature` is out of range"),
        (Sampling(0.0, min_p=0.5), "have no effect"),
        (Sampling(1.0, seed=-1), "`--seed` is out of range"),
        (Sampling(1.0, 2**31), "`--top-k` is out of range"),
        (Sampling(0.0, 5), "have no effect"),
        (Sampling(0.0, None, 0.5), "have no effect"),
    ],
)
def test_what_is_out_of_range_is_refused(sampling, said):
    with pytest.raises(InputError, match=said):
        sampling.check()
