"""Runs jobs in several threads, with a limit on the bytes that they hold at once."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

THREADS = 4
LIMIT_BYTES = 256 << 20  # what conversions hold at once, unless one tensor is larger


def map_in_flight(
    function: Callable[[Job], Result],
    jobs: Iterable[Job],
    size_of: Callable[[Job], int],
) -> Iterator[Result]:
    """Yields the results in the order of the jobs, which threads work on.

    A job begins when its bytes fit beside those in flight, or alone. Its bytes are in flight until
    the next result is asked for, so a caller that keeps no results holds `LIMIT_BYTES` at most, or
    the bytes of one job that is larger.

    Args:
      size_of: returns the bytes that a job holds, its result included.
    """
    running: deque[tuple[Future[Result], int]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            held = 0
            for job in jobs:
                size = size_of(job)
                while running and held + size > LIMIT_BYTES:
                    held -= running[0][1]
                    yield running.popleft()[0].result()
                running.append((pool.submit(function, job), size))
                held += size
            while running:
                yield running.popleft()[0].result()
        finally:
            for future, _ in running:
                future.cancel()
