"""A plan in options of torchtitan's trainer: `--section.name value`.

Meanings follow torchtitan 0.3.0: torchtitan/config/configs.py, distributed/parallel_dims.py
and distributed/activation_checkpoint.py. Its dense mesh is (dp_replicate, dp_shard, tp), and its
expert mesh (dp_replicate, efsdp, ep), slowest first, where dp_shard x tp = efsdp x ep.
"""

import math

from moejax.config.schema import Config
from moejax.plan.others.gaps import (
    across_row,
    chunks_row,
    codec_gaps,
    dense_row,
    ends_row,
    gaps_of,
    host_row,
    pieces_row,
    sharing_row,
    sharing_text,
    slices_row,
    trim_row,
    whole_row,
)
from moejax.plan.others.shapes import TORCHTITAN, shape_of
from moejax.plan.others.translation import (
    Gap,
    Option,
    Sizes,
    Translation,
    experts_text,
    has_exchange,
    sizes_of,
    stages_text,
    torchrun,
)

PACKAGE = "torchtitan 0.3.0"
YOURS = "hf_assets_path (tokenizer), data, optimizer, learning rate, steps and checkpoints"
# model.remat -> (subcommand, the consequence).
REMATS: dict[str, tuple[str, str]] = {
    "none": ("none", "nothing is recomputed"),
    "full": ("full", "inputs of a block alone are kept"),
    "dots": ("selective", "results of matrix products are kept, but for every second one"),
    "collectives": ("selective", "tokens that came over the network are kept, and more"),
    "token_collectives": ("selective", "tokens that came over the network are kept, and more"),
    "attention": ("selective", "tokens and results of attention are kept, and more"),
    "experts": ("selective", "tokens, results of attention and products are kept"),
}
# Values of `model.remat` with which backward needs no second gather of weights.
KEEPS_WEIGHTS = ("none", "collectives")


def to_torchtitan(cfg: Config) -> Translation:
    """Returns the nearest options of torchtitan for a plan's resolved config."""
    sizes = sizes_of(cfg)
    return Translation(
        trainer="torchtitan",
        package=PACKAGE,
        style="dashes",
        start=(*torchrun(sizes), "-m", "torchtitan.train"),
        options=(*_model(cfg), *_mesh(cfg, sizes), *_batch(cfg, sizes), *_remat(cfg)),
        gaps=tuple(_gaps(cfg, sizes)),
        yours=YOURS,
    )


def _model(cfg: Config) -> list[Option]:
    if (known := TORCHTITAN.get(shape_of(cfg))) is None:
        return []
    text = "a registered config of the same shape"
    return [Option("module", known[0], text), Option("config", known[1], text)]


def expert_degree(cfg: Config, sizes: Sizes) -> int:
    """Returns its expert parallel degree: whole experts on (expert, tensor) where they divide."""
    if not cfg.model.has_experts:
        return 1
    if cfg.mesh.expert_weights == "whole":
        return sizes.expert
    return math.gcd(cfg.moe.num_experts, sizes.expert * sizes.tensor)


