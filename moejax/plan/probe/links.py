"""Measures the links: our own collectives on each tier, alone, together and beside compute."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.layout.layout import Axes
from moejax.plan.cluster.topology import KINDS, Link, Tier, same_links
from moejax.plan.probe.fit import fit_link
from moejax.plan.probe.timer import AXES, ProgressFn, Stopwatch, build_probe_mesh, loop, unrolled
from moejax.runtime.processes import Processes

SMALLEST, LARGEST = 2**14, 2**26  # bytes of a device's operand
STEP, QUICK_STEP = 4, 16  # from one size to the next
LEAST_SIZES = 3
LONGEST_S = 1.0  # of one call
SHORT_S = 0.006  # a shorter call is mostly its start: if time is short, sizes after it are skipped
COMPILE_S = 0.5  # about, for a rough account
# Of the calls that are timed together: what fits a shaped link's bucket (4 ms) hardly counts.
AIM_S = 0.12
TOGETHER_S = 0.25  # of the calls that are put beside others
PAIR_S = 0.2  # of one transfer between two nodes
PRODUCT = 256  # of the matrices in the work beside a collective
PRODUCTS = 4  # in the work between collectives, and half of that of devices that take turns
TINY = 2**10  # bytes of a device's operand that cost nothing but their start


def probe_tier(
    watch: Stopwatch,
    axis: str,
    name: str,
    *,
    oversubscription: float,
    seconds: float,
    quick: bool,
    progress: ProgressFn,
) -> Tier:
    """Measures one tier.

    Args:
      axis: of the stopwatch's mesh, over which the tier's links go.
      sharing: devices of a node that take turns on the same cores.
      seconds: about how long it may take.
      quick: fewer sizes; contention is not measured.
    """
    size = watch.mesh.shape[axis]
    if size == 1:
        return Tier(name, 1, same_links(_memory_link(watch)))
    share = seconds / len(KINDS) * (1 if quick else 0.8)
    links = {}
    for kind in KINDS:
        progress(f"{name}: {kind}")
        links[kind] = fit_link(list(_curve(watch, axis, kind, seconds=share, quick=quick)))
    progress(f"{name}: a collective between computations")
    sync_delay_s = _late(
        watch, axis, links["all_to_all"], oversubscription if axis == AXES[0] else 1.0
    )
    if quick:
        return Tier(name, size, links, sync_delay_s=sync_delay_s)
    progress(f"{name}: two collectives at once, and one beside compute")
    contention, compute_share = _contention(watch, axis, links)
    return Tier(name, size, links, contention, compute_share, sync_delay_s)


def probe_oversubscription(watch: Stopwatch) -> float:
    """Returns how many devices of a node take turns: seconds of all at once over those of one.

    In both cases they meet after their work; without, one would run ahead of the others.
    """
    count, (work, start) = watch.mesh.shape[AXES[1]], _work(2 * PRODUCTS)

    def busy(devices: int) -> float:
        def operate(x: jax.Array) -> jax.Array:
            mine = jax.lax.axis_index(AXES[1]) < devices
            y = jax.lax.cond(mine, work, lambda x: x, x)
            return y + wire.all_reduce(y[0, 0], AXES[1:], tag=None)

        return watch.seconds(operate, start)

    return min(count, max(1.0, busy(count) / busy(1))) if count > 1 else 1.0


def _late(watch: Stopwatch, axis: str, link: Link, turns: float) -> float:
    """Seconds that a tiny collective costs between computations, less what it takes by itself.

    Between computations of one length, and of twice that: what both have is the collective.

    Args:
      link: of the all-to-alls.
      turns: devices that reach it one after the other, so that only the last one's share is seen.
    """
    send, values, sent = collective("all_to_all", axis, TINY, watch.mesh.shape[axis])

    def between(products: int) -> tuple[Callable, Callable]:
        work, matrix = _work(products)

        def operate(both: Any) -> Any:
            x, y = work(both[0]), both[1]
            y = send(y.at[0, 0].add(x[0, 0]))
            return x.at[0, 0].add(y[0, 0]), y

        return operate, lambda: (matrix(), values())

    rounds = watch.in_turns([between(PRODUCTS), between(2 * PRODUCTS)], AIM_S)
    return max(
        0.0, statistics.median(2 * one - two for one, two in rounds) - link.seconds(sent) / turns
    )


def _memory_link(watch: Stopwatch) -> Link:
    """Where one device stands alone nothing is sent; a copy bounds what would be."""
    found = watch.seconds(lambda x: x + 1, lambda: jnp.zeros(2**18))
    return Link(0.0, 2**20 / found)


def _curve(
    watch: Stopwatch, axis: str, kind: str, *, seconds: float, quick: bool
) -> Iterator[tuple[int, float]]:
    """Yields (bytes on the wire of a device, seconds), from small to large, while time is left.

    Where it will not do for every size, those are left out that cost little more than a start.
    """
    began, count = watch.elapsed(), watch.mesh.shape[axis]
    aim_s = AIM_S / 4 if quick else AIM_S
    size, found = SMALLEST, 0
    while size <= LARGEST:
        operate, start, wire_bytes = collective(kind, axis, size, count)
        one = watch.seconds(operate, start, aim_s=aim_s)
        yield wire_bytes, one
        found, spent = found + 1, watch.elapsed() - began
        left, more = seconds - spent, math.log(LARGEST / size, STEP)
        short = quick or (one < SHORT_S and spent / found * more > left)
        step = QUICK_STEP if short else STEP
        size *= step
        if found >= LEAST_SIZES and (one * step > LONGEST_S or left < COMPILE_S + 6 * one * step):
            return


def collective(kind: str, axis: str, size: int, count: int) -> tuple[Callable, Callable, int]:
    """Returns a collective, its argument's maker, and its bytes on the wire of a device.

    Args:
      size: bytes of the operand, of an all_gather of the result.
      count: devices along the axis.
    """
    axes: Axes = (axis,)
    part = max(1, size // (4 * count))  # floats for each peer
    sent = 4 * part * (count - 1)
    if kind == "all_to_all":
        return lambda x: wire.all_to_all(x, axes, tag=None), _zeros(count, part), sent
    if kind == "all_gather":
        return lambda x: wire.all_gather(x, axes, dim=0, tag=None), _zeros(part), sent
    whole = _zeros(count * part)
    if kind == "reduce_scatter":
        return lambda x: wire.reduce_scatter(x, axes, dim=0, tag=None), whole, sent
    assert kind == "all_reduce"
    return lambda x: wire.all_reduce(x, axes, tag=None), whole, 2 * sent


def _zeros(*shape: int) -> Callable[[], jax.Array]:
    return lambda: jnp.zeros(shape)


def _contention(watch: Stopwatch, axis: str, links: dict[str, Link]) -> tuple[float, float]:
    """Two collectives at once over one after the other; the compute that a collective takes."""
    first, second = (_of_seconds(kind, axis, links, watch) for kind in ("all_to_all", "all_gather"))
    alone = [watch.seconds(operate, start, aim_s=0) for operate, start in (first, second)]
    both = watch.seconds(*_beside(first, second), aim_s=0)
    contention = min(2.0, both / sum(alone))
    one = watch.seconds(*_work(1))
    # Longer than the collective, so that all of it runs beside the work.
    work = _work(max(1, math.ceil(1.5 * alone[0] / one)))
    working = watch.seconds(*work, aim_s=0)
    beside = watch.seconds(*_beside(first, work), aim_s=0)
    compute_share = (beside - working) / alone[0]
    return contention, min(1.0, max(0.0, compute_share))


def _of_seconds(
    kind: str, axis: str, links: dict[str, Link], watch: Stopwatch
) -> tuple[Callable, Callable]:
    """A collective of a size that was measured to take up to `TOGETHER_S`."""
    count = watch.mesh.shape[axis]
    fitting = [sent for sent, one in links[kind].points if one <= TOGETHER_S]
    sent = max(fitting, default=links[kind].points[0][0])
    operate, start, _ = collective(kind, axis, sent * count // (count - 1), count)
    return operate, start


def _beside(
    first: tuple[Callable, Callable], second: tuple[Callable, Callable]
) -> tuple[Callable, Callable]:
    """Two operations that do not wait for each other."""

    def operate(both: Any) -> Any:
        return first[0](both[0]), second[0](both[1])

    return operate, lambda: (first[1](), second[1]())


def _work(products: int) -> tuple[Callable, Callable]:
    """So many matrix products, each of the one before."""

    def operate(x: jax.Array) -> jax.Array:
        matrix = jnp.full((PRODUCT, PRODUCT), 1 / PRODUCT)
        return jax.lax.fori_loop(0, products, lambda _, y: y @ matrix, x)

    return operate, _zeros(PRODUCT, PRODUCT)


def probe_pairs(
    devices: Any, processes: Processes, bytes_per_s: float, *, progress: ProgressFn
) -> tuple[tuple[float, ...], ...]:
    """Returns bytes a second of a device from node (row) to node (column).

    Two nodes at a time talk, in one direction; pairs that share no node do so at the same time.

    Args:
      devices: [nodes][devices of a node].
      bytes_per_s: of a device to other nodes, as measured, to choose the size by.
    """
    nodes = len(devices)
    size = 2 ** round(math.log2(min(LARGEST, max(SMALLEST, bytes_per_s * PAIR_S))))
    rates = [[0.0] * nodes for _ in range(nodes)]
    for number, games in enumerate(tournament(nodes)):
        progress(f"pairs of nodes, round {number + 1}")
        for way in (0, 1):
            pairs = [(a, b) if way == 0 else (b, a) for a, b in games]
            for (a, b), seconds in _transfer(devices, processes, pairs, size).items():
                rates[a][b] = size / seconds
    return tuple(map(tuple, rates))


def tournament(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yields rounds of pairs without a shared member, until every two have met (circle method)."""
    players = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        games = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(a, b) for a, b in games if a is not None and b is not None]
        players = [players[0], players[-1], *players[1:-1]]


