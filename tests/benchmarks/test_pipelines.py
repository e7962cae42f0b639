"""The closed forms and limits of a chunked, two-link dispatch and of compression, simulated."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.papers.pipelines import Stage, ideal_chunks, pipeline, pipeline_seconds
from moejax.plan.price.simulate import simulate

SECONDS = st.integers(1, 1000).map(lambda milliseconds: milliseconds / 1000)
STAGES = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=5).map(
    lambda drawn: [
        Stage(f"stage {place}", f"stream {place}", seconds, startup)
        for place, (seconds, startup) in enumerate(drawn)
    ]
)

# The most that dispatch without duplicates gains over one that sends each tensor rank's copy of a
# token across nodes, by how much faster the links inside a node are: for (tensor ranks, expert
# ranks), one after the other and overlapped. Rounded as written.
BOUNDS = {
    4: ((1.78, 2.29), (2.67, 4.00), (1.60, 2.67)),
    8: ((2.91, 4.57), (4.00, 8.00), (2.29, 4.00)),
    16: ((4.27, 8.00), (5.33, 8.00), (2.91, 4.00)),
    32: ((5.57, 8.00), (6.40, 8.00), (3.37, 4.00)),
    64: ((6.56, 8.00), (7.11, 8.00), (3.66, 4.00)),
}
RANKS = ((8, 2), (8, 8), (4, 2))
CASES = [
    (ratio, ranks, bounds)
    for ratio, row in BOUNDS.items()
    for ranks, bounds in zip(RANKS, row, strict=True)
]


def dispatch(ratio, tensor, expert):
    """Of a buffer of one second across nodes: with duplicates, and the stages without."""
    crosses = (expert - 1) / expert
    stages = [
        Stage("all-to-all", "slow", crosses / tensor),
        Stage("all-gather", "fast", (tensor - 1) / tensor / ratio),
    ]
    return crosses, stages


def run(stages, chunks):
    return simulate(pipeline(stages, chunks)).seconds


@given(stages=STAGES, chunks=st.integers(1, 40))
def test_simulated_and_in_closed_form_a_pipeline_takes_the_same(stages, chunks):
    assert run(stages, chunks) == pytest.approx(pipeline_seconds(stages, chunks), rel=1e-12)


@pytest.mark.parametrize(("ratio", "ranks", "bounds"), CASES)
def test_dispatch_without_duplicates_gains_what_the_links_allow(ratio, ranks, bounds):
    duplicated, stages = dispatch(ratio, *ranks)
    times = [stage.seconds for stage in stages]
    in_turn, overlapped = duplicated / sum(times), duplicated / max(times)
    assert (round(in_turn, 2), round(overlapped, 2)) == bounds
    assert duplicated / run(stages, 1) == pytest.approx(in_turn, rel=1e-12)
    # In k chunks the faster link adds a k-th of its time, before or after the slower one's.
    chunks = 200
    left = min(times) / chunks
    assert duplicated / (run(stages, chunks) - left) == pytest.approx(overlapped, rel=1e-12)


@given(stages=STAGES)
def test_the_best_number_of_chunks_is_beside_the_ideal_one(stages):
    def slowest(chunks):
        return max(range(len(stages)), key=lambda place: stages[place].chunk_seconds(chunks))

    last = 64
    ideal = ideal_chunks(stages, slowest(1))
    # The formula is of one slowest stage; where another takes over it says nothing.
    assume(ideal <= last - 1 and all(slowest(k) == slowest(1) for k in range(1, last + 1)))
    best = min(pipeline_seconds(stages, chunks) for chunks in range(1, last + 1))
    beside = {max(1, math.floor(ideal)), max(1, math.ceil(ideal))}
    assert min(run(stages, chunks) for chunks in beside) == pytest.approx(best, rel=1e-12)


def test_the_best_number_of_chunks_of_an_example():
    # 100 ms on the slow link with 1 ms of start-up hides 36 ms on the fast one.
    stages = [Stage("all-to-all", "slow", 0.1, 0.001), Stage("all-gather", "fast", 0.036)]
    assert ideal_chunks(stages, 0) == 6
    assert min(range(1, 17), key=lambda chunks: run(stages, chunks)) == 6
    assert ideal_chunks(stages, 1) == math.inf


def compression(size, link, ratio, encode, decode, startup=0.0):
    """Seconds of a message plain, and the stages compressed; throughputs in bytes a second."""
    stages = [
        Stage("encode", "encoder", size / encode),
        Stage("send", "link", size / (ratio * link), startup),
        Stage("decode", "decoder", size / decode),
    ]
    return startup + size / link, stages


@given(
    link=st.integers(1, 400),
    ratio=st.sampled_from([1.5, 2.0, 4.0, 8.0]),
    encode=st.integers(1, 2000),
    decode=st.integers(1, 2000),
)
def test_compression_pays_from_the_break_even_on(link, ratio, encode, decode):
    plain, stages = compression(1e3, link, ratio, encode, decode)
    gap = (1 - 1 / ratio) / link - (1 / encode + 1 / decode)
    assume(abs(gap) > 1e-9)
    assert (run(stages, 1) < plain) == (gap > 0)
    # In many chunks only the slowest stage counts; the others fill and drain.
    slowest = max(1 / encode, 1 / (ratio * link), 1 / decode)
    chunks = 20
    fill = (1 / encode + 1 / (ratio * link) + 1 / decode - slowest) / chunks
    assert run(stages, chunks) == pytest.approx(1e3 * (slowest + fill), rel=1e-12)
    gap = 1 / link - slowest - fill
    assume(abs(gap) > 1e-9)
    assert (run(stages, chunks) < plain) == (gap > 0)


@pytest.mark.parametrize(("link", "needed"), [(25e9, 50e9), (200e9, 400e9)])
def test_codecs_of_ratio_two_need_twice_the_speed_of_the_link(link, needed):
    # Encoder and decoder together: 1/Q = 1/Qc + 1/Qd.
    for speed, pays in ((0.99, False), (1.01, True)):
        plain, stages = compression(1e9, link, 2.0, 2 * needed * speed, 2 * needed * speed)
        assert (run(stages, 1) < plain) == pays
