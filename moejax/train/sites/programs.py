"""The compiled functions of a round, where sites are programs of their own.

The same arithmetic as `step.outer` inside one program, cut where the sites' parts travel: `start`
encodes this site's part, `finish` averages those that arrived. Rows are what devices send, in the
order of the mesh without `replica`, whose copies are equal.

Letters: R sites, P devices of the mesh.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.comm.codecs.codec import pack, unpack
from moejax.comm.cpu import gloo
from moejax.step.outer import (
    Counted,
    OuterLoop,
    Part,
    Pending,
    averaged,
    build_outer,
    with_averaged,
)
from moejax.step.state import TrainState, first_sites
from moejax.step.train_step import TrainStep


class Programs:
    """The functions of a round of a run.

    Attributes:
      rows: rows of a part, of all devices of a site.
      row_bytes, whole_bytes: of one row of a part, and of outer weights and momentum.
    """

    def __init__(self, train_step: TrainStep):
        """Describes them; compiles nothing."""
        layout, cfg = train_step.layout, train_step.cfg
        self._step, self._outer = train_step, build_outer(cfg, train_step.site)
        self.site, self.sites, self.every = cfg.outer.site, cfg.outer.sites, self._outer.every
        self._specs = jax.tree.map(lambda x: x.sharding.spec, train_step.abstract)
        self._own = P(layout.mesh_axes)
        self._copies = layout.size(layout.replica)
        self.rows = layout.size(layout.mesh_axes) // self._copies
        like = (train_step.abstract, jax.ShapeDtypeStruct((), jnp.int32))
        self.row_bytes = jax.eval_shape(self._mapped(_start), *like)[0].shape[1]
        self.whole_bytes = jax.eval_shape(self._mapped(_whole), like[0]).shape[1]
        self.start = jax.jit(self._mapped(_start))
        self.whole = jax.jit(self._mapped(_whole))
        self._finish = jax.jit(self._mapped(_finish), donate_argnums=0)
        self._take = jax.jit(self._mapped(_take), donate_argnums=0)

    def _mapped(self, body: Callable) -> Callable:
        own, state, any_site = self._own, self._specs, P(None, *self._own)
        takes = {
            _start: (state, P()),
            _whole: (state,),
            _finish: (state, own, any_site, P(), P()),
            _take: (state, own),
        }[body]
        gives = {_start: (own, own, own), _whole: own}.get(body, state)
        bound = partial(body, self)
        return gloo.shard_map(bound, self._step.mesh, takes, gives)

    @property
    def outer(self) -> OuterLoop:
        """The outer loop."""
        return self._outer

    def finish(
        self,
        state: TrainState,
        pending: Pending,
        arrived: Mapping[int, np.ndarray],
        weights: Mapping[int, int],
        number: int,
    ) -> TrainState:
        """Averages the parts that arrived. Donates the state.

        Args:
          arrived: by row of this process [sites of the round, bytes], in the order of `weights`.
          weights: tokens of each site that counts.
          number: of the part.
        """
        weight_R, shared = np.full(self.sites, -1, np.float32), math.gcd(*weights.values()) or 1
        weight_R[list(weights)] = [tokens // shared for tokens in weights.values()]
        wanted = {}
        for row, data in arrived.items():
            wanted[row] = np.zeros((self.sites, self.row_bytes), np.uint8)
            wanted[row][list(weights)] = data
        shape = (self.sites, self.rows * self._copies, self.row_bytes)
        sharding = NamedSharding(self._step.mesh, P(None, *self._own))
        parts = jax.make_array_from_callback(
            shape, sharding, lambda index: wanted[self._row(index, 1)][:, None]
        )
        return self._finish(state, pending, parts, weight_R, np.int32(number))

    def take(self, state: TrainState, rows: Mapping[int, np.ndarray]) -> TrainState:
        """Returns the state at outer weights and momentum of another site. Donates the state.

        Args:
          rows: by row of this process, as of `whole`.
        """
        shape = (self.rows * self._copies, self.whole_bytes)
        sharding = NamedSharding(self._step.mesh, self._own)
        all_rows = jax.make_array_from_callback(
            shape, sharding, lambda index: rows[self._row(index, 0)][None]
        )
        return self._take(state, all_rows)

    def _row(self, index: Any, dim: int) -> int:
        """Returns the row of a device's part of an array whose dimension `dim` is the devices."""
        return (index[dim].start or 0) % self.rows

    def rows_here(self) -> list[int]:
        """Returns the rows that the devices of this process need."""
        sharding = NamedSharding(self._step.mesh, self._own)
        shape = (self.rows * self._copies,)
        found = sharding.addressable_devices_indices_map(shape).values()
        return sorted({self._row(index, 0) for index in found})

    def to_send(self, x: jax.Array) -> dict[int, np.ndarray]:
        """Returns the rows that this process sends: those of its first copies. Waits for them."""
        return {
            start: np.asarray(shard.data)[0]
            for shard in x.addressable_shards
            if (start := shard.index[0].start or 0) < self.rows
        }


def _start(
    programs: Programs, state: TrainState, number: jax.Array
) -> tuple[jax.Array, jax.Array, Pending]:
    """Returns this device's row [1, bytes], the sum of its outer part's bits [1], and the rest."""
    part = Part(programs.every, number)
    now = averaged(state)
    sent = programs.outer.encode(*now, part)
    bits = [
        jax.lax.bitcast_convert_type(part.take(x), jnp.uint32)
        for x in jax.tree.leaves(tuple(now[0]))
    ]
    total = sum((jnp.sum(x, dtype=jnp.uint32) for x in bits), jnp.uint32(0))
    return pack(sent.own), total[None], jax.tree.map(lambda x: x[None], sent)


def _finish(
    programs: Programs,
    state: TrainState,
    pending: Pending,
    arrived: jax.Array,
    weight_R: jax.Array,
    number: jax.Array,
) -> TrainState:
    """Averages [R, 1, bytes]. The site's own errors are of what it is recorded to have sent."""
    sent, site, arrived = jax.tree.map(lambda x: x[0], pending), programs.site, arrived[:, 0]
    own = unpack(arrived[site][None], sent.own)
    counted = Counted(weight_R, site)
    now = programs.outer.receive(
        sent._replace(arrived=arrived, own=own),
        *averaged(state),
        Part(programs.every, number),
        counted,
    )
    return with_averaged(state, *now)


def _shared(state: TrainState) -> Any:
    return state.params, state.router_bias, state.momentum


def _whole(programs: Programs, state: TrainState) -> jax.Array:
    """Returns outer weights and momentum on this device, [1, bytes]."""
    return pack(jax.tree.map(lambda x: x.reshape(1, -1), _shared(state)))


def _take(programs: Programs, state: TrainState, row: jax.Array) -> TrainState:
    """The inverse of `_whole`; the site's own weights become the outer ones."""
    like, shared = jax.tree.map(lambda x: x.reshape(1, -1), _shared(state)), _shared(state)
    found = jax.tree.map(lambda x, old: x.reshape(old.shape), unpack(row, like), shared)
    params, router_bias, momentum = found
    assert state.sites is not None, "the run has an outer loop"
    own = jax.tree.map(lambda x: x[0], state.sites.optimizer)
    sites = first_sites(state.sites, params, router_bias, own)
    return state._replace(params=params, router_bias=router_bias, momentum=momentum, sites=sites)
