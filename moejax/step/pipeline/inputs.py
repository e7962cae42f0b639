"""Inputs of pipeline stages: what is before them, and gradients back to it.

Per device, inside the shard_map of the training mesh. Two ways:

- `Lookup`, where nothing but the embedding is before the stages. Tokens are a thousandth of hidden
  states, so every stage has those of all micro-batches, and the first looks up its input at each
  tick. All stages do, because they run one program: a read of as many bytes as a slot has.
- `Chain`, where layers are before the stages. They run on each stage's own micro-batches, before
  the first tick; what they return moves down to the first stage, one stage a tick, and gradients
  move up.

Letters: those of `layout.layout`; P stages, M micro-batches, k a micro-batch in the order in which
stages work on them, j one of a stage's own.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.comm.links import Link
from moejax.step.pipeline.model import RouterParts, StagedModel, no_parts
from moejax.step.pipeline.weights import put_part
from moejax.step.state import Tree


class Lookup:
    """The embedding, at the first stage.

    The state of gradients is the float32 sum of the table's; None if it is not trained.
    """

    def __init__(self, staged: StagedModel):
        self.staged = staged
        self.table = staged.weights.trained_of(staged.weights.outer)["embedding"]["table"]
        self.trained = staged.weights.trains("embedding", "table")

    def first(self) -> tuple[jax.Array, None]:
        """Returns hidden states of real tokens, and what moves besides: nothing."""
        return self.staged.embed(self.table, jnp.int32(0), jnp.int32(0)), None

    def input(self, fed: None, t: jax.Array) -> tuple[jax.Array, None]:
        """Returns the first stage's input at a tick at which micro-batches enter."""
        schedule = self.staged.schedule
        k, _ = self.staged.numbered(schedule.micro_batch(t))
        return self.staged.embed(self.table, k, schedule.kind(t)), None

    def first_back(self) -> Tree | None:
        """Returns the state of gradients before the first tick."""
        return sums_like(self.table) if self.trained else None

    def move(
        self, back: Tree | None, dx_BtD: jax.Array, t: jax.Array, *, leave: bool
    ) -> Tree | None:
        """Moves gradients on by one stage; where nothing moves, adds that of the first's input.

        Args:
          dx_BtD: what backward left one tick before tick t.
          leave: whether micro-batches leave at tick t, and the first stage's is that of an input.
        """
        if not leave or not self.trained:
            return back
        staged, schedule = self.staged, self.staged.schedule
        n = t - schedule.begins - schedule.chunks * staged.stages
        k, valid = staged.numbered(schedule.micro_batch(n))
        piece = schedule.kind(n, backward=True)
        _, pull = jax.vjp(partial(staged.embed, k=k, piece=piece), self.table)
        (table,) = pull(jnp.where((staged.stage == 0) & valid, dx_BtD, 0))
        return add(back, table)

    def finish(self, back: Tree, dx_BtD: jax.Array) -> tuple[Tree, RouterParts]:
        """Takes what the last tick left.

        Returns:
          The gradients of what is trained of `outer`, without those of the loss, and the parts'
          sums.
        """
        zeros = sums_like(self.staged.weights.trained_of(self.staged.weights.outer))
        if not self.trained:
            return zeros, no_parts()
        back = self.move(back, dx_BtD, jnp.int32(self.staged.schedule.end), leave=True)
        return put_part(zeros, {"embedding": {"table": back}}), no_parts()


class Returning(NamedTuple):
    """Gradients on their way back to the layers before the stages.

    Attributes:
      moving: one on its way up.
      own: what came back, for each of this stage's own micro-batches.
    """

    moving: jax.Array
    own_JBtD: jax.Array


