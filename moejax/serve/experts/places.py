"""The experts that the places of devices hold: counts how busy they are, and moves weights.

A state for generation has the weights of all places in place of those of all experts, and beside
each router a table (`moe.layer.Table`). Both are arguments of the programs, so nothing recompiles.
Whatever the table, a token reaches its experts. What its author did not foresee costs time:
buckets overflow, and the rest goes in rounds.

Letters: L layers with experts, E experts, P devices that own experts, M places (on a device: its
own).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from moejax.comm import wire
from moejax.errors import InputError
from moejax.layout.layout import Axes
from moejax.model.cached import Loads
from moejax.runtime.processes import ALONE, Processes
from moejax.serve.experts.tables import (
    PLANS,
    WORTH,
    Cluster,
    Table,
    aligned,
    device_loads,
    homes,
    placement,
    plan_table,
    sources,
)
from moejax.serve.programs import Programs
from moejax.step.state import TrainState

Arrays = list[jax.Array]


class Places:
    """The tables of an engine's layers, and the loads of its calls.

    Attributes:
      tables: of each layer.
      load_LE: choices of each expert since the tables were planned.
      overflowed: choices that went in overflow rounds since then.
      rounds: number of these rounds, of all layers.
    """

    def __init__(self, programs: Programs, processes: Processes = ALONE):
        """Describes the places of programs with slots for experts.

        Raises:
          InputError: if the model has no experts, or one device owns them all.
        """
        self._programs, self._processes = programs, processes
        step = programs.train_step
        layout, self._axes = step.layout, step.layout.expert_owner_axes
        nodes, owners = layout.size(layout.between_nodes(self._axes)), layout.size(self._axes)
        if not step.cfg.model.has_experts or owners == 1:
            raise InputError(
                f"`expert_slots` has no effect. Got {programs.expert_slots}. Copies go to other "
                "devices that own experts, and there are none. Leave it out, or set mesh.expert."
            )
        self.cluster = Cluster(nodes, owners // nodes, programs.expert_slots)
        self._experts = step.cfg.moe.num_experts
        dims = jax.tree.leaves((step.model.frozen_dims, step.model.dims))
        weights = _named((step.abstract.frozen, step.abstract.params))
        self._leaves: dict[str, list[int]] = {}  # of each layer: numbers of its weights
        for number, ((name, _), letters) in enumerate(zip(weights, dims, strict=True)):
            if letters[0] == "E" and len(letters) > 1:
                layer = name[name.index(".") + 1 : name.index("moe.")]
                self._leaves.setdefault(layer, []).append(number)
        self._specs = [leaf.sharding.spec for _, leaf in weights]
        self._at_home()

    def _at_home(self) -> None:
        self.tables = [homes(self._experts, self.cluster) for _ in self._leaves]
        e = self._experts // self.cluster.P
        own_PM = np.arange(e + self.cluster.slots) % e + e * np.arange(self.cluster.P)[:, None]
        self._held = [own_PM.reshape(-1) for _ in self._leaves]  # the expert that a place holds
        self._forget()

    def _forget(self) -> None:
        self.load_LE = np.zeros((len(self._leaves), self._experts))
        self.overflowed = self.rounds = 0

    def count(self, loads: Loads) -> None:
        """Adds the loads of a call."""
        self.load_LE[: len(loads.load_LE)] += loads.load_LE
        self.overflowed += int(loads.overflowed_L.sum())
        self.rounds += int(loads.rounds_L.sum())

    def at_home(self, state: TrainState, *, keep: bool = False) -> TrainState:
        """Returns a state with slots, where nothing goes to them.

        Wire: nothing. A slot holds an expert of its own device.

        Args:
          state: weights as `Programs.homes` takes them.
          keep: whether its arrays live on. If not, the experts' are deleted layer by layer.
        """
        self._at_home()
        leaves, tree = jax.tree.flatten((state.frozen, state.params))
        e, slots = self._experts // self.cluster.P, self.cluster.slots

        def widen(arrays: Arrays) -> Arrays:
            return [x[:, np.arange(e + slots) % e] for x in arrays]

        for numbers in self._leaves.values():
            specs, own = [self._specs[n] for n in numbers], [leaves[n] for n in numbers]
            wide = self._call(self._program("widen", widen, (specs,), specs), own)
            for number, new, old in zip(numbers, jax.block_until_ready(wide), own, strict=True):
                leaves[number] = new
                if not keep:
                    old.delete()
        frozen, params = jax.tree.unflatten(tree, leaves)
        return self._with_tables(state._replace(frozen=frozen, params=params))

    def place(self, state: TrainState, load_LE: np.ndarray, plan: str) -> TrainState:
        """Plans a table for each layer where that pays, and moves weights. Returns the new state.

        Args:
          load_LE: loads that are expected; only proportions count.
          plan: as of `plan_table`.
        Raises:
          InputError: if they are no loads of this model's experts, or no plan has this name.
        """
        shape, most = load_LE.shape, len(self._leaves)
        good = len(shape) == 2 and shape[0] <= most and shape[1] == self._experts
        if not good or not np.isfinite(load_LE).all() or (load_LE < 0).any():
            raise InputError(
                f"load does not fit. Got shape {shape}. A load has a number, at least 0, for each "
                f"of {self._experts} experts of up to {most} layers. Count it with this model."
            )
        if plan not in (*PLANS, "best"):
            raise InputError(f"unknown plan. Got {plan!r}. Take one of {', '.join(PLANS)}, best.")
        tables = []
        for held, load_E in zip(self.tables, load_LE, strict=False):
            new = plan_table(plan, load_E, self.cluster)
            before, after = (device_loads(x, load_E, self.cluster).max() for x in (held, new))
            tables.append(new if before > WORTH * after else held)
        return self.apply(state, tables)

    def apply(self, state: TrainState, tables: list[Table]) -> TrainState:
        """Moves weights to where tables say, layer after layer. Returns the new state.

        Wire: for each place number at which any device's expert changes, and each distance that
        one comes from, one expert's weights from each device. Memory: one further layer.

        Args:
          tables: of the first layers; the others stay.
        """
        leaves, tree = jax.tree.flatten((state.frozen, state.params))
        for layer, (numbers, new) in enumerate(zip(self._leaves.values(), tables, strict=False)):
            table = aligned(new, self._held[layer], self.cluster)
            from_PM = sources(table.expert_M, self._held[layer], self.cluster)
            from_PM = from_PM.reshape(self.cluster.P, -1)
            moved = self._moved([leaves[n] for n in numbers], numbers, _moves(from_PM))
            for number, array in zip(numbers, moved, strict=True):
                leaves[number] = array
            self.tables[layer], self._held[layer] = table, table.expert_M
        frozen, params = jax.tree.unflatten(tree, leaves)
        self._forget()
        return self._with_tables(state._replace(frozen=frozen, params=params))

    def _moved(
        self, own: Arrays, numbers: list[int], moves: list[tuple[int, np.ndarray, int]]
    ) -> Arrays:
        """Returns a layer's weights after moves, as `_moves` names them."""
        specs = [self._specs[n] for n in numbers]

        def copy(old: Arrays) -> Arrays:
            return [jnp.array(x, copy=True) for x in old]

        if not moves:
            return own
        everywhere = PartitionSpec()
        moved = self._call(self._program("copy", copy, (specs,), specs), own)
        body, in_specs = partial(_move, axes=self._axes), (specs, specs, (everywhere,) * 3)
        program = self._program("move", body, in_specs, specs, donate_argnums=1)
        for move in moves:
            placed = tuple(self._programs.put(np.asarray(x, np.int32), everywhere) for x in move)
            # A collective is under way at a time.
            moved = jax.block_until_ready(self._call(program, own, moved, placed))
        return moved

    def _with_tables(self, state: TrainState) -> TrainState:
        """Puts the tables into a state beside its selection biases."""
        held = self._programs.train_step.abstract.router_bias
        known = dict(_named(state.router_bias))
        new = iter([placement(one, self._experts, self.cluster) for one in self.tables])
        leaves = [
            self._placed(next(new)[None], leaf) if name.endswith(".table") else known[name]
            for name, leaf in _named(held)
        ]
        return state._replace(router_bias=jax.tree.unflatten(jax.tree.structure(held), leaves))

    def _placed(self, array: np.ndarray, leaf: Any) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: array[index])

    def _program(self, name: str, body: Any, in_specs: Any, specs: Any, **options: Any) -> Any:
        key = (name, *specs)
        return self._programs.program(key, body, in_specs, specs, **options)

    def _call(self, function: Any, *arguments: Any) -> Any:
        if self._processes.count > 1:
            function = self._processes.compile(function, *arguments)
        return function(*arguments)


