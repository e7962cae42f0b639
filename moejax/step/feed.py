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

from moejax.comm.stages import Link
from moejax.step.staged_model import RouterParts, StagedModel, no_parts, put_table
from moejax.step.state import Tree


class Lookup:
    """The embedding, at the first stage.

    The state of gradients is the float32 sum of the table's.
    """

    def __init__(self, staged: StagedModel):
        self.staged = staged
        self.table = staged.outer["embedding"]["table"]

    def first(self) -> tuple[jax.Array, None]:
        """Returns hidden states of real tokens, and what moves besides: nothing."""
        return self.staged.embed(self.table, jnp.int32(0), jnp.int32(0)), None

    def input(self, fed: None, t: jax.Array) -> tuple[jax.Array, None]:
        """Returns the first stage's input at a tick at which micro-batches enter."""
        schedule = self.staged.schedule
        k, _ = self.staged.numbered(schedule.micro_batch(t))
        return self.staged.embed(self.table, k, schedule.kind(t)), None

    def first_back(self) -> Tree:
        """Returns the state of gradients before the first tick."""
        return sums_like(self.table)

    def move(self, back: Tree, dx_BtD: jax.Array, t: jax.Array, *, leave: bool) -> Tree:
        """Moves gradients on by one stage; where nothing moves, adds that of the first's input.

        Args:
          dx_BtD: what backward left one tick before tick t.
          leave: whether micro-batches leave at tick t, and the first stage's is that of an input.
        """
        if not leave:
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
          The gradients of `outer`, without those of the loss, and the parts' sums.
        """
        zeros = sums_like(self.staged.outer)
        back = self.move(back, dx_BtD, jnp.int32(self.staged.schedule.end), leave=True)
        return put_table(zeros, back), no_parts()


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

    Each stage in turn has the next micro-batch. Before the first stage begins with P of them all
    put their next one on a chain that ends at it.

    Attributes:
      x_JBtD: hidden states of this stage's own micro-batches.
    """

    def __init__(self, staged: StagedModel):
        self.staged = staged
        each = jnp.arange(staged.each)
        self.x_JBtD = lax.map(lambda j: staged.run_before(staged.outer, j)[0], each)
        self.ahead: Link = staged.link("stage", self.x_JBtD[0])
        self.behind: Link = staged.link("stage_gradient", self.x_JBtD[0])

    def first(self) -> tuple[jax.Array, jax.Array]:
        """Returns hidden states of real tokens, and what moves down the chain."""
        return self.x_JBtD[0], self.x_JBtD[0]

    def input(self, fed: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the first stage's input at a tick at which they enter, and moves the chain on."""
        staged = self.staged
        j = t // (staged.stages * staged.schedule.chunks)
        new = get(self.x_JBtD, jnp.minimum(j, staged.each - 1))
        fed = jnp.where(t % staged.stages == 0, new, fed)
        return fed, self.ahead.to_previous(self.ahead.encode_once(fed))

    def first_back(self) -> Returning:
        """Returns the state of gradients before the first tick."""
        return Returning(jnp.zeros_like(self.x_JBtD[0]), jnp.zeros_like(self.x_JBtD))

    def move(self, back: Returning, dx_BtD: jax.Array, t: jax.Array, *, leave: bool) -> Returning:
        """Moves gradients on by one stage, and keeps one that has come back to where it is from.

        Of micro-batches that enter together, that of stage s leaves s ticks after the first, and
        reaches stage s as many later. Arguments as of `Lookup.move`.
        """
        moving = self.behind.to_next(self.behind.encode_once(back.moving))
        if leave:
            moving = jnp.where(self.staged.stage == 0, dx_BtD, moving)
        staged, turn = self.staged, self.staged.stages * self.staged.schedule.chunks
        u = t - staged.schedule.begins - turn - 2 * staged.stage
        j, here = u // turn, u % turn == 0
        here &= (j >= 0) & (j < staged.each)
        slot = jnp.clip(j, 0, staged.each - 1)
        return Returning(moving, put(back.own_JBtD, moving, slot, here))

    def finish(self, back: Returning, dx_BtD: jax.Array) -> tuple[Tree, RouterParts]:
        """Brings back what is under way, and runs backward through the layers before the stages.

        Arguments and results as of `Lookup.finish`.
        """
        staged, end = self.staged, self.staged.schedule.end
        back = self.move(back, dx_BtD, jnp.int32(end), leave=True)

        def bring_back(back: Returning, t: jax.Array) -> tuple[Returning, None]:
            return self.move(back, dx_BtD, t, leave=False), None

        back, _ = lax.scan(bring_back, back, jnp.arange(end + 1, end + staged.stages))

        def add_one(sums: Any, scanned: Any) -> tuple[Any, None]:
            j, dx_BtD = scanned
            _, pull, parts = jax.vjp(partial(staged.before, j=j), staged.outer, has_aux=True)
            (outer,) = pull((dx_BtD, jnp.ones(())))
            return (add(sums[0], outer), jax.tree.map(jnp.add, sums[1], parts)), None

        parts = jax.eval_shape(staged.before, staged.outer, jnp.int32(0))[1]
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parts)
        first = sums_like(staged.outer), none
        return lax.scan(add_one, first, (jnp.arange(staged.each), back.own_JBtD))[0]


def build_feed(staged: StagedModel) -> Lookup | Chain:
    """Returns the way in which a model's stages get their inputs."""
    return Lookup(staged) if staged.embeds_alone else Chain(staged)


def get(slots: jax.Array, slot: jax.Array) -> jax.Array:
    """Reads a slot."""
    return lax.dynamic_index_in_dim(slots, slot, keepdims=False)


def put(slots: jax.Array, x: jax.Array, slot: jax.Array, valid: jax.Array) -> jax.Array:
    """Writes to a slot, if valid."""
    x = jnp.where(valid, x, get(slots, slot))
    return lax.dynamic_update_index_in_dim(slots, x, slot, 0)


def sums_like(tree: Tree) -> Tree:
    """Returns zeros to which gradients of weights are added."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), tree)


def add(sums: Tree, more: Tree) -> Tree:
    """Adds to float32 sums."""
    return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), sums, more)
