"""Measures the links: our own collectives on each tier, alone, together and beside compute."""

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from moejax.comm import wire
from moejax.comm.cpu import gloo
from moejax.layout.layout import Axes
from moejax.plan.cluster.pairs import Matrix
from moejax.plan.cluster.topology import KINDS, Link, Tier, same_links
from moejax.plan.probe.fit import fit_link
from moejax.plan.probe.timer import (
    AXES,
    Operate,
    Operation,
    ProgressFn,
    Start,
    Stopwatch,
    build_probe_mesh,
    loop,
    meet,
    unrolled,
)
from moejax.runtime.processes import Processes

SMALLEST, LARGEST = 2**14, 2**26  # bytes of a device's operand
STEP, QUICK_STEP = 4, 16  # factor from one size to the next
LEAST_SIZES = 3
LONGEST_S = 1.0  # longest call
SHORT_S = 0.006  # a shorter call is mostly startup: if time is short, the next sizes are skipped
COMPILE_S = 0.5  # estimate of one compilation
# Time of the calls timed together: long enough that a shaped link's token bucket (4 ms) is noise.
AIM_S = 0.12
TOGETHER_S = 0.25  # longest call that is measured beside others
PAIR_S = 0.2  # one transfer between two nodes
ROUND_TRIPS = 16  # of a small message between two nodes
PRODUCT = 256  # size of the matrices multiplied beside a collective
PRODUCTS = 4  # products between collectives; twice as many to measure sharing of cores
TINY = 2**10  # bytes of a device's operand, so few that only the startup counts


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
    """Measures the links of one tier.

    Args:
      axis: axis of the stopwatch's mesh that the tier connects.
      oversubscription: devices of a node that share the same cores.
      seconds: about how long it may take.
      quick: fewer sizes; contention is not measured.
    """
    size = watch.mesh.shape[axis]
    if size == 1:  # it sends nothing: the rate of a copy
        startup = watch.seconds(lambda x: x + 1, lambda: jnp.zeros(2**18))
        return Tier(name, 1, same_links(Link(0.0, 2**20 / startup)))
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
    first, second = (_of_seconds(kind, axis, links, watch) for kind in ("all_to_all", "all_gather"))
    alone = [watch.seconds(operate, start, aim_s=0) for operate, start in (first, second)]
    contention = min(2.0, watch.seconds(*_beside(first, second), aim_s=0) / sum(alone))
    if gloo.computes_beside(watch.mesh):
        compute_share = watch.core_share(*first, seconds=alone[0]) * oversubscription
    else:
        compute_share = _slows_products(watch, first, alone[0])
    return Tier(name, size, links, contention, min(1.0, compute_share), sync_delay_s)


def probe_oversubscription(watch: Stopwatch) -> float:
    """Returns the time of all devices of a node at once over the time of one alone.

    The devices meet after their work, so that none runs ahead. Work of two lengths is timed, and
    only the difference counts: the meeting itself takes as long as some products. If it
    counted, four hosts of two devices would measure 1.0, although their devices take turns.
    """
    count = watch.mesh.shape[AXES[1]]
    if count == 1:
        return 1.0

    def busy(devices: int, products: int) -> Operation:
        multiply, start = _products(products)

        def operate(x: jax.Array) -> jax.Array:
            is_busy = jax.lax.axis_index(AXES[1]) < devices
            y = jax.lax.cond(is_busy, multiply, lambda x: x, x)
            return y + wire.all_reduce(y[0, 0], AXES[1:], tag=None)

        return operate, start

    kinds = [busy(devices, length * PRODUCTS) for devices in (1, count) for length in (2, 4)]
    rounds = watch.in_turns(kinds, AIM_S)
    alone = statistics.median(double - single for single, double, _, _ in rounds)
    together = statistics.median(double - single for _, _, single, double in rounds)
    return min(float(count), max(1.0, together / alone)) if alone > 0 else float(count)


