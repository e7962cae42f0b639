"""Refuses changed settings that have no effect with the others."""

from collections.abc import Callable, Iterator

from moejax.config.checks.mesh import expert_owners
from moejax.config.checks.planned import is_planned
from moejax.config.compression import GRADIENTS, NO_COMPRESSION, build_compression
from moejax.config.fields import fields, get_value, short
from moejax.config.schema import Config
from moejax.errors import InputError

ROUTE_SETTINGS = ("route", "route_chunks", "route_chunks_backward", "route_trim")
# Values of `model.remat` with which backward gathers weights again.
RECOMPUTED = ("full", "dots", "token_collectives", "attention", "experts")
PLANNER_SETTINGS = tuple(
    f"plan.{name}"
    for name in ("topology", "routing", "codecs", "traces", "seconds", "keep", "replan")
)

# A rule: settings (a name or a prefix), whether `cfg` uses them, and the reason if not.
_Effect = tuple[tuple[str, ...], Callable[[Config], bool], str]


def _effects(cfg: Config) -> Iterator[_Effect]:
    yield (
        ("moe.", "model.first_dense_layers", "mesh.expert_weights", "mesh.expert", *ROUTE_SETTINGS),
        lambda cfg: cfg.model.has_experts,
        "`model.moe_every` is none, so no block has experts",
    )
    yield (
        ("model.first_dense_layers", "model.moe_every"),
        lambda cfg: not cfg.model.layer_mlps,
        "`model.layer_mlps` sets the MLP of each block",
    )
    yield (
        ("model.mlp_hidden",),
        lambda cfg: cfg.model.has_dense_blocks,
        "every block has experts (`model.moe_every` is 1, `model.first_dense_layers` is 0)",
    )
    if cfg.plan.mode != "auto":  # else a search chooses the axes, and refuses what does not fit
        yield from _axis_effects()
    yield from _mesh_effects()
    yield (
        ("compression.block", "compression.start_layer"),
        lambda cfg: build_compression(cfg.compression) != NO_COMPRESSION,
        "`compression` is none",
    )
    yield (
        ("checkpoint.memory_dir",),
        lambda cfg: cfg.checkpoint.memory_every is not None,
        "`checkpoint.memory_every` is none",
    )
    yield (
        ("model.activation_limit",),
        lambda cfg: cfg.model.clamp is not None,
        "only `model.activation` clamped_swiglu reads it",
    )
    yield (
        ("model.predict_ahead",),
        lambda cfg: cfg.data.sequence_length > 1,
        "`data.sequence_length` is 1, so no position has a token after the next",
    )
    yield from _expert_effects()
    yield from _attention_effects()
    yield from _rope_effects()
    yield from _training_effects()


def _expert_effects() -> Iterator[_Effect]:
    yield (
        ("moe.shared_gate", "moe.shared_hidden"),
        lambda cfg: cfg.moe.num_shared_experts > 0,
        "`moe.num_shared_experts` is 0",
    )
    yield (
        ("moe.headroom",),
        lambda cfg: cfg.moe.capacity_factor is None,
        "`moe.capacity_factor` is set, and buckets hold the capacity of every expert",
    )
    yield (
        ("moe.router.groups_per_token",),
        lambda cfg: cfg.moe.router.num_groups > 1,
        "`moe.router.num_groups` is 1",
    )


def _axis_effects() -> Iterator[_Effect]:
    yield (
        ("mesh.expert_weights", "mesh.activations"),
        lambda cfg: cfg.mesh.tensor > 1,
        "`mesh.tensor` is 1",
    )
    yield (
        ("mesh.gather_dense",),
        lambda cfg: cfg.mesh.fsdp * cfg.mesh.expert > 1,
        "`mesh.fsdp` and `mesh.expert` are 1",
    )
    yield (
        ("mesh.schedule", "mesh.stage_keeps", "mesh.stage_slices"),
        lambda cfg: cfg.mesh.stage > 1,
        "`mesh.stage` is 1",
    )
    yield (
        ("route_chunks", "route_chunks_backward", "route_trim", "moe.headroom"),
        lambda cfg: expert_owners(cfg.mesh) > 1,
        "one device owns all experts, so nothing is exchanged",
    )


def _mesh_effects() -> Iterator[_Effect]:
    yield (
        ("mesh.gather_dense",),
        lambda cfg: cfg.lora.rank is None,
        "`lora.rank` is set",
    )
    yield (
        ("mesh.gather_dense",),
        lambda cfg: cfg.mesh.stage == 1,
        "`mesh.stage` is above 1, and with stages all weights are gathered once a step",
    )
    yield (
        ("mesh.gather_across",),
        lambda cfg: cfg.mesh.stage == 1 or cfg.mesh.gather_across == "use",
        "`mesh.stage` is above 1, and with stages weights are gathered once a step; choose use",
    )
    yield (
        ("mesh.gather_across",),
        lambda cfg: cfg.mesh.gather_across != "passes" or cfg.model.remat in RECOMPUTED,
        "`model.remat` keeps gathered weights for backward, or all; choose use",
    )
    yield (
        ("mesh.simulated_devices",),
        lambda cfg: cfg.mesh.platform in (None, "cpu"),
        "only CPU devices are simulated; set `mesh.platform` to cpu",
    )


