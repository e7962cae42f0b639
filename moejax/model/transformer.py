"""The language model: blocks of attention and MLP or experts, scanned by repeating pattern.

Per device, inside shard_map. Modules hold this device's shards of the parameters; the letters of
their dimensions are metadata (`dims`), from which `Layout` derives every sharding.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.annotations import Array, Float, Int
from moejax.comm import context
from moejax.comm.activations import enter_tensor
from moejax.comm.host import is_on_host
from moejax.comm.weights.adapters import Weight
from moejax.comm.weights.shard import without
from moejax.config.pattern import BlockKind, ahead_kind, layer_groups
from moejax.config.schema import ModelConfig, MoEConfig
from moejax.layout.spec import StepSpec
from moejax.model.ahead import PredictAhead, next_tokens
from moejax.model.block import Pattern, PositionShare, Slice
from moejax.model.layers import Embedding, model_norm
from moejax.model.remat import in_turn, remat_policy
from moejax.model.rope import Angles, angles_of
from moejax.moe.layer import MoEStats
from moejax.moe.router import Noise


class Hidden(NamedTuple):
    """The results of the blocks, and the inputs of a block after them."""

    h_BtD: jax.Array  # final hidden states, normalised, in the layout between blocks
    weights: tuple[Weight, Weight]  # of the embedding
    stats: list[MoEStats]  # of each layer group that has experts
    angles: Angles


class Ahead(NamedTuple):
    """The results of `Transformer`, and the hidden states that predict the token after the next."""

    x_BTD: Float[Array, "B T D"]
    w_Dv: Weight
    stats: MoEStats | None
    ahead_BTD: Float[Array, "B T D"]


class Transformer(nnx.Module):
    """A decoder-only language model. Parameters of a layer group are stacked: layers come first."""

    def __init__(self, cfg: ModelConfig, moe: MoEConfig, spec: StepSpec, rngs: nnx.Rngs):
        self.cfg, self.moe, self.spec = cfg, moe, spec
        self.embedding = Embedding(cfg, spec, rngs)

        def stack(kinds: tuple[BlockKind, ...], repeats: int) -> Pattern:
            build_pattern = partial(Pattern, kinds, cfg, moe, spec)
            return nnx.vmap(build_pattern, in_axes=0, out_axes=0)(rngs.split(repeats))

        groups = layer_groups(cfg, stacked=spec.stacked)
        self.groups = nnx.List([stack(kinds, repeats) for kinds, repeats in groups])
        self.norm = model_norm(cfg, divisor=cfg.logit_divisor)
        # Behind `groups` in the order of names too: selection biases move in that order.
        self.predict_ahead = (
            PredictAhead(cfg, spec, rngs, stack((ahead_kind(cfg),), 1))
            if cfg.predict_ahead
            else None
        )

    def use_recorded(self, expert_BSLK: Int[Array, "B S L K"]) -> None:
        """Sends the tokens of a step to recorded experts; the next call of this object does so.

        The module for multi-token prediction chooses freely.

        Args:
          expert_BSLK: of all L layers with experts; -1 for all K: the layer chooses.
        """
        expert_BTLK = context.own(expert_BSLK, self.spec.layout)
        for group, own_nRBTK in self._by_group(jnp.moveaxis(expert_BTLK, 2, 0)):
            group.use_recorded(own_nRBTK)

    def use_load(self, load_LE: Int[Array, "L E"]) -> None:
        """Chooses experts for copies by an earlier load; the next call of this object does so.

        The module for multi-token prediction chooses by its own tokens.

        Args:
          load_LE: of all L layers with experts, as in `Metrics`.
        """
        for group, own_nRE in self._by_group(load_LE):
            group.use_load(own_nRE)

    def _by_group(self, array_L: jax.Array) -> Iterator[tuple[Any, jax.Array]]:
        """Yields each layer group and its layers' parts [n, R, ...]: n a repeat, R repeats."""
        first, groups = 0, layer_groups(self.cfg, stacked=self.spec.stacked)
        for group, (kinds, repeats) in zip(self.groups, groups, strict=True):
            count = sum(kind.mlp == "moe" for kind in kinds)
            own_L = array_L[first : first + repeats * count]
            yield group, own_L.reshape(repeats, count, *own_L.shape[1:]).swapaxes(0, 1)
            first += repeats * count

    def __call__(
        self, token_BS: Int[Array, "B S"], segment_BS: Int[Array, "B S"], noise: Noise | None = None
    ) -> tuple[Float[Array, "B T D"], Weight, MoEStats | None]:
        """Returns final hidden states of this device's positions, output projection, statistics.

        They are all positions, or where devices share sequences `context.own` of them.

        The projection [D, v] is this tensor rank's slice of the vocabulary. The statistics of the
        expert layers are stacked in layer order.

        Args:
          segment_BS: document of each position; attention stays inside it.
          noise: for the jitter of the routers' input; None for no jitter.
        """
        hidden = self._run(token_BS, segment_BS, noise)
        x_BTD = enter_tensor(hidden.h_BtD, self.spec.layout)
        return x_BTD, hidden.weights[1], _joined(hidden.stats)

    def look_ahead(
        self, token_BS: Int[Array, "B S"], segment_BS: Int[Array, "B S"], noise: Noise | None = None
    ) -> Ahead:
        """Runs the module for multi-token prediction too; its experts are the last in `stats`."""
        hidden, module = self._run(token_BS, segment_BS, noise), self.predict_ahead
        assert module is not None, "model.predict_ahead is 0"
        layout = self.spec.layout
        with jax.named_scope("predict_ahead"):
            next_BT = context.own(next_tokens(token_BS, segment_BS), layout)
            next_BtD = self.embedding.embed(next_BT, hidden.weights[0])
            x_BtD, own_stats = self._run_group(
                module.group,
                module.join(next_BtD, hidden.h_BtD),
                segment_BS,
                hidden.angles,
                None if noise is None else noise.of(len(self.groups)),
                max(0, self.spec.compression.start_layer - self.cfg.num_layers),
            )
            ahead_BTD = enter_tensor(module.norm(x_BtD), layout)
        x_BTD = enter_tensor(hidden.h_BtD, layout)
        stats = hidden.stats + ([] if own_stats is None else [own_stats])
        if own_stats is not None and hidden.stats and hidden.stats[0].replayed_2 is not None:
            none = jnp.zeros_like(hidden.stats[0].replayed_2, shape=(1, 2))
            stats[-1] = own_stats._replace(replayed_2=none)
        return Ahead(x_BTD, hidden.weights[1], _joined(stats), ahead_BTD)

    def before_stages(
        self, token_BS: jax.Array, segment_BS: jax.Array, noise: Noise | None
    ) -> tuple[Float[Array, "B t D"], MoEStats | None]:
        """Takes tokens through the embedding, and the layer groups before the stages."""
        own_BT = context.own(token_BS, self.spec.layout)
        x_BtD = self.embedding.embed(own_BT, self.embedding.weights()[0])
        before = range(len(self.groups) - self.cfg.stage_chunks)
        x_BtD, stats = self._run_groups(x_BtD, segment_BS, self._angles(token_BS), noise, before)
        return x_BtD, _joined(stats)

    def in_layer(
        self,
        x_BtD: Float[Array, "B t D"],
        segment_BS: Int[Array, "B S"],
        noise: Noise | None,
        part: Slice | None,
    ) -> tuple[Float[Array, "B t D"], MoEStats | None, list[jax.Array]]:
        """Takes hidden states through one repeat of the last layer group.

        The group holds the weights of the repeat, not stacked.

        Args:
          noise: noise of the repeat.
          part: the slice that `x_BtD` holds; None: it holds whole sequences.
        Returns:
          Hidden states, the experts' statistics, and keys and values of a slice, as `Slice.past`.
        """
        group, own = self.groups[-1], []
        if part is None:
            x_BtD, stats = group(x_BtD, segment_BS, self._angles(segment_BS), noise)
        else:
            if noise is not None:
                noise = noise._replace(position_T=part.position_T)
            attends, angles = part.attends(segment_BS), part.angles(self.cfg)
            x_BtD, stats, own = group.in_slice(x_BtD, angles, attends, noise)
        return x_BtD, _joined(stats, jnp.stack), own

    def keys(self, x_BtD: Float[Array, "B t D"], part: Slice) -> list[jax.Array]:
        """Returns the last result of `in_layer`; only its shapes and dtypes count."""
        mixers: list[Any] = [block.attention for block in self.groups[-1].blocks]
        angles = part.angles(self.cfg)
        return [array for mixer in mixers for array in mixer.keys(x_BtD, angles)]

    def after_stages(self, y_BtD: Float[Array, "B t D"]) -> tuple[Float[Array, "B T D"], Weight]:
        """Returns the final hidden states, on all tensor ranks, and the output projection."""
        return enter_tensor(self.norm(y_BtD), self.spec.layout), self.embedding.weights()[1]

    def look_ahead_in_share(
        self,
        y_BtD: Float[Array, "B t D"],
        next_BT: Int[Array, "B T"],
        share: PositionShare,
        noise: Noise | None,
    ) -> tuple[Float[Array, "B T D"], MoEStats | None]:
        """Runs the module for multi-token prediction on a stage's share of the positions.

        Args:
          y_BtD: hidden states after the stages; see `after_stages`.
          next_BT: `next_tokens` of the share.
        Returns:
          `Ahead.ahead_BTD` of the share, and the statistics of the module's experts.
        """
        module, position_T = self.predict_ahead, share.position_T
        assert module is not None, "model.predict_ahead is 0"
        graph, stacked = nnx.split(module.group)
        if noise is not None:
            noise = noise.of(len(self.groups)).of(0)._replace(position_T=position_T)
        angles = angles_of(position_T, self.cfg)

        def run(state: Any, x_BtD: jax.Array) -> Any:
            group = nnx.merge(graph, state)
            attends = [share.attend] * len(group.blocks)
            return group.in_slice(x_BtD, angles, attends, noise)[:2]

        if self.cfg.remat != "none":
            run = jax.checkpoint(run, policy=remat_policy(self.cfg.remat, self.spec))
        with jax.named_scope("predict_ahead"):
            next_BtD = self.embedding.embed(next_BT, self.embedding.weights()[0])
            x_BtD = module.join(next_BtD, self.norm(y_BtD))
            x_BtD, stats = run(jax.tree.map(lambda x: x[0], stacked), x_BtD)
            return enter_tensor(module.norm(x_BtD), self.spec.layout), _joined(stats, jnp.stack)

    def _angles(self, token_BS: jax.Array) -> Angles:
        position_T = context.positions(token_BS.shape[1], self.spec.layout)
        return angles_of(position_T, self.cfg)

    def _run(self, token_BS: jax.Array, segment_BS: jax.Array, noise: Noise | None) -> Hidden:
        angles = self._angles(token_BS)
        with jax.named_scope("embed"):
            weights = self.embedding.weights()
            x_BtD = self.embedding.embed(context.own(token_BS, self.spec.layout), weights[0])
        every = range(len(self.groups))
        x_BtD, stats = self._run_groups(x_BtD, segment_BS, angles, noise, every)
        return Hidden(self.norm(x_BtD), weights, stats, angles)

    def _run_groups(
        self,
        x_BtD: jax.Array,
        segment_BS: jax.Array,
        angles: Angles,
        noise: Noise | None,
        indices: range,
    ) -> tuple[jax.Array, list[MoEStats]]:
        """Runs layer groups, from the first on; returns the statistics of groups with experts."""
        stats, first_block = [], 0
        groups = layer_groups(self.cfg, stacked=self.spec.stacked)
        for index in indices:
            kinds, repeats = groups[index]
            group_noise = None if noise is None else noise.of(index)
            plain_blocks = max(0, self.spec.compression.start_layer - first_block)
            x_BtD, group_stats = self._run_group(
                self.groups[index], x_BtD, segment_BS, angles, group_noise, plain_blocks
            )
            stats += [] if group_stats is None else [group_stats]
            first_block += len(kinds) * repeats
        return x_BtD, stats

    def _run_group(
        self,
        group: Pattern,
        x_BtD: jax.Array,
        segment_BS: jax.Array,
        angles: Angles,
        noise: Noise | None,
        plain_blocks: int,
    ) -> tuple[jax.Array, MoEStats | None]:
        """Scans one layer group; returns statistics stacked in layer order.

        Args:
          plain_blocks: number of first blocks, rounded up to a whole pattern, whose gradients are
            not compressed.
        """
        graph, stacked = nnx.split(group)
        repeats, pattern = jax.tree.leaves(stacked)[0].shape[0], len(group.blocks)

        def repeat(x_BtD, scanned):
            layer, state = scanned
            layer_noise = None if noise is None else noise.of(layer)
            return nnx.merge(graph, state)(x_BtD, segment_BS, angles, layer_noise)

        if self.cfg.remat != "none":
            # JAX's barrier would have backward wait for all that comes from the host before it
            # recomputes. A loop needs none.
            comes = self.spec.residuals_on_host or any(map(is_on_host, jax.tree.leaves(stacked)))
            barrier = not (comes and self.cfg.scan_layers)
            policy = remat_policy(self.cfg.remat, self.spec)
            repeat = jax.checkpoint(repeat, policy=policy, prevent_cse=barrier)
        if self.spec.barriers and not self.cfg.scan_layers:
            repeat = partial(in_turn, repeat)
        plain_repeats, stats = min(-(-plain_blocks // pattern), repeats), []
        for start, stop in ((0, plain_repeats), (plain_repeats, repeats)):
            if start == stop:
                continue
            part = (jnp.arange(repeats), stacked)
            if plain_repeats:
                part = jax.tree.map(lambda x, a=start, b=stop: x[a:b], part)
            part = without(part, "residual") if stop == plain_repeats else part
            unroll = 1 if self.cfg.scan_layers else stop - start
            x_BtD, part_stats = jax.lax.scan(repeat, x_BtD, part, unroll=unroll)
            stats.append(part_stats)
        if not stats[0]:
            return x_BtD, None
        joined = jax.tree.map(lambda *p: jnp.concatenate(p), *stats)
        # [repeats, ...] for each expert block of a pattern -> [repeats * blocks, ...], ordered.
        flat = jax.tree.map(lambda *p: jnp.stack(p, axis=1).reshape(-1, *p[0].shape[1:]), *joined)
        return x_BtD, flat


def _joined(stats: list[MoEStats], join: Callable = jnp.concatenate) -> MoEStats | None:
    """Returns the statistics of all expert layers in order; of single layers by `jnp.stack`."""
    return jax.tree.map(lambda *parts: join(parts), *stats) if stats else None
