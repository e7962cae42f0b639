"""Runs every program of a batch once, so that no request waits for a compiler."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from moejax.serve.batch import Batch, Request
from moejax.serve.programs import LONG, SHORT, Programs
from moejax.serve.sampling import GREEDY, Sampling

RULES = (GREEDY, Sampling(1.0), Sampling(1.0, top_p=0.5))  # one for each kind of draw


class Case(NamedTuple):
    """Prompts that enter together, and the rule of their tokens."""

    prompts: int
    length: int
    sampling: Sampling
    likeliest: int


def cases(programs: Programs) -> list[Case]:
    """Returns what makes a batch run all its programs."""
    return [
        Case(prompts, length, sampling, likeliest)
        for prompts, length in _shapes(programs)
        for likeliest in (0, 1)
        for sampling in RULES
    ]


def _shapes(programs: Programs) -> Iterator[tuple[int, int]]:
    """Yields numbers of prompts on a device and their lengths."""
    for length, kind in ((1, 1), (1, SHORT), (2 * SHORT + 1, LONG)):
        if length <= programs.positions:
            counts = sorted({programs.rows(n + 1, kind) for n in range(programs.slots)})
            yield from ((count, length) for count in counts)


def warm_up(batch: Batch, programs: Programs, tell: Callable[[int, int], None]) -> None:
    """Runs all cases.

    Args:
      tell: called before each with its number and how many there are.
    """
    every = list(dict.fromkeys(cases(programs)))
    for number, case in enumerate(every):
        tell(number + 1, len(every))
        # Enough that texts of the last call of prompts meet those of the first.
        calls = -(-case.prompts // programs.rows(programs.slots, SHORT))
        tokens = min(1 + calls, programs.positions - case.length + 1)
        request = Request(
            [0] * case.length,
            tokens,
            case.sampling,
            likeliest=case.likeliest,
            scored=case.likeliest > 0,
        )
        for _ in range(case.prompts * programs.devices):
            batch.submit(request)
        while batch.running or batch.waiting:
            batch.step()