def _attention_effects() -> Iterator[_Effect]:
    yield (
        ("model.q_latent", "model.kv_latent", "model.value_width"),
        lambda cfg: cfg.model.is_latent,
        "`model.attention` is not latent",
    )
    yield (
        ("model.num_kv_heads",),
        lambda cfg: not cfg.model.is_latent,
        "`model.attention` is latent, where every head has keys and values of its own",
    )
    yield (
        (
            "model.qk_norm",
            "model.attention_bias",
            "model.attention_output_bias",
            "model.attention_sinks",
        ),
        lambda cfg: not cfg.model.is_latent,
        "`model.attention` is latent, which has norms on its latents, no biases and no sinks",
    )
    yield (
        ("model.full_attention_every",),
        lambda cfg: not cfg.model.layer_attention,
        "`model.layer_attention` sets the attention of each block",
    )
    yield (
        ("model.full_attention_every", "model.layer_attention"),
        lambda cfg: cfg.model.sliding_window is not None,
        "`model.sliding_window` is none, so every block attends without a window",
    )


def _rope_effects() -> Iterator[_Effect]:
    scaled = {
        ("model.rope.factor",): ("linear", "llama3", "yarn"),
        ("model.rope.trained_length",): ("llama3", "yarn"),
        ("model.rope.low_frequency_factor", "model.rope.high_frequency_factor"): ("llama3",),
        ("model.rope.beta_fast", "model.rope.beta_slow", "model.rope.truncate"): ("yarn",),
        (
            "model.rope.attention_factor",
            "model.rope.mscale",
            "model.rope.mscale_all_dim",
        ): ("yarn",),
    }
    for names, scalings in scaled.items():
        yield (
            names,
            lambda cfg, scalings=scalings: cfg.model.rope.scaling in scalings,
            f"only `model.rope.scaling` {' or '.join(scalings)} reads it",
        )
    yield (
        ("model.rope.scaling",),
        lambda cfg: cfg.model.rope.factor > 1,
        "`model.rope.factor` is 1, which stretches nothing",
    )


def _training_effects() -> Iterator[_Effect]:
    yield (
        ("train.predict_ahead_loss",),
        lambda cfg: cfg.model.predict_ahead > 0,
        "`model.predict_ahead` is 0",
    )
    yield (
        ("train.rollbacks",),
        lambda cfg: cfg.train.max_skipped is not None or cfg.train.on_spike == "roll_back",
        "`train.max_skipped` is none and `train.on_spike` is tell, so no run goes back",
    )
    yield (
        ("train.on_spike",),
        lambda cfg: cfg.train.spike_threshold is not None and cfg.train.rollbacks > 0,
        "`train.spike_threshold` is none or `train.rollbacks` is 0",
    )
    yield from _optimizer_effects()


def _optimizer_effects() -> Iterator[_Effect]:
    yield (
        ("optimizer.muon_",),
        lambda cfg: cfg.optimizer.name == "muon",
        "`optimizer.name` is not muon",
    )
    yield (
        ("optimizer.final_fraction",),
        lambda cfg: cfg.optimizer.schedule != "constant",
        "`optimizer.schedule` is constant",
    )
    yield (
        ("lora.alpha", "lora.targets", "lora.base_dtype"),
        lambda cfg: cfg.lora.rank is not None,
        "`lora.rank` is none, so there are no adapters",
    )
    yield (
        (*(f"compression.{kind}" for kind in GRADIENTS), "compression.start_layer"),
        lambda cfg: cfg.lora.rank is None,
        "`lora.rank` is set, and gradients of adapters are not compressed",
    )
    yield (
        ("data.train_files", "data.train_weights", "data.eval_files"),
        lambda cfg: cfg.data.source != "stdlib",
        "`data.source` is stdlib, which reads the text of Python's own library",
    )
    yield (
        ("train.eval_every", "train.eval_batches"),
        lambda cfg: cfg.data.source == "stdlib" or bool(cfg.data.eval_files),
        "`data.eval_files` is empty, so nothing is evaluated",
    )
    yield (
        ("train.sample_prompt",),
        lambda cfg: cfg.train.sample_tokens > 0,
        "`train.sample_tokens` is 0",
    )
    yield (
        PLANNER_SETTINGS,
        is_planned,
        "the planner is off (`plan` is hand, or default with a choice made by hand)",
    )


def check_effects(cfg: Config) -> None:
    """Refuses changed settings that would be ignored.

    None switches a feature off, which is accepted where it is off anyway.
    """
    values = {field: get_value(cfg, field.name) for field in fields().values()}
    changed = [field for field, value in values.items() if value not in (field.default, None)]
    for names, used, reason in _effects(cfg):
        if used(cfg):
            continue
        groups = tuple(name for name in names if name.endswith((".", "_")))
        for field in changed:
            if field.name in names or field.name.startswith(groups):
                value = get_value(cfg, field.name)
                raise InputError(
                    f"`{field.name}` = {short(value)} has no effect: {reason}. "
                    f"Leave it at {short(field.default)} or change the other setting."
                )
