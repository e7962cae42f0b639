"""Blocks of attention and MLP or experts, and the repeating pattern in which they are scanned.

Per device, inside shard_map.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from moejax.annotations import Array, Float, Int
from moejax.comm import links, wire
from moejax.comm.weights.gather import replicated_weight
from moejax.config.pattern import BlockKind, settings_of
from moejax.config.schema import ModelConfig, MoEConfig
from moejax.kernels.attention.attention import sliced_attention
from moejax.kernels.kept import ATTENDED
from moejax.layout.layout import Layout
from moejax.layout.spec import StepSpec
from moejax.model.layers import MLP, model_norm, normalised, scaled
from moejax.model.mixers.attention import Attention
from moejax.model.mixers.delta import GatedDeltaNet, KimiDelta
from moejax.model.mixers.interface import NoMixer
from moejax.model.mixers.latent import LatentAttention
from moejax.model.mixers.mamba import Mamba2
from moejax.model.mixers.sparse import SparseAttention
from moejax.model.rope import Angles, angles_of
from moejax.moe.layer import KnownLoad, MoE, MoEStats, RecordedExperts
from moejax.moe.router import Noise

# The mixers of tokens (`mixers.interface.Mixer`) by their names in a `BlockKind`.
MIXERS: dict[str, Any] = {
    "grouped": Attention,
    "latent": LatentAttention,
    "sparse": SparseAttention,
    "gated_delta": GatedDeltaNet,
    "kimi_delta": KimiDelta,
    "mamba2": Mamba2,
    "none": NoMixer,
}
# Calls a block's attention; returns its output, and the arrays for a cache.
Attend = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


class Block(nnx.Module):
    """Attention, then an MLP or experts, each with norms of its inputs, of its results, or both.

    One of them may be missing, with its norms.
    """

    def __init__(
        self, kind: BlockKind, cfg: ModelConfig, moe: MoEConfig, spec: StepSpec, rngs: nnx.Rngs
    ):
        self.barriers = spec.barriers
        self.norms, self.residual_scale = cfg.block_norm, cfg.residual_scale
        own, has_mixer = settings_of(cfg, kind.window), kind.mixer != "none"
        self.attention = MIXERS[kind.mixer](own, kind.window, spec, rngs) if has_mixer else None
        for of, there in (("attention", has_mixer), ("mlp", kind.mlp != "none")):
            if there:
                setattr(self, f"{of}_norm", model_norm(cfg))
            if there and cfg.block_norm == "both":
                setattr(self, f"{of}_out_norm", model_norm(cfg))
        self.own_norms = kind.mlp == "moe" and moe.own_norms
        if self.own_norms:
            self.experts_norm, self.experts_out_norm = model_norm(cfg), model_norm(cfg)
            self.shared_out_norm = model_norm(cfg)
            self.router_scale = nnx.Param(jnp.ones((cfg.width,)), dims="D")
        self.layer_scale = nnx.Param(jnp.ones((1,)), dims="Y") if cfg.layer_scale else None
        self.moe = MoE(cfg, moe, spec, rngs) if kind.mlp == "moe" else None
        hidden = {"dense": cfg.mlp_hidden, "moe": moe.shared_width, "none": 0}[kind.mlp]
        self.mlp = MLP(cfg, hidden, spec, rngs) if hidden else None
        normal = jax.nn.initializers.normal(cfg.init_deviation)
        self.shared_gate = (
            nnx.Param(normal(rngs.params(), (cfg.width,)), dims="D")
            if kind.mlp == "moe" and moe.shared_gate
            else None
        )

    def run(
        self,
        x_BtD: jax.Array,
        attend: Attend,
        noise: Noise | None = None,
        is_token_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEStats | None, Any]:
        """Runs the block around a call of its attention.

        Args:
          attend: takes the attention and its input; returns its output, and the arrays for a cache.
          is_token_BT: as of `MoE.__call__`.
        Returns:
          The new residual stream, the statistics of the experts, and the arrays for a cache.
        """
        # Gathered here, the weights of the MLP and experts arrive while attention runs.
        stats, kept = None, ()
        fetched = [] if self.moe is None else self.moe.fetch()
        moe_weights = None if self.moe is None or fetched else self.moe.weights()
        mlp_weights = None if self.mlp is None else self.mlp.weights()
        with jax.named_scope("attention"):
            if self.attention is not None:
                y_BtD, kept = attend(self.attention, self._input(x_BtD, "attention"))
                x_BtD = self._add(x_BtD, [y_BtD], "attention")
            if self.moe is not None and fetched:
                # Their first use waits for attention, which hides the copies.
                x_BtD, fetched = jax.lax.optimization_barrier((x_BtD, fetched))
                moe_weights = self.moe.weights(fetched)
            elif self.barriers and moe_weights is not None:
                # In backward too they arrive while attention's projections are computed again.
                x_BtD, moe_weights = jax.lax.optimization_barrier((x_BtD, moe_weights))
            elif self.attention is not None:
                x_BtD = checkpoint_name(x_BtD, ATTENDED)
        if self.moe is None and self.mlp is None:
            return self._scaled(x_BtD), stats, kept
        h_BtD, added = self._input(x_BtD, "mlp"), []
        if self.moe is not None and moe_weights is not None:
            own_BtD, inputs = (x_BtD, self._inputs) if self.own_norms else (h_BtD, None)
            y_BtD, stats = self.moe(own_BtD, moe_weights, noise, is_token_BT, inputs)
            added.append(self.experts_out_norm(y_BtD) if self.own_norms else y_BtD)
        if self.mlp is not None and mlp_weights is not None:
            with jax.named_scope("mlp"):
                y_BtD = self.mlp(h_BtD, mlp_weights)
                if self.shared_gate is not None:
                    y_BtD = scale_by_gate(y_BtD, h_BtD, replicated_weight(self.shared_gate))
                added.append(self.shared_out_norm(y_BtD) if self.own_norms else y_BtD)
        return self._scaled(self._add(x_BtD, added, "mlp")), stats, kept

    def _scaled(self, x_BtD: jax.Array) -> jax.Array:
        """Returns the block's result times its constant, if it has one."""
        if self.layer_scale is None:
            return x_BtD
        # Without a gradient Adam does not move it.
        factor_1 = jax.lax.stop_gradient(replicated_weight(self.layer_scale))
        return (x_BtD * factor_1).astype(x_BtD.dtype)

    def _inputs(self, x_BtD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the inputs of the experts and of the router, of the residual stream."""
        seen_BtD = normalised(x_BtD.astype(jnp.float32), self.experts_norm.epsilon)
        scale_D = replicated_weight(self.router_scale) / math.sqrt(x_BtD.shape[-1])
        return self.experts_norm(x_BtD), seen_BtD * scale_D

    def _input(self, x_BtD: jax.Array, of: str) -> jax.Array:
        """Returns the input of attention, or of experts and MLP."""
        return x_BtD if self.norms == "after" else getattr(self, f"{of}_norm")(x_BtD)

    def _add(self, x_BtD: jax.Array, added: list[jax.Array], of: str) -> jax.Array:
        """Returns the residual stream with results of attention, or of experts and MLP."""
        if self.norms != "before":
            norm = getattr(self, f"{of}_norm" if self.norms == "after" else f"{of}_out_norm")
            added = [norm(sum(added[1:], start=added[0]))]
        for y_BtD in added:
            x_BtD = x_BtD + scaled(y_BtD, self.residual_scale)
        return x_BtD


def scale_by_gate(
    y_BtD: Float[Array, "B t D"], h_BtD: Float[Array, "B t D"], gate_D: Float[Array, " D"]
) -> Float[Array, "B t D"]:
    """Scales y of each position by sigmoid(h . gate), in float32.

    Source: Qwen2-MoE (Yang et al. 2024), whose shared experts have such a gate.
    """
    logit_Bt = jnp.dot(h_BtD.astype(jnp.float32), gate_D, precision="highest")
    return (y_BtD * jax.nn.sigmoid(logit_Bt)[..., None]).astype(y_BtD.dtype)


class Slice(NamedTuple):
    """A slice of sequences; slices run through the layers one after the other.

    Attributes:
      number: its number.
      length: its positions.
      past: keys and values of earlier slices, [B, S, ...], for each block; see
        `kernels.attention.attention.sliced_attention`.
    """

    number: jax.Array
    length: int
    past: list[jax.Array]

    @property
    def position_T(self) -> jax.Array:
        """Its positions in the sequence."""
        return self.number * self.length + jnp.arange(self.length)

    def angles(self, cfg: ModelConfig) -> Angles:
        """Returns the angles of its positions."""
        return angles_of(self.position_T, cfg)

    def attends(self, segment_BS: jax.Array) -> list[Any]:
        """Returns for each block its attention to this slice and those before it."""
        return [
            partial(sliced_attention, past=past, segment_BS=segment_BS, number=self.number)
            for past in zip(self.past[::2], self.past[1::2], strict=True)
        ]


@dataclass(frozen=True)
class PositionShare:
    """A stage's share of each sequence's positions in a loss step (`StageLink.scatter_positions`).

    A block that runs there attends from a share: its queries stay, and keys and values of all
    positions are gathered over the stages.

    Attributes:
      layout: layout with the stages.
      segment_BS: document of each position of the sequences.
    """

    layout: Layout
    segment_BS: Int[Array, "B S"]

    @property
    def position_T(self) -> Int[Array, " T"]:
        """Its positions in the sequence."""
        position_S = jnp.arange(self.segment_BS.shape[1])
        return links.share_of_positions(position_S[None], self.layout)[0]

    def attend(
        self,
        q_BTHC: Float[Array, "B T H C"],
        k_BTGC: Float[Array, "B T G C"],
        v_BTGV: Float[Array, "B T G V"],
        **form: Any,
    ) -> Float[Array, "B T H V"]:
        """Returns the result of `attention` for the queries of this share.

        Wire: keys and values of each stage, gathered.

        Args:
          form: further arguments of `sliced_attention`.
        """
        P, here = self.layout.size(self.layout.stage), wire.index(self.layout.stage)
        k_BSGC, v_BSGV = (links.gather_positions(x, self.layout) for x in (k_BTGC, v_BTGV))
        parts = links.parts_per_share(self.layout)
        cut = [jnp.split(x, parts, axis=1) for x in (q_BTHC, k_BTGC, v_BTGV)]
        results = [
            sliced_attention(
                *own,
                past=(k_BSGC, v_BSGV),
                segment_BS=self.segment_BS,
                number=n * P + here,
                numbers=range(n * P, (n + 1) * P),
                **form,
            )
            for n, own in enumerate(zip(*cut, strict=True))
        ]
        return jnp.concatenate(results, axis=1)


class Pattern(nnx.Module):
    """The blocks of one repeat of a layer group."""

    def __init__(
        self,
        kinds: tuple[BlockKind, ...],
        cfg: ModelConfig,
        moe: MoEConfig,
        spec: StepSpec,
        rngs: nnx.Rngs,
    ):
        self.blocks = nnx.List([Block(kind, cfg, moe, spec, rngs) for kind in kinds])

    def use_recorded(self, experts: Iterable[jax.Array]) -> None:
        """Sets `MoE.recorded` of each block with experts, in order."""
        for layer, expert_BTK in zip(self._expert_layers, experts, strict=True):
            layer.recorded = RecordedExperts(expert_BTK)

    def use_load(self, loads: Iterable[jax.Array]) -> None:
        """Sets `MoE.known_load` of each block with experts, in order."""
        for layer, load_E in zip(self._expert_layers, loads, strict=True):
            layer.known_load = KnownLoad(load_E)

    @property
    def _expert_layers(self) -> list[MoE]:
        return [block.moe for block in self.blocks if block.moe is not None]

    def __call__(
        self, x_BtD: jax.Array, segment_BS: jax.Array, angles: Angles, noise: Noise | None
    ) -> tuple[jax.Array, list[MoEStats]]:
        """Runs the blocks in order; returns the statistics of each expert block."""

        def attend(attention: Any, h_BtD: jax.Array) -> tuple[jax.Array, Any]:
            return attention(h_BtD, segment_BS, angles), ()

        return _run_blocks(self.blocks, x_BtD, [attend] * len(self.blocks), noise)[:2]

    def in_slice(
        self, x_BtD: jax.Array, angles: Angles, attends: list[Any], noise: Noise | None
    ) -> tuple[jax.Array, list[MoEStats], list[jax.Array]]:
        """As `__call__`, for a part of the positions; also returns their keys and values.

        Args:
          attends: for each block, `attend` of `Attention.in_slice`.
        """

        def in_slice(form: Any) -> Attend:
            return lambda attention, h_BtD: attention.in_slice(h_BtD, angles, form)

        return _run_blocks(self.blocks, x_BtD, list(map(in_slice, attends)), noise)


def _run_blocks(
    blocks: Sequence[Block], x_BtD: jax.Array, attends: list[Attend], noise: Noise | None
) -> tuple[jax.Array, list[MoEStats], list[jax.Array]]:
    stats, own = [], []
    for index, (block, attend) in enumerate(zip(blocks, attends, strict=True)):
        block_noise = None if noise is None else noise.of(index)
        x_BtD, block_stats, kept = block.run(x_BtD, attend, block_noise)
        stats += [] if block_stats is None else [block_stats]
        own += kept
    return x_BtD, stats, own
