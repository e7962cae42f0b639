"""Rules for settings that may change when a run resumes, or starts from another run's weights."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import jax

from moejax.comm.weights.path import path_of
from moejax.config.fields import short
from moejax.config.load import diff, from_dict, to_dict
from moejax.config.schema import Config, OptimizerConfig
from moejax.data.sources import Content
from moejax.data.tokens import FilePart
from moejax.errors import InputError
from moejax.layout.layout import Axes, Layout
from moejax.runtime.jax_settings import NUMBERS
from moejax.step.train_step import TrainStep

# A change here would change the meaning of weights, optimizer state or data position.
FIXED = (
    "model.",
    "moe.",
    "data.",
    "lora.",
    "optimizer.name",
    "train.batch_sequences",
    "train.seed",
)
# Fixed settings by prefix that do not change a step's result, so they may change.
FREE = (
    "model.dtype",
    "model.remat",
    "model.scan_layers",
    "moe.headroom",
    "moe.slots",
    "moe.slots_from",
    "moe.implementation",
    "lora.base_dtype",
    "kernels",
)
# Settings that decide the parameters, their shapes, and how stored norms scale.
SHAPES = (
    "model.vocab_size",
    "model.width",
    "model.num_layers",
    "model.attention",
    "model.num_heads",
    "model.num_kv_heads",
    "model.head_width",
    "model.rope_width",
    "model.q_latent",
    "model.kv_latent",
    "model.value_width",
    "model.mlp_hidden",
    "model.activation",
    "model.first_dense_layers",
    "model.layers_before_stages",
    "model.stage_chunks",
    "model.moe_every",
    "model.layer_mlps",
    "model.block_norm",
    "model.layer_scale",
    "model.zero_centered_norms",
    "model.qk_norm",
    "model.attention_bias",
    "model.attention_output_bias",
    "model.attention_gate",
    "model.attention_sinks",
    "model.full_attention_every",
    "model.layer_attention",
    "model.full_attention.head_width",
    "model.full_attention.num_kv_heads",
    "model.full_attention.keys_are_values",
    "model.full_attention.sinks",
    "model.indexer.heads",
    "model.indexer.width",
    "model.linear.form",
    "model.linear.key_heads",
    "model.linear.value_heads",
    "model.linear.key_width",
    "model.linear.value_width",
    "model.linear.convolution",
    "model.linear.convolution_bias",
    "model.tie_embeddings",
    "model.predict_ahead",
    "model.ahead_block",
    "moe.num_experts",
    "moe.expert_hidden",
    "moe.num_shared_experts",
    "moe.shared_hidden",
    "moe.shared_gate",
    "moe.own_norms",
    "moe.expert_scale",
    "moe.latent",
    "moe.router_bias",
    "moe.expert_bias",
)
SHOWN = 4  # changed files named in a message
CODEC_STATE = 1  # increases when the meaning of the codecs' state changes
ConfigChange = tuple[str, Any, Any]  # name, value in the checkpoint, value now


def resume_notes(
    manifest: dict[str, Any], cfg: Config, content: Content, *, step: int, rates: bool = True
) -> Iterator[str]:
    """Yields notes about harmless changes since the checkpoint of `step`, to be logged.

    Args:
      rates: whether a changed learning rate is such a change.
    Raises:
      InputError: lists settings or data that changed and must not.
    """
    saved = manifest.get("config", {})
    for change in check_resumable(saved, cfg, step=step):
        yield f"setting changed since the checkpoint: {change}"
    if rates:
        yield from rate_notes(saved, cfg, step=step)
    for change in check_same_data(manifest, content, allowed=cfg.checkpoint.allow_changed_data):
        yield f"data changed since the checkpoint: {change}"


def check_resumable(saved: dict[str, Any], cfg: Config, *, step: int) -> list[str]:
    """Returns the harmless changes from the config of a checkpoint of `step`, to be logged.

    Raises:
      InputError: lists changed settings that the checkpoint depends on.
    """
    changes = diff(from_dict(saved), cfg)
    refused = [c for c in changes if c[0].startswith(FIXED) and c[0] not in FREE]
    if refused:
        raise InputError(
            f"config differs from the checkpoint's. {_listed(refused)}. These cannot change within "
            f"a run. Change them back, or set another run_dir (with checkpoint.init_from to keep "
            f"weights)."
        )
    every = [one.outer.every for one in (from_dict(saved), cfg)]
    if (every[0] is None) != (every[1] is None):
        raise InputError(
            f"config differs from the checkpoint's. outer.every: {short(every[0])} -> "
            f"{short(every[1])}. A run has an outer loop from its first step to its last, or none. "
            "Change it back, or set another run_dir with checkpoint.init_from, which takes the "
            "weights."
        )
    if step > cfg.train.num_steps:
        raise InputError(
            f"run is past its end. The checkpoint has step {step}, train.num_steps is "
            f"{cfg.train.num_steps}. A run does not go back. Raise train.num_steps, or set another "
            f"run_dir."
        )
    # The checkpoint's replica axis and nodes are resolved; None in the config is no change.
    open_ended = ("mesh.replica", "mesh.nodes")
    told = [c for c in changes if not c[0].startswith("plan.")]  # it does not matter who chose
    return [_listed([c]) for c in told if c[0] not in open_ended or c[2] is not None]


def rate_notes(saved: dict[str, Any], cfg: Config, *, step: int) -> list[str]:
    """Returns a note if the rate after a checkpoint's `step` is not what the checkpoint's run had.

    For example, a run whose rate has decayed goes on with more steps, and the rate rises again.
    """
    before = from_dict(saved)
    steps, longer = before.train.num_steps, cfg.train.num_steps
    old, new = rate_after(before.optimizer, step, steps), rate_after(cfg.optimizer, step, longer)
    if math.isclose(old, new, rel_tol=1e-3, abs_tol=1e-12):
        return []
    text = (
        f"learning rate after step {step}: {old:.3g} as the checkpoint's run had it, now {new:.3g}"
    )
    if steps != longer:
        text += f", by its schedule over {longer:,} steps, not {steps:,}"
    return [text]


def rate_after(cfg: OptimizerConfig, updates: int, num_steps: int) -> float:
    """Returns the learning rate after some updates, without a device.

    The step's own is `step.optimizer.learning_rate`.
    """
    warmup = cfg.warmup(num_steps)
    if updates < warmup:
        return cfg.learning_rate * updates / warmup
    done = min((updates - warmup) / max(num_steps - warmup, 1), 1.0)
    left = {
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "linear": 1 - done,
        "constant": 1.0,
    }[cfg.schedule]
    return cfg.learning_rate * (cfg.final_fraction + (1 - cfg.final_fraction) * left)


def sites_before(saved: dict[str, Any], train_step: TrainStep) -> int | None:
    """Returns the number of sites of a checkpoint, if it differs from this run's; else None.

    Args:
      saved: the checkpoint's manifest.
    """
    if train_step.abstract.sites is None:
        return None
    cfg = from_dict(saved["config"])
    before = 1 if cfg.outer.hub is not None else cfg.mesh.replica
    return None if before == train_step.num_sites else before


def check_same_data(saved: dict[str, Any], content: Content, *, allowed: bool) -> list[str]:
    """Compares the data that a checkpoint was trained on with the run's data.

    Returns the changes, to be logged. File names do not count, only contents.

    Args:
      saved: the checkpoint's manifest. Format 1 has no digests of data: nothing is compared.
    Raises:
      InputError: lists the changes.
    """
    known = saved.get("data", content)
    changes = [
        f"{name}: {_what_changed(known[stream], content[stream])}"
        for stream, name in (("train", "data.train_files"), ("held_out", "data.eval_files"))
        if [p["digest"] for p in known[stream]] != [p["digest"] for p in content[stream]]
    ]
    if changes and not allowed:
        raise InputError(
            f"data differs from the checkpoint's. {'; '.join(changes)}. A run reads the same "
            f"tokens to its end. Put the files back, set another run_dir (with "
            f"checkpoint.init_from to keep weights), or set checkpoint.allow_changed_data=true to "
            f"go on with these."
        )
    return changes


def _what_changed(before: list[FilePart], now: list[FilePart]) -> str:
    """Returns text about added, removed and changed files, at most `SHOWN` by name."""
    old, new = ({part["name"]: part for part in parts} for parts in (before, now))
    changes = [
        f"{name} has other content ({new[name]['tokens']:,} tokens, had {old[name]['tokens']:,})"
        for name in old
        if name in new and new[name]["digest"] != old[name]["digest"]
    ]
    changes += [f"{name} is gone" for name in old if name not in new]
    changes += [f"{name} is new" for name in new if name not in old]
    rest = [f"and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
    return ", ".join(changes[:SHOWN] + rest) or "the same files in another order"


def describe_run(
    train_step: TrainStep, content: Content, base: dict[str, str] | None = None
) -> dict[str, Any]:
    """Returns a manifest's entries about the run, which later starts compare.

    Args:
      base: path and digest of the frozen weights of a run with adapters.
    """
    return {
        "config": to_dict(train_step.cfg),
        "mesh": dict(train_step.layout.sizes),
        "reduction": fingerprint(train_step),
        "data": content,
        "jax_settings": NUMBERS,
        **({} if base is None else {"base": base}),
    }


def check_same_base(saved: dict[str, Any], base: dict[str, str]) -> None:
    """Raises InputError if adapters were trained on other frozen weights than these.

    Args:
      saved: the manifest of the checkpoint with the adapters.
      base: path and digest of the frozen weights.
    """
    known = saved["base"]
    if known["weights"] != base["weights"]:
        raise InputError(
            f"base weights differ from the checkpoint's. {base['path']} has digest "
            f"{base['weights'][:12]}, the adapters were trained on {known['path']} with "
            f"{known['weights'][:12]}. Adapters fit the weights they were trained on only. Name "
            "those in checkpoint.init_from, down to the step, or set another run_dir."
        )


def fingerprint(train_step: TrainStep) -> str | None:
    """Returns a digest that decides the meaning of the codecs' state; None if they have none.

    It covers the codecs; the mesh axes in order, and which of them cross nodes; and for each
    parameter its name, shape, sharding, gradient path and shapes of codec state. Devices count by
    their position on the mesh.
    """
    layout = train_step.layout
    if not jax.tree.leaves(train_step.abstract.reduction):
        return None

    def spread(axes: Axes) -> Axes:
        return tuple(axis for axis in axes if layout.size((axis,)) > 1)

    def facts(name: Any, param: Any, dims: str, own: Layout, residuals: Any) -> list[Any]:
        path = path_of(dims, own)
        return [
            jax.tree_util.keystr(name, simple=True, separator="."),
            [dims, param.shape, [spread(axes) for axes in own.param_axes(dims)]],
            [path.dim, spread(path.gather), spread(path.copies), spread(path.slow)],
            [leaf.shape for leaf in jax.tree.leaves(residuals)],
        ]

    state = train_step.abstract
    model = train_step.site
    trees = (state.params, model.dims, model.layouts, state.reduction)
    facts_of_params = jax.tree_util.tree_map_with_path(facts, *trees)
    content = {
        "meaning": CODEC_STATE,
        # It was a setting, of codecs that are gone: fingerprints have it.
        "compression": dataclasses.asdict(train_step.cfg.compression) | {"adapt_every": 100},
        "axes": [axis_size for axis_size in layout.sizes if axis_size[1] > 1],
        "parameters": jax.tree.leaves(facts_of_params, is_leaf=lambda x: isinstance(x, list)),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def same_reduction(saved: dict[str, Any], train_step: TrainStep) -> bool:
    """Returns whether the codec state of a checkpoint with this manifest is valid for this run."""
    if "reduction" in saved:
        return saved["reduction"] == fingerprint(train_step)
    # Format 1 had no fingerprint: all settings that could matter must be unchanged.
    changes = diff(from_dict(saved.get("config", {})), train_step.cfg)
    matters = ("compression.", "mesh.nodes", "mesh.expert_weights")
    changed = any(name.startswith(matters) for name, *_ in changes)
    return saved.get("mesh") == dict(train_step.layout.sizes) and not changed


def check_same_weights(saved: dict[str, Any], cfg: Config) -> None:
    """Checks that the weights of another run are for the same parameters.

    Raises:
      InputError: lists the settings that differ, or says that there are only adapters.
    """
    if (rank := from_dict(saved).lora.rank) is not None:
        raise InputError(
            f"checkpoint.init_from holds adapters, no weights: it is of a run with `lora.rank` = "
            f"{rank}. A run starts from all weights of a model. Name the checkpoint that the "
            "adapters were trained on."
        )
    if (forced := from_dict(saved).moe.router.forced) != cfg.moe.router.forced == "none":
        raise InputError(
            f"checkpoint.init_from is of a benchmark, with `moe.router.forced` = {forced}. Its "
            "router never chose experts. Take weights from a run that trained without it."
        )
    refused = [change for change in diff(from_dict(saved), cfg) if change[0] in SHAPES]
    if refused:
        raise InputError(
            f"model differs from that of checkpoint.init_from. {_listed(refused)}. Its weights fit "
            f"a model of the same shape only. Change these back, or take weights from another run."
        )


def _listed(changes: list[ConfigChange]) -> str:
    return ", ".join(f"{name}: {before} -> {after}" for name, before, after in changes)
