"""Several processes on CPU: exchanges beside which a program computes until it uses the result.

For `comm.cpu.gloo`: transfers between pipeline stages, and the outer loop's between sites. XLA
orders a program as it pleases, and gives the memory of one array to another that comes later in its
order: a computation could then wait for a transfer whose result it does not use. So each long
computation waits for the start of the transfers before it, and a transfer is waited for after all
computations that come before the first use of its result.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from moejax.comm.cpu.exchange import Exchange, PendingExchange, hold
from moejax.comm.cpu.held import runs_long, wait_for
from moejax.comm.jaxprs import KINDS, communicates, inner_jaxprs


class _PendingTransfer(NamedTuple):
    exchange: PendingExchange
    computed: int  # number of long computations before its start


class Transfers:
    """The pending transfers of a scope, and the equations that are deferred until they end.

    Attributes:
      values: of the scope's variables, without results of pending transfers and deferred equations.
      pending: by the variable of its result, each transfer.
      deferred: by the variable of a result, each deferred equation.
      results: one result of each long computation so far.
      number: of the last transfer, until a computation waits for its start.
    """

    def __init__(self, values: dict[Any, Any]):
        self.values = values
        self.pending: dict[Any, _PendingTransfer] = {}
        self.deferred: dict[Any, Any] = {}
        self.results: list[jax.Array] = []
        self.number: jax.Array | None = None

    def start(self, eqn: Any, exchange: Exchange, x: jax.Array, after: jax.Array) -> jax.Array:
        """Starts the transfer of x, or its gather. Returns its number."""
        gathers = eqn.primitive.name == "all_gather"
        begin = exchange.start_gather if gathers else exchange.start_transfer
        started = begin(x, after, **eqn.params)
        self.pending[eqn.outvars[0]] = _PendingTransfer(started, len(self.results))
        self.number = started.number
        return started.number

    def defer(self, eqn: Any) -> bool:
        """Defers an equation that uses a pending result, if it is quick. Returns whether it did."""
        uses = any(v in self.deferred or v in self.pending for v in _variables(eqn.invars))
        if not uses or eqn.effects or computes_or_communicates(eqn):
            return False
        self.deferred.update(dict.fromkeys(eqn.outvars, eqn))
        return True

    def compute(self, atoms: Sequence[Any]) -> None:
        """Computes the values of variables: waits for transfers, and runs deferred equations."""
        wanted, needed, equations = list(_variables(atoms)), set(), {}
        while wanted:
            var = wanted.pop()
            if var in self.pending:
                needed.add(var)
            elif var in self.deferred and id(eqn := self.deferred[var]) not in equations:
                equations[id(eqn)] = eqn
                wanted.extend(_variables(eqn.invars))
        for var in [var for var in self.pending if var in needed]:
            self._end(var)
        order = {id(eqn): place for place, eqn in enumerate(self.deferred.values())}
        for eqn in sorted(equations.values(), key=lambda eqn: order[id(eqn)]):
            self.values |= dict(zip(eqn.outvars, bind(eqn, self.read(eqn.invars)), strict=True))
            for var in eqn.outvars:
                del self.deferred[var]

    def end_all(self) -> None:
        """Waits for all transfers, and runs all deferred equations."""
        self.compute([*self.pending, *self.deferred])

    def read(self, atoms: Sequence[Any]) -> list[Any]:
        """Returns the values of literals and of variables, which are in `values`."""
        return [atom.val if hasattr(atom, "val") else self.values[atom] for atom in atoms]

    def after_start(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        """Returns an equation's inputs; if it is long, one waits for the last transfer's start."""
        if self.number is None or not runs_long(eqn):
            return inputs
        number, self.number = self.number, None
        return wait_for(eqn, inputs, [number])

    def add_results(self, eqn: Any, results: Sequence[Any]) -> None:
        """Adds the smallest result of a long computation to `results`."""
        arrays = [x for x in results if isinstance(x, jax.Array) and x.size]
        if arrays and computes_or_communicates(eqn):
            self.results.append(min(arrays, key=lambda x: x.nbytes))

    def _end(self, var: Any) -> None:
        """Waits for a transfer, after the computations since its start."""
        exchange, computed = self.pending.pop(var)
        if since := self.results[computed:]:
            exchange = exchange._replace(number=hold(exchange.number, since))
        self.values[var] = exchange.end()


def computes_or_communicates(eqn: Any) -> bool:
    """Returns whether an equation runs for long or has a collective."""
    if eqn.primitive.name in KINDS or runs_long(eqn):
        return True
    return any(map(communicates, inner_jaxprs(eqn)))


def bind(eqn: Any, inputs: list[Any]) -> list[Any]:
    """Returns the results of an equation."""
    results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not hasattr(atom, "val")]
