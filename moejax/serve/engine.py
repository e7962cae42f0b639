"""The compiled functions of generation: prefill, a decoding step, a draw.

Each is one `jax.shard_map` over the whole mesh, sharded as training is: rows over the token axes,
and over tensor the heads, in the cache too. Devices that share sequences have a part of the cache
of all their rows. Legend: B rows, T positions of a prompt, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.comm import context, wire
from moejax.comm.cpu import gloo
from moejax.config.schema import Config
from moejax.layout.layout import Layout, build_layout
from moejax.model import cached
from moejax.model.layers import logits
from moejax.serve.sampling import Sampling, draw
from moejax.serve.weights import separate, targets_apart
from moejax.step.state import TrainState
from moejax.step.train_step import TrainStep, build_step, local_bytes

# Prompts are padded to a multiple of this, so that their lengths need few programs.
PROMPT_MULTIPLE = 64
STRIPE = 32  # positions side by side of a cache that devices share


class Prompts(NamedTuple):
    """A batch of prompts; global arrays outside the programs."""

    token_BT: Any  # padded at the end
    length_B: Any


class DecodingInputs(NamedTuple):
    """The inputs of a decoding step for each row."""

    token_B: Any  # the last token, which is not in the cache yet
    position_B: Any  # its position
    number_B: Any  # number of the row's prompt, which decides the draws


@dataclass(frozen=True)
class Engine:
    """The compiled functions for batches of one shape."""

    stored: TrainStep  # for weights as a checkpoint has them
    train_step: TrainStep  # for weights with each layer apart; its batch is one of prompts
    capacity: int  # positions of the cache
    sampling: Sampling
    allowed: int  # ids from this one on are never drawn

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Rows of a batch, and positions of their prompts."""
        return self.train_step.batch_shape

    @cached_property
    def prefill(self) -> Callable[[TrainState, Prompts], cached.Cached]:
        """The jitted (state, prompts) -> logits after each prompt, and a cache."""
        model, capacity = self.train_step.plain.model, self.capacity

        def body(state: TrainState, prompts: Prompts) -> cached.Cached:
            transformer = model.merge(state.params, state.router_bias, state.frozen)
            return cached.prefill(transformer, *prompts, capacity)

        return self._jitted(body, (self._states, self._prompts), self._cached)

    @cached_property
    def logits(self) -> Callable[[TrainState, jax.Array], jax.Array]:
        """The jitted (state, token_BT) -> logit_BTV of every position, float32."""
        model = self.train_step.plain.model

        def body(state: TrainState, token_BT: jax.Array) -> jax.Array:
            transformer = model.merge(state.params, state.router_bias, state.frozen)
            x_BTD, w_Dv, _ = transformer(token_BT, jnp.zeros_like(token_BT))
            logit_Nv = logits(x_BTD.reshape(-1, x_BTD.shape[2]), w_Dv)
            logit_BTv = logit_Nv.reshape(*x_BTD.shape[:2], -1)
            logit_BTV = wire.all_gather(logit_BTv, self._layout.tensor, dim=2)
            return context.gather(logit_BTV, self._layout)

        return self._jitted(body, (self._states, self._prompts), self._prompts)

    @cached_property
    def decode(self) -> Callable[[TrainState, DecodingInputs, cached.Cache], cached.Cached]:
        """The jitted (state, rows, cache) -> logits of the next token, and the cache, donated."""
        model = self.train_step.plain.model

        def body(state: TrainState, rows: DecodingInputs, cache: cached.Cache) -> cached.Cached:
            transformer = model.merge(state.params, state.router_bias, state.frozen)
            return cached.decode(transformer, rows.token_B, rows.position_B, cache)

        specs = (self._states, self._rows, self._cached.cache)
        return self._jitted(body, specs, self._cached, donate_argnums=2)

    @cached_property
    def draw(self) -> Callable[[jax.Array, DecodingInputs], tuple[DecodingInputs, jax.Array]]:
        """The jitted (logits, rows) -> rows with their next token, and it on all devices."""

        def body(logit_BV: jax.Array, rows: DecodingInputs) -> tuple[DecodingInputs, jax.Array]:
            position_B = rows.position_B + 1
            token_B = draw(logit_BV, rows.number_B, position_B, self.sampling, self.allowed)
            found = wire.all_gather(token_B, self._layout.token_axes, dim=0)
            return DecodingInputs(jnp.maximum(token_B, 0), position_B, rows.number_B), found

        return self._jitted(body, (self._rows, self._rows), (self._rows, P()))

    def take(self, state: TrainState) -> TrainState:
        """Returns a state of `stored` as the functions take it; deletes its arrays."""
        return separate(state, self.stored)

    def place(self, arrays: Any) -> Any:
        """Puts NumPy arrays, whose rows come first, onto the mesh."""
        spec = self._rows if isinstance(arrays, DecodingInputs) else self._prompts
        sharding = NamedSharding(self.train_step.mesh, spec)
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]),
            arrays,
        )

    def abstract(self) -> tuple[Prompts, DecodingInputs, cached.Cached]:
        """Shapes and shardings of the functions' arguments and results."""
        rows, mesh = self.batch_shape[0], self.train_step.mesh

        def integers(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))

        of_prompts = partial(integers, self._prompts)
        prompts = Prompts(of_prompts(*self.batch_shape), of_prompts(rows))
        made = jax.eval_shape(self.prefill, self.train_step.abstract, prompts)
        return prompts, DecodingInputs(*[integers(self._rows, rows)] * 3), made

    def bytes_beside_weights(self) -> int:
        """Returns the bytes that a device holds beside the weights.

        They are the cache, or before it the largest stack of layers, from which parts are cut.
        """
        stacks = (self.stored.abstract.params, self.stored.abstract.frozen)
        largest = max(map(local_bytes, jax.tree.leaves(stacks)))
        layout = self._layout
        shards = layout.size(layout.token_axes)
        shards *= 1 if self.train_step.cfg.model.is_latent else layout.size(layout.tensor)
        cache = self.abstract()[2].cache
        whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
        return max(whole // shards, largest)

    @property
    def _layout(self) -> Layout:
        return self.train_step.layout

    @property
    def _states(self) -> TrainState:
        return jax.tree.map(lambda x: x.sharding.spec, self.train_step.abstract)

    @property
    def _rows(self) -> P:
        """Sharding of tokens, one of each row."""
        return P(self._layout.token_axes)

    @property
    def _prompts(self) -> P:
        return self._layout.token_spec()

    @property
    def _cached(self) -> cached.Cached:
        """Sharding of logits and cache; a latent is of all heads, so every tensor rank has it."""
        layout, latent = self._layout, self.train_step.cfg.model.is_latent
        heads = () if latent else (layout.tensor,)
        cache = P(layout.row_axes, layout.context or None, *heads)
        return cached.Cached(self._rows, cache)  # type: ignore[arg-type]

    def _jitted(self, body: Any, in_specs: Any, out_specs: Any, **options: Any) -> Any:
        """Maps per-device code over the mesh."""
        mapped = gloo.shard_map(body, self.train_step.mesh, in_specs, out_specs)
        return jax.jit(mapped, compiler_options=self.train_step.options or None, **options)


def build_engine(
    cfg: Config,
    mesh: Mesh,
    platform: str,
    *,
    longest: int,
    prompts: int,
    tokens: int,
    sampling: Sampling,
    allowed: int,
) -> Engine:
    """Describes the functions for some prompts; allocates nothing.

    At most `train.batch_sequences` rows, rounded up, go at a time.

    Args:
      cfg: config of a run, with its mesh resolved.
      longest: tokens of the longest prompt.
      prompts: number of prompts.
      tokens: most tokens that continue a prompt.
    """
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, context_stripe=STRIPE))
    layout = build_layout(cfg.mesh)
    tensor = layout.size(layout.tensor)
    rows = min(prompts, cfg.train.batch_sequences)
    rows = _rounded_up(rows, layout.size(layout.token_axes) * tensor)
    pair = 2 * STRIPE * layout.size(layout.context) if layout.context else 1
    length = _rounded_up(longest, math.lcm(PROMPT_MULTIPLE, pair, tensor))
    cfg = dataclasses.replace(
        cfg,
        # Dropless, so that no row depends on the others of its batch.
        moe=dataclasses.replace(cfg.moe, capacity_factor=None),
        data=dataclasses.replace(cfg.data, sequence_length=length),
        train=dataclasses.replace(cfg.train, batch_sequences=rows, micro_batches=1),
    )
    dtype = cfg.model.dtype
    stored = build_step(cfg, mesh, platform).of_weights(dtype)
    lora = dataclasses.replace(cfg.lora, base_dtype=dtype, targets=targets_apart(stored))
    cfg = dataclasses.replace(cfg, lora=lora)
    apart = build_step(cfg, mesh, platform, stacked=False).of_weights(dtype)
    return Engine(stored, apart, _rounded_up(length + tokens, pair), sampling, allowed)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
