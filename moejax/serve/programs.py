"""The compiled functions of generation: new tokens behind cached ones, their scores, a draw.

Each is one `jax.shard_map` over the whole mesh, sharded as training is: slots of the cache and rows
of new tokens over the token axes, and over tensor the heads, in the cache too. Devices that share
sequences have a part of the cache of all their slots. Legend: R rows, T new tokens of each, V
vocabulary.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.comm import context, wire
from moejax.comm.cpu import gloo
from moejax.config.schema import Config
from moejax.layout.layout import Layout, build_layout
from moejax.model import cached
from moejax.model.context import Rows
from moejax.runtime.processes import ALONE, Processes
from moejax.serve.sampling import Drawn, Draws, draw, log_probabilities
from moejax.serve.weights import Separator, targets_apart
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep, build_step, by_scores, local_bytes

SHORT, LONG = 64, 256  # tokens of a row of a prompt in one call
CALL_TOKENS = 512  # most tokens of a device in one call, if a row has no more
STRIPE = 32  # positions side by side of a cache that devices share
LIKELIEST = 20  # tokens whose log probabilities are reported, where they are asked for


class NewTokens(NamedTuple):
    """Rows of new tokens, as many for each device; arrays of all devices."""

    token_RT: Any  # padded at the end
    slot_R: Any  # slot of the row, counted on its device
    start_R: Any  # position of its first token
    count_R: Any  # its tokens; 0: none


class Scores(NamedTuple):
    """Log probabilities of given tokens, and the likeliest tokens with theirs, in order."""

    logprob_RT: Any
    likeliest_RTN: Any
    logprob_RTN: Any


@dataclass(frozen=True)
class Programs:
    """The compiled functions for a number of slots.

    Attributes:
      stored: for weights as a checkpoint has them.
      train_step: for weights with each layer apart; its batch has a row for each slot.
      single: the same for rows of one token: see `_for_single_tokens`.
      homes: as `train_step`, where every expert is at home alone.
      slots: of each device.
      positions: of a slot.
      allowed: ids from this one on are never drawn.
    """

    stored: TrainStep
    train_step: TrainStep
    single: TrainStep
    homes: TrainStep
    slots: int
    positions: int
    allowed: int
    _made: dict[Any, Any] = field(default_factory=dict, compare=False)

    @property
    def form(self) -> tuple[int, int, int]:
        """Slots, positions and allowed ids, which tell the programs of a model apart."""
        return self.slots, self.positions, self.allowed

    @property
    def expert_slots(self) -> int:
        """Places of each device for further experts: see `serve.experts.places`."""
        return self.train_step.cfg.moe.slots

    @property
    def devices(self) -> int:
        """Number of devices, or groups of tensor ranks, that have slots of their own."""
        return self._layout.size(self._layout.token_axes)

    def rows(self, wanted: int, length: int) -> int:
        """Returns the rows of a device, of `length` tokens, in the program for `wanted` rows.

        They are 1, 4, 16 and so on, or as many as there may be, so that programs are few.
        """
        most = self.slots if length == 1 else max(1, min(self.slots, CALL_TOKENS // length))
        step, rows = self._layout.size(self._layout.tensor) if length == 1 else 1, 1
        while rows < wanted:
            rows *= 4
        return min(-(-rows // step) * step, most)

    def extend(self, every: bool, routing: bool = False) -> Any:
        """The jitted (state, tokens, cache) -> logits behind each row, and the cache, donated.

        With slots for experts `cached.Loads` of the call are a further result, on all devices.

        Args:
          every: whether row r of a device has slot r, for every slot.
          routing: whether the experts of the tokens, expert_RTLK, are a further result. They are
            on all devices.
        """

        def body(state: TrainState, tokens: NewTokens, cache: cached.Cache) -> Any:
            x_RTD, w_Dv, transformer, cache, more = self._run(state, tokens, cache, every, routing)
            return _last_logits(transformer, x_RTD, w_Dv, tokens), cache, *more

        specs = (self._states, self._rows, self._cache_spec)
        out = (self._rows, self._cache_spec, *self._more(routing))
        return self.program(("extend", every, routing), body, specs, out, donate_argnums=2)

    def score(self, every: bool, routing: bool = False) -> Any:
        """As `extend`; takes another array, the tokens that are behind, and returns their scores.

        Scores are on all devices.
        """

        def body(state: TrainState, tokens: NewTokens, cache: cached.Cache, next_RT: Any) -> Any:
            x_RTD, w_Dv, transformer, cache, more = self._run(state, tokens, cache, every, routing)
            logit_RV = _last_logits(transformer, x_RTD, w_Dv, tokens)

            def of_tokens(arrays: tuple[jax.Array, jax.Array]) -> Scores:
                x_ND, next_N = arrays
                logit_NV = cached.whole_logits(transformer, x_ND, w_Dv)
                form = {"allowed": self.allowed, "likeliest": LIKELIEST}
                return Scores(*log_probabilities(logit_NV, next_N, **form))

            # A position of all rows at a time, so that few logits are held.
            scores = jax.lax.map(of_tokens, (x_RTD.swapaxes(0, 1), next_RT.T))
            scores = jax.tree.map(lambda x: x.swapaxes(0, 1), scores)
            return logit_RV, cache, self._on_all(scores), *more

        specs = (self._states, self._rows, self._cache_spec, self._rows)
        out = (self._rows, self._cache_spec, P(), *self._more(routing))
        return self.program(("score", every, routing), body, specs, out, donate_argnums=2)

    def draw(self, kind: str, likeliest: int) -> Any:
        """The jitted (logits, draws) -> tokens on all devices; see `sampling.draw`."""

        def body(logit_RV: jax.Array, draws: Draws) -> Drawn:
            form = {"kind": kind, "allowed": self.allowed, "likeliest": likeliest}
            return self._on_all(draw(logit_RV, draws, **form))

        return self.program(("draw", kind, likeliest), body, (self._rows, self._rows), P())

    @cached_property
    def logits(self) -> Any:
        """The jitted (state, token_BT) -> logit_BTV of every position, float32, without a cache.

        Where several processes share the mesh, all devices have them.
        """
        model, mesh = self.train_step.plain.model, self.train_step.mesh
        shared = isinstance(mesh, Mesh) and mesh.is_multi_process

        def body(state: TrainState, token_BT: jax.Array) -> jax.Array:
            transformer = model.merge(state.params, state.router_bias, state.frozen)
            x_BTD, w_Dv, _ = transformer(token_BT, jnp.zeros_like(token_BT))
            logit_NV = cached.whole_logits(transformer, x_BTD.reshape(-1, x_BTD.shape[2]), w_Dv)
            logit_BTV = context.gather(logit_NV.reshape(*x_BTD.shape[:2], -1), self._layout)
            axes = self._layout.row_axes if shared else ()
            return wire.all_gather(logit_BTV, axes, dim=0, tag=None)

        batch = self._layout.token_spec()
        return self.program("logits", body, (self._states, batch), P() if shared else batch)

    def take(self, state: TrainState, processes: Processes = ALONE) -> TrainState:
        """Returns a state of `stored` as the functions take it; deletes its arrays."""
        return Separator(self.homes, processes).take(state)

    def place(self, arrays: Any) -> Any:
        """Puts NumPy arrays, whose rows come first, onto the mesh."""
        return jax.tree.map(partial(self.put, spec=self._rows), arrays)

    def place_batch(self, token_BT: np.ndarray) -> Any:
        """Puts sequences for `logits` onto the mesh."""
        return self.put(token_BT, self._layout.token_spec())

    def put(self, array: np.ndarray, spec: P) -> Any:
        """Puts an array onto the mesh, where several processes share it."""
        sharding = NamedSharding(self.train_step.mesh, spec)
        if sharding.is_fully_addressable:
            return array  # a call of a function places it in a tenth of the time
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    @cached_property
    def empty_cache(self) -> Any:
        """The jitted () -> a cache on the devices."""
        of_arrays = partial(jax.tree.map, is_leaf=cached.is_cache_array)

        def zeros() -> cached.Cache:
            return of_arrays(lambda x: jnp.zeros(x.shape, x.dtype), self._cache_shapes)

        place = partial(NamedSharding, self.train_step.mesh)
        return jax.jit(zeros, out_shardings=jax.tree.map(place, self._cache_spec))

    def bytes_beside_weights(self) -> int:
        """Returns the bytes that a device holds beside the weights.

        They are the cache and, with slots for experts, a layer that moves; or before them the
        largest stack of layers, from which parts are cut.
        """
        stacks = (self.stored.abstract.params, self.stored.abstract.frozen)
        largest = max(map(local_bytes, jax.tree.leaves(stacks)))
        cache = cached.cache_bytes(self._cache_shapes, self._layout)
        if self.expert_slots:
            held = self.train_step.abstract
            layers = [(held.frozen or {}).get("groups", {}), held.params.get("groups", {})]
            cache += max(local_bytes(one) for own in layers for one in own.values())
        return max(cache, largest)

    def _run(
        self, state: TrainState, tokens: NewTokens, cache: cached.Cache, every: bool, routing: bool
    ) -> Any:
        """Returns hidden states, the output projection, the model, the cache, and a list.

        It has the loads with slots for experts, and the experts with `routing`.
        """
        length = tokens.token_RT.shape[1]
        train_step = self.single if length == 1 else self.train_step
        transformer = train_step.plain.model.merge(state.params, state.router_bias, state.frozen)
        rows = Rows(tokens.slot_R, tokens.start_R, tokens.count_R, length, every)
        found = cached.extend(transformer, tokens.token_RT, rows, cache, routing=routing)
        more = [] if found.loads is None else [found.loads]
        more += [self._on_all(found.expert_RTLK)] if routing else []
        w_Dv = transformer.embedding.weights()[1]
        return found.x_RTD, w_Dv, transformer, found.cache, more

    def _more(self, routing: bool) -> list[P]:
        return [P()] * (bool(self.expert_slots) + routing)

    def _on_all(self, arrays: Any) -> Any:
        """Gathers rows over the devices."""
        gather = partial(wire.all_gather, axes=self._layout.token_axes, dim=0)
        return jax.tree.map(gather, arrays)

    @property
    def _cache_shapes(self) -> cached.Cache:
        return cached.cache_shapes(
            self.train_step.cfg.model,
            self._layout,
            slots=self.slots * self.devices,
            positions=self.positions,
            chunk=LONG if self.positions > SHORT else SHORT,
        )

    @property
    def _layout(self) -> Layout:
        return self.train_step.layout

    @cached_property
    def _states(self) -> TrainState:
        return jax.tree.map(lambda x: x.sharding.spec, self.train_step.abstract)

    @property
    def _rows(self) -> P:
        """Sharding of rows."""
        return P(self._layout.token_axes)

    @property
    def _cache_spec(self) -> Any:
        of_arrays = partial(jax.tree.map, is_leaf=cached.is_cache_array)
        return of_arrays(lambda array: array.spec, self._cache_shapes)

    def program(self, key: Any, body: Any, in_specs: Any, out_specs: Any, **options: Any) -> Any:
        """Maps per-device code over the mesh; returns the same function for the same key."""
        if key not in self._made:
            mapped = gloo.shard_map(body, self.train_step.mesh, in_specs, out_specs)
            compiler_options = self.train_step.options or None
            self._made[key] = jax.jit(mapped, compiler_options=compiler_options, **options)
        return self._made[key]


def _last_logits(transformer: Any, x_RTD: jax.Array, w_Dv: Any, tokens: NewTokens) -> jax.Array:
    """Returns the logits [R, V] of the token behind each row."""
    last_R11 = jnp.maximum(tokens.count_R - 1, 0)[:, None, None]
    x_RD = jnp.take_along_axis(x_RTD, last_R11, axis=1)[:, 0]
    return cached.whole_logits(transformer, x_RD, w_Dv)


def build_programs(
    cfg: Config,
    mesh: Mesh | AbstractMesh,
    platform: str,
    gathered: bool = False,
    *,
    slots: int,
    positions: int,
    allowed: int,
    expert_slots: int = 0,
) -> Programs:
    """Describes the functions; allocates nothing.

    Args:
      cfg: config of a run, with its mesh resolved.
      mesh: an AbstractMesh is enough to trace the functions.
      gathered: as in `Layout`. Weights as a checkpoint has them are sharded all the same.
      slots: texts that are continued at a time, on all devices; rounded up to what they share.
      positions: the most of a text, its prompt included; rounded up.
      expert_slots: places of each device that owns experts, beside those of its own.
    """
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, context_stripe=STRIPE))
    layout = build_layout(cfg.mesh)
    tensor, devices = layout.size(layout.tensor), layout.size(layout.token_axes)
    own = _rounded_up(-(-slots // devices), tensor)
    pair = 2 * STRIPE * layout.size(layout.context) if layout.context else 1
    positions = _rounded_up(positions, math.lcm(SHORT, pair, tensor))
    cfg = dataclasses.replace(
        cfg,
        # Dropless, so that no text depends on the others.
        moe=dataclasses.replace(by_scores(cfg).moe, capacity_factor=None, slots=0),
        data=dataclasses.replace(cfg.data, sequence_length=positions),
        train=dataclasses.replace(cfg.train, batch_sequences=own * devices, micro_batches=1),
    )
    dtype = cfg.model.dtype
    stored = build_step(cfg, mesh, platform).of_weights(dtype)
    lora = dataclasses.replace(cfg.lora, base_dtype=dtype, targets=targets_apart(stored))
    cfg = dataclasses.replace(cfg, lora=lora)

    def of_layers(cfg: Config) -> TrainStep:
        options = {"stacked": False, "gathered": gathered, "tables": cfg.moe.slots > 0}
        return build_step(cfg, mesh, platform, None, **options).of_weights(dtype)

    homes = apart = of_layers(cfg)
    if expert_slots:
        cfg = dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, slots=expert_slots))
        apart = of_layers(cfg)
    single = of_layers(_for_single_tokens(cfg, layout))
    return Programs(stored, apart, single, homes, own, positions, allowed)


def _for_single_tokens(cfg: Config, layout: Layout) -> Config:
    """Returns the config for rows of one token: buckets hold any routing, filled rows travel.

    Few tokens overflow buckets of a balanced load often, and would go in rounds.
    """
    headroom = float(layout.size(layout.expert_owner_axes) * layout.size(layout.tensor))
    moe = dataclasses.replace(cfg.moe, headroom=headroom)
    one_chunk = {"route_chunks": 1, "route_chunks_backward": None, "route_trim": True}
    return dataclasses.replace(cfg, moe=moe, **one_chunk)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def no_tokens(programs: Programs, rows: int, length: int) -> NewTokens:
    """Returns NumPy arrays of rows without tokens; `rows` of each device."""
    total = rows * programs.devices
    slot_R = np.tile(np.arange(rows, dtype=np.int32), programs.devices)
    token_RT = np.zeros((total, length), np.int32)
    return NewTokens(token_RT, slot_R, np.zeros(total, np.int32), np.zeros(total, np.int32))
