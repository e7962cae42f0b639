"""The settings of the model: blocks, rotary positions, router, experts."""

import math
from dataclasses import dataclass

from moejax.config.declare import section, setting


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions."""

    theta: float = setting(10_000.0, "base of the rotary frequencies", above=0)
    scaling: str = setting(
        "none",
        "how frequencies stretch past the trained length",
        choices=("none", "linear", "llama3", "yarn"),
    )
    factor: float = setting(1.0, "stretch of linear, llama3 and yarn scaling", at_least=1)
    trained_length: int = setting(
        4096, "length the unscaled model was trained at (llama3, yarn)", at_least=1
    )
    low_frequency_factor: float = setting(
        1.0, "llama3: wavelengths above trained_length / this are stretched", above=0
    )
    high_frequency_factor: float = setting(
        4.0, "llama3: wavelengths below trained_length / this are kept", above=0
    )
    beta_fast: float = setting(32.0, "yarn: dims with more rotations than this are kept", above=0)
    beta_slow: float = setting(
        1.0, "yarn: dims with fewer rotations than this are stretched", above=0
    )
    truncate: bool = setting(
        True, "yarn: the range between the betas is widened to whole channel pairs (gpt-oss: false)"
    )
    attention_factor: float | None = setting(
        None, "yarn: factor of cos and sin; none: 0.1 ln(factor) + 1, or from mscale", above=0
    )
    mscale: float | None = setting(
        None,
        "yarn: cos and sin times m(mscale) / m(mscale_all_dim), m(s) = 0.1 s ln(factor) + 1 "
        "(DeepSeek-V2 and V3)",
        at_least=0,
    )
    mscale_all_dim: float | None = setting(
        None, "yarn: scores times m(mscale_all_dim)^2; goes with mscale", at_least=0
    )
    query_growth: float = setting(
        0.0,
        "queries times 1 + this x ln(1 + floor(position / trained_length)) (Mistral 4); 0 is off",
        at_least=0,
    )


@dataclass(frozen=True)
class LinearConfig:
    """Linear attention: blocks whose heads keep a state in place of keys and values."""

    form: str = setting(
        "none",
        "gated_delta: gated delta net (Qwen3-Next), kimi_delta: with fading of each channel (Kimi "
        "Linear), mamba2: Mamba-2 (Nemotron-H), in blocks without softmax attention, which are all "
        "but each model.full_attention_every-th; none: no block has it",
        choices=("none", "gated_delta", "kimi_delta", "mamba2"),
    )
    key_heads: int = setting(2, "heads of queries and keys", at_least=1)
    value_heads: int = setting(4, "heads of values, with a state each; a multiple", at_least=1)
    key_width: int = setting(32, "channels of a head of queries or keys", at_least=1)
    value_width: int = setting(32, "channels of a head of values", at_least=1)
    convolution: int = setting(
        4, "positions that the convolution of queries, keys and values sees", at_least=1
    )
    convolution_bias: bool = setting(False, "mamba2: biases of the convolution")
    least_step: float = setting(0.0, "mamba2: least time step of a position", at_least=0)


@dataclass(frozen=True)
class IndexerConfig:
    """The indexer of sparse attention, which chooses the keys that a query attends to."""

    heads: int = setting(4, "I: heads of the indexer", at_least=1)
    width: int = setting(
        32, "J: channels of one of its heads; the first model.rope_width rotate", at_least=2
    )
    keys: int = setting(
        2048, "keys that a query attends to, those of the highest scores", at_least=1
    )


@dataclass(frozen=True)
class FullAttentionConfig:
    """Blocks without a window, where their heads are others than those of blocks with one."""

    head_width: int | None = setting(
        None, "channels of one head (Gemma 4); none: model.head_width", at_least=2
    )
    num_kv_heads: int | None = setting(
        None, "key and value heads (Gemma 4); none: model.num_kv_heads", at_least=1
    )
    keys_are_values: bool = setting(
        False, "values are keys before their norm and rotation: no projection (Gemma 4)"
    )
    theta: float | None = setting(
        None, "base of the rotary frequencies (Gemma 4); none: model.rope.theta", above=0
    )
    sinks: bool = setting(True, "have sinks too, if model.attention_sinks (MiMo-V2: false)")
    turned_channels: int | None = setting(
        None,
        "channels that rotate: the fastest pairs (c, c + half a head), with the frequencies of a "
        "whole head (Gemma 4); none: as in other blocks",
        at_least=2,
    )


@dataclass(frozen=True)
class ModelConfig:
    """The transformer around the experts."""

    vocab_size: int = setting(264, "V: token ids are 0 .. V-1", at_least=2)
    width: int = setting(128, "D: width of the residual stream", at_least=1)
    # The most layers are some fifty times what is published: lists of layers stay short.
    num_layers: int = setting(4, "number of blocks", at_least=1, at_most=10_000)
    attention: str = setting(
        "grouped",
        "grouped: heads share keys and values; latent: both come from a narrow latent (DeepSeek); "
        "sparse: latent attention to keys that an indexer chooses (DeepSeek-V3.2)",
        choices=("grouped", "latent", "sparse"),
    )
    num_heads: int = setting(4, "H: query heads", at_least=1)
    num_kv_heads: int = setting(2, "G: key and value heads; H must be a multiple", at_least=1)
    head_width: int = setting(32, "C: channels of one head", at_least=2)
    positions: str = setting(
        "rotary",
        "rotary: queries and keys rotate; window: in blocks with a window alone (AFMoE); none: not "
        "at all (Kimi Linear, Nemotron-H)",
        choices=("rotary", "window", "none"),
    )
    rope_width: int | None = setting(
        None,
        "channels of a head that rotate; none: all. Latent attention needs it, without positions "
        "too: keys of all heads have them in common",
        at_least=2,
    )
    q_latent: int | None = setting(
        None, "Z: width of the latent of queries; none: projected directly", at_least=1
    )
    kv_latent: int | None = setting(
        None, "Z: width of the latent of keys and values (latent attention)", at_least=1
    )
    value_width: int | None = setting(
        None, "channels of a value's head; none: head_width", at_least=1
    )
    mlp_hidden: int = setting(384, "F: hidden width of a dense MLP", at_least=1)
    first_dense_layers: int = setting(0, "blocks at the start that use a dense MLP", at_least=0)
    layers_before_stages: int = setting(
        0,
        "blocks after first_dense_layers that run outside of pipeline stages, so that the rest "
        "divides by the stages; a group of its own in checkpoints",
        at_least=0,
    )
    stage_chunks: int = setting(
        1,
        "virtual stages per pipeline stage (interleaved schedule): equal chunks of the remaining "
        "layers, each spread over all stages; groups of their own in checkpoints",
        at_least=1,
    )
    moe_every: int | None = setting(
        1, "each n-th block after first_dense_layers has experts; none: dense model", at_least=1
    )
    layer_mlps: tuple[str, ...] = setting(
        (),
        "MLP of each layer, as a list, if first_dense_layers and moe_every cannot express it; "
        "none: the layer is attention alone (Nemotron-H)",
        choices=("dense", "experts", "none"),
    )
    activation: str = setting(
        "swiglu",
        "activation of MLPs and experts; clamped_swiglu clamps gate and up (gpt-oss); geglu: GELU, "
        "by tanh, of the gate times up (Gemma); relu2: square of ReLU, without a gate (Nemotron)",
        choices=("swiglu", "clamped_swiglu", "geglu", "relu2"),
    )
    activation_limit: float = setting(
        7.0, "clamped_swiglu: largest gate, and largest size of up", above=0
    )
    predict_ahead: int = setting(
        0,
        "multi-token prediction (DeepSeek-V3): tokens past the next that training predicts too",
        at_least=0,
        at_most=1,
    )
    ahead_block: tuple[str, ...] = setting(
        (),
        "attention and MLP of the block that predict_ahead adds, for example full,dense; as in the "
        "last layer if it is not given",
        choices=("window", "full", "linear", "dense", "experts"),
    )
    norm_epsilon: float = setting(1e-6, "epsilon of RMSNorm", above=0)
    block_norm: str = setting(
        "before",
        "RMSNorms of a block; before: on the inputs of attention and MLP; after: on what they add "
        "(OLMo 2); both: four norms (Gemma)",
        choices=("before", "after", "both"),
    )
    layer_scale: bool = setting(
        False, "a constant of each block scales its result; it is not trained (Gemma 4)"
    )
    zero_centered_norms: bool = setting(
        False,
        "norms scale by 1 + weight, which begins at zero (Qwen3-Next); not in linear attention",
    )
    qk_norm: str = setting(
        "none",
        "RMSNorm on queries and keys; full: over all heads; rotated: of each head, behind rotary "
        "positions (Hunyuan)",
        choices=("none", "head", "full", "rotated"),
    )
    value_scale: float = setting(1.0, "factor on values (MiMo-V2)", above=0)
    value_norm: bool = setting(False, "RMSNorm without a scale on values of each head (Gemma 4)")
    embedding_scale: float = setting(1.0, "factor on embeddings of tokens (Granite)", above=0)
    residual_scale: float = setting(
        1.0, "factor on what attention and MLP add to the residual stream (Granite)", above=0
    )
    score_scale: float | None = setting(
        None, "factor on attention's scores (Granite); none: 1 / sqrt(head_width)", above=0
    )
    logit_divisor: float = setting(
        1.0, "divides final hidden states, and with them logits (Granite)", above=0
    )
    logit_cap: float | None = setting(
        None, "logits are cap * tanh(logits / cap) (Gemma); none: as they are", above=0
    )
    attention_bias: bool = setting(False, "biases on the query, key and value projections")
    attention_output_bias: bool = setting(False, "bias on the output projection of attention")
    attention_gate: bool = setting(
        False, "heads' results times sigmoid(h . w_gate), channel by channel (Qwen3-Next)"
    )
    attention_sinks: bool = setting(
        False, "a learned logit per head in its softmax, without a value (gpt-oss)"
    )
    sliding_window: int | None = setting(
        None, "positions that a query attends to, its own and earlier ones; none: all", at_least=1
    )
    full_attention_every: int | None = setting(
        None,
        "each n-th block attends without the window (gpt-oss: 2), or at all (Qwen3-Next: 4)",
        at_least=2,
    )
    layer_attention: tuple[str, ...] = setting(
        (),
        "attention of each layer, as a list, if full_attention_every cannot express it; none: the "
        "layer is an MLP or experts alone (Nemotron-H)",
        choices=("window", "full", "linear", "none"),
    )
    tie_embeddings: bool = setting(True, "use the embedding as the output projection")
    init_deviation: float = setting(0.02, "standard deviation of initial weights", above=0)
    dtype: str = setting(
        "float32", "dtype of compute; masters stay float32", choices=("float32", "bfloat16")
    )
    remat: str = setting(
        "none",
        "values that backward recomputes (docs/architecture.md); the last four send no token again",
        choices=(
            "none",
            "full",
            "dots",
            "collectives",
            "token_collectives",
            "attention",
            "experts",
        ),
    )
    scan_layers: bool = setting(
        True, "one compiled block for all layers; false unrolls (slower compile)"
    )
    rope: RopeConfig = section(RopeConfig, "rotary positions")
    linear: LinearConfig = section(LinearConfig, "linear attention")
    indexer: IndexerConfig = section(IndexerConfig, "the indexer of sparse attention")
    full_attention: FullAttentionConfig = section(
        FullAttentionConfig, "heads of blocks without a window, where others have one"
    )

    @property
    def is_linear(self) -> bool:
        """True if blocks have linear attention."""
        return self.linear.form != "none"

    @property
    def is_latent(self) -> bool:
        """True if keys and values come from a latent."""
        return self.attention in ("latent", "sparse")

    @property
    def is_sparse(self) -> bool:
        """True if an indexer chooses the keys that a query attends to."""
        return self.attention == "sparse"

    @property
    def value_channels(self) -> int:
        """Channels of a value's head."""
        return self.value_width or self.head_width

    @property
    def rotates(self) -> bool:
        """True if queries and keys of some block rotate."""
        return self.positions != "none"

    @property
    def rotated_channels(self) -> int:
        """Channels of a head that rotate, or would with positions."""
        return self.rope_width or self.head_width

    @property
    def clamp(self) -> float | None:
        """The limit of clamped SwiGLU; None for plain SwiGLU."""
        return self.activation_limit if self.activation == "clamped_swiglu" else None

    @property
    def hidden_inputs(self) -> int:
        """U: matrices into the hidden layer of an MLP: gate and up, or one without a gate."""
        return 1 if self.activation == "relu2" else 2

    @property
    def parts(self) -> int:
        """Number of parts that add to the residual stream: attention and MLP of a whole block."""
        missing = self.layer_attention.count("none") + self.layer_mlps.count("none")
        return 2 * self.num_layers - missing

    @property
    def out_deviation(self) -> float:
        """Standard deviation of initial weights whose products are added to the residual stream."""
        return self.init_deviation / math.sqrt(self.parts)

    @property
    def has_experts(self) -> bool:
        """True if any block has experts."""
        return "experts" in self.layer_mlps if self.layer_mlps else self.moe_every is not None

    @property
    def mlps(self) -> tuple[str, ...]:
        """Returns "dense", "experts" or "none" for each block."""
        if self.layer_mlps:
            return self.layer_mlps
        every, first = self.moe_every, 1 - self.first_dense_layers
        return tuple(
            "experts" if every is not None and place > 0 and place % every == 0 else "dense"
            for place in range(first, first + self.num_layers)
        )

    @property
    def expert_layers(self) -> int:
        """Number of blocks with experts, without the block of `predict_ahead`."""
        return self.mlps.count("experts")

    @property
    def blocks(self) -> int:
        """Number of blocks, with the block of `predict_ahead`."""
        return self.num_layers + self.predict_ahead

    @property
    def has_dense_blocks(self) -> bool:
        """True if any block has a dense MLP, or that of `predict_ahead` would have one."""
        return "dense" in (*self.mlps, *self.ahead_block)


