"""Work cut in chunks that goes through stages one after another: as tasks, and in closed form.

Each stage has a stream of its own. With k equal chunks the first takes the sum of all stages, and
every further one ends one turn of the slowest stage later:

    t(k) = sum_j t_j(k) + (k - 1) max_j t_j(k),    t_j(k) = startup_j + seconds_j / k

The closed form is exact where no two stages share a stream, and says nothing where they do; the
simulator takes both. Each checks the other in the tests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moejax.plan.price.simulate import Task


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
      name: what a reader sees in a timeline; chunks are numbered after it.
      stream: where it runs.
      seconds: of all chunks together, without start-up.
      startup_s: of each chunk, whatever its size.
      occupies: share of compute's speed that it takes, if it is communication.
    """

    name: str
    stream: str
    seconds: float
    startup_s: float = 0.0
    compute_share: float = 0.0

    def chunk_seconds(self, chunks: int) -> float:
        """Seconds of one of so many equal chunks."""
        return self.startup_s + self.seconds / chunks


def pipeline(
    stages: Sequence[Stage], chunks: int, *, after: tuple[int, ...] = (), place: int = 0
) -> list[Task]:
    """The tasks of a pipeline: all chunks of a stage stand before those of the next one.

    Chunk c of stage s is task `place + s * chunks + c`. So on a stream that several stages share,
    among chunks that are ready at once those of the earlier stage go first.

    Args:
      stages: in the order in which a chunk passes them.
      chunks: equal parts.
      after: what the first stage waits for.
      place: where in the schedule its first task will stand.
    """
    tasks = []
    for number, stage in enumerate(stages):
        seconds = stage.chunk_seconds(chunks)
        for chunk in range(chunks):
            waits_for = (place + (number - 1) * chunks + chunk,) if number else after
            name = f"{stage.name} {chunk}" if chunks > 1 else stage.name
            tasks.append(
                Task(name, stage.stream, seconds, waits_for, compute_share=stage.compute_share)
            )
    return tasks


def pipeline_seconds(stages: Sequence[Stage], chunks: int) -> float:
    """t(k): how long a pipeline takes whose stages have a stream each."""
    times = [stage.chunk_seconds(chunks) for stage in stages]
    return sum(times) + (chunks - 1) * max(times)


def ideal_chunks(stages: Sequence[Stage], slowest: int) -> float:
    """k*: where t(k) is least as long as this stage is the slowest, as a real number.

    Then t(k) is a constant plus k times its start-up plus 1/k times the seconds of the others, so
    k* = sqrt(sum of the others' seconds / its start-up). As t is convex, the best whole number is
    beside it. Without start-up it is infinite: ever smaller chunks.
    """
    others = sum(stage.seconds for place, stage in enumerate(stages) if place != slowest)
    startup_s = stages[slowest].startup_s
    return math.sqrt(others / startup_s) if startup_s else math.inf
