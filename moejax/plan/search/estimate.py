"""A rough estimate of every mesh, which decides only which meshes are traced.

Closed formulas for the bytes that a step moves and a device holds; microseconds per mesh. With
pipeline stages all layers count as the stages'.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from moejax.config.checks.size import attention_parameters, mean_of_mixers, mlp_parameters
from moejax.config.compression import outer_codec
from moejax.config.pattern import ahead_kind, block_kinds, layer_groups, settings_of
from moejax.config.schema import Config, ModelConfig
from moejax.layout.layout import Axes, Layout, build_layout
from moejax.model.block import MIXERS
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.cost import group_of, node_groups
from moejax.step.pipeline.schedule import PipelineSchedule, build_schedule

WIDTHS = {"float32": 4, "bfloat16": 2}
# Bytes of activations that a block keeps for backward, by recomputation; rough.
KEPT = {"none": 1.0, "dots": 0.7, "experts": 0.6, "collectives": 0.35, "attention": 0.35}
KEPT |= {"token_collectives": 0.3, "full": 0.05}

NEAR = 3  # slots on the device where the others are on the host: two that are used, one that comes
SMALL_OPS = 100  # small operations of an expert block: counts of rows, sorts, comparisons
HIDDEN = 0.75  # share of a stage's sending, or of its computing, that the other hides; as by price


@dataclass(frozen=True)
class Estimate:
    """A rough estimate of one config's step on a cluster. Bytes and seconds of one device."""

    cfg: Config
    topology: Topology

    @cached_property
    def layout(self) -> Layout:
        """Layout of the mesh."""
        return build_layout(self.cfg.mesh)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one tensor group."""
        train, layout = self.cfg.train, self.layout
        ranks = layout.size(layout.inside.token_axes) * train.micro_batches
        return train.batch_sequences * self.cfg.data.sequence_length / ranks

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.cfg.mesh.stage

    @property
    def weights(self) -> tuple[float, float]:
        """Parameters of a whole block, (dense, experts): a mean over all blocks."""
        dense, experts, beside = mlp_parameters(self.cfg)
        share = self.expert_blocks
        own = share * beside + self.dense_blocks * dense
        return attention_parameters(self.cfg.model) + own, share * experts

    @property
    def expert_blocks(self) -> float:
        """Share of the blocks that have experts."""
        model = self.cfg.model
        ahead = model.predict_ahead * (ahead_kind(model).mlp == "moe")
        return (model.expert_layers + ahead) / model.blocks

    @property
    def dense_blocks(self) -> float:
        """Share of the blocks that have a dense MLP."""
        model = self.cfg.model
        return 1 - self.expert_blocks - model.layer_mlps.count("none") / model.blocks

    @property
    def trained(self) -> tuple[float, float]:
        """Parameters of a whole block that are trained: all, or adapters of all matrices."""
        model, moe, rank = self.cfg.model, self.cfg.moe, self.cfg.lora.rank
        share = self.expert_blocks
        if rank is None:
            return self.weights

        def mlp(hidden: int, width: int = model.width) -> float:
            return rank * (2.0 * width + (model.hidden_inputs + 1) * hidden)

        attention = rank * mean_of_mixers(model, lambda matrices: sum(map(sum, matrices)))
        shared = mlp(moe.shared_width) if moe.shared_width else 0.0
        shared += 2 * rank * (model.width + moe.latent) if moe.latent else 0.0
        dense = share * shared + self.dense_blocks * mlp(model.mlp_hidden)
        experts = moe.num_experts * mlp(moe.expert_hidden, moe.latent or model.width)
        return attention + dense, share * experts

    @property
    def tables(self) -> float:
        """Parameters of embedding and output projection."""
        model = self.cfg.model
        return (1.0 if model.tie_embeddings else 2.0) * model.vocab_size * model.width

    @property
    def own(self) -> float:
        """Parameters that are trained and whose master weights are on one device."""
        tables = self.tables if self.cfg.lora.rank is None else 0.0
        return self._of_device(*self.trained, tables)

    @property
    def frozen_bytes(self) -> float:
        """Bytes of the frozen weights on one device."""
        if self.cfg.lora.rank is None:
            return 0.0
        return WIDTHS[self.cfg.lora.base_dtype] * self._of_device(*self.weights, self.tables)

    def _of_device(self, dense: float, experts: float, tables: float) -> float:
        """Returns a device's share of all blocks' parameters, and of the tables'."""
        layout, layers = self.layout, self.cfg.model.blocks
        over = layout.size(layout.stage + layout.fsdp + layout.expert + layout.tensor)
        shards = self.expert_share * layout.size(layout.stage + layout.fsdp)
        return (layers * dense + tables) / over + layers * experts / shards

    @property
    def expert_share(self) -> int:
        """Number of parts that a block's experts are sharded into, besides fsdp."""
        layout = self.layout
        hidden = layout.tensor if layout.hidden_over_tensor else ()
        return layout.size((*layout.expert_owner_axes, *hidden))

    def bytes(self) -> float:
        """Returns the peak memory of a device."""
        layout, model = self.layout, self.cfg.model
        width = WIDTHS[model.dtype]
        dense, experts = self.weights
        block_weights = dense / layout.size(layout.tensor) + experts / self.expert_share
        # In float32: masters, two moments, two copies of gradients, and their sum over
        # micro-batches. In the dtype of compute: one block's gathered weights.
        held = (20 + 4 * (self.cfg.train.micro_batches > 1)) * self.own + self.frozen_bytes
        held += self._outer() * self.own
        held -= self._moments() + (12 + 4 * (self.cfg.train.micro_batches > 1)) * self._experts()
        if self.stages == 1:
            held += width * (self._largest_block() + self._kept_in_node())
        else:  # all weights of a stage, and float32 sums of trained weights' gradients
            trained = sum(self.trained) / sum(self.weights)
            held += (width + 4 * trained) * block_weights * self.cfg.model.blocks / self.stages
        block, kept, away = self._block(), self._kept(), self._away()
        if self.stages > 1:
            held += self._in_hand() * self._passed() / self.schedule.slices + self._keys()
            # The stage's slots, and one micro-batch's residuals.
            kept *= self.schedule.slots
            held += (block * KEPT[model.remat] + self._passed()) * self._blocks()
            held += NEAR * self._kept() * (self.cfg.memory.residuals == "host")
        return held + kept - away + 2 * block

    def _outer(self) -> int:
        """Returns the bytes that an outer loop keeps of each number: weights, momentum, error."""
        outer = outer_codec(self.cfg) if self.cfg.outer.every is not None else None
        return 8 * (self.cfg.outer.every is not None) + 4 * (outer is not None and outer.feedback)

    def host_state(self) -> float:
        """Returns the bytes of the state of a device in its host's memory."""
        return self._moments() + 4 * self._experts()

    def host_bytes(self) -> float:
        """Returns the bytes of a device in its host's memory.

        Weights have as large gradients, and stages one more slot, for tasks in the bubble.
        """
        bubble = self._away() / self.schedule.slots if self.stages > 1 else 0.0
        return self.host_state() + 4 * self._experts() + self._away() + bubble

    def _blocks(self) -> float:
        """Returns the blocks of a stage that a task computes."""
        sections = self.schedule.sections if self.stages > 1 else 1
        return self.cfg.model.blocks / self.stages / sections

    def _block(self) -> float:
        """Returns the bytes of the activations of a block."""
        layout, model, moe = self.layout, self.cfg.model, self.cfg.moe
        rows = self.tokens / layout.size(layout.tensor)
        rows *= moe.experts_per_token * (1.5 if model.has_experts else 0)
        own = 3 * (moe.latent or model.width) + (model.hidden_inputs + 1) * moe.expert_hidden
        hidden = rows * own * (1.0 if "none" not in model.layer_mlps else self.expert_blocks)
        channels, _ = _mixers(model, self.cfg.data.sequence_length)
        attention = self.tokens * channels / layout.size(layout.tensor)
        keys = 2 * self._seen_keys() * (self.cfg.mesh.context_exchange == "gather")
        return WIDTHS[model.dtype] * (hidden + attention + keys) + 6 * self._passed()

    def _passed(self) -> float:
        """Returns the bytes of the hidden states between two blocks."""
        whole = self.cfg.mesh.activations == "replicated"
        local = self.tokens / (1 if whole else self.layout.size(self.layout.tensor))
        return WIDTHS[self.cfg.model.dtype] * local * self.cfg.model.width

    def _kept(self) -> float:
        """Returns the bytes that a micro-batch keeps for backward, of a stage in one slot."""
        if self.stages > 1 and self.cfg.mesh.stage_keeps == "input":
            return self._passed() / self.schedule.slices
        return (self._block() * KEPT[self.cfg.model.remat] + self._passed()) * self._blocks()

    def _away(self) -> float:
        """Returns the bytes of residuals in the host's memory: without stages the named ones."""
        if self.cfg.memory.residuals != "host":
            return 0.0
        if self.stages > 1:
            return self._kept() * self.schedule.slots
        return self._kept() - self._passed() * self._blocks()

    def _moments(self) -> float:
        """Returns the bytes of moments in the host's memory: Muon has one of a matrix."""
        each = 4 if self.cfg.optimizer.name == "muon" else 8
        return each * self.own * (self.cfg.memory.optimizer == "host")

    def _experts(self) -> float:
        """Returns the parameters of experts whose masters lie in the host's memory."""
        on_host = self.cfg.memory.experts == "host"
        return self._of_device(0.0, self.trained[1], 0.0) * on_host

    def _largest_block(self) -> float:
        """Returns the parameters of a block with experts, or of a dense one without any, gathered.

        Experts are sharded as they are; everything else over tensor alone.
        """
        layout, model = self.layout, self.cfg.model
        dense, experts, beside = mlp_parameters(self.cfg)
        own = attention_parameters(model) + (beside if model.has_experts else dense)
        experts *= model.has_experts
        return own / layout.size(layout.tensor) + experts / self.expert_share

    def _kept_in_node(self) -> float:
        """Returns the parameters that a device keeps after gathering weights across nodes."""
        layout, (dense, experts) = self.layout, self.weights
        if self.cfg.mesh.gather_across not in ("passes", "step"):
            return 0.0
        kept = 0.0
        of_dense = dense / layout.size(layout.tensor), layout.fsdp + layout.expert
        for size, axes in (of_dense, (experts / self.expert_share, layout.fsdp)):
            if layout.between_nodes(axes):
                kept += size / layout.size(layout.inside_node(axes))
        return kept * self.cfg.model.blocks

    @property
    def schedule(self) -> PipelineSchedule:
        """The schedule of stages."""
        mesh = self.cfg.mesh
        micro, chunks = self.cfg.train.micro_batches, self.cfg.model.stage_chunks
        return build_schedule(mesh.schedule, mesh.stage, micro, chunks, mesh.stage_slices)

    def _keys(self) -> float:
        """Returns the bytes of keys and values, and of their gradients, that slices keep."""
        model, schedule = self.cfg.model, self.schedule
        if schedule.slices == 1:
            return 0.0
        channels = model.num_heads * (model.head_width + model.value_channels)
        channels = channels if model.is_latent else _keys_of(model)
        each = self.tokens * channels * model.blocks / self.stages
        each /= self.layout.size(self.layout.tensor)
        return each * (WIDTHS[model.dtype] * schedule.saved_groups[0] + 4)

    def _in_hand(self) -> int:
        """Returns how many micro-batches' hidden states a stage holds besides its slots."""
        model, before = self.cfg.model, 2 * self.cfg.train.micro_batches // self.stages
        groups = len(layer_groups(model)) - model.stage_chunks
        return self.schedule.loss_slots + 7 + before * (groups > 0)

    def seconds(self) -> float:
        """Returns the time of a step: compute, plus communication that cannot be hidden."""
        compute, exchange, weights = self._compute(), self._exchange(), self._weights()
        micro = self.cfg.train.micro_batches
        if self.stages > 1:
            return self._staged_seconds(compute, exchange, weights)
        # On CPU collectives take the cores that compute; elsewhere weights travel beside compute.
        hidden = 0.0 if self.topology.device.platform == "cpu" else 0.5 * compute
        block = compute + exchange + max(0.0, weights - hidden)
        ends = self._ends() + self._tables()
        beside = self._copied(micro * self.cfg.model.blocks * compute)
        return micro * (self.cfg.model.blocks * block + ends) + beside + self._update()

    def _staged_seconds(self, compute: float, exchange: float, weights: float) -> float:
        """Returns the time of a step with pipeline stages, whose weights move once."""
        model, micro, layout = self.cfg.model, self.cfg.train.micro_batches, self.layout
        share, schedule = model.blocks / self.stages, self.schedule
        passed = self.tokens * model.width * WIDTHS[model.dtype] / layout.size(layout.tensor)
        passed /= schedule.slices
        # A stage in the middle sends both ways; interleaved, the first and the last do too.
        both_ways = self.stages > 2 or schedule.virtual_stages > 1
        sent = self._cost("ppermute", passed, layout.stage) * (1 + both_ways)
        part = passed / self.stages  # for the loss step: to each stage from the last, and back
        sent += self._cost("ppermute", part, layout.stage) * (self.stages - 1)
        layers = compute + exchange
        if schedule.combined and self.topology.device.platform != "cpu":
            layers = max(compute, exchange)  # of the other pass
        layers *= share / schedule.sections
        tick = layers + sent - HIDDEN * min(layers, sent)
        moved = share * weights + self._tables()
        ends = micro * self._ends() / self.stages
        beside = self._copied(micro * share * compute)
        return (schedule.tasks + self.stages - 1) * tick + ends + moved + beside + self._update()

    def _ends(self) -> float:
        """Returns the compute seconds of embedding and loss in one micro-batch."""
        layout, model = self.layout, self.cfg.model
        flops = 6.0 * self.tokens * model.width * model.vocab_size / layout.size(layout.tensor)
        flops *= 1 + model.predict_ahead
        rate = self.topology.device.product_rate(model.dtype, flops / 3)
        return self.topology.device.program_overhead * flops / max(rate, 1.0)

    def _tables(self) -> float:
        """Returns the seconds of gathering embedding and output projection, and reducing them."""
        layout = self.layout
        table = self.tables / layout.size(layout.tensor)
        reduced = table if self.cfg.lora.rank is None else 0.0
        return self._moved(table, reduced, layout.stage + layout.fsdp + layout.expert)

    def _update(self) -> float:
        """Returns the update's seconds: reads masters, moments, gradients; writes the first two."""
        device, moved = self.topology.device, self.host_state()
        seconds = device.program_overhead * 28 * self.own / device.copy_bytes_per_s
        return seconds + self._each_way(moved + 4 * self._experts(), moved)

    def _copied(self, computed: float) -> float:
        """Returns the seconds of copies of experts and residuals that compute does not hide.

        Weights of experts come in both passes and their gradients go; each way there is as much
        time as compute takes, which on a CPU is none.
        """
        micro, slots = self.cfg.train.micro_batches, self.schedule.slots if self.stages > 1 else 1
        kept = micro * self._away() / slots
        ways = micro * 8 * self._experts() + kept, micro * 4 * self._experts() + kept
        if self.topology.device.platform == "cpu":
            return self._each_way(*ways)
        return max(0.0, *(self._each_way(*w) - computed for w in ((ways[0], 0), (0, ways[1]))))

    def _each_way(self, coming: float, going: float) -> float:
        """Returns the seconds of bytes to the device and from it, one way after the other."""
        if not coming + going:
            return 0.0
        host = self.topology.known_host()
        return coming / host.to_device + going / host.from_device

    def _compute(self) -> float:
        """Returns the compute seconds of a block: products, and passes over its activations."""
        layout, model, moe = self.layout, self.cfg.model, self.cfg.moe
        dense, experts = self.weights
        active = dense + experts * moe.experts_per_token / moe.num_experts
        recomputed = 0 if model.remat in ("none", "dots", "experts") else 1
        recomputed += self.stages > 1 and self.cfg.mesh.stage_keeps == "input"
        _, mixed = _mixers(model, self.cfg.data.sequence_length)
        flops = (3 + recomputed) * self.tokens * (2 * active + mixed) / layout.size(layout.tensor)
        device = self.topology.device
        rate = device.product_rate(model.dtype, flops / 20)
        local = self.tokens / layout.size(layout.tensor)
        passes = 30 * local * model.width * WIDTHS[model.dtype] * (1 + moe.experts_per_token)
        return device.program_overhead * (flops / max(rate, 1.0) + passes / device.copy_bytes_per_s)

    def _exchange(self) -> float:
        """Returns a block's seconds of dispatch, combine and tensor parallelism, both passes."""
        layout, model, moe = self.layout, self.cfg.model, self.cfg.moe
        width, local = WIDTHS[model.dtype], self.tokens / layout.size(layout.tensor)
        total = 0.0
        if model.has_experts:
            rows = 1.25 * local * moe.experts_per_token * (moe.latent or model.width) * width
            if layout.size(layout.expert_owner_axes) > 1:  # from token order to buckets, and back
                device = self.topology.device
                moved = 8 * rows / device.gather_bytes_per_s + SMALL_OPS * device.startup_s
                total += device.program_overhead * moved
            total += 4 * self._cost("all_to_all", rows, layout.expert_owner_axes)
            if layout.hidden_over_tensor:
                ranks = layout.size(layout.tensor)
                total += 4 * self._cost("all_gather", rows * ranks, layout.tensor)
            total *= self.expert_blocks
        whole = self.tokens * model.width * width
        total += 4 * self._cost("all_gather", whole, layout.tensor)
        return total + self._keys_moved() + self._states_moved()

    def _keys_moved(self) -> float:
        """Returns a block's seconds of gathering keys of shared sequences, both passes.

        A mean over the blocks: those with a window pass on next to nothing, those of linear
        attention no keys.
        """
        layout, axes = self.layout, self.layout.context
        size = self._seen_keys() * WIDTHS[self.cfg.model.dtype]
        slow, fast = layout.between_nodes(axes), layout.inside_node(axes)
        across, inside = size / layout.size(fast), size
        once = self._cost("all_gather", across, slow) + self._cost("all_gather", inside, fast)
        wide = WIDTHS[self.cfg.train.gradient_dtype] / WIDTHS[self.cfg.model.dtype]
        return once * (2 + wide) * self._full_blocks()

    def _seen_keys(self) -> float:
        """Returns the elements of keys and values, or latents, that a device gathers in a block."""
        layout, model = self.layout, self.cfg.model
        if not layout.context:
            return 0.0
        seen = self.tokens * layout.size(layout.context)
        if model.is_latent:
            index = model.indexer.width if model.is_sparse else 0
            return seen * ((model.kv_latent or 0) + model.rotated_channels + index)
        return seen * _keys_of(settings_of(model, None)) / layout.size(layout.tensor)

    def _full_blocks(self) -> float:
        """Returns the share of the blocks that attend without a window."""
        without, kinds = {"none", self.cfg.model.linear.form}, block_kinds(self.cfg.model)
        full = sum(kind.window is None and kind.mixer not in without for kind in kinds)
        return full / len(kinds)

    def _states_moved(self) -> float:
        """Returns a block's seconds of effects and states of stripes, both passes; a mean.

        The heads of all sequences are filled up to a multiple of the devices that share them.
        """
        layout, linear = self.layout, self.cfg.model.linear
        if not (layout.context and self.cfg.model.is_linear):
            return 0.0
        C, V = linear.key_width, linear.value_width
        shared, length = layout.size(layout.context), self.cfg.data.sequence_length
        heads = linear.value_heads / layout.size(layout.tensor) * self.tokens * shared / length
        stripes, heads = length / shared / layout.stripe, shared * math.ceil(heads / shared)
        factor = 1 if linear.form == "mamba2" else C * C
        size = 4 * stripes * heads * (factor + 2 * C * V)
        kinds = block_kinds(self.cfg.model)
        share = sum(kind.mixer == linear.form for kind in kinds) / len(kinds)
        return 2 * self._cost("all_to_all", size, layout.context) * share

    def _weights(self) -> float:
        """Returns a block's seconds of gathering weights and reducing gradients."""
        layout, (dense, experts), trained = self.layout, self.weights, self.trained
        tensor, share = layout.size(layout.tensor), self.expert_share
        moved = self._moved(dense / tensor, trained[0] / tensor, layout.fsdp + layout.expert)
        return moved + self._moved(experts / share, trained[1] / share, layout.fsdp)

    def _moved(self, size: float, reduced: float, axes: Axes) -> float:
        """Returns the seconds of gathering `size` parameters and reducing `reduced` gradients."""
        layout = self.layout
        width = WIDTHS[self.cfg.model.dtype]
        wide = WIDTHS[self.cfg.train.gradient_dtype]
        copies = self._copies()
        every = axes + copies
        inside, across = layout.inside_node(every), layout.between_nodes(every)
        total = self._gathered(size * width, axes)
        total += self._cost("reduce_scatter", reduced * wide, inside)
        left = reduced * wide / layout.size(inside)
        total += self._cost("all_reduce", left, across)
        copies = layout.inside_node(copies)
        return total + self._cost("all_gather", left * layout.size(copies), copies)

    def _copies(self) -> Axes:
        """Returns the axes along which copies sum gradients: none where they are sites."""
        return self.layout.replica if self.cfg.outer.every is None else ()

    def _gathered(self, size: float, axes: Axes) -> float:
        """Returns the seconds of gathering weights of a number of bytes."""
        layout, across = self.layout, self.cfg.mesh.gather_across
        slow, fast = layout.between_nodes(axes), layout.inside_node(axes)
        if across == "flat" or not slow:
            return self._cost("all_gather", size, axes)
        first = self._cost("all_gather", size / layout.size(fast), slow)
        if across == "step" and self.stages == 1:
            first /= self.cfg.train.micro_batches
        return first + self._cost("all_gather", size, fast)

    def _cost(self, kind: str, size: float, axes: Axes) -> float:
        group = group_of(self.topology, self.layout, axes)
        if group is None:
            return 0.0
        nodes = node_groups(self.layout, axes)
        return max(self.topology.seconds(kind, size, *group, nodes=nodes))


@lru_cache(maxsize=16)
def _mixers(model: ModelConfig, length: int) -> tuple[float, float]:
    """Returns a block's mean of `Mixer.channels`, and of FLOPs forward a token, without windows."""
    kinds = block_kinds(model)
    mixers = [(MIXERS[kind.mixer], settings_of(model, kind.window)) for kind in kinds]
    channels = sum(mixer.channels(own) for mixer, own in mixers)
    flops = sum(mixer.flops(own, length, None) for mixer, own in mixers)
    return channels / len(mixers), flops / len(mixers) / length


def _keys_of(model: ModelConfig) -> float:
    """Returns the channels of keys and values of grouped attention, a mean over the blocks."""
    owns = [settings_of(model, kind.window) for kind in block_kinds(model)]
    each = [own.num_kv_heads * (own.head_width + own.value_channels) for own in owns]
    return sum(each) / len(each)