class Chain:
    """Layers before the stages, on each stage's own micro-batches.

    Each stage in turn has the next micro-batch. Stage s puts it, or its slices, on a chain to the
    first stage, s ticks before they begin there.

    Attributes:
      x_JBtD: hidden states of this stage's own micro-batches, positions by slices.
    """

    def __init__(self, staged: StagedModel):
        self.staged = staged
        each = jnp.arange(staged.each)
        self.x_JBtD = lax.map(lambda j: staged.run_before(staged.weights.outer, j)[0], each)
        like = self.first()[0]
        self.ahead: Link = staged.link("stage", like)
        self.behind: Link = staged.link("stage_gradient", like)

    def first(self) -> tuple[jax.Array, jax.Array]:
        """Returns hidden states of real tokens, and what moves down the chain."""
        x_BtD = self.staged.piece_of(self.x_JBtD[0], jnp.int32(0))
        return x_BtD, x_BtD

    def input(self, fed: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the first stage's input at a tick at which they enter, and moves the chain on."""
        staged, n = self.staged, t + self.staged.stage
        k, _ = staged.numbered(staged.schedule.micro_batch(n))
        owner, j = staged.rank(k)
        new = staged.piece_of(get(self.x_JBtD, j), staged.schedule.kind(n))
        fed = jnp.where(owner == staged.stage, new, fed)
        return fed, self.ahead.to_previous(self.ahead.encode_once(fed))

    def first_back(self) -> Returning:
        """Returns the state of gradients before the first tick."""
        return Returning(jnp.zeros_like(self.first()[0]), jnp.zeros_like(self.x_JBtD))

    def move(self, back: Returning, dx_BtD: jax.Array, t: jax.Array, *, leave: bool) -> Returning:
        """Sends gradients one stage toward their owner; stores those that arrived.

        What the first stage leaves at a tick reaches stage s s ticks later. Arguments as of
        `Lookup.move`.
        """
        moving = self.behind.to_next(self.behind.encode_once(back.moving))
        if leave:
            moving = jnp.where(self.staged.stage == 0, dx_BtD, moving)
        staged, schedule = self.staged, self.staged.schedule
        n = t - staged.stage - schedule.begins - schedule.chunks * staged.stages
        k, here = staged.numbered(schedule.micro_batch(n))
        owner, j = staged.rank(k)
        kind = schedule.kind(n, backward=True)
        first_chunk = n // staged.stages % schedule.chunks == 0
        here &= (owner == staged.stage) & first_chunk
        piece = kind if schedule.slices > 1 else 0
        start = (j, 0, piece * moving.shape[1], 0)
        old = lax.dynamic_slice(back.own_JBtD, start, (1, *moving.shape))
        own_JBtD = lax.dynamic_update_slice(
            back.own_JBtD, jnp.where(here, moving[None], old), start
        )
        return Returning(moving, own_JBtD)

    def finish(self, back: Returning, dx_BtD: jax.Array) -> tuple[Tree, RouterParts]:
        """Brings back what is under way, and runs backward through the layers before the stages.

        Arguments and results as of `Lookup.finish`.
        """
        staged, end = self.staged, self.staged.schedule.end
        back = self.move(back, dx_BtD, jnp.int32(end), leave=True)

        def bring_back(back: Returning, t: jax.Array) -> tuple[Returning, None]:
            return self.move(back, dx_BtD, t, leave=False), None

        back, _ = lax.scan(bring_back, back, jnp.arange(end + 1, end + staged.stages))

        trained = staged.weights.trained_of(staged.weights.outer)
        weights = staged.before_of(trained)

        def add_one(sums: Any, scanned: Any) -> tuple[Any, None]:
            j, dx_BtD = scanned
            _, pull, parts = jax.vjp(partial(staged.before, j=j), weights, has_aux=True)
            (more,) = pull((dx_BtD, jnp.ones(())))
            return (add(sums[0], more), jax.tree.map(jnp.add, sums[1], parts)), None

        parts = jax.eval_shape(staged.before, weights, jnp.int32(0))[1]
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parts)
        each = jnp.arange(staged.each), back.own_JBtD
        (sums, parts), _ = lax.scan(add_one, (sums_like(weights), none), each)
        return put_part(sums_like(trained), sums), parts


def build_feed(staged: StagedModel) -> Lookup | Chain:
    """Returns the way in which a model's stages get their inputs."""
    return Lookup(staged) if staged.embeds_alone else Chain(staged)


def get(slots: jax.Array, slot: jax.Array) -> jax.Array:
    """Reads a slot."""
    return lax.dynamic_index_in_dim(slots, slot, keepdims=False)


def sums_like(tree: Tree) -> Tree:
    """Returns zeros to which gradients of weights are added."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), tree)


@jax.named_scope("stage_sums")
def add(sums: Tree, more: Tree) -> Tree:
    """Adds to float32 sums."""
    return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), sums, more)
