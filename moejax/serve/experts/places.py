"""The experts that the places of devices hold: counts how busy they are, and moves weights.

A state for generation has the weights of all places in place of those of all experts, and beside
each router a table (`moe.layer.Table`). Both are arguments of the programs, so nothing recompiles.
Whatever the table, a token reaches its experts. What its author did not foresee costs time:
buckets overflow, and the rest goes in rounds. So weights may move between any two calls, also while
texts are under way (`Places.follow`).

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
from moejax.comm.cpu import gloo
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
STEPS = 64  # calls between two looks at a layer, or as many as there are layers
ENOUGH = 400  # choices a device that tell its load within 5 %, as 1 / sqrt(400)


class Places:
    """The tables of an engine's layers, and the loads of its calls.

    Attributes:
      tables: of each layer.
      load_LE: choices of each expert since the tables were planned; halved by each `follow`.
      overflowed: choices that went in overflow rounds, of all calls.
      rounds: number of these rounds, of all calls and layers.
      replanned: how many times a layer got another table.
      moved: how many places got the weights of another expert.
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
        # Programs are dispatched one behind the other. Gloo alone would mix their messages.
        self._waits = gloo.is_gloo(step.mesh)
        self.overflowed = self.rounds = self.replanned = self.moved = self._calls = 0
        self._at_home()

    def _at_home(self) -> None:
        self.tables = [homes(self._experts, self.cluster) for _ in self._leaves]
        e = self._experts // self.cluster.P
        own_PM = np.arange(e + self.cluster.slots) % e + e * np.arange(self.cluster.P)[:, None]
        self._held = [own_PM.reshape(-1) for _ in self._leaves]  # the expert that a place holds
        self.load_LE = np.zeros((len(self._leaves), self._experts))

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many tables were replanned, places filled anew, and choices overflowed so far."""
        return self.replanned, self.moved, self.overflowed

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
        state = state._replace(frozen=frozen, params=params)
        return self._with_tables(state, dict(enumerate(self.tables)))

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
        tables = [self._planned(layer, plan, load_E) for layer, load_E in enumerate(load_LE)]
        state = self.apply(state, tables)
        self.load_LE[:] = 0
        return state

    def compile_moves(self, state: TrainState) -> TrainState:
        """Moves weights of each layer and sends choices home again, so that no text waits for it.

        Args:
          state: weights whose experts are at home.
        """
        hot_LE = np.eye(self._experts)[[0] * len(self._leaves)]
        state = self.place(state, hot_LE, "greedy")
        state = self.apply(state, [homes(self._experts, self.cluster) for _ in self._leaves])
        self.replanned = self.moved = 0
        return state

    def follow(self, state: TrainState, running: jax.Array) -> TrainState:
        """Looks at one layer by turns while a call runs. Returns the state for the next call.

        Each layer is looked at every `STEPS` calls, or as many as there are layers. It moves as in
        `place` from the load so far, which is then halved, so that older calls count less; but not
        before `ENOUGH` choices a device. The host does not wait for weights that move, but where
        gloo carries them.

        Args:
          state: that of the call. Weights that another place takes are deleted.
          running: a result of the call.
        """
        layer = self._calls % max(STEPS, len(self._leaves))
        self._calls += 1
        if layer >= len(self._leaves) or self.load_LE[layer].sum() < ENOUGH * self.cluster.P:
            return state
        table = self._planned(layer, "best", self.load_LE[layer])
        self.load_LE[layer] /= 2
        if self._waits:
            jax.block_until_ready(running)
        return self._with_layers(state, {layer: table})

    def _planned(self, layer: int, plan: str, load_E: np.ndarray) -> Table:
        """Returns a table that pays, or the layer's own."""
        own = self.tables[layer]
        busiest, mean = device_loads(own, load_E, self.cluster).max(), load_E.sum() / self.cluster.P
        if busiest <= WORTH * mean:  # no plan is better than even
            return own
        new = plan_table(plan, load_E, self.cluster)
        return new if busiest > WORTH * device_loads(new, load_E, self.cluster).max() else own

    def apply(self, state: TrainState, tables: list[Table]) -> TrainState:
        """Moves weights to where tables say, layer after layer. Returns the new state.

        Wire: for each place number at which any device's expert changes, and each distance that
        one comes from, one expert's weights from each device. Memory: one further layer; a layer's
        old weights are deleted.

        Args:
          tables: of the first layers; the others stay.
        """
        return self._with_layers(state, dict(enumerate(tables)))

    def _with_layers(self, state: TrainState, tables: dict[int, Table]) -> TrainState:
        """As `apply`, for tables by layer."""
        leaves, tree = jax.tree.flatten((state.frozen, state.params))
        numbers_L, changed = list(self._leaves.values()), {}
        for layer, new in tables.items():
            if new is self.tables[layer]:
                continue
            table = aligned(new, self._held[layer], self.cluster)
            from_PM = sources(table.expert_M, self._held[layer], self.cluster)
            self.replanned += 1
            self.moved += int((from_PM != np.arange(len(from_PM))).sum())
            moves, numbers = _moves(from_PM.reshape(self.cluster.P, -1)), numbers_L[layer]
            if moves:
                moved = self._moved([leaves[n] for n in numbers], numbers, moves)
                if len(tables) > 1:  # a layer is there twice at a time
                    jax.block_until_ready(moved)
                for number, array in zip(numbers, moved, strict=True):
                    leaves[number].delete()
                    leaves[number] = array
            self.tables[layer], self._held[layer] = table, table.expert_M
            changed[layer] = table
        frozen, params = jax.tree.unflatten(tree, leaves)
        return self._with_tables(state._replace(frozen=frozen, params=params), changed)

    def _moved(
        self, own: Arrays, numbers: list[int], moves: list[tuple[int, np.ndarray, int]]
    ) -> Arrays:
        """Returns a layer's weights after moves, as `_moves` names them."""
        specs = [self._specs[n] for n in numbers]

        def copy(old: Arrays) -> Arrays:
            return [jnp.array(x, copy=True) for x in old]

        everywhere = PartitionSpec()
        moved = self._call(self._program("copy", copy, (specs,), specs), own)
        body, in_specs = partial(_move, axes=self._axes), (specs, specs, (everywhere,) * 3)
        program = self._program("move", body, in_specs, specs, donate_argnums=1)
        for move in moves:
            placed = tuple(self._programs.put(np.asarray(x, np.int32), everywhere) for x in move)
            moved = self._call(program, own, moved, placed)
            if self._waits:
                jax.block_until_ready(moved)
        return moved

    def _with_tables(self, state: TrainState, tables: dict[int, Table]) -> TrainState:
        """Puts tables of some layers into a state beside its selection biases."""
        held = _named(self._programs.train_step.abstract.router_bias)
        known, names = dict(_named(state.router_bias)), [n for n, _ in held if n.endswith(".table")]
        new = {
            names[layer]: placement(table, self._experts, self.cluster)[None]
            for layer, table in tables.items()
        }
        leaves = [self._placed(new[n], x) if n in new else known[n] for n, x in held]
        tree = jax.tree.structure(self._programs.train_step.abstract.router_bias)
        return state._replace(router_bias=jax.tree.unflatten(tree, leaves))

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
