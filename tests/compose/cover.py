"""Draws combinations until each pair of features was in one, or is refused by name.

A pair of features that round nothing counts where the whole combination rounds nothing: only there
is a wrong number seen.
"""

import functools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, product
from types import MappingProxyType

from moejax.errors import InputError
from tests.compose.features import (
    FACTORS,
    ROUNDED,
    Combination,
    check_combination,
    is_rounded,
    plain,
)

Feature = tuple[str, str]  # factor, feature
Pair = frozenset[Feature]

CANDIDATES = 5  # combinations of which the one that covers most is taken
# Factors that others need: a route needs experts on several devices, a codec several nodes.
CONTEXT = ("mesh", "nodes", "stages", "micro-batches", "layout")


def all_pairs() -> set[Pair]:
    """Every pair of features of different factors."""
    features = [[(factor, feature) for feature in FACTORS[factor]] for factor in FACTORS]
    return {
        frozenset(pair) for both in combinations(features, 2) for pair in product(both[0], both[1])
    }


def pairs_of(combination: Combination) -> set[Pair]:
    """The pairs that a combination covers; of a factor that it does not name it has the first."""
    whole = (dict(plain()) | dict(combination)).items()
    pairs = {frozenset(pair) for pair in combinations(whole, 2)}
    if not is_rounded(combination):
        return pairs
    return {pair for pair in pairs if pair & ROUNDED}


def plan(
    seed: int, done: Iterable[Combination] = (), known: Mapping[Pair, str] = MappingProxyType({})
) -> tuple[list[Combination], dict[Pair, str]]:
    """Returns combinations that cover all pairs, and the pairs that are refused, with the message.

    The same for the same seed and `done`. Each combination covers the most of what those before it
    left.

    Args:
      done: combinations that have run: what they cover is not covered again.
      known: pairs that were refused. Whether they are in every context, which takes minutes, is not
        asked again, as long as they are without one.
    """
    known = {pair: message for pair, message in known.items() if _refusal(_with(plain(), *pair))}
    drawn = list(draw(seed, done, known))
    refused = known | {one[0]: one[1] for one in drawn if isinstance(one[1], str)}
    left, ordered = all_pairs() - set(refused), []
    left -= set().union(*map(pairs_of, done))
    covers = {one: pairs_of(one) for one in drawn if not isinstance(one[1], str)}
    while left:
        best = max(covers, key=lambda one: len(covers[one] & left))
        left -= covers.pop(best)
        ordered.append(best)
    return ordered, refused


def draw(
    seed: int, done: Iterable[Combination] = (), known: Iterable[Pair] = ()
) -> Iterator[Combination | tuple[Pair, str]]:
    """Yields combinations that cover ever more pairs, and pairs that are refused, with the message.

    The same for the same seed. Ends when no pair is left.

    Args:
      done: combinations whose pairs are covered.
      known: pairs that are refused.
    """
    rng = random.Random(seed)
    left = all_pairs().difference(known, *map(pairs_of, done))
    while left:
        pair = rng.choice(sorted(left, key=sorted))
        found = _around(pair, rng)
        if isinstance(found, str):
            left.discard(pair)
            yield pair, found
            continue
        found = _filled(found, pair, left, rng)
        covered = pairs_of(found)
        assert pair in covered
        left -= covered
        yield found


def _around(pair: Pair, rng: random.Random) -> Combination | str:
    """Returns a combination with the pair that is not refused, or the message that refuses it."""
    simple = _with(plain(), *pair)
    if _refusal(simple) is None:
        return simple
    fixed = {factor for factor, _ in pair}
    free = [factor for factor in CONTEXT if factor not in fixed]
    contexts = list(product(*(product([factor], FACTORS[factor]) for factor in free)))
    rng.shuffle(contexts)
    for context in contexts:
        tried = _with(simple, *context)
        if _refusal(tried) is None:
            return tried
    return _best_message(pair, simple, contexts)


def _best_message(pair: Pair, simple: Combination, contexts: list) -> str:
    """The message of all contexts that names most of the pair's settings, and is met most often."""
    messages = Counter(filter(None, (_refusal(_with(simple, *context)) for context in contexts)))
    settings = [list(FACTORS[factor][feature]) for factor, feature in pair]

    def named(message: str) -> tuple[int, int]:
        return sum(any(f"`{s}`" in message for s in own) for own in settings), messages[message]

    return max(messages, key=named)


def _filled(found: Combination, pair: Pair, left: set[Pair], rng: random.Random) -> Combination:
    """Returns the best of some combinations that have other features beside the pair."""
    candidates = [_filled_once(found, pair, left, rng) for _ in range(CANDIDATES)]
    return max(candidates, key=lambda candidate: len(pairs_of(candidate) & left))


def _filled_once(
    found: Combination, pair: Pair, left: set[Pair], rng: random.Random
) -> Combination:
    """Takes for one factor after the other what covers most with the factors before it.

    A feature that other factors still need counts a little more, and a feature that is refused with
    the others is not taken.
    """
    settled = set(pair)
    factors = [factor for factor in FACTORS if factor not in {factor for factor, _ in pair}]
    rng.shuffle(factors)
    exact = not pair & ROUNDED
    needs = Counter(feature for one in left for feature in one)
    for factor in factors:
        options = [(factor, feature) for feature in FACTORS[factor]]
        options = [option for option in options if not (exact and option in ROUNDED)]
        rng.shuffle(options)

        def gain(option: Feature) -> float:
            return sum(frozenset((option, one)) in left for one in settled) + needs[option] / 100

        for option in sorted(options, key=gain, reverse=True):
            tried = _with(found, option)
            if _refusal(tried) is None:
                found = tried
                break
        settled.add((factor, dict(found)[factor]))
    return found


def _with(combination: Combination, *features: Feature) -> Combination:
    return tuple((dict(combination) | dict(features)).items())


@functools.cache
def _refusal(combination: Combination) -> str | None:
    try:
        check_combination(combination)
    except InputError as error:
        return str(error)
    return None
