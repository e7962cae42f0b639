"""Times small programs on all devices of all processes at once.

What is timed is a loop around one operation, so that a call costs nothing beside it, less an empty
run of the same loop. All processes start together and the slowest counts: a train step waits too.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from moejax.comm import gloo
from moejax.runtime.processes import Processes

Tree = Any  # of arrays
ProgressFn = Callable[[str], None]  # is told what is done next
AXES = ("nodes", "devices")
MOST_TIMES = 4096
LONG_S = 0.06
ROUNDS = 7  # of operations in turns


class Stopwatch:
    """Compiles and times operations; every process makes the same calls in one order."""

    def __init__(self, processes: Processes, devices: Any, more: Sequence[str] = ()):
        """Takes devices [nodes][devices of a node], and axes of one that operations may name."""
        self.processes = processes
        self.mesh = build_probe_mesh(devices, more)
        self._began = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the start, the same in all processes: process 0's."""
        return self.processes.gather(time.perf_counter() - self._began)[0]

    def seconds(
        self,
        operate: Callable[[Tree], Tree],
        start: Callable[[], Tree],
        *,
        aim_s: float = 0.04,
    ) -> float:
        """Seconds of one operation: of the fastest run, for other work can only slow it down.

        Args:
          operate: per device, inside shard_map; may communicate over `AXES`.
          start: gives its argument, per device.
          aim_s: how long a timed run should take, about; it takes longer if one operation does.
        """
        run = loop(operate, start, self.mesh)
        self.processes.compile(run, 0)
        jax.block_until_ready(run(1))  # the first run opens connections
        none = min(self._time(run, 0) for _ in range(3))
        # Longer than twice the empty run, whose time differs from one to the next.
        enough = max(aim_s / 2, 2 * none)
        times = 1
        while True:
            runs = [self._time(run, times)]
            runs += [self._time(run, times) for _ in range(4 if runs[0] < LONG_S else 2)]
            net = min(runs) - none
            if net >= enough or times == MOST_TIMES:
                return max(net, enough / 100) / (times * unrolled(self.mesh))
            missing = enough / max(net, enough / 16)
            times = min(MOST_TIMES, times * math.ceil(1.5 * missing))

    def in_turns(
        self, operations: Sequence[tuple[Callable[[Tree], Tree], Callable[[], Tree]]], aim_s: float
    ) -> list[list[float]]:
        """Rounds of the seconds of each operation, one after the other: what is near is alike.

        Args:
          operations: (operate, start) as `seconds` takes them.
          aim_s: how long a timed run of the first should take, about.
        """
        runs = [loop(operate, start, self.mesh) for operate, start in operations]
        for run in runs:
            self.processes.compile(run, 0)
            jax.block_until_ready(run(1))
        times = max(1, min(MOST_TIMES, math.ceil(aim_s / self._time(runs[0], 1))))
        made = times * unrolled(self.mesh)
        return [[self._time(run, times) / made for run in runs] for _ in range(ROUNDS)]

    def _time(self, run: Callable, times: int) -> float:
        self.processes.gather("ready")
        began = time.perf_counter()
        jax.block_until_ready(run(times))
        return max(self.processes.gather(time.perf_counter() - began))


def build_probe_mesh(devices: Any, more: Sequence[str] = ()) -> Mesh:
    """A mesh of devices [nodes][devices of a node], and more axes of one."""
    names = (*AXES, *more)
    grid = np.array(devices)
    grid = grid.reshape(*grid.shape, *(1 for _ in more))
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def unrolled(mesh: Mesh) -> int:
    """Operations of one turn of a loop.

    An accelerator may wait for the host to read the loop's condition, some microseconds each turn.
    """
    return 1 if mesh.devices.flat[0].platform == "cpu" else 8


def loop(operate: Callable[[Tree], Tree], start: Callable[[], Tree], mesh: Mesh) -> Any:
    """Returns a jitted function of a number: so many turns of operations, each after the last."""
    operate = jax.jit(operate, inline=True)  # so that it is traced once

    def body(times: Any) -> jax.Array:
        x = start()
        y = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(operate, x))

        def again(_: Any, both: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            for _ in range(unrolled(mesh)):
                x = _after(*both)
                both = x, operate(x)
            return both

        _, y = jax.lax.fori_loop(0, times, again, (x, y))
        return _first(y)[None]

    return jax.jit(gloo.shard_map(body, mesh, P(), P(AXES)))


def _first(tree: Tree) -> jax.Array:
    """The sum of the first elements of all arrays that have one."""
    leaves = [leaf.reshape(-1) for leaf in jax.tree.leaves(tree) if leaf.size]
    return sum((leaf[0].astype(jnp.float32) for leaf in leaves), jnp.float32(0))


def _after(x: Tree, y: Tree) -> Tree:
    """x, each array's first element in a way that depends on y: nothing moves out of the loop."""
    never = _first(y) > 1e30

    def touch(leaf: jax.Array) -> jax.Array:
        if not leaf.size:
            return leaf
        start = (0,) * leaf.ndim
        corner = jax.lax.slice(leaf, start, (1,) * leaf.ndim)
        corner = jnp.where(never, jnp.ones_like(corner), corner)
        return jax.lax.dynamic_update_slice(leaf, corner, start)

    return jax.tree.map(touch, x)
