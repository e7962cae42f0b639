"""How a worker talks to its parent: a line with a command comes in, a line of JSON goes out.

Runs in both environments, so it needs NumPy and nothing of moejax or PyTorch. The first line in is
the request (sizes, threads), answered by facts about the side; then commands, until input ends. Of
`step.py`:

  run N         takes N train steps and answers the seconds of each
  multiply N    times a float32 matrix product of N x N by N x N
  experts NAME  changes the implementation of the experts (PyTorch only)

Of `generate.py`:

  run WORKLOAD VARIANT  continues the prompts of a workload and answers the seconds and the tokens
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
Command = Callable[..., dict[str, Any]]


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

    def commands(side: Side, request: dict[str, Any]) -> dict[str, Command]:
        batches = [side.place(token_BT) for token_BT in random_batches(request)]
        steps = 0

        def take(count: str) -> dict[str, Any]:
            nonlocal steps
            answer = run(side, batches, first=steps, count=int(count))
            steps += int(count)
            return answer

        def multiply(size: str) -> dict[str, Any]:
            return {"flops_per_second": time_product(side, int(size))}

        def set_experts(name: str) -> dict[str, Any]:
            side.set_experts(name)
            return {}

        return {"run": take, "multiply": multiply, "experts": set_experts}

    listen(build, commands)


def listen(build: Callable[[dict[str, Any]], Any], commands: Callable[..., dict]) -> None:
    """Builds a side from the first line of standard input, then answers each line until it ends.

    Args:
      commands: (side, request) -> what answers each command; it gets the line's other words.
    """
    # Libraries print to standard output; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    side = build(request)
    known = commands(side, request)
    print(json.dumps(side.facts), file=answers, flush=True)
    idle_from = (time.perf_counter(), time.process_time())
    for line in iter(sys.stdin.readline, ""):
        # A side that spins while it waits would slow the other one down: that is measured.
        idle_seconds = time.perf_counter() - idle_from[0]
        idle_cpu_seconds = time.process_time() - idle_from[1]
        command, *arguments = line.split()
        answer = known[command](*arguments)
        answer |= {"idle_seconds": idle_seconds, "idle_cpu_seconds": idle_cpu_seconds}
        print(json.dumps(answer), file=answers, flush=True)
        idle_from = (time.perf_counter(), time.process_time())


class Answers:
    """What a side has answered to the requests of a workload, and when."""

    def __init__(self, count: int):
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self.first_seconds = [0.0] * count
        self.begin()

    def begin(self) -> None:
        """Starts the clock; what was made ready before is not counted."""
        self.start, self.cpu_start = time.perf_counter(), time.process_time()

    def add(self, number: int, ids: list[int]) -> None:
        """Appends tokens to the answer to a request."""
        if ids and not self.ids[number]:
            self.first_seconds[number] = time.perf_counter() - self.start
        self.ids[number] += ids

    def result(self) -> dict[str, Any]:
        """Returns seconds, of each request up to its first token, and the tokens."""
        return {
            "seconds": time.perf_counter() - self.start,
            "cpu_seconds": time.process_time() - self.cpu_start,
            "first_seconds": self.first_seconds,
            "ids": self.ids,
        }


class Generator(Protocol):
    """A model that continues prompts, loaded and ready."""

    facts: dict[str, Any]  # versions and settings, for the record

    def run(self, requests: list[dict[str, Any]], variant: str, answers: Answers) -> None:
        """Continues prompts greedily.

        Args:
          requests: "ids" of the prompt, and the number of "tokens" that continue it.
          variant: how; each side has names of its own.
        """
        ...


def serve_generation(build: Callable[[dict[str, Any]], Generator]) -> None:
    """The same for a side that continues the prompts of the request's workloads."""

    def commands(side: Generator, request: dict[str, Any]) -> dict[str, Command]:
        def run(workload: str, *variant: str) -> dict[str, Any]:
            requests = request["workloads"][workload]
            answers = Answers(len(requests))
            side.run(requests, " ".join(variant), answers)
            found = answers.result()
            assert [len(ids) for ids in found["ids"]] == [r["tokens"] for r in requests]
            return found

        return {"run": run}

    listen(build, commands)


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
