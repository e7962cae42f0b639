"""Several processes on CPU: transfers between pipeline stages, overlapped with computation.

For `comm.cpu.gloo`. XLA chooses the order of a program, and reuses the memory of one array for a
later one: a computation could then wait for a transfer whose result it does not need. So each
long computation waits until the transfers before it have begun, and a transfer is waited for only
after all computations that come before its first use.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from moejax.comm.cpu.exchange import Begun, Exchange, hold
from moejax.comm.cpu.held import runs_long, wait_for
from moejax.comm.jaxprs import KINDS, communicates, inner_jaxprs


class _UnderWay(NamedTuple):
    begun: Begun
    computed: int  # how many computations came before it


class Transfers:
    """The transfers that are under way in a scope, and the variables that wait for them.

    Attributes:
      values: by variable of the scope, without the variables that wait for a transfer.
    """

    def __init__(self, values: dict[Any, Any]):
        self.values = values
        self.under_way: dict[Any, _UnderWay] = {}
        self.makers: dict[Any, Any] = {}  # variable that waits -> its equation
        self.results: list[jax.Array] = []  # one result of each long computation
        self.number: jax.Array | None = None  # of the last transfer, until one waits for it

    def begin(self, eqn: Any, exchange: Exchange, x: jax.Array, after: jax.Array) -> jax.Array:
        """Begins the transfer of x. Returns its number."""
        begun = exchange.begin_transfer(x, after, **eqn.params)
        self.under_way[eqn.outvars[0]] = _UnderWay(begun, len(self.results))
        self.number = begun.number
        return begun.number

    def defer(self, eqn: Any) -> bool:
        """Returns whether an equation is put off: it needs a transfer and is short."""
        waiting = any(var in self.makers or var in self.under_way for var in _variables(eqn.invars))
        if not waiting or eqn.effects or computes_or_communicates(eqn):
            return False
        self.makers.update(dict.fromkeys(eqn.outvars, eqn))
        return True

    def bring(self, atoms: Sequence[Any]) -> None:
        """Waits for the transfers that some variables need, and computes the variables."""
        wanted, needed, makers = list(_variables(atoms)), set(), {}
        while wanted:
            var = wanted.pop()
            if var in self.under_way:
                needed.add(var)
            elif var in self.makers and id(eqn := self.makers[var]) not in makers:
                makers[id(eqn)] = eqn
                wanted.extend(_variables(eqn.invars))
        for var in [var for var in self.under_way if var in needed]:
            self._end(var)
        order = {id(eqn): place for place, eqn in enumerate(self.makers.values())}
        for eqn in sorted(makers.values(), key=lambda eqn: order[id(eqn)]):
            self.values |= dict(zip(eqn.outvars, bind(eqn, self.read(eqn.invars)), strict=True))
            for var in eqn.outvars:
                del self.makers[var]

    def end_all(self) -> None:
        """Waits for all transfers, and computes all waiting variables."""
        self.bring([*self.under_way, *self.makers])

    def read(self, atoms: Sequence[Any]) -> list[Any]:
        """Returns the values of literals and of variables; these must be computed."""
        return [atom.val if hasattr(atom, "val") else self.values[atom] for atom in atoms]

    def begun_before(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        """Returns a computation's inputs; one of them waits until transfers have begun."""
        if self.number is None or not runs_long(eqn):
            return inputs
        number, self.number = self.number, None
        return wait_for(eqn, inputs, [number])

    def computed(self, eqn: Any, results: Sequence[Any]) -> None:
        """Takes the results of a computation."""
        made = [x for x in results if isinstance(x, jax.Array) and x.size]
        if made and computes_or_communicates(eqn):
            self.results.append(min(made, key=lambda x: x.nbytes))

    def _end(self, var: Any) -> None:
        begun, before = self.under_way.pop(var)
        if since := self.results[before:]:
            begun = begun._replace(number=hold(begun.number, since))
        self.values[var] = begun.end()


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
