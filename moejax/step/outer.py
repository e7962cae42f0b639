"""The outer loop: sites train apart, and a part of the model is averaged in every step.

Per device, inside the shard_map of the training mesh. In step t of a period of H steps each device
takes the t-th of H parts of each of its shards: of stacked layers these are runs of whole layers
where H divides their number, and blocks inside layers otherwise. What its site moved that part
since it was last averaged is encoded and sent to the devices with the same shard at the other
sites, while the step computes. At its end all sites decode the same bytes, average them, and move
the outer weights by Nesterov's rule, so that their copies stay equal to the bit. The site goes on
from them with the progress of the step.

    delta = outer - inner                        the pseudo-gradient, of the part, at the start
    momentum = mu momentum + mean(delta)
    outer = outer - rate (mean(delta) + mu momentum)
    inner = outer + (inner at the end - inner at the start)

What a site trains gets the sites as its first dimension, sharded over them, because sites differ.
The outer weights and their momentum are the same at all sites, so every site has a copy: it needs
them to know what it moved, and another site may be gone.

Sources: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512). Decision 0038.

Letters: R sites, H steps of a period, n values of a part on this device, m values of one array's.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from moejax.comm import wire
from moejax.comm.codecs.codec import Codec, build_plain_codec, pack, unpack
from moejax.comm.weights.path import compressible
from moejax.config.compression import CodecSpec, outer_codec
from moejax.config.schema import Config
from moejax.layout.layout import Axes
from moejax.step.model import ModelDef
from moejax.step.optimizer import Optimizer
from moejax.step.per_device import train_step
from moejax.step.state import Batch, Metrics, Sites, TrainState, Tree


@dataclass(frozen=True)
class Part:
    """The part of each array that a step averages; static but for its number.

    Attributes:
      count: parts of an array.
      number: of this one, from zero.
    """

    count: int
    number: Any

    def take(self, x: jax.Array) -> jax.Array:
        """Returns this part of an array, [m] in float32. The last one begins earlier to fit."""
        box = self._box(x.shape)
        return jax.lax.dynamic_slice(x, box.starts, box.sizes).reshape(-1).astype(jnp.float32)

    def put(self, x: jax.Array, new: jax.Array) -> jax.Array:
        """Returns an array with this part replaced by [m]; values of the part before it stay.

        XLA does this in place in an array of its own shape, and copies one that was reshaped.
        """
        box = self._box(x.shape)
        new = new.astype(x.dtype).reshape(box.sizes)
        if box.uneven is not None:
            at = jax.lax.broadcasted_iota(jnp.int32, box.sizes, box.uneven)
            old = jax.lax.dynamic_slice(x, box.starts, box.sizes)
            new = jnp.where(box.starts[box.uneven] + at >= box.first, new, old)
        return jax.lax.dynamic_update_slice(x, new, box.starts)

    def put_all(self, tree: Tree, new: list[jax.Array]) -> Tree:
        """Returns a tree with this part of each array replaced."""
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, map(self.put, leaves, new))

    def _box(self, shape: tuple[int, ...]) -> "_Box":
        """Returns the place of this part: dimensions are cut from the first on, as often as fits.

        What no dimension divides cuts the one whose pieces are longest. An array has a dimension.
        """
        left, cuts = self.count, []
        for size in shape:
            cuts.append(math.gcd(left, size))
            left //= cuts[-1]
        pieces = [size // cut for size, cut in zip(shape, cuts, strict=True)]
        longest = pieces.index(max(pieces))
        cuts[longest] *= left
        sizes = [-(-size // cut) for size, cut in zip(shape, cuts, strict=True)]
        starts, number = [], self.number
        for size, cut in reversed(list(zip(sizes, cuts, strict=True))):
            starts.insert(0, number % cut * size)
            number = number // cut
        first = starts[longest]
        if left == 1:
            return _Box(starts, sizes, None, first)
        starts[longest] = jnp.minimum(first, shape[longest] - sizes[longest])
        return _Box(starts, sizes, longest, first)


class _Box(NamedTuple):
    """Where a part lies in an array.

    Attributes:
      uneven: dimension that is cut in more pieces than divide it; None: all are cut evenly.
      first: where the part begins along it, at or after the box.
    """

    starts: list[Any]
    sizes: list[int]
    uneven: int | None
    first: Any


class Pending(NamedTuple):
    """The parts of all sites on their way, and what this site needs when they arrive.

    Attributes:
      arrived: [R, bytes] of packed payloads, in the order of the sites; None before they are here.
      own: this site's payload, [1, ...], as it was sent.
      before: of each array this site's part [m] at the start.
      wanted: [n], what was encoded: with feedback the differences and the errors so far.
    """

    arrived: Any
    own: Any
    before: list[jax.Array]
    wanted: jax.Array


class Shared(NamedTuple):
    """What all sites hold alike: outer weights and selection biases, and momentum of weights."""

    params: Tree
    router_bias: Tree
    momentum: Tree


class Counted(NamedTuple):
    """Whose parts count in a round of sites that are programs of their own (`train.sites`).

    Attributes:
      weight_R: tokens that a site's part has seen, or a multiple; negative: it does not count.
      site: this site's number.
    """

    weight_R: jax.Array
    site: int


@dataclass(frozen=True)
class OuterLoop:
    """The outer loop of a run; static.

    Attributes:
      axes: mesh axes along which the sites lie.
      every: H.
      at_once: whether all parts are sent at the end of a period, by a step that waits.
      codec: of differences of matrices; None: nothing is encoded.
      dims: letters of the dimensions of each parameter.
      within: mesh axes of one site.
    """

    axes: Axes
    every: int
    rate: float
    momentum: float
    at_once: bool
    codec: CodecSpec | None
    dims: Tree
    within: Axes

    def encoded(self) -> list[bool]:
        """Returns of each parameter whether the codec encodes it."""
        return [self.codec is not None and compressible(d) for d in jax.tree.leaves(self.dims)]

    def no_error(self, params: Tree) -> Tree:
        """Returns the first `Sites.error`: zeros like the parameters that feedback is for."""
        remembers = self.codec is not None and self.codec.feedback
        keeps = jax.tree.unflatten(jax.tree.structure(params), self.encoded())
        return jax.tree.map(
            lambda x, keep: jnp.zeros(x.shape, jnp.float32) if remembers and keep else None,
            params,
            keeps,
        )

    def part(self, step: jax.Array) -> Part:
        """Returns the part that a step averages, counted from zero."""
        return Part(1, jnp.int32(0)) if self.at_once else Part(self.every, step % self.every)

    def send(self, shared: Shared, inner: tuple[Tree, Tree], error: Tree, part: Part) -> Pending:
        """Sends this site's differences to the other sites. The program need not wait.

        Wire: R - 1 times the encoded part, per device, gathered. Arguments as of `encode`.
        """
        sent = self.encode(shared, inner, error, part)
        with jax.named_scope("outer"):
            return sent._replace(arrived=wire.gather_beside(pack(sent.own)[0], self.axes))

    def encode(self, shared: Shared, inner: tuple[Tree, Tree], error: Tree, part: Part) -> Pending:
        """Encodes this site's differences.

        Args:
          inner: this site's weights and selection biases.
          error: as of `Sites`.
        """
        before = [part.take(x) for x in jax.tree.leaves(inner)]
        outer = [part.take(x) for x in jax.tree.leaves((shared.params, shared.router_bias))]
        deltas = [theirs - ours for theirs, ours in zip(outer, before, strict=True)]
        groups = _Groups(self._is_encoded(len(deltas)), self._block, [x.size for x in deltas])
        errors = jax.tree.leaves(error)
        if errors:  # of the encoded parameters, in their order
            found = iter(errors)
            deltas = [
                delta + part.take(next(found)) if coded else delta
                for delta, coded in zip(deltas, groups.encoded, strict=True)
            ]
        wanted, plain = groups.join(deltas)
        own = {"plain": plain[None]}
        if wanted.size:
            own["coded"] = self._codec.encode_once(wanted[None])
        return Pending(None, own, before, wanted)

    def receive(
        self,
        sent: Pending,
        shared: Shared,
        inner: tuple[Tree, Tree],
        error: Tree,
        part: Part,
        counted: "Counted | None" = None,
    ) -> tuple[Shared, tuple[Tree, Tree], Tree]:
        """Averages what arrived. Returns the next outer state, this site's weights and its errors.

        Sites whose part is not finite do not count, and take the outer weights.

        Args:
          inner: this site's weights and selection biases as they are now.
          counted: of sites that are programs of their own; None: all sites are here and count
            alike.
        """
        groups = _Groups(
            self._is_encoded(len(sent.before)), self._block, [x.size for x in sent.before]
        )
        payload = unpack(sent.arrived, sent.own)
        arrived = [payload["plain"]]
        if sent.wanted.size:
            arrived.append(self._codec.decode(payload["coded"], sent.wanted.size))
        finite_R = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x), 1) for x in arrived]), 0)
        # All devices of a site agree, because some arrays have copies on several of them.
        finite_R = wire.all_max(jnp.int32(~finite_R), self.within) == 0
        if counted is None:
            weighted, weight_R, own = arrived, jnp.float32(1), wire.index(self.axes)
        else:
            finite_R &= counted.weight_R >= 0
            weight_R, own = counted.weight_R, counted.site
            weighted = [x * weight_R[:, None] for x in arrived]
        count = jnp.maximum(jnp.sum(jnp.where(finite_R, weight_R, 0)), 1)
        means = [jnp.sum(jnp.where(finite_R[:, None], x, 0), 0) / count for x in weighted]
        finite = finite_R[own]
        deltas = groups.split(means[1] if sent.wanted.size else sent.wanted, means[0])
        moved, speeds = self._moved(shared, deltas, part)
        now = [part.take(x) for x in jax.tree.leaves(inner)]
        mine = [
            jnp.where(finite, mean + (x - old), mean)
            for mean, x, old in zip(moved, now, sent.before, strict=True)
        ]
        left = self._left_out(sent, groups, finite) if jax.tree.leaves(error) else []
        # Known before one is put back: XLA would copy whole arrays that it still reads.
        moved, speeds, mine, left = jax.lax.optimization_barrier((moved, speeds, mine, left))
        params, router_bias = part.put_all((shared.params, shared.router_bias), moved)
        shared = Shared(params, router_bias, part.put_all(shared.momentum, speeds))
        return shared, part.put_all(inner, mine), part.put_all(error, left)

    def _moved(
        self, shared: Shared, deltas: list[jax.Array], part: Part
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns parts of the outer weights and biases, moved by averaged differences, and speeds.

        Selection biases take the average: their steps have one size, which momentum would change.
        """
        outer = [part.take(x) for x in jax.tree.leaves((shared.params, shared.router_bias))]
        old = [part.take(x) for x in jax.tree.leaves(shared.momentum)]
        of_weights = deltas[: len(old)]
        speeds = [self.momentum * v + delta for v, delta in zip(old, of_weights, strict=True)]
        steps = [
            self.rate * (delta + self.momentum * speed)
            for delta, speed in zip(of_weights, speeds, strict=True)
        ]
        steps += deltas[len(old) :]
        return [x - step for x, step in zip(outer, steps, strict=True)], speeds

    def _left_out(self, sent: Pending, groups: "_Groups", finite: jax.Array) -> list[jax.Array]:
        """Returns of each encoded parameter the next error: what was wanted, less what was sent."""
        left = sent.wanted - self._codec.decode(sent.own["coded"], sent.wanted.size)[0]
        parts = groups.split(jnp.where(finite, left, 0), sent.own["plain"][0])
        return [x for x, coded in zip(parts, groups.encoded, strict=True) if coded]

    def _is_encoded(self, count: int) -> list[bool]:
        """Returns whether each of the arrays is encoded: parameters, then selection biases."""
        encoded = self.encoded()
        return encoded + [False] * (count - len(encoded))

    @property
    def _codec(self) -> Codec:
        codec = build_plain_codec(self.codec)
        assert codec is not None, "nothing is encoded without a codec"
        return codec

    @property
    def _block(self) -> int:
        return 1 if self.codec is None else self.codec.block


