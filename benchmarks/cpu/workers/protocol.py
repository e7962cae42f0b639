"""How a worker talks to `step.py`: a line with a command comes in, a line of JSON goes out.

Runs in both environments, so it needs NumPy and nothing of moejax or PyTorch. The first line in is
the request (sizes, threads), answered by facts about the side; then commands, until input ends:

  run N         takes N train steps and answers the seconds of each
  multiply N    times a float32 matrix product of N x N by N x N
  experts NAME  changes the implementation of the experts (PyTorch only)
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

NUM_BATCHES = 16


class Side(Protocol):
    """One trainer, built and ready."""

    facts: dict[str, Any]  # versions, settings and sizes, for the record

    def step(self, token_BT: Any) -> Any:
        """Takes one train step, waits until it is done, and returns its loss."""
        ...

    def place(self, token_BT: np.ndarray) -> Any:
        """Turns a batch into what `step` takes."""
        ...

    def multiplier(self, size: int) -> Callable[[], None]:
        """Returns a function that multiplies two square matrices and waits for the result."""
        ...

    def set_experts(self, name: str) -> None:
        """Changes the implementation of the experts."""
        ...


def serve(build: Callable[[dict[str, Any]], Side]) -> None:
    """Builds a side from the request on standard input and answers commands until it ends."""
    # Libraries print to standard output; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    side = build(request)
    batches = [side.place(token_BT) for token_BT in random_batches(request)]
    print(json.dumps(side.facts), file=answers, flush=True)
    idle_from = (time.perf_counter(), time.process_time())
    steps = 0
    for line in iter(sys.stdin.readline, ""):
        # A side that spins while it waits would slow the other one down: that is measured.
        idle_seconds = time.perf_counter() - idle_from[0]
        idle_cpu_seconds = time.process_time() - idle_from[1]
        command, argument = line.split()
        answer: dict[str, Any] = {}
        if command == "run":
            answer = run(side, batches, first=steps, count=int(argument))
            steps += int(argument)
        elif command == "multiply":
            answer = {"flops_per_second": time_product(side, int(argument))}
        else:
            side.set_experts(argument)
        answer |= {"idle_seconds": idle_seconds, "idle_cpu_seconds": idle_cpu_seconds}
        print(json.dumps(answer), file=answers, flush=True)
        idle_from = (time.perf_counter(), time.process_time())


def random_batches(request: dict[str, Any]) -> np.ndarray:
    """Returns [batches, sequences, positions] of uniform token ids, the same on both sides."""
    shape = (NUM_BATCHES, request["sequences"], request["positions"])
    return np.random.default_rng(0).integers(0, request["vocabulary"], shape, dtype=np.int32)


def run(side: Side, batches: list[Any], *, first: int, count: int) -> dict[str, Any]:
    """Takes `count` steps. Each is timed by itself, from a batch in place to all results done."""
    seconds, losses = [], []
    cpu_before = time.process_time()
    for step in range(first, first + count):
        begin = time.perf_counter()
        loss = side.step(batches[step % len(batches)])
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss))
    return {
        "seconds": seconds,
        "losses": losses,
        "cpu_seconds": time.process_time() - cpu_before,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux: KiB
    }


def time_product(side: Side, size: int) -> float:
    """FLOP/s of a matrix product, the best of ten."""
    multiply = side.multiplier(size)
    multiply()
    best = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        multiply()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