def _named(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree with their names, such as 0.groups.1.blocks.0.moe.w_in."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(p, simple=True, separator="."), leaf) for p, leaf in leaves]


def _moves(from_PM: np.ndarray) -> list[tuple[int, np.ndarray, int]]:
    """Returns moves: a place, its sources [P], and a distance that some of them are away."""
    P, M = from_PM.shape
    device_P, moves = np.arange(P), []
    for place in range(M):
        changes_P = from_PM[:, place] != device_P * M + place
        shift_P = (device_P - from_PM[:, place] // M) % P
        moves += [(place, from_PM[:, place], int(s)) for s in np.unique(shift_P[changes_P])]
    return moves


def _move(
    old: Arrays, new: Arrays, move: tuple[jax.Array, jax.Array, jax.Array], axes: Axes
) -> Arrays:
    """Returns `new` [1, M, ...] after a move; `old` are the weights before all moves. Per device.

    Wire: one expert's weights from each device.

    Args:
      move: the place that changes; its source on each device, [P], a place of all; and how many
        devices on weights travel. Devices with a source at another distance keep what they have.
    """
    place, from_P, shift = move
    P, M, here = wire.size(axes), old[0].shape[1], wire.index(axes)
    asked = from_P[(here + shift) % P] % M

    def by(step: int, sent: Arrays) -> Arrays:
        pairs = [(device, (device + step) % P) for device in range(P)]
        return [wire.ppermute(x, axes, pairs) if step else x for x in sent]

    got = jax.lax.switch(
        shift, [partial(by, step) for step in range(P)], [x[:, asked] for x in old]
    )
    is_for_here = from_P[here] // M == (here - shift) % P
    pairs = zip(new, got, strict=True)
    return [x.at[:, place].set(jnp.where(is_for_here, y, x[:, place])) for x, y in pairs]