class _Groups(NamedTuple):
    """Parts of arrays joined in two vectors: those that are encoded, and the others.

    Encoded ones begin at a block of the codec, so that arrays of other sizes do not share scales.
    """

    encoded: list[bool]
    block: int
    sizes: list[int]

    def join(self, parts: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns the encoded parts and the others, each joined."""
        vectors: tuple[list[jax.Array], list[jax.Array]] = [], []
        for x, coded in zip(parts, self.encoded, strict=True):
            vectors[0 if coded else 1].append(jnp.pad(x, (0, -x.size % self.block)) if coded else x)
        none = jnp.zeros(0)
        return jnp.concatenate([none, *vectors[0]]), jnp.concatenate([none, *vectors[1]])

    def split(self, coded: jax.Array, plain: jax.Array) -> list[jax.Array]:
        """The inverse of `join`."""
        parts, at = [], [0, 0]
        for size, is_coded in zip(self.sizes, self.encoded, strict=True):
            which = 0 if is_coded else 1
            parts.append((coded, plain)[which][at[which] : at[which] + size])
            at[which] += size + (-size % self.block if is_coded else 0)
        return parts


def build_outer(cfg: Config, model: ModelDef) -> OuterLoop:
    """Returns the outer loop that a config describes.

    Args:
      model: as a site sees it.
    """
    outer = cfg.outer
    assert outer.every is not None, "the config has no outer loop"
    return OuterLoop(
        model.layout.sites,
        outer.every,
        outer.rate,
        outer.momentum,
        outer.order == "all",
        outer_codec(cfg),
        model.dims,
        model.layout.mesh_axes,
    )


def site_step(
    model: ModelDef, optimizer: Optimizer, outer: OuterLoop, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Runs one step of this device's site, and averages a part of the model over the sites.

    Args:
      model, optimizer: as a site sees them.
      state: leaves of `sites` are [1, ...], this site's.
    """
    now, step, part = averaged(state), state.step, outer.part(state.step)
    sent = None if outer.at_once else outer.send(*now, part)
    own, metrics = own_step(
        model, optimizer, state._replace(skipped=jnp.zeros((), jnp.int32)), batch
    )
    now = averaged(own)
    with jax.named_scope("outer"):
        if sent is not None:
            now = outer.receive(sent, *now, part)
        else:
            now = _all_at_once(outer, *now, step)
        metrics = over_sites(metrics, outer.axes)
    metrics = metrics._replace(skipped=state.skipped + metrics.skipped)
    return with_averaged(own._replace(skipped=metrics.skipped), *now), metrics


def own_step(
    model: ModelDef, optimizer: Optimizer, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Runs one step of this device's site; the outer weights stay. Arguments as of `site_step`."""
    assert state.sites is not None
    sites = jax.tree.map(lambda x: x[0], state.sites)
    weights = (sites.params, sites.router_bias, sites.optimizer)
    counters = state.step, state.skipped
    own = TrainState(*counters, *weights, state.reduction, load_LE=sites.load_LE)
    own, metrics = train_step(model, optimizer, own, batch)
    sites = Sites(own.params, own.router_bias, own.optimizer, own.load_LE, sites.error)
    sites = jax.tree.map(lambda x: x[None], sites)
    own = state._replace(step=own.step, skipped=own.skipped, reduction=own.reduction, sites=sites)
    return own, metrics


def averaged(state: TrainState) -> tuple[Shared, tuple[Tree, Tree], Tree]:
    """Returns what an outer step reads and moves: outer weights, this site's, and its errors."""
    assert state.sites is not None
    own = jax.tree.map(lambda x: x[0], state.sites._replace(optimizer=(), load_LE=None))
    shared = Shared(state.params, state.router_bias, state.momentum)
    return shared, (own.params, own.router_bias), own.error


def with_averaged(
    state: TrainState, shared: Shared, inner: tuple[Tree, Tree], error: Tree
) -> TrainState:
    """The inverse of `averaged`."""
    assert state.sites is not None
    params, router_bias, error = jax.tree.map(lambda x: x[None], (*inner, error))
    sites = state.sites._replace(params=params, router_bias=router_bias, error=error)
    return state._replace(**shared._asdict(), sites=sites)


def _all_at_once(
    outer: OuterLoop, shared: Shared, inner: tuple[Tree, Tree], error: Tree, step: jax.Array
) -> tuple[Shared, tuple[Tree, Tree], Tree]:
    """Averages all of the model after the last step of a period; other steps change nothing."""
    part = outer.part(step)

    def average(now: Any) -> Any:
        shared, inner, error = now
        return outer.receive(outer.send(shared, inner, error, part), shared, inner, error, part)

    last = (step + 1) % outer.every == 0
    return jax.lax.cond(last, average, lambda now: now, (shared, inner, error))


def over_sites(metrics: Metrics, axes: Axes) -> Metrics:
    """Returns means of the sites' measures, and sums of their counts. Wire: one small gather."""
    leaves, tree = jax.tree.flatten(metrics)
    words = [
        jax.lax.bitcast_convert_type(x.astype(jnp.int32) if x.dtype == bool else x, jnp.uint32)
        for x in leaves
    ]
    flat = jnp.concatenate([x.reshape(-1) for x in words])
    words_Rn, at, found = wire.all_gather(flat[None], axes, dim=0, tag=None), 0, []
    for x in leaves:
        own = words_Rn[:, at : at + x.size].reshape(-1, *x.shape)
        at += x.size
        if x.dtype == bool:
            found.append(jnp.any(own > 0, 0))
        elif jnp.issubdtype(x.dtype, jnp.integer):
            found.append(jnp.sum(jax.lax.bitcast_convert_type(own, x.dtype), 0))
        else:
            found.append(jnp.mean(jax.lax.bitcast_convert_type(own, x.dtype), 0))
    return jax.tree.unflatten(tree, found)


def with_sites(
    site: ModelDef, shapes: TrainState, specs: TrainState
) -> tuple[TrainState, TrainState]:
    """Returns shapes and shardings of a run's state, made of those of a site's own state.

    Args:
      site: the model as a site sees it.
    """
    layout, error = site.layout, build_outer(site.cfg, site).no_error

    def stacked(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((layout.size(layout.sites), *x.shape), x.dtype)

    def each(spec: P) -> P:
        return P(layout.sites or None, *spec)

    errors = jax.eval_shape(error, shapes.params)
    error_specs = jax.tree.map(
        lambda x, spec: None if x is None else spec,
        errors,
        specs.params,
        is_leaf=lambda x: x is None,
    )
    gone = {"optimizer": (), "load_LE": None}
    return shapes._replace(
        sites=jax.tree.map(stacked, _own(shapes, errors)), momentum=shapes.params, **gone
    ), specs._replace(
        sites=jax.tree.map(each, _own(specs, error_specs)), momentum=specs.params, **gone
    )


def _own(state: TrainState, error: Tree) -> Sites:
    return Sites(state.params, state.router_bias, state.optimizer, state.load_LE, error)
