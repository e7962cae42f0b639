"""Refuses changed settings that have no effect with the others."""

from collections.abc import Callable
from dataclasses import fields as fields_of

from moejax.config.checks.mesh import expert_owners
from moejax.config.checks.planned import is_planned
from moejax.config.compression import GRADIENTS, NO_COMPRESSION, build_compression
from moejax.config.fields import fields, get_value, short
from moejax.config.pattern import layer_attention
from moejax.config.schema import Config, LinearConfig
from moejax.errors import InputError

# Settings (names, or prefixes that end in . or _), whether a config uses them, the reason if not.
_Effect = tuple[str, Callable[[Config], bool], str]

# Values of `model.remat` with which backward gathers weights again.
RECOMPUTED = ("full", "dots", "token_collectives", "attention", "experts")

_OF_BLOCKS: tuple[_Effect, ...] = (
    (
        "moe. memory.experts model.first_dense_layers mesh.expert_weights mesh.expert "
        "route route_chunks route_chunks_backward route_trim",
        lambda cfg: cfg.model.has_experts,
        "`model.moe_every` is none, so no block has experts",
    ),
    (
        "model.first_dense_layers model.moe_every",
        lambda cfg: not cfg.model.layer_mlps,
        "`model.layer_mlps` sets the MLP of each block",
    ),
    (
        "model.mlp_hidden",
        lambda cfg: cfg.model.has_dense_blocks,
        "every block has experts (`model.moe_every` is 1, `model.first_dense_layers` is 0)",
    ),
)

# For axes that are given. A search chooses them itself, and refuses what does not fit.
_OF_AXES: tuple[_Effect, ...] = (
    (
        "mesh.expert_weights mesh.activations",
        lambda cfg: cfg.mesh.tensor > 1,
        "`mesh.tensor` is 1",
    ),
    (
        "mesh.gather_dense",
        lambda cfg: cfg.mesh.fsdp * cfg.mesh.expert > 1,
        "`mesh.fsdp` and `mesh.expert` are 1",
    ),
    (
        "mesh.context_stripe mesh.context_exchange",
        lambda cfg: cfg.mesh.context > 1,
        "`mesh.context` is 1, so no device shares a sequence",
    ),
    (
        "mesh.schedule mesh.stage_keeps mesh.stage_slices",
        lambda cfg: cfg.mesh.stage > 1,
        "`mesh.stage` is 1",
    ),
    (
        "route_chunks route_chunks_backward route_trim moe.headroom moe.slots",
        lambda cfg: expert_owners(cfg.mesh) > 1,
        "one device owns all experts, so nothing is exchanged",
    ),
)

_OF_MESH: tuple[_Effect, ...] = (
    ("mesh.gather_dense", lambda cfg: cfg.lora.rank is None, "`lora.rank` is set"),
    (
        "mesh.gather_dense",
        lambda cfg: cfg.mesh.stage == 1,
        "`mesh.stage` is above 1, and with stages all weights are gathered once a step",
    ),
    (
        "mesh.gather_across",
        lambda cfg: cfg.mesh.stage == 1 or cfg.mesh.gather_across == "use",
        "`mesh.stage` is above 1, and with stages weights are gathered once a step; choose use",
    ),
    (
        "mesh.gather_across",
        lambda cfg: cfg.mesh.gather_across != "passes" or cfg.model.remat in RECOMPUTED,
        "`model.remat` keeps gathered weights for backward, or all; choose use",
    ),
    (
        "mesh.simulated_devices",
        lambda cfg: cfg.mesh.platform in (None, "cpu"),
        "only CPU devices are simulated; set `mesh.platform` to cpu",
    ),
    (
        "compression.start_layer",
        lambda cfg: build_compression(cfg.compression) != NO_COMPRESSION,
        "`compression` is none",
    ),
    (
        "compression.block",
        lambda cfg: (
            build_compression(cfg.compression) != NO_COMPRESSION
            or (cfg.outer.every is not None and cfg.outer.codec != "none")
        ),
        "`compression` is none, and so is the codec of an outer loop",
    ),
    (
        "outer.rate outer.momentum outer.codec outer.order outer.hub",
        lambda cfg: cfg.outer.every is not None or cfg.plan.sites,
        "`outer.every` is none, so there is no outer loop",
    ),
    (
        "outer.site outer.sites",
        lambda cfg: cfg.outer.hub is not None,
        "`outer.hub` is none, so the sites are the copies along mesh.replica",
    ),
    (
        "checkpoint.memory_dir",
        lambda cfg: cfg.checkpoint.memory_every is not None,
        "`checkpoint.memory_every` is none",
    ),
)