def _late(watch: Stopwatch, axis: str, link: Link, oversubscription: float) -> float:
    """Returns the extra seconds of a tiny collective that stands between computations.

    Times it between computations of two lengths. The part that does not grow with the length is the
    collective.

    Args:
      link: the tier's all-to-all link.
      oversubscription: devices that share cores and reach it one after the other.
    """
    send, values, sent = collective("all_to_all", axis, TINY, watch.mesh.shape[axis])

    def between(products: int) -> Operation:
        multiply, matrix = _products(products)

        def operate(both: Any) -> Any:
            x, y = multiply(both[0]), both[1]
            y = send(y.at[0, 0].add(x[0, 0]))
            return x.at[0, 0].add(y[0, 0]), y

        return operate, lambda: (matrix(), values())

    rounds = watch.in_turns([between(PRODUCTS), between(2 * PRODUCTS)], AIM_S)
    late = statistics.median(2 * single - double for single, double in rounds)
    return max(0.0, late - link.seconds(sent) / oversubscription)


def _curve(
    watch: Stopwatch, axis: str, kind: str, *, seconds: float, quick: bool
) -> Iterator[tuple[int, float]]:
    """Yields (bytes a device sends, seconds), from small to large, while time is left.

    If time is short, it skips sizes that cost little more than the startup.
    """
    began, count = watch.elapsed(), watch.mesh.shape[axis]
    aim_s = AIM_S / 4 if quick else AIM_S
    size, points = SMALLEST, 0
    while size <= LARGEST:
        operate, start, wire_bytes = collective(kind, axis, size, count)
        duration = watch.seconds(operate, start, aim_s=aim_s)
        yield wire_bytes, duration
        points, spent = points + 1, watch.elapsed() - began
        left, more = seconds - spent, math.log(LARGEST / size, STEP)
        short = quick or (duration < SHORT_S and spent / points * more > left)
        step = QUICK_STEP if short else STEP
        size *= step
        if points >= LEAST_SIZES and (
            duration * step > LONGEST_S or left < COMPILE_S + 6 * duration * step
        ):
            return


def collective(kind: str, axis: str, size: int, count: int) -> tuple[Operate, Start, int]:
    """Returns a collective, a function that makes its argument, and the bytes a device sends.

    Args:
      size: bytes of the operand; for an all_gather, of the result.
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
    if kind != "all_reduce":
        raise ValueError(f"no collective {kind}")
    return lambda x: wire.all_reduce(x, axes, tag=None), whole, 2 * sent


def _zeros(*shape: int) -> Start:
    return lambda: jnp.zeros(shape)


def _slows_products(watch: Stopwatch, first: Operation, alone: float) -> float:
    """Returns the seconds that a collective adds to products beside it, over its own."""
    single = watch.seconds(*_products(1))
    # Compute that lasts longer than the collective, so that all of it runs beside compute.
    products = _products(max(1, math.ceil(1.5 * alone / single)))
    computing = watch.seconds(*products, aim_s=0)
    beside = watch.seconds(*_beside(first, products), aim_s=0)
    return max(0.0, (beside - computing) / alone)


def _of_seconds(kind: str, axis: str, links: dict[str, Link], watch: Stopwatch) -> Operation:
    """Returns a collective of the largest size that took up to `TOGETHER_S`."""
    count = watch.mesh.shape[axis]
    fitting = [sent for sent, duration in links[kind].points if duration <= TOGETHER_S]
    sent = max(fitting, default=links[kind].points[0][0])
    operate, start, _ = collective(kind, axis, sent * count // (count - 1), count)
    return operate, start


def _beside(first: Operation, second: Operation) -> Operation:
    def operate(both: Any) -> Any:
        return first[0](both[0]), second[0](both[1])

    return operate, lambda: (first[1](), second[1]())


def _products(count: int) -> Operation:
    """Returns `count` dependent matrix products as one operation, and its input."""

    def operate(x: jax.Array) -> jax.Array:
        matrix = jnp.full((PRODUCT, PRODUCT), 1 / PRODUCT)
        return jax.lax.fori_loop(0, count, lambda _, y: y @ matrix, x)

    return operate, _zeros(PRODUCT, PRODUCT)


def probe_pairs(
    devices: Any, processes: Processes, bytes_per_s: float, *, progress: ProgressFn
) -> tuple[Matrix, Matrix]:
    """Returns bytes a second of a device from node (row) to node (column), and seconds of a start.

    Each pair of nodes is measured in one direction at a time; pairs without a common node run at
    the same time. A start is half of the time of a small message there and back.

    Args:
      devices: [nodes][devices of a node].
      bytes_per_s: measured rate of a device to other nodes; decides the size of a transfer.
    """
    nodes = len(devices)
    size = 2 ** round(math.log2(min(LARGEST, max(SMALLEST, bytes_per_s * PAIR_S))))
    rates, starts = ([[0.0] * nodes for _ in range(nodes)] for _ in range(2))
    for number, games in enumerate(tournament(nodes)):
        progress(f"pairs of nodes, round {number + 1}")
        late = _transfer(devices, processes, games, TINY, round_trips=ROUND_TRIPS)
        for (a, b), seconds in late.items():
            starts[a][b] = starts[b][a] = seconds / (2 * ROUND_TRIPS)
        for pairs in (games, [(b, a) for a, b in games]):
            for (a, b), seconds in _transfer(devices, processes, pairs, size).items():
                rates[a][b] = size / max(seconds - starts[a][b], seconds / 2)
    return tuple(map(tuple, rates)), tuple(map(tuple, starts))


def tournament(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yields rounds of disjoint pairs until every two nodes have met (circle method)."""
    players = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        games = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(a, b) for a, b in games if a is not None and b is not None]
        players = [players[0], players[-1], *players[1:-1]]