@dataclass(frozen=True)
class RouterConfig:
    """The choice of a token's experts."""

    score: str = setting(
        "softmax", "turns router logits into scores", choices=("softmax", "sigmoid")
    )
    renormalize: bool = setting(True, "scale the K chosen weights to sum to one")
    weight_scale: float = setting(1.0, "factor on the routing weights (DeepSeek-V3: 2.5)", above=0)
    num_groups: int = setting(
        1, "experts form this many groups (group-limited routing)", at_least=1
    )
    groups_per_token: int = setting(1, "groups a token may choose experts from", at_least=1)
    jitter: float = setting(
        0.0, "router input is scaled by uniform(1 - j, 1 + j)", at_least=0, at_most=0.5
    )
    balance_loss: float = setting(
        0.04,
        "coefficient of the load-balance loss (mean over expert layers, 1 when even); 0 is off",
        at_least=0,
    )
    balance_over: str = setting(
        "batch",
        "span of the load-balance loss; batch: over each micro-batch (its rows depend on the "
        "mesh); sequence: counts the K best scores (DeepSeek-V3)",
        choices=("batch", "sequence"),
    )
    z_loss: float = setting(
        0.0, "coefficient of the router z-loss, a mean over expert layers; 0 is off", at_least=0
    )
    bias_update_rate: float = setting(
        0.0, "loss-free balance: step of the selection bias; 0 is off", at_least=0
    )
    quantile_bins: int | None = setting(
        None,
        "quantile balance (Kimi K3), in place of bias_update_rate: bins of the histogram that sets "
        "the selection bias after each step (K3: 1000); none is off",
        at_least=1,
        at_most=65_536,
    )
    forced: str = setting(
        "none",
        "for benchmarks alone: balanced sends tokens to experts in turn, whatever their scores",
        choices=("none", "balanced"),
    )


