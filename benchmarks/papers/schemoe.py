"""ScheMoE: the order of compute in a compressed, chunked MoE layer, and the ablation of Table 10.

Of each of r parts: compress, all-to-all, decompress, expert, compress, all-to-all, decompress; the
all-to-alls on the link, in the order in which they become ready, the rest on compute. The paper's
theorem says which order of compute is the best: all first compressions; then decompress, expert and
compress of one part after another; then all last decompressions.

The ablation prints four totals and no time of any operation. Two numbers are fitted, to the first
two totals: all-to-alls and experts, with ZFP's 8 of 32 bits a value and a codec that costs nothing.
The other two totals are predicted with the printed 1.4 that Pipe-A2A gains on large messages, and
with the theorem's order of two parts.

Source: Shi et al., ScheMoE (EuroSys 2024), Table 10 (32 RTX 2080 Ti). Times in ms.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.papers.comparison import Comparison
from moejax.plan.price.simulate import Task, simulate

NAIVE_MS, COMPRESSED_MS, PIPED_MS, SCHEDULED_MS = 2401, 1264, 1110, 1019
BITS_KEPT = 8 / 32
PIPE_GAIN = 1.4
PARTS = 2

COMPUTE_STAGES = ("compress", "decompress", "expert", "compress again", "decompress again")
Order = tuple[tuple[int, int], ...]  # (part, stage), as compute takes them


@dataclass(frozen=True)
class Part:
    """Times of one part."""

    compress: float
    exchange: float
    decompress: float
    expert: float

    def compute(self, stage: int) -> float:
        """Of the compute stage of this number."""
        return (self.compress, self.decompress, self.expert, self.compress, self.decompress)[stage]


def tasks(part: Part, order: Order) -> list[Task]:
    """A layer whose compute is done in this order, waiting where the next in order is not ready."""
    listed: list[Task] = []
    arrival: dict[tuple[int, int], int] = {}  # of a part, by the compute stage that waits for it
    last = ()
    for number, stage in order:
        after = last + ((arrival[number, stage],) if stage in (1, 4) else ())
        last = (len(listed),)
        listed.append(Task(COMPUTE_STAGES[stage], "compute", part.compute(stage), after))
        if stage in (0, 3):
            arrival[number, stage + 1] = len(listed)
            listed.append(Task("all-to-all", "net", part.exchange, last))
    return listed


def seconds(part: Part, order: Order) -> float:
    """How long the layer takes, in the unit of the part's times."""
    return simulate(tasks(part, order)).seconds


def theorem_order(parts: int) -> Order:
    """The order of the paper's theorem."""
    numbers = range(parts)
    middle = [(number, stage) for number in numbers for stage in (1, 2, 3)]
    return (
        *((number, 0) for number in numbers),
        *middle,
        *((number, 4) for number in numbers),
    )


def orders(parts: int, *, in_turn: bool = False) -> Iterator[Order]:
    """All orders of compute that keep each part's own.

    Args:
      parts: how many.
      in_turn: only those in which no part passes an earlier one. Parts are equal, so that the
        others are no better, and these are far fewer: 6,006 instead of 756,756 for three parts.
    """

    def extend(done: tuple[int, ...]) -> Iterator[Order]:
        if min(done) == len(COMPUTE_STAGES):
            yield ()
        for number, stage in enumerate(done):
            may_pass = not in_turn or number == 0 or done[number - 1] > stage
            if stage < len(COMPUTE_STAGES) and may_pass:
                further = (*done[:number], stage + 1, *done[number + 1 :])
                yield from (((number, stage), *rest) for rest in extend(further))

    return extend((0,) * parts)


def fit() -> tuple[float, float]:
    """One all-to-all and the experts: what the first two totals leave of two unknowns."""
    both = (NAIVE_MS - COMPRESSED_MS) / (1 - BITS_KEPT)
    return both / 2, NAIVE_MS - both


def totals(exchange: float, expert: float, codec: float = 0.0, parts: int = PARTS) -> list[float]:
    """The four totals of the ablation; of the codec, all four times together."""
    one = theorem_order(1)
    small, piped = exchange * BITS_KEPT, exchange * BITS_KEPT / PIPE_GAIN
    pieces = Part(codec / 4 / parts, piped / parts, codec / 4 / parts, expert / parts)
    return [
        seconds(Part(0.0, exchange, 0.0, expert), one),
        seconds(Part(codec / 4, small, codec / 4, expert), one),
        seconds(Part(codec / 4, piped, codec / 4, expert), one),
        seconds(pieces, theorem_order(parts)),
    ]


def comparisons() -> list[Comparison]:
    """Table 10: successive ratios, the first one fitted."""
    naive, compressed, piped, scheduled = totals(*fit())
    return [
        Comparison("with ZFP", "x", NAIVE_MS / COMPRESSED_MS, naive / compressed, None),
        Comparison("and Pipe-A2A", "x", COMPRESSED_MS / PIPED_MS, compressed / piped, 0.15),
        Comparison("and scheduling", "x", PIPED_MS / SCHEDULED_MS, piped / scheduled, 0.15),
    ]


def notes() -> list[str]:
    """What the model's free choices would change."""
    exchange, expert = fit()
    found = totals(exchange, expert)
    four = totals(exchange, expert, parts=4)
    # All three unknowns from the first three totals.
    piped_off = (COMPRESSED_MS - PIPED_MS) / (1 - 1 / PIPE_GAIN)
    other_exchange = piped_off / BITS_KEPT / 2
    other_expert = NAIVE_MS - 2 * other_exchange
    codec = COMPRESSED_MS - piped_off - other_expert
    other = totals(other_exchange, other_expert, codec)
    ratio, printed = other[2] / other[3], PIPED_MS / SCHEDULED_MS
    return [
        f"The fit makes an all-to-all {exchange:.0f} ms and the experts {expert:.0f} ms. Totals: "
        f"{', '.join(f'{total:.0f}' for total in found)} ms; printed "
        f"{NAIVE_MS}, {COMPRESSED_MS}, {PIPED_MS}, {SCHEDULED_MS}.",
        f"How many parts the paper took is not printed. With four, scheduling gains "
        f"{four[2] / four[3]:.3f} instead of {found[2] / found[3]:.3f} "
        f"({four[2] / four[3] / printed - 1:+.0%} beside the paper).",
        "That the codec costs nothing decides whether the last prediction is inside. If three "
        "totals are fitted, its cost being the third unknown, the codec takes "
        f"{codec:.0f} ms, the experts {other_expert:.0f} ms, and scheduling gains {ratio:.3f} "
        f"({ratio / printed - 1:+.0%}, outside). Four totals are weak evidence for three "
        "unknowns.",
    ]