# Settings of `model.rope`, and the values of its `scaling` that read them.
_SCALINGS = {
    "factor": ("linear", "llama3", "yarn"),
    "low_frequency_factor": ("llama3",),
    "high_frequency_factor": ("llama3",),
    **dict.fromkeys(("beta_fast", "beta_slow", "truncate", "attention_factor"), ("yarn",)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), ("yarn",)),
}


def _some_windows(cfg: Config) -> bool:
    """Returns whether some blocks have a window, and some have none."""
    has_both = {"full", "window"}.issubset(layer_attention(cfg.model))
    return cfg.model.sliding_window is not None and has_both


_OF_MODEL: tuple[_Effect, ...] = (
    (
        "model.activation_limit",
        lambda cfg: cfg.model.clamp is not None,
        "only `model.activation` clamped_swiglu reads it",
    ),
    (
        "model.predict_ahead",
        lambda cfg: cfg.data.sequence_length > 1,
        "`data.sequence_length` is 1, so no position has a token after the next",
    ),
    (
        "moe.shared_gate moe.shared_hidden",
        lambda cfg: cfg.moe.num_shared_experts > 0,
        "`moe.num_shared_experts` is 0",
    ),
    (
        "moe.headroom",
        lambda cfg: cfg.moe.capacity_factor is None,
        "`moe.capacity_factor` is set, and buckets hold the capacity of every expert",
    ),
    (
        "moe.router.forced",
        lambda cfg: cfg.data.source != "routing",
        "`data.source` is routing, whose texts bring their experts",
    ),
    ("moe.slots_from", lambda cfg: cfg.moe.slots > 0, "`moe.slots` is 0"),
    (
        "moe.router.groups_per_token",
        lambda cfg: cfg.moe.router.num_groups > 1,
        "`moe.router.num_groups` is 1",
    ),
    (
        "model.q_latent model.kv_latent",
        lambda cfg: cfg.model.is_latent,
        "`model.attention` is not latent",
    ),
    (
        "model.indexer. train.indexer_loss",
        lambda cfg: cfg.model.is_sparse,
        "`model.attention` is not sparse, so there is no indexer",
    ),
    (
        "model.num_kv_heads",
        lambda cfg: not cfg.model.is_latent,
        "`model.attention` is latent, where every head has keys and values of its own",
    ),
    (
        "model.rope.",
        lambda cfg: cfg.model.rotates,
        "`model.positions` is none, so nothing rotates",
    ),
    (
        "model.rope_width",
        lambda cfg: cfg.model.rotates or cfg.model.is_latent,
        "`model.positions` is none, so nothing rotates",
    ),
    (
        "model.qk_norm model.attention_bias model.attention_output_bias model.attention_sinks "
        "model.attention_gate",
        lambda cfg: not cfg.model.is_latent,
        "`model.attention` is latent, which has norms on its latents, no biases, sinks or gate",
    ),
    (
        "model.value_norm model.value_scale model.full_attention.",
        lambda cfg: not cfg.model.is_latent,
        "`model.attention` is latent: heads are alike in all blocks, and values as they are",
    ),
    ("model.full_attention.", _some_windows, "no block has a window, or all have"),
    (
        "model.full_attention.theta model.full_attention.turned_channels",
        lambda cfg: cfg.model.positions != "window",
        "`model.positions` is window, so blocks without one have no positions",
    ),
    (
        "model.full_attention.sinks",
        lambda cfg: cfg.model.attention_sinks,
        "`model.attention_sinks` is false, so no block has sinks",
    ),
    (
        "model.positions",
        lambda cfg: cfg.model.positions != "window" or _some_windows(cfg),
        "no block has a window, or all have",
    ),
    (
        "model.positions",
        lambda cfg: cfg.model.positions != "window" or not cfg.model.is_latent,
        "`model.attention` is latent, whose heads are alike in all blocks",
    ),
    (
        "model.full_attention_every",
        lambda cfg: not cfg.model.layer_attention,
        "`model.layer_attention` sets the attention of each block",
    ),
    (
        "model.full_attention_every model.layer_attention",
        lambda cfg: (
            cfg.model.sliding_window is not None
            or cfg.model.is_linear
            or "none" in cfg.model.layer_attention
        ),
        "`model.sliding_window` is none, so every block attends without a window",
    ),
    (
        " ".join(f"model.linear.{field.name}" for field in fields_of(LinearConfig)[1:]),
        lambda cfg: cfg.model.is_linear,
        "`model.linear.form` is none, so no block has linear attention",
    ),
    (
        "model.linear.convolution_bias model.linear.least_step",
        lambda cfg: cfg.model.linear.form == "mamba2",
        "only `model.linear.form` mamba2 reads it",
    ),
    (
        "model.rope.trained_length",
        lambda cfg: cfg.model.rope.scaling in ("llama3", "yarn") or cfg.model.rope.query_growth > 0,
        "only `model.rope.scaling` llama3 or yarn and `model.rope.query_growth` read it",
    ),
    *(
        (
            f"model.rope.{name}",
            lambda cfg, scalings=scalings: cfg.model.rope.scaling in scalings,
            f"only `model.rope.scaling` {' or '.join(scalings)} reads it",
        )
        for name, scalings in _SCALINGS.items()
    ),
    (
        "model.rope.scaling",
        lambda cfg: cfg.model.rope.factor > 1,
        "`model.rope.factor` is 1, which stretches nothing",
    ),
)