@dataclass(frozen=True)
class MoEConfig:
    """The expert layers."""

    num_experts: int = setting(8, "E: routed experts of a layer", at_least=1, at_most=100_000)
    experts_per_token: int = setting(2, "K: experts a token visits", at_least=1)
    expert_hidden: int = setting(192, "F: hidden width of an expert", at_least=1)
    num_shared_experts: int = setting(
        0, "experts that every token visits, fused into one MLP", at_least=0
    )
    shared_hidden: int | None = setting(
        None,
        "hidden width of the shared experts together; none: num_shared_experts x expert_hidden",
        at_least=1,
    )
    shared_gate: bool = setting(
        False, "the shared experts' output is scaled by sigmoid(h . gate), learned (Qwen2-MoE)"
    )
    own_norms: bool = setting(
        False,
        "experts and the shared experts each have norms of their input and result, and the router "
        "one of the residual stream, all beside those of the block (Gemma 4)",
    )
    expert_scale: bool = setting(
        False, "a learned factor of each expert on its routing weights (Gemma 4)"
    )
    latent: int | None = setting(
        None,
        "width at which experts take and return rows, between projections of all tokens (Nemotron "
        "3 Super); none: model.width",
        at_least=1,
    )
    router_bias: bool = setting(False, "a learned bias of the router's logits (gpt-oss)")
    expert_bias: bool = setting(False, "biases of the experts' two products (gpt-oss)")
    capacity_factor: float | None = setting(
        None,
        "none: dropless; else most rows from a device to an expert, over the balanced number; "
        "further rows are dropped",
        above=0,
    )
    headroom: float = setting(
        1.25,
        "dropless: rows that a bucket holds, over the balanced number; further rows go in overflow "
        "rounds",
        at_least=1.0,
    )
    slots: int = setting(
        0,
        "places of each device with experts for copies of hot experts of other devices",
        at_least=0,
        at_most=3,
    )
    slots_from: str = setting(
        "now",
        "load by which experts get copies; now: of each micro-batch's choices; last: of the step "
        "before, so that weights of copies travel beside attention",
        choices=("now", "last"),
    )
    implementation: str = setting(
        "auto",
        "implementation of the experts' matrix products; _e4m3: forward products in e4m3",
        choices=("auto", "mosaic", "mosaic_e4m3", "tokamax", "megablox", "blocked", "ragged_dot"),
    )
    router: RouterConfig = section(RouterConfig, "routing")

    @property
    def shared_width(self) -> int:
        """Hidden width of the shared experts together; 0 without them."""
        if self.shared_hidden is not None and self.num_shared_experts:
            return self.shared_hidden
        return self.num_shared_experts * self.expert_hidden
