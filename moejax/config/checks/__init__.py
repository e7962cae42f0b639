"""Every rule between settings, checked before any device is touched.

`check` is for a config as it was written; `resolve_mesh` follows once the number of devices is
known. Neither imports JAX. The rules on single values live with the fields in `config.schema`.

Read in this order: this file, `effects` (settings that would change nothing), `gradients`
(settings that leave a parameter without a gradient), `attention`, `mesh` (axes and their sizes),
`stages` (the pipeline's), `memory` (what lies on the host), `size` (limits of arrays), `planned`
(settings that a planner chooses), `paths` (files and folders). `machine` says how much memory there
is. `text` has words that their messages share.
"""

import math

from moejax.config.checks.attention import check_attention
from moejax.config.checks.effects import check_effects
from moejax.config.checks.gradients import check_gradients
from moejax.config.checks.memory import check_memory
from moejax.config.checks.mesh import (
    AXES,
    check_batch,
    check_context,
    check_expert_axis,
    check_outer,
    check_tensor_axis,
    check_width,
    resolve_mesh,
)
from moejax.config.checks.paths import check_no_secrets
from moejax.config.checks.planned import check_plan, is_planned
from moejax.config.checks.size import check_size
from moejax.config.checks.stages import check_chunks, check_stages
from moejax.config.checks.text import divisors_text, require
from moejax.config.compression import build_compression
from moejax.config.fields import short
from moejax.config.pattern import ahead_parts
from moejax.config.schema import Config, ModelConfig

__all__ = ["AXES", "check", "resolve_mesh"]


def check(cfg: Config, *, trained: bool = True) -> None:
    """Raises InputError at the first rule between settings that `cfg` breaks.

    Args:
      trained: whether the config is for training, and not for evaluating or importing weights.
    """
    check_no_secrets(cfg)
    check_effects(cfg)
    _check_tables(cfg.model)
    check_size(cfg)
    _check_paths(cfg)
    check_attention(cfg)
    _check_blocks(cfg)
    _check_data(cfg)
    _check_training(cfg)
    if cfg.model.has_experts:
        _check_experts(cfg)
        check_expert_axis(cfg)
        _check_route(cfg)
    _check_compression(cfg)
    check_tensor_axis(cfg)
    check_width(cfg)
    check_context(cfg)
    check_batch(cfg)
    check_stages(cfg)
    check_memory(cfg)
    check_outer(cfg)
    if trained:
        check_gradients(cfg)
    check_plan(cfg)
    if cfg.mesh.simulated_devices is not None and not is_planned(cfg):
        resolve_mesh(cfg, cfg.mesh.simulated_devices, "cpu")


def _check_paths(cfg: Config) -> None:
    named = {
        "run_dir": (cfg.run_dir,),
        "checkpoint.init_from": (cfg.checkpoint.init_from,),
        "checkpoint.memory_dir": (cfg.checkpoint.memory_dir,),
        "data.train_files": cfg.data.train_files,
        "data.eval_files": cfg.data.eval_files,
    }
    for name, paths in named.items():
        for path in paths:
            require(
                path is None or (path.strip() != "" and "\0" not in path),
                f"`{name}` has {short(path)}. A path is not empty and has no null byte. "
                "Name a file or directory.",
            )


def _check_blocks(cfg: Config) -> None:
    model = cfg.model
    tables = model.layer_mlps or model.layer_attention
    pattern = 1 if tables else math.lcm(model.moe_every or 1, model.full_attention_every or 1)
    before = model.layers_before_stages
    require(
        before == 0
        or (before % pattern == 0 and before + model.first_dense_layers < model.num_layers),
        f"`model.layers_before_stages` = {before} does not fit {model.num_layers} layers, of which "
        f"{model.first_dense_layers} are dense ones at the start. It is a multiple of {pattern}, "
        "the layers until both kinds repeat, and leaves layers for the stages. Choose such a "
        "number, or 0.",
    )
    check_chunks(model)
    if model.moe_every is None or model.layer_mlps:
        return
    rest = model.num_layers - model.first_dense_layers
    require(
        rest >= 1,
        f"`model.first_dense_layers` = {model.first_dense_layers} leaves none of "
        f"{model.num_layers} layers for experts. It must be below `model.num_layers`; set "
        "model.moe_every=none for a dense model.",
    )
    require(
        model.moe_every <= rest,
        f"`model.moe_every` = {model.moe_every} leaves no block with experts. It must be at "
        f"most num_layers - first_dense_layers = {rest}; set none for a dense model.",
    )