def _transfer(
    devices: Any,
    processes: Processes,
    pairs: list[tuple[int, int]],
    size: int,
    *,
    round_trips: int = 0,
) -> dict[tuple[int, int], float]:
    """Returns the seconds in which each device of a pair's first node sends `size` bytes.

    Args:
      round_trips: so often the bytes go there and come back; 0: they go there once.
    """
    runs, operations = {}, unrolled(build_probe_mesh(devices))

    def there(x: jax.Array) -> jax.Array:
        return wire.ppermute(x, AXES[:1], [(0, 1)])

    def and_back(x: jax.Array) -> jax.Array:
        return wire.ppermute(there(x), AXES[:1], [(1, 0)])

    for a, b in pairs:
        mesh = build_probe_mesh([devices[a], devices[b]])
        if any(d.process_index == jax.process_index() for d in mesh.devices.flat):
            runs[a, b] = loop(and_back if round_trips else there, _zeros(size // 4), mesh)
    for run in runs.values():
        run.lower(0).compile()
    processes.gather("compiled")
    for run in runs.values():
        jax.block_until_ready(run(1))
    shortest: dict[tuple[int, int], float] = {}
    for _ in range(2):
        for pair, seconds in _time_pairs(runs, processes, max(1, round_trips)).items():
            shortest[pair] = min(seconds / operations, shortest.get(pair, math.inf))
    return shortest


def _time_pairs(runs: dict[tuple[int, int], Any], processes: Processes, count: int) -> dict:
    """Times `count` trips of each pair, less an empty run; the slower of the two nodes counts."""
    meet(processes)
    measured = []
    for pair, run in runs.items():
        marks = [time.perf_counter()]
        for times in (0, count):
            jax.block_until_ready(run(times))
            marks.append(time.perf_counter())
        empty, single = (after - before for before, after in itertools.pairwise(marks))
        measured.append([*pair, max(single - empty, single / 100)])
    slowest: dict[tuple[int, int], float] = {}
    for a, b, seconds in (row for rows in processes.gather(measured) for row in rows):
        slowest[a, b] = max(seconds, slowest.get((a, b), 0.0))
    return slowest