def _mesh(cfg: Config, sizes: Sizes) -> list[Option]:
    keeps = cfg.model.remat in KEEPS_WEIGHTS
    again = "kept for backward" if keeps else "gathered again in backward"
    kept = f"remat {cfg.model.remat}: gathered weights are {again}"
    over = f"fsdp {sizes.fsdp} x expert {sizes.expert} shard dense weights"
    stages, chunks = stages_text(cfg), cfg.model.stage_chunks
    options = [
        ("data_parallel_replicate_degree", sizes.replica, f"replica {sizes.replica}"),
        ("data_parallel_shard_degree", sizes.fsdp * sizes.expert // cfg.mesh.context, over),
        ("fsdp_reshard_after_forward", "never" if keeps else "always", kept),
        ("tensor_parallel_degree", sizes.tensor, f"tensor {sizes.tensor}"),
        ("context_parallel_degree", cfg.mesh.context, sharing_text(cfg)),
        ("pipeline_parallel_degree", sizes.stage, stages),
    ]
    if sizes.stage > 1 and chunks > 1:
        each = cfg.model.num_layers // (sizes.stage * chunks)
        # It counts embedding and loss as a layer each.
        options += [
            ("pipeline_parallel_layers_per_stage", each, stages),
            ("pipeline_parallel_first_stage_less_layers", 0, "chunks are equal"),
            ("pipeline_parallel_last_stage_less_layers", 0, "chunks are equal"),
        ]
    if sizes.stage > 1:
        schedule = "Interleaved1F1B" if chunks > 1 else "1F1B"
        options += [
            ("pipeline_parallel_schedule", schedule, stages),
            ("pipeline_parallel_microbatch_size", sizes.rows, "sequences of a micro-batch"),
        ]
    degree = expert_degree(cfg, sizes)
    options.append(("expert_parallel_degree", degree, experts_text(cfg)))
    out = [Option(f"parallelism.{name}", value, because) for name, value, because in options]
    if sizes.tensor > 1 and cfg.mesh.activations != "sequence":
        text = "activations between blocks: replicated"
        out.append(Option("parallelism.no-enable_sequence_parallel", None, text))
    if degree > 1:
        text = "its usual exchange of tokens waits for the host, which CUDA graphs forbid"
        out.append(Option("training.disable_cuda_graphs", None, text))
    return out


def _batch(cfg: Config, sizes: Sizes) -> list[Option]:
    text = f"{sizes.batch} sequences / ({sizes.data} ranks x {sizes.micro_batches} micro-batches)"
    local = sizes.rows
    if sizes.stage > 1:  # it cuts the local batch into the pipeline's micro-batches
        local *= sizes.micro_batches
        text = f"{sizes.batch} sequences / {sizes.data} ranks of a stage"
    return [
        Option("training.seq_len", cfg.data.sequence_length, "data.sequence_length"),
        Option("training.local_batch_size", local, text),
        Option("training.global_batch_size", sizes.batch, "train.batch_sequences"),
        Option("training.mixed_precision_param", cfg.model.dtype, "model.dtype"),
        Option("training.mixed_precision_reduce", "float32", "gradients are reduced in float32"),
    ]


def _remat(cfg: Config) -> list[Option]:
    kind, text = REMATS[cfg.model.remat]
    text = f"remat {cfg.model.remat}: {text}"
    return [Option(f"activation_checkpoint:{kind}", None, text, subcommand=True)]


def _gaps(cfg: Config, sizes: Sizes) -> list[Gap]:
    remat, reduced, factor = cfg.model.remat, cfg.train.gradient_dtype, cfg.moe.capacity_factor
    unknown = shape_of(cfg) not in TORCHTITAN
    register = "has none: register one, and put its --module and --config in front"
    cut = sizes.tensor > 1 and cfg.model.has_experts and cfg.mesh.expert_weights == "hidden"
    hidden = "hidden width of experts over tensor (expert tensor parallelism)"
    experts = f"has whole experts on {expert_degree(cfg, sizes)} devices each group"
    ahead = "has it as num_mtp_layers of a registered config"
    routed = has_exchange(cfg) and (cfg.route not in ("split", "duplicate") or sizes.tensor > 1)
    # DeepEP is chosen in code of the model, not by an option.
    flat = 'has one flat all-to-all (its model_registry takes moe_comm_backend="deepep")'
    listed = "keeps what its own list of operations says, so memory differs"
    rows = [
        (unknown, "a registered config of this model", register),
        whole_row(cfg, "spreads the copies' shards over its efsdp axis"),
        (cut, hidden, experts),
        (cfg.model.is_sparse, "sparse attention", "has dense latent attention"),
        (cfg.model.predict_ahead > 0, "multi-token prediction", ahead),
        dense_row(cfg, "gathers and reduces block by block, in each micro-batch"),
        chunks_row(cfg, "exchanges all tokens at once"),
        (routed, f"the route {cfg.route}", flat),
        trim_row(cfg),
        across_row(cfg),
        host_row(cfg),
        pieces_row(cfg, "reduces the weights of a block together"),
        (reduced != "float32", f"gradients reduced in {reduced}", "reduces in float32"),
    ]
    last = [
        ends_row(cfg),
        slices_row(cfg),
        sharing_row(cfg, "cuts each sequence in two parts for each device"),
        (remat not in ("none", "full"), f"the values that remat {remat} keeps", listed),
        (factor is not None, f"a capacity factor of {factor or 0:g}", "drops no token"),
    ]
    return [*gaps_of(rows), *codec_gaps(cfg), *gaps_of(last)]