def _check_tables(model: ModelConfig) -> None:
    """Checks the tables of layers: one entry a layer, and no needless table."""
    for name in ("layer_mlps", "layer_attention"):
        entries = len(getattr(model, name))
        require(
            entries in (0, model.num_layers),
            f"`model.{name}` has {entries} entries for {model.num_layers} layers. Each layer has "
            "one. Write as many, or none.",
        )
    require(
        not model.layer_mlps
        or (model.has_experts and model.moe_every is not None)
        or ("none" in model.layer_mlps and not model.has_experts and model.moe_every is None),
        "`model.layer_mlps` names no block with experts, or `model.moe_every` is none. Leave the "
        "table out for a dense model, and moe_every at 1 with a table of experts.",
    )
    table = model.layer_attention
    require(
        ("none", "none") not in zip(table, model.layer_mlps, strict=False),
        "`model.layer_attention` and `model.layer_mlps` both have none for a layer. Each layer has "
        "attention, an MLP or experts. Leave out layers without any.",
    )
    _check_ahead(model)
    require(
        not table or not {"window", "linear", "none"}.isdisjoint(table),
        "`model.layer_attention` leaves no block its window. Leave it out, and set "
        "model.sliding_window=none.",
    )
    require(
        not table or ("linear" in table) == model.is_linear,
        f"`model.layer_attention` has {table.count('linear')} blocks of linear attention, and "
        f"`model.linear.form` is {model.linear.form}. Set the form of such blocks, or none "
        "without them.",
    )
    require(
        not model.is_linear or model.sliding_window is None or "window" in table,
        f"`model.sliding_window` = {model.sliding_window} is of no block: with `model.linear.form` "
        f"= {model.linear.form} others attend in full. Set it to none, or name blocks with a "
        "window in model.layer_attention.",
    )


def _check_ahead(model: ModelConfig) -> None:
    """Checks the block that predicts further tokens."""
    given = model.ahead_block
    is_mlp = [part in ("dense", "experts") for part in given]
    require(
        is_mlp in ([], [False, True]),
        f"`model.ahead_block` is {','.join(given)}. It is attention (window, full or linear), then "
        "an MLP (dense or experts). Set for example model.ahead_block=full,dense.",
    )
    if not model.predict_ahead:
        return
    parts = ahead_parts(model)
    require(
        "none" not in parts,
        "`model.predict_ahead` has a block like the last one, which has attention or an MLP alone. "
        "Set model.ahead_block, or model.predict_ahead=0.",
    )
    require(
        not given or given[0] == parts[0],
        "`model.ahead_block` has a window, and `model.sliding_window` is none. Set one of them.",
    )
    require(
        parts[0] != "linear" or model.is_linear,
        "`model.ahead_block` has linear attention, and `model.linear.form` is none. Set one of "
        "them.",
    )
    require(
        parts[1] != "experts" or model.has_experts,
        "`model.ahead_block` has experts, and no layer has. Set model.ahead_block=full,dense.",
    )


def _check_data(cfg: Config) -> None:
    if cfg.data.source == "stdlib":
        require(
            cfg.model.vocab_size >= 257,
            f"`model.vocab_size` = {cfg.model.vocab_size} is too small for `data.source` stdlib: "
            "256 bytes and the end of a document need at least 257. Set model.vocab_size=264.",
        )
    else:
        require(
            len(cfg.data.train_files) > 0,
            f"`data.train_files` is empty, but `data.source` is {cfg.data.source}. Name token "
            "files or globs, or set data.source=stdlib.",
        )
    require(
        cfg.data.source != "routing" or cfg.model.expert_layers > 0,
        "`data.source` is routing, but the model has no experts. Its tokens all take the same way. "
        "Set data.source=tokens, or give the model experts.",
    )
    weights, files = cfg.data.train_weights, cfg.data.train_files
    require(
        not weights or len(weights) == len(files),
        f"`data.train_weights` has {len(weights)} numbers for {len(files)} entries of "
        "`data.train_files`. Each entry needs one. Write as many, or none.",
    )
    require(
        all(weight > 0 for weight in weights),
        f"`data.train_weights` has {short(list(weights))}. A weight is above 0. Leave out files "
        "that give nothing.",
    )


def _check_training(cfg: Config) -> None:
    optimizer, train = cfg.optimizer, cfg.train
    require(
        optimizer.warmup_steps < 1 or optimizer.warmup_steps % 1 == 0,
        f"`optimizer.warmup_steps` = {optimizer.warmup_steps} is neither whole nor below 1. It "
        "counts steps, or is a share of the run. Write 20, or 0.1 for a tenth of the run.",
    )
    require(
        optimizer.warmup(train.num_steps) <= train.num_steps,
        f"`optimizer.warmup_steps` = {optimizer.warmup_steps:g} is more than `train.num_steps` = "
        f"{train.num_steps}. Lower the warm-up (0.1 is a tenth of the run) or train longer.",
    )
    profile, last = cfg.profile, train.num_steps
    require(
        profile.start_step is None or profile.start_step + profile.num_steps - 1 <= last,
        f"`profile.start_step` = {profile.start_step} and "
        f"`profile.num_steps` = {profile.num_steps} end after `train.num_steps` = {last}. "
        "Profile earlier or fewer steps, or train longer.",
    )
    for name in ("beta1", "beta2", "muon_momentum"):
        require(
            getattr(optimizer, name) < 1,
            f"`optimizer.{name}` = {getattr(optimizer, name)} must be below 1: an average that "
            "never forgets never learns. Choose 0.9 to 0.999.",
        )
    require(
        optimizer.name != "muon" or cfg.lora.rank is None,
        f"`optimizer.name` is muon, and `lora.rank` is {cfg.lora.rank}. Muon orthogonalises whole "
        "matrices, not the factors of an adapter. Set optimizer.name=adamw.",
    )
    require(
        train.seed < 2**32,
        f"`train.seed` = {train.seed} does not fit in 32 bits, so JAX would cut it. Choose a seed "
        "below 4294967296.",
    )


