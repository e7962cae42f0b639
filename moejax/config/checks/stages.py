"""Rules of pipeline stages: sizes that they divide, and settings that they do not support."""

from dataclasses import replace

from moejax.config.checks.planned import is_planned
from moejax.config.checks.text import divisors_text, multiples, require
from moejax.config.fields import get_value
from moejax.config.pattern import ahead_kind, layer_groups
from moejax.config.schema import Config, ModelConfig


def check_chunks(model: ModelConfig) -> None:
    """Checks that chunks of layers are equal."""
    chunks = model.stage_chunks
    kinds, repeats = layer_groups(replace(model, stage_chunks=1))[-1]
    blocks = "" if len(kinds) == 1 else f" of {len(kinds)} blocks"
    require(
        repeats % chunks == 0,
        f"`model.stage_chunks` = {chunks} does not divide the last {repeats} equal layers{blocks}. "
        f"All chunks are equal. Choose {divisors_text(repeats)}.",
    )


def check_stages(cfg: Config) -> None:
    """Checks that stages get equally many layers, micro-batches and positions."""
    stages, model, train = cfg.mesh.stage, cfg.model, cfg.train
    if stages == 1:
        return
    chunks = model.stage_chunks
    kinds, repeats = layer_groups(model)[-1]
    blocks = "" if len(kinds) == 1 else f" of {len(kinds)} blocks"
    before = model.layers_before_stages + repeats % stages * len(kinds) * chunks
    more = f", or set model.layers_before_stages={before}" if repeats > stages else ""
    part = "" if chunks == 1 else f" of each of {chunks} chunks (`model.stage_chunks`)"
    require(
        repeats % stages == 0,
        f"`mesh.stage` = {stages} does not divide the last {repeats} equal layers{blocks}{part}, "
        f"which stages share equally. Choose {divisors_text(repeats)}{more}.",
    )
    require(
        chunks == 1 or cfg.mesh.schedule == "1f1b",
        f"`model.stage_chunks` is {chunks} and `mesh.schedule` is {cfg.mesh.schedule}. Only 1f1b "
        "interleaves stages. Set mesh.schedule=1f1b, or model.stage_chunks=1.",
    )
    require(
        train.micro_batches % stages == 0 or (is_planned(cfg) and train.micro_batches == 1),
        f"`train.micro_batches` = {train.micro_batches} is not divisible by `mesh.stage` = "
        f"{stages}. It must be a multiple. Choose {multiples(train.micro_batches, stages)}; "
        "more micro-batches leave stages less idle.",
    )
    slices = cfg.mesh.stage_slices
    pieces = cfg.mesh.tensor * stages * slices
    product = "mesh.tensor x mesh.stage" + " x mesh.stage_slices" * (slices > 1)
    require(
        cfg.data.sequence_length % pieces == 0,
        f"`data.sequence_length` = {cfg.data.sequence_length} is not divisible by {product} = "
        f"{pieces}. Stages share the positions of the loss. Choose "
        f"{multiples(cfg.data.sequence_length, pieces)}.",
    )
    require(
        cfg.mesh.schedule != "combined_1f1b" or cfg.mesh.stage_keeps == "residuals",
        "`mesh.schedule` is combined_1f1b and `mesh.stage_keeps` is input. Layers of both passes "
        "take turns, and recomputation from the input would add a third pass. Set "
        "mesh.stage_keeps=residuals, with model.remat=full to keep little, or another schedule.",
    )
    _check_parts(cfg)
    layer = cfg.compression.start_layer
    require(
        layer == 0,
        f"`compression.start_layer` is {layer}, and `mesh.stage` is {stages}. All stages run one "
        "program, so their layers have one codec. Set compression.start_layer=0.",
    )


def _check_parts(cfg: Config) -> None:
    """Checks that blocks can run on parts of the positions, where they have to."""
    model = cfg.model
    require(
        not model.predict_ahead or ahead_kind(model).mixer != model.linear.form,
        "`model.predict_ahead` has a block of linear attention, as the last layer has or "
        "`model.ahead_block` says, and "
        f"`mesh.stage` is {cfg.mesh.stage}. Stages share the positions of that block, and a state "
        "does not pass between them. Set model.predict_ahead=0 or mesh.stage=1.",
    )
    require(
        not (model.predict_ahead and model.is_sparse),
        "`model.predict_ahead` has a block of sparse attention, as the last layer has, and "
        f"`mesh.stage` is {cfg.mesh.stage}. Stages share the positions of that block, and its "
        "indexer needs all. Set model.predict_ahead=0 or mesh.stage=1.",
    )
    require(
        not cfg.train.indexer_loss,
        f"`train.indexer_loss` is {cfg.train.indexer_loss}, and `mesh.stage` is {cfg.mesh.stage}. "
        "Stages do not add the indexers' loss. Set train.indexer_loss=0 or mesh.stage=1.",
    )
    if cfg.mesh.stage_slices > 1:
        _check_slices(cfg)


def _check_slices(cfg: Config) -> None:
    """Refuses settings that slices of a sequence do not support."""
    slices = f"`mesh.stage_slices` is {cfg.mesh.stage_slices}"
    require(
        "none" not in cfg.model.layer_attention,
        f"`model.layer_attention` has none, and {slices}. Slices take keys and values of every "
        "layer. Set mesh.stage_slices=1.",
    )
    require(
        not cfg.model.is_linear,
        f"`model.linear.form` is {cfg.model.linear.form}, and {slices}. The states of linear "
        "attention do not pass from slice to slice. Set mesh.stage_slices=1.",
    )
    require(
        not cfg.model.is_sparse,
        f"`model.attention` is sparse, and {slices}. Its indexer needs keys of the whole sequence. "
        "Set mesh.stage_slices=1.",
    )
    usual = (
        ("mesh.schedule", "1f1b", "Slices go back in the opposite order, in 1f1b alone."),
        ("mesh.stage_keeps", "residuals", "Backward of a slice needs keys that forward made."),
        ("model.stage_chunks", 1, "Slices and interleaved chunks cannot be combined."),
        ("moe.router.balance_over", "batch", "No expert layer sees a whole sequence."),
        ("model.predict_ahead", 0, "Its block attends to keys that later slices have."),
    )
    for name, value, why in usual:
        require(
            get_value(cfg, name) == value,
            f"`{name}` is {get_value(cfg, name)}, and {slices}. {why} Set {name}={value}, or "
            "mesh.stage_slices=1.",
        )
