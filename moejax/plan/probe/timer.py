"""Times small programs on all devices of all processes at once.

It times a loop around one operation, less an empty run of the same loop, so that the cost of a
call does not count. All processes start together and the slowest counts, as in a train step.
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

from moejax.comm.cpu import gloo
from moejax.runtime.processes import Processes

Tree = Any  # a tree of arrays
Operate = Callable[[Tree], Tree]  # what is timed, on one device inside shard_map
Start = Callable[[], Tree]  # makes its argument on each device
Operation = tuple[Operate, Start]
ProgressFn = Callable[[str], None]  # called with a text before each measurement
AXES = ("nodes", "devices")
MAX_TIMES = 4096
SHORT_S, SHARED_S = 0.04, 0.3
LONG_S = 0.06
BUSY_S = 0.25  # approximate time of a run whose CPU seconds are counted
ROUNDS = 7  # timings of each operation
SETTLE_S = 0.01  # until every process knows that all are ready


class Stopwatch:
    """Compiles and times operations. Every process makes the same calls in the same order."""

    def __init__(self, processes: Processes, devices: Any, more: Sequence[str] = ()):
        """Takes devices [nodes][devices of a node], and names of extra axes of size one."""
        self.processes = processes
        self.mesh = build_probe_mesh(devices, more)
        self._began = time.perf_counter()

    def elapsed(self) -> float:
        """Returns process 0's seconds since the start, in all processes."""
        return self.processes.gather(time.perf_counter() - self._began)[0]

    def seconds(self, operate: Operate, start: Start, *, aim_s: float | None = None) -> float:
        """Returns the seconds of one operation in the fastest run: other work only slows runs down.

        Args:
          operate: function of one device, run inside shard_map; may communicate over `AXES`.
          start: function that makes its argument on each device.
          aim_s: approximate time of a timed run, longer if one operation takes longer; None: short,
            or where devices share cores long enough that each gets its share of them.
        """
        if aim_s is None:
            aim_s = SHARED_S if self.mesh.devices.flat[0].platform == "cpu" else SHORT_S
        run = self._ready(operate, start)
        none = min(self._time(run, 0) for _ in range(3))
        # Must be longer than twice the empty run, because that varies from run to run.
        enough = max(aim_s / 2, 2 * none)
        times = 1
        while True:
            runs = [self._time(run, times)]
            runs += [self._time(run, times) for _ in range(4 if runs[0] < LONG_S else 2)]
            net = min(runs) - none
            if net >= enough or times == MAX_TIMES:
                return max(net, enough / 100) / (times * unrolled(self.mesh))
            missing = enough / max(net, enough / 16)
            times = min(MAX_TIMES, times * math.ceil(1.5 * missing))

    def in_turns(self, operations: Sequence[Operation], aim_s: float) -> list[list[float]]:
        """Times operations in turns, so that slow drifts of the machine cancel. Returns rounds.

        Args:
          operations: (operate, start) pairs, as for `seconds`.
          aim_s: approximate time of a timed run of the first operation.
        """
        runs = [self._ready(operate, start) for operate, start in operations]
        times = max(1, min(MAX_TIMES, math.ceil(aim_s / self._time(runs[0], 1))))
        calls = times * unrolled(self.mesh)
        return [[self._time(run, times) / calls for run in runs] for _ in range(ROUNDS)]

    def core_share(self, operate: Operate, start: Start, *, seconds: float) -> float:
        """Returns how much of a core an operation keeps busy for each device, on CPU.

        It divides the CPU seconds of all threads of a process by the seconds of the operation and
        by the number of the process's devices. The busiest process counts.

        Args:
          seconds: about how long the operation takes.
        """
        run = self._ready(operate, start)
        times = max(1, min(MAX_TIMES, math.ceil(BUSY_S / seconds)))
        busy = time.process_time()
        elapsed = self._time(run, times)
        busy = max(self.processes.gather(time.process_time() - busy))
        return busy / (elapsed * len(self.mesh.local_devices))

    def _ready(self, operate: Operate, start: Start) -> Callable:
        """Returns the loop around an operation, compiled, with its connections open."""
        run = loop(operate, start, self.mesh)
        self.processes.compile(run, 0)
        jax.block_until_ready(run(1))
        return run

    def _time(self, run: Callable, times: int) -> float:
        meet(self.processes)
        began = time.perf_counter()
        jax.block_until_ready(run(times))
        return max(self.processes.gather(time.perf_counter() - began))


def meet(processes: Processes) -> None:
    """Waits until all processes are here, and then until all know it.

    That word may travel on the link to be measured. Without the pause, the first process to know
    sends its data ahead of the word to the others, which then start a whole collective late.
    """
    if processes.count > 1:
        processes.gather("ready")
        time.sleep(SETTLE_S)


def build_probe_mesh(devices: Any, more: Sequence[str] = ()) -> Mesh:
    """Returns a mesh of devices [nodes][devices of a node], with extra axes of size one."""
    names = (*AXES, *more)
    grid = np.array(devices)
    grid = grid.reshape(*grid.shape, *(1 for _ in more))
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def unrolled(mesh: Mesh) -> int:
    """Returns how many operations one trip of a loop holds.

    An accelerator may wait some microseconds each trip until the host has read the condition.
    """
    return 1 if mesh.devices.flat[0].platform == "cpu" else 8


def loop(operate: Operate, start: Start, mesh: Mesh) -> Any:
    """Returns a jitted function of a number of trips; operations run one after the other."""
    operate = jax.jit(operate, inline=True)  # traced once

    def body(times: Any) -> jax.Array:
        x = start()
        y = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(operate, x))

        def repeat(_: Any, both: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            for _ in range(unrolled(mesh)):
                x = _after(*both)
                # Else XLA computes only the one element that is read of results but the last.
                both = jax.lax.optimization_barrier((x, operate(x)))
            return both

        _, y = jax.lax.fori_loop(0, times, repeat, (x, y))
        return _first(y)[None]

    return jax.jit(gloo.shard_map(body, mesh, P(), P(AXES)))


def _first(tree: Tree) -> jax.Array:
    """Returns the sum of the first elements of all non-empty arrays."""
    leaves = [leaf.reshape(-1) for leaf in jax.tree.leaves(tree) if leaf.size]
    return sum((leaf[0].astype(jnp.float32) for leaf in leaves), jnp.float32(0))


def _after(x: Tree, y: Tree) -> Tree:
    """Returns x with first elements that depend on y, so that nothing is hoisted from the loop.

    They do not depend on x: XLA copies an array that one fusion reads and writes.
    """
    never = _first(y) > 1e30

    def touch(leaf: jax.Array) -> jax.Array:
        if not leaf.size:
            return leaf
        corner = never.astype(leaf.dtype).reshape((1,) * leaf.ndim)
        return jax.lax.dynamic_update_slice(leaf, corner, (0,) * leaf.ndim)

    return jax.tree.map(touch, x)