def _check_experts(cfg: Config) -> None:
    E, K, router = cfg.moe.num_experts, cfg.moe.experts_per_token, cfg.moe.router
    G, chosen = router.num_groups, router.groups_per_token
    require(
        K <= E,
        f"`moe.experts_per_token` = {K} is more than `moe.num_experts` = {E}. Lower the first or "
        "raise the second.",
    )
    require(
        not cfg.moe.own_norms or (cfg.model.block_norm == "both" and cfg.moe.shared_width > 0),
        "`moe.own_norms` is for shared experts beside the others, in blocks with norms of inputs "
        "and results. Set moe.num_shared_experts and model.block_norm=both, or leave it off.",
    )
    _check_quantiles(cfg)
    if G == 1:
        return
    require(
        E % G == 0,
        f"`moe.num_experts` = {E} is not a multiple of `moe.router.num_groups` = {G}. "
        f"Choose {divisors_text(E)} groups.",
    )
    require(
        chosen <= G,
        f"`moe.router.groups_per_token` = {chosen} is more than `moe.router.num_groups` = {G}. "
        "Lower the first or raise the second.",
    )
    require(
        chosen * (E // G) >= K,
        f"`moe.experts_per_token` = {K} is more than the {chosen * (E // G)} experts that a token "
        f"can reach: `moe.router.groups_per_token` = {chosen} times {E // G} experts a group. "
        "Raise the second or lower the first.",
    )
    require(
        router.score != "sigmoid" or E // G >= 2,
        f"`moe.router.num_groups` = {G} leaves one expert in a group of {E}. With sigmoid scores "
        f"a group counts by its two best experts. Choose at most {E // 2} groups.",
    )


def _check_quantiles(cfg: Config) -> None:
    E, router = cfg.moe.num_experts, cfg.moe.router
    if router.quantile_bins is None:
        return
    bins = f"`moe.router.quantile_bins` = {router.quantile_bins}"
    require(
        router.bias_update_rate == 0,
        f"{bins} and `moe.router.bias_update_rate` = {router.bias_update_rate} both set the "
        "selection bias. Set bias_update_rate=0, or quantile_bins=none.",
    )
    require(
        router.num_groups == 1,
        f"{bins} needs one group of experts, and `moe.router.num_groups` is {router.num_groups}. "
        "No bias brings an expert to a token that chose other groups. Set num_groups=1, or "
        "bias_update_rate in place of quantile_bins.",
    )
    require(
        cfg.moe.experts_per_token < E,
        f"{bins} has no effect: every token visits all {E} experts. Set quantile_bins=none.",
    )


def _check_route(cfg: Config) -> None:
    mesh, route = cfg.mesh, cfg.route
    chunks = cfg.route_chunks, cfg.route_chunks_backward or cfg.route_chunks
    if route == "duplicate":
        require(
            mesh.tensor > 1 and mesh.expert_weights == "hidden",
            f"`route` = {route} is for experts whose hidden width is sharded. `mesh.tensor` is "
            f"{mesh.tensor}, `mesh.expert_weights` is {mesh.expert_weights}. Choose split, or a "
            "tensor axis above 1 and hidden.",
        )
    require(
        not cfg.route_trim or chunks == (1, 1),
        f"`route_trim` sends each bucket in one piece. `route_chunks` is "
        f"{' and '.join(map(str, chunks))}, which cuts it. Leave `route_trim` off, or choose "
        "one chunk.",
    )
    if route in ("merge", "two_level_merge"):
        plain = "split" if route == "merge" else "two_level"
        require(
            cfg.moe.experts_per_token > 1,
            f"`route` = {route} merges a token's copies. `moe.experts_per_token` is 1, so there is "
            f"one. Choose {plain}.",
        )


def _check_compression(cfg: Config) -> None:
    build_compression(cfg.compression)
    require(
        cfg.compression.block % 4 == 0,
        f"`compression.block` is {cfg.compression.block}. It must be a multiple of 4.",
    )
