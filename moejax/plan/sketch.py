"""A first guess at every mesh: it says which are worth tracing, and decides nothing else.

Closed forms of the bytes that a step moves and of what a device must hold, in microseconds a mesh.
"""

from dataclasses import dataclass
from functools import cached_property

from moejax.config import Config
from moejax.dims import Axes, Layout, build_layout
from moejax.plan.topology import Topology

WIDTHS = {"float32": 4, "bfloat16": 2}
# Of the bytes of activations that a block keeps for backward, by what is recomputed; rough.
KEPT = {"none": 1.0, "dots": 0.7, "collectives": 0.35, "token_collectives": 0.3, "full": 0.05}


@dataclass(frozen=True)
class Sketch:
    """A step of one config on a cluster, roughly. Bytes and seconds of one device."""

    cfg: Config
    topology: Topology

    @cached_property
    def layout(self) -> Layout:
        """Of the mesh."""
        return build_layout(self.cfg.mesh)

    @property
    def tokens(self) -> float:
        """Of a micro-batch, on the devices of one tensor group."""
        train, layout = self.cfg.train, self.layout
        ranks = layout.size(layout.token_axes) * train.micro_batches
        return train.batch_sequences * self.cfg.data.sequence_length / ranks

    @property
    def weights(self) -> tuple[float, float]:
        """Parameters of a block: (dense, experts), whole."""
        model, moe = self.cfg.model, self.cfg.moe
        heads = 2 * model.num_heads + 2 * model.num_kv_heads
        dense = model.width * heads * model.head_width
        if not model.has_experts:
            return dense + 3.0 * model.width * model.mlp_hidden, 0.0
        shared = 3.0 * model.width * moe.num_shared_experts * moe.expert_hidden
        return dense + shared, 3.0 * moe.num_experts * model.width * moe.expert_hidden

    @property
    def expert_share(self) -> int:
        """In how many parts the experts of a block are cut, besides over fsdp."""
        layout = self.layout
        hidden = layout.tensor if layout.hidden_over_tensor else ()
        return layout.size((*layout.expert_owner_axes, *hidden))

    def bytes(self) -> float:
        """What a device holds at its fullest."""
        layout, model, moe = self.layout, self.cfg.model, self.cfg.moe
        width = WIDTHS[model.dtype]
        dense, experts = self.weights
        table = (1 if model.tie_embeddings else 2) * model.vocab_size * model.width
        over = layout.size(layout.fsdp + layout.expert + layout.tensor)
        own = (model.num_layers * dense + table) / over
        own += model.num_layers * experts / (self.expert_share * layout.size(layout.fsdp))
        # Masters, two moments and gradients in float32; a block's weights gathered.
        held = 16 * own + width * (dense / layout.size(layout.tensor) + experts / self.expert_share)
        local = self.tokens / layout.size(layout.tensor)
        rows = local * moe.experts_per_token * (1.5 if model.has_experts else 0)
        hidden = rows * (3 * model.width + 3 * moe.expert_hidden)
        attention = (
            self.tokens * 4 * model.num_heads * model.head_width / layout.size(layout.tensor)
        )
        block = width * (hidden + attention + 6 * local * model.width)
        kept = block * KEPT[model.remat] + width * local * model.width
        return held + kept * model.num_layers + 2 * block

    def seconds(self) -> float:
        """A step: what is computed, and what is sent and cannot be hidden."""
        compute, exchange, weights = self._compute(), self._exchange(), self._weights()
        times = self.cfg.model.num_layers * self.cfg.train.micro_batches
        busy = compute * times
        # On CPU collectives take the cores that compute; elsewhere weights travel beside it.
        hidden = 0.0 if self.topology.device.platform == "cpu" else 0.5 * compute
        return busy + times * (exchange + max(0.0, weights - hidden))

    def _compute(self) -> float:
        """Of a block: products, and passes over its activations."""
        layout, model, moe = self.layout, self.cfg.model, self.cfg.moe
        dense, experts = self.weights
        active = dense + experts * moe.experts_per_token / moe.num_experts
        again = 1 if model.remat in ("full", "collectives", "token_collectives") else 0
        positions = model.num_heads * model.head_width * self.cfg.data.sequence_length
        flops = (3 + again) * 2 * self.tokens * (active + positions) / layout.size(layout.tensor)
        device = self.topology.device
        rate = device.product_rate(model.dtype, flops / 20)
        local = self.tokens / layout.size(layout.tensor)
        passes = 30 * local * model.width * WIDTHS[model.dtype] * (1 + moe.experts_per_token)
        return flops / max(rate, 1.0) + passes / device.copy_bytes_per_s

    def _exchange(self) -> float:
        """Of a block: tokens to experts and home, and activations over tensor, both ways."""
        layout, model, moe = self.layout, self.cfg.model, self.cfg.moe
        width, local = WIDTHS[model.dtype], self.tokens / layout.size(layout.tensor)
        total = 0.0
        if model.has_experts:
            rows = 1.25 * local * moe.experts_per_token * model.width * width
            total += 4 * self._cost("all_to_all", rows, layout.expert_owner_axes)
            if layout.hidden_over_tensor:
                ranks = layout.size(layout.tensor)
                total += 4 * self._cost("all_gather", rows * ranks, layout.tensor)
        whole = self.tokens * model.width * width
        return total + 4 * self._cost("all_gather", whole, layout.tensor)

    def _weights(self) -> float:
        """Of a block: weights gathered, and their gradients reduced."""
        layout = self.layout
        width = WIDTHS[self.cfg.model.dtype]
        wide = WIDTHS[self.cfg.train.gradient_dtype]
        dense, experts = self.weights
        dense /= layout.size(layout.tensor)
        experts /= self.expert_share
        total = 0.0
        for size, axes in ((dense, layout.fsdp + layout.expert), (experts, layout.fsdp)):
            total += self._cost("all_gather", size * width, axes)
            total += self._cost("reduce_scatter", size * wide, axes)
            left = size * wide / layout.size(axes)
            total += self._cost("all_reduce", left, layout.replica)
        return total

    def _cost(self, kind: str, size: float, axes: Axes) -> float:
        layout = self.layout
        inside, across = (
            layout.size(layout.inside_node(axes)),
            layout.size(layout.between_nodes(axes)),
        )
        if inside * across == 1:
            return 0.0
        return max(self.topology.seconds(kind, size, *self.topology.group(inside, across)))