_OF_TRAINING: tuple[_Effect, ...] = (
    (
        "train.predict_ahead_loss",
        lambda cfg: cfg.model.predict_ahead > 0,
        "`model.predict_ahead` is 0",
    ),
    (
        "plan.routing",
        lambda cfg: cfg.moe.router.forced == "none",
        "`moe.router.forced` is balanced, so every load is even",
    ),
    (
        "train.rollbacks",
        lambda cfg: cfg.train.max_skipped is not None or cfg.train.on_spike == "roll_back",
        "`train.max_skipped` is none and `train.on_spike` is tell, so no run goes back",
    ),
    (
        "train.on_spike",
        lambda cfg: cfg.train.spike_threshold is not None and cfg.train.rollbacks > 0,
        "`train.spike_threshold` is none or `train.rollbacks` is 0",
    ),
    (
        "optimizer.muon_",
        lambda cfg: cfg.optimizer.name == "muon",
        "`optimizer.name` is not muon",
    ),
    (
        "optimizer.final_fraction",
        lambda cfg: cfg.optimizer.schedule != "constant",
        "`optimizer.schedule` is constant",
    ),
    (
        "lora.alpha lora.targets lora.base_dtype",
        lambda cfg: cfg.lora.rank is not None,
        "`lora.rank` is none, so there are no adapters",
    ),
    (
        " ".join(f"compression.{kind}" for kind in (*GRADIENTS, "start_layer")),
        lambda cfg: cfg.lora.rank is None,
        "`lora.rank` is set, and gradients of adapters are not compressed",
    ),
    (
        "data.train_files data.train_weights data.eval_files",
        lambda cfg: cfg.data.source != "stdlib",
        "`data.source` is stdlib, which reads the text of Python's own library",
    ),
    (
        "train.eval_every train.eval_batches",
        lambda cfg: cfg.data.source == "stdlib" or bool(cfg.data.eval_files),
        "`data.eval_files` is empty, so nothing is evaluated",
    ),
    (
        "train.sample_prompt",
        lambda cfg: cfg.train.sample_tokens > 0,
        "`train.sample_tokens` is 0",
    ),
    (
        "plan.topology plan.routing plan.documents plan.codecs plan.traces plan.seconds plan.keep "
        "plan.replan plan.sites",
        is_planned,
        "the planner is off (`plan` is hand, or default with a choice made by hand)",
    ),
)


def check_effects(cfg: Config) -> None:
    """Refuses changed settings that would be ignored.

    None switches a feature off, which is accepted where it is off anyway.
    """
    values = {field: get_value(cfg, field.name) for field in fields().values()}
    changed = [field for field, value in values.items() if value not in (field.default, None)]
    of_axes = () if cfg.plan.mode == "auto" else _OF_AXES
    effects = (*_OF_BLOCKS, *of_axes, *_OF_MESH, *_OF_MODEL, *_OF_TRAINING)
    for text, used, reason in effects:
        if used(cfg):
            continue
        names = text.split()
        groups = tuple(name for name in names if name.endswith((".", "_")))
        for field in changed:
            if field.name in names or field.name.startswith(groups):
                raise InputError(
                    f"`{field.name}` = {short(values[field])} has no effect: {reason}. "
                    f"Leave it at {short(field.default)} or change the other setting."
                )
