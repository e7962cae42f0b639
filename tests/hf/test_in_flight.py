"""Bytes in flight: never more than the limit, unless one job alone is larger."""

import threading

import pytest

from moejax.hf import in_flight
from moejax.hf.in_flight import map_in_flight


class Meter:
    """Counts the bytes of jobs that have begun and whose results were not yet used up."""

    def __init__(self):
        self.lock, self.held, self.peak = threading.Lock(), 0, 0

    def begin(self, size):
        with self.lock:
            self.held += size
            self.peak = max(self.peak, self.held)
        return size

    def end(self, size):
        with self.lock:
            self.held -= size


@pytest.mark.parametrize(
    ("sizes", "limit", "peak"),
    [
        ([1] * 50, 10, 10),
        ([3] * 20, 10, 9),
        ([1, 100, 1, 100, 1], 10, 100),
        ([100, 200, 150], 10, 200),
        ([5, 5, 5], 1000, 15),
        ([], 10, 0),
    ],
)
def test_bytes_in_flight_are_bounded(monkeypatch, sizes, limit, peak):
    monkeypatch.setattr(in_flight, "LIMIT_BYTES", limit)
    meter, found = Meter(), []
    for size in map_in_flight(meter.begin, sizes, lambda size: size):
        found.append(size)
        meter.end(size)
    assert found == sizes
    assert meter.peak <= peak
    assert meter.held == 0


def test_jobs_run_beside_each_other():
    barrier = threading.Barrier(4, timeout=10)
    done = map_in_flight(lambda _: barrier.wait(), range(4), lambda _: 1)
    assert sorted(done) == [0, 1, 2, 3]


def test_an_error_ends_the_work(monkeypatch):
    monkeypatch.setattr(in_flight, "LIMIT_BYTES", 10)
    begun = []

    def work(job):
        begun.append(job)
        if job == 3:
            raise OSError("no")
        return job

    results = map_in_flight(work, range(1000), lambda _: 1)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="no"):
        next(results)
    assert len(begun) <= 14