def _transfer(
    devices: Any, processes: Processes, pairs: list[tuple[int, int]], size: int
) -> dict[tuple[int, int], float]:
    """Seconds in which each device of the first node of a pair sends `size` bytes to the second."""
    runs, operations = {}, unrolled(build_probe_mesh(devices))
    for a, b in pairs:
        mesh = build_probe_mesh([devices[a], devices[b]])
        if any(d.process_index == jax.process_index() for d in mesh.devices.flat):
            runs[a, b] = loop(
                lambda x: wire.permute(x, AXES[:1], [(0, 1)]), _zeros(size // 4), mesh
            )
    for run in runs.values():
        run.lower(0).compile()
    processes.gather("compiled")
    for run in runs.values():
        jax.block_until_ready(run(1))
    found: dict[tuple[int, int], float] = {}
    for _ in range(2):
        for pair, seconds in _time_pairs(runs, processes).items():
            found[pair] = min(seconds / operations, found.get(pair, math.inf))
    return found


def _time_pairs(runs: dict[tuple[int, int], Any], processes: Processes) -> dict:
    """One transfer of each pair, less an empty run; the slower of its two nodes counts."""
    processes.gather("ready")
    mine = []
    for pair, run in runs.items():
        marks = [time.perf_counter()]
        for times in (0, 1):
            jax.block_until_ready(run(times))
            marks.append(time.perf_counter())
        none, one = (after - before for before, after in itertools.pairwise(marks))
        mine.append([*pair, max(one - none, one / 100)])
    found: dict[tuple[int, int], float] = {}
    for a, b, seconds in (row for rows in processes.gather(mine) for row in rows):
        found[a, b] = max(seconds, found.get((a, b), 0.0))
    return found
