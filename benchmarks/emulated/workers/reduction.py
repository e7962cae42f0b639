"""One host of `reduction.py`: backward passes whose reductions are ordered in several ways.

Started by launch/emulate on every host; a host's devices all do the same. A layer's backward is
work, an all-to-all, work; then its gradient is ready to be reduced. The link carries collectives in
the order of the program (comm.gloo), so the order is written in the program.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from moejax.runtime.start import join

processes = join()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from gaps import Gap, assign  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from moejax.comm import wire  # noqa: E402
from moejax.comm.cpu import gloo  # noqa: E402

SIZE = 512  # of the matrices in the work
HOSTS = ("hosts",)
AT_ONCE = 8  # pieces that are timed one after the other

SENT = Path("/sys/class/net/net0/statistics/tx_bytes")


def work(x: jax.Array, products: int) -> jax.Array:
    """So many products of [SIZE, SIZE] matrices, each of the one before."""
    matrix = jnp.full((SIZE, SIZE), 1 / SIZE, x.dtype)
    rows = x.reshape(-1)[: SIZE * SIZE].reshape(SIZE, SIZE)
    rows = jax.lax.fori_loop(0, products, lambda _, r: r @ matrix, rows)
    return x.at[: SIZE * SIZE].add(rows.reshape(-1) * 1e-6)


def now(x: jax.Array, began: list[float]) -> jax.Array:
    """The time at which x was ready, in seconds since the run began."""

    def clock(_: Any) -> np.float32:
        return np.float32(time.perf_counter() - began[0])

    return jax.pure_callback(clock, jax.ShapeDtypeStruct((), jnp.float32), x[:1])


def reduce_piece(piece: jax.Array) -> jax.Array:
    """Sums a piece over the hosts, in the two halves that run beside compute on CPU."""
    own = wire.reduce_scatter(piece, HOSTS, dim=0, tag=None)
    return wire.all_gather(own, HOSTS, dim=0, tag=None)


class Pending:
    """Pieces of gradients that are ready and not reduced yet."""

    def __init__(self) -> None:
        self.pieces: list[jax.Array] = []
        self.done: list[jax.Array] = []

    def send(self, count: int | None = None) -> None:
        """Reduces the next pieces; None: all."""
        count = len(self.pieces) if count is None else count
        now, self.pieces = self.pieces[:count], self.pieces[count:]
        self.done += [reduce_piece(piece) for piece in now]


def backward(
    x: jax.Array, gradient: jax.Array, *, case: dict, order: str, plan: list[int], began: Any
) -> Any:
    """All layers. Returns sums of what was reduced, and when each exchange was asked and done."""
    pending, times, gaps = Pending(), [], iter(plan)
    pieces = 1 if order == "whole" else case["pieces"]
    for _ in range(case["layers"]):
        x = work(x, case["products"])  # of the experts
        if order == "planned":
            pending.send(next(gaps))
        asked = now(x, began)
        x = wire.all_to_all(x.reshape(2, -1), HOSTS, tag=None).reshape(-1)
        times += [asked, now(x, began)]
        x = work(x, case["products"])  # of attention
        if order == "planned":
            pending.send(next(gaps))
        pending.pieces += jnp.split(gradient * x[0], pieces)
        if order in ("whole", "pieces"):
            pending.send()
    pending.send()
    return jnp.stack([jnp.sum(piece) for piece in pending.done]), jnp.stack(times), x


def seconds_of(run: Callable[[], Any], rounds: int = 5) -> float:
    """The median of some runs after the first."""
    found = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return median(found[1:])


def plan_of(case: dict, mesh: Any) -> list[int]:
    """How many pieces go into each gap; how long gaps and pieces take is measured here."""
    x, piece = jnp.ones(case["tokens"]), jnp.ones(case["gradient"] // case["pieces"])
    gap = seconds_of(partial(jax.jit(partial(work, products=case["products"])), x))

    def several(piece: jax.Array) -> jax.Array:
        for _ in range(AT_ONCE):
            piece = reduce_piece(piece) / 2
        return piece

    program = jax.jit(gloo.shard_map(several, mesh, P(), P())).lower(piece).compile()
    processes.gather("compiled")
    one = seconds_of(lambda: program(piece)) / AT_ONCE
    gap, one = (max(processes.gather(seconds)) for seconds in (gap, one))
    gaps = []
    for layer in range(case["layers"]):
        # A layer's gradient is ready at its end; before its exchange, the one before's.
        gaps += [Gap(gap, case["pieces"] if layer else 0), Gap(gap)]
    return assign(gaps, one)[:-1]


def main() -> None:
    """Runs the orders of a case in turns."""
    path = Path(sys.argv[1])
    case = json.loads(path.read_text())
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, -1), (*HOSTS, "lanes"))
    x, gradient = jnp.ones(case["tokens"]), jnp.ones(case["gradient"])
    began, plan, programs = [0.0], plan_of(case, mesh), {}
    for order in case["orders"]:
        body = partial(backward, case=case, order=order, plan=plan, began=began)
        mapped = gloo.shard_map(body, mesh, (P(), P()), (P(), P(), P()))
        programs[order] = jax.jit(mapped).lower(x, gradient).compile()
    meet = jax.jit(gloo.shard_map(lambda x: wire.all_reduce(x, HOSTS), mesh, P(), P()))
    processes.gather("built")
    found: dict[str, Any] = {o: {"seconds": [], "waits": [], "sent": []} for o in programs}
    sums = {}
    for number in range(-1, case["rounds"]):
        for order, program in programs.items():
            jax.block_until_ready(meet(1.0))
            before = int(SENT.read_text())
            began[0] = time.perf_counter()
            total, times, _ = jax.block_until_ready(program(x, gradient))
            seconds = time.perf_counter() - began[0]
            jax.block_until_ready(meet(1.0))
            asked_done = np.asarray(times.addressable_data(0)).reshape(-1, 2)
            sums[order] = float(np.asarray(total.addressable_data(0)).sum())
            if number >= 0:
                found[order]["seconds"].append(seconds)
                found[order]["waits"].append((asked_done[:, 1] - asked_done[:, 0]).tolist())
                found[order]["sent"].append(int(SENT.read_text()) - before)
    largest = max(sums.values())
    assert all(abs(value - largest) <= 1e-5 * abs(largest) for value in sums.values()), sums
    result = {"plan": plan, "orders": found}
    path.with_suffix(f".h{jax.process_index()}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
