"""Several processes on CPU: arrays that stay in memory during exchanges, and long equations.

For `comm.cpu.gloo`, which rewrites a program so that it computes while its collectives run.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.comm.cpu.exchange import hold
from moejax.comm.jaxprs import inner_jaxprs, opened, scan_operands

# Primitives that may run for long.
LONG = ("dot_general", "ffi_call", "ragged_dot", "scan", "while")
SMALL = 2**16  # bytes of an array that may be copied


class HeldArrays(NamedTuple):
    """The arrays that stay in memory until a scope's last exchange of tokens has ended.

    XLA reuses the memory of an array that was sent or read for the next results of the program,
    which then wait for all readers of the array. The order of rows counts as well: XLA may reuse a
    chunk's index buffer for results, which would then wait for its experts.

    Attributes:
      arrays: arrays that were sent or received, or used by long equations between exchanges.
      since: arrays used by long equations since the last exchange.
      orders: integer arrays from before the first exchange, by id, until something reads them.
      last: the results of the last long equation.
    """

    arrays: list[jax.Array]
    since: list[jax.Array]
    orders: dict[int, jax.Array]
    last: list[jax.Array]

    def sent(self, arrays: list[jax.Array], known: Iterable[Any]) -> None:
        """Takes what an exchange sends and receives; `known`: all values of the scope so far."""
        if not self.arrays:
            self.orders.update({id(x): x for x in known if _is_order(x)})
        self.arrays.extend([*self.since, *arrays])
        self.since.clear()

    def in_turn(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        """Returns the inputs of an equation; one of them waits for the last long equation.

        Otherwise chunks whose rows have arrived would run at the same time, each slower, and the
        first results would reach the link late. With several devices in a process nothing waits:
        they share its threads, and fill each other's gaps.
        """
        if not self.last or jax.local_device_count() > 1 or not runs_long(eqn):
            return inputs
        return wait_for(eqn, inputs, self.last)

    def computed(self, eqn: Any, inputs: list[Any], results: list[Any]) -> None:
        """Adds the inputs and results of an equation that runs long beside an exchange.

        Arrays that it writes in place are left out: held, they would have to be copied.
        """
        if not self.arrays:
            return
        read_now = [self.orders.pop(id(x)) for x in inputs if id(x) in self.orders]
        self.arrays.extend(read_now)
        if not runs_long(eqn):
            return
        places = carried_places(eqn)
        in_place = {(eqn.invars[n].aval.shape, eqn.invars[n].aval.dtype) for n in places}
        read = [x for n, x in enumerate(inputs) if n not in places]
        made = [x for x in results if (x.shape, x.dtype) not in in_place]
        self.since.extend(x for x in [*read, *made] if isinstance(x, jax.Array) and x.size)
        self.last[:] = [x for x in results if x.size]


def _is_order(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.size > 1 and jnp.issubdtype(x.dtype, jnp.integer)


def wait_for(eqn: Any, inputs: list[Any], others: list[jax.Array]) -> list[Any]:
    """Returns the inputs of an equation; the smallest below `SMALL`, if any, waits for `others`.

    That input may have to be copied.
    """
    places = carried_places(eqn)
    small = [
        (x.nbytes, n)
        for n, x in enumerate(inputs)
        if n not in places and isinstance(x, jax.Array) and 0 < x.nbytes < SMALL
    ]
    if not small:
        return inputs
    _, n = min(small)
    return [*inputs[:n], hold(inputs[n], others), *inputs[n + 1 :]]


def runs_long(eqn: Any) -> bool:
    """Returns whether an equation may run for long."""
    if eqn.primitive.name in LONG:
        return True
    return any(runs_long(inner) for jaxpr in inner_jaxprs(eqn) for inner in opened(jaxpr).eqns)


def carried_places(eqn: Any) -> set[int]:
    """Returns the positions of the inputs that loops write to."""
    name, params, count = eqn.primitive.name, eqn.params, len(eqn.invars)
    if name == "while":
        return set(range(params["cond_nconsts"] + params["body_nconsts"], count))
    if name == "scan":
        _, carry, _ = scan_operands(params, list(range(count)))
        return set(carry)
    found = set()
    for jaxpr in map(opened, inner_jaxprs(eqn)):
        written = {id(inner.invars[n]) for inner in jaxpr.eqns for n in carried_places(inner)}
        before = count - len(jaxpr.invars)  # a conditional's index
        found |= {before + n for n, var in enumerate(jaxpr.invars) if id(var) in written}
    return found
