"""A plan in settings of MaxText: `key=value` words of its command line, or lines of its YAML.

Meanings follow MaxText 0.2.5: maxtext/configs/base.yml (comments at each key) and types.py.
Its mesh axes data, fsdp, expert and tensor_sequence shard weights and tokens as replica, fsdp,
expert and tensor do here: dense weights over fsdp and expert, experts' hidden width over tensor.
"""

from moejax.config.pattern import layer_groups
from moejax.config.schema import Config
from moejax.plan.others.gaps import (
    Row,
    across_row,
    chunks_row,
    codec_gaps,
    dense_row,
    gaps_of,
    host_row,
    pieces_row,
    sharing_row,
    slices_row,
    trim_row,
    whole_row,
)
from moejax.plan.others.shapes import MAXTEXT, shape_of
from moejax.plan.others.translation import (
    SHAPE,
    Gap,
    Option,
    Sizes,
    Translation,
    Value,
    has_exchange,
    sizes_of,
    stages_text,
)

PACKAGE = "maxtext 0.2.5"
START = ("python3", "-m", "maxtext.trainers.pre_train.train")
YOURS = (
    "run_name, base_output_directory, the data set, the tokenizer, learning rate, steps, and the "
    "losses of the router"
)
SEGMENTS = 32  # of its own files for GPUs, such as configs/gpu/models/mixtral_8x7b.yml
ATTENTION = {
    "tpu": ("flash", "its fused attention for TPUs"),
    "gpu": ("cudnn_flash_te", "its fused attention for GPUs (TransformerEngine, cuDNN)"),
    "cpu": ("dot_product", "no fused attention on CPUs"),
}
TOKENS = ("moe_x_sorted", "moe_mlpwo")
TOKENS_KEPT = "tokens that came over the network are kept"
# model.remat -> (remat_policy, tensors that a custom policy keeps, the consequence).
REMATS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "none": ("minimal_with_context", (), "nothing is recomputed; this is the least it documents"),
    "dots": ("minimal", (), "results of matrix products are kept"),
    "full": ("full", (), "inputs of a block alone are kept"),
    "collectives": ("custom", TOKENS, TOKENS_KEPT),
    "token_collectives": ("custom", TOKENS, TOKENS_KEPT),
    "attention": (
        "custom",
        (*TOKENS, "context", "out_proj"),
        "tokens that came over the network and results of attention are kept",
    ),
    "experts": (
        "custom",
        (*TOKENS, "context", "out_proj", "moe_mlpwi_0", "moe_mlpwi_1", "mlpwi_0", "mlpwi_1"),
        "tokens, results of attention, and gate and up of hidden layers are kept",
    ),
}


def to_maxtext(cfg: Config, platform: str) -> Translation:
    """Returns the nearest settings of MaxText for a plan's resolved config."""
    sizes, ahead = sizes_of(cfg), cfg.model.predict_ahead
    return Translation(
        trainer="MaxText",
        package=PACKAGE,
        style="equals",
        start=START,
        options=(
            *_model(cfg),
            *[Option("mtp_num_layers", ahead, "multi-token prediction")] * ahead,
            Option("hardware", platform, f"the cluster's devices are {platform}"),
            *_mesh(cfg, sizes, platform),
            *_batch(cfg, sizes),
            *_experts(cfg, platform),
            *_remat(cfg),
        ),
        gaps=tuple(_gaps(cfg, sizes, platform)),
        yours=YOURS,
    )


def _model(cfg: Config) -> list[Option]:
    """Returns the name of the model, or its shapes where MaxText has no name for it."""
    model, moe = cfg.model, cfg.moe
    indexer: dict[str, Value] = {}
    if model.is_sparse:
        own = model.indexer
        indexer = {"use_indexer": True, "indexer_n_heads": own.heads}
        indexer |= {"indexer_head_dim": own.width, "indexer_topk": own.keys}
    if (name := MAXTEXT.get(shape_of(cfg))) is not None:
        named = Option("model_name", name, "MaxText's file of this model has the same shape")
        return [named, *(Option(key, value, SHAPE) for key, value in indexer.items())]
    dense = model.mlp_hidden if model.has_dense_blocks else moe.expert_hidden
    shapes: dict[str, Value] = {
        "base_emb_dim": model.width,
        "base_num_decoder_layers": model.num_layers,
        "base_num_query_heads": model.num_heads,
        "base_num_kv_heads": model.num_heads if model.is_latent else model.num_kv_heads,
        "head_dim": model.head_width,
        "base_mlp_dim": dense,
        "vocab_size": model.vocab_size,
        "logits_via_embedding": model.tie_embeddings,
    }
    if model.has_experts:
        shapes |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "base_moe_mlp_dim": moe.expert_hidden,
            "shared_experts": moe.shared_width // moe.expert_hidden,
            "first_num_dense_layers": model.first_dense_layers,
        }
    return [Option(name, value, SHAPE) for name, value in (shapes | indexer).items()]


def _mesh(cfg: Config, sizes: Sizes, platform: str) -> list[Option]:
    """Returns sizes inside a slice (ici) and between slices (dcn); a slice is a node here."""
    tensor = "tensor_sequence" if cfg.mesh.activations == "sequence" else "tensor"
    names = {"replica": "data", "fsdp": "fsdp", "expert": "expert", "tensor": tensor}
    if sizes.stage > 1:
        names = {"stage": "pipeline"} | names
    whole = platform == "cpu"  # there MaxText counts one slice, whatever joins the processes
    across = {axis: 1 if whole else sizes.across[axis] for axis in names}
    options = [
        Option("num_slices", 1 if whole else sizes.nodes, "nodes that slow links join are slices")
    ]
    for kind, share in (("dcn", "across nodes"), ("ici", "inside a node")):
        for axis, theirs in names.items():
            own = across[axis] if kind == "dcn" else getattr(sizes, axis) // across[axis]
            text = f"{axis} {getattr(sizes, axis)}: {own} of it {share}"
            options.append(Option(f"{kind}_{theirs}_parallelism", own, text))
    return options + _stages(cfg, sizes)


def _stages(cfg: Config, sizes: Sizes) -> list[Option]:
    if sizes.stage == 1:
        return []
    kinds, repeats = layer_groups(cfg.model)[-1]
    staged, text = len(kinds) * repeats * cfg.model.stage_chunks, stages_text(cfg)
    return [
        Option("pipeline_parallel_layers", staged, "the layers that stages share"),
        Option("num_layers_per_pipeline_stage", len(kinds) * repeats // sizes.stage, text),
        Option("num_pipeline_microbatches", sizes.micro_batches, text),
        Option("pipeline_fsdp_ag_once", True, "weights are gathered once a step"),
    ]


def _batch(cfg: Config, sizes: Sizes) -> list[Option]:
    # The micro-batches of a pipeline are no accumulation there.
    steps = sizes.micro_batches if sizes.stage == 1 else 1
    share = sizes.batch / (sizes.devices * steps)
    size: Value = int(share) if share == int(share) else share
    text = f"{sizes.batch} sequences / ({sizes.devices} devices x {steps})"
    return [
        Option("max_target_length", cfg.data.sequence_length, "data.sequence_length"),
        Option("per_device_batch_size", size, text),
        Option("gradient_accumulation_steps", steps, "micro-batches"),
        Option("dtype", cfg.model.dtype, "model.dtype"),
        Option("weight_dtype", "float32", "masters are float32"),
        Option("grad_dtype", cfg.train.gradient_dtype, "train.gradient_dtype"),
    ]


def _experts(cfg: Config, platform: str) -> list[Option]:
    options = [Option("attention", *ATTENTION[platform])]
    if platform == "gpu":
        text = "its fused attention asks for a bound of documents a sequence"
        options.append(Option("max_segments_per_seq", SEGMENTS, text))
    if not cfg.model.has_experts:
        return options
    factor = cfg.moe.capacity_factor
    if factor is not None:
        text = "with a capacity, its dense path drops tokens"
        return [
            *options,
            Option("sparse_matmul", False, text),
            Option("megablox", False, text),
            Option("capacity_factor", factor, "moe.capacity_factor"),
        ]
    return [
        *options,
        Option("sparse_matmul", True, "dropless: products of sorted tokens"),
        Option("megablox", platform == "tpu", "megablox is a kernel for TPUs; else ragged_dot"),
        Option("capacity_factor", -1.0, "dropless: no capacity"),
        Option("use_ring_of_experts", False, "an all-to-all of tokens, not a gather of all tokens"),
    ]


def _remat(cfg: Config) -> list[Option]:
    policy, kept, text = REMATS[cfg.model.remat]
    options = [Option("remat_policy", policy, f"remat {cfg.model.remat}: {text}")]
    options += [Option(name, "device", "kept on the device") for name in kept]
    return [*options, Option("scan_layers", cfg.model.scan_layers, "model.scan_layers")]


def _gaps(cfg: Config, sizes: Sizes, platform: str) -> list[Gap]:
    mesh, remat = cfg.mesh, cfg.model.remat
    folded = mesh.tensor > 1 and cfg.model.has_experts and mesh.expert_weights == "folded"
    spread = "experts spread over (expert, tensor), each whole on one device (folded)"
    several, borders = platform == "cpu" and sizes.nodes > 1, "axes split at the borders of nodes"
    order, kept = f"the schedule {mesh.schedule}", "gathered weights kept for backward"
    rows = [
        whole_row(cfg, "shards their hidden width over the tensor axis"),
        (folded, spread, "spreads them over expert, their hidden width over tensor"),
        (several, borders, "counts one slice on CPUs"),
        chunks_row(cfg, "exchanges all tokens at once (num_moe_token_chunks is for its ring)"),
        _route_row(cfg),
        trim_row(cfg),
        across_row(cfg),
        host_row(cfg),
        dense_row(cfg, "gathers and reduces at each use, in each micro-batch"),
        pieces_row(cfg, "leaves the size of reductions to XLA"),
    ]
    last = [
        slices_row(cfg),
        sharing_row(cfg, "keeps sequences whole here; its context axis is not translated"),
        (mesh.stage > 1, order, "runs all forward passes first, so keeps more"),
        (remat == "none", "no recomputation", "recomputes what lies between matrix products"),
        (remat == "collectives", kept, "gathers them again"),
    ]
    return [*_model_gaps(cfg), *gaps_of(rows), *codec_gaps(cfg), *gaps_of(last)]


def _model_gaps(cfg: Config) -> list[Gap]:
    if shape_of(cfg) in MAXTEXT:
        return []
    model, moe = cfg.model, cfg.moe
    mixed = model.has_experts and bool(model.layer_mlps or model.moe_every != 1)
    dense, shared = "dense blocks between those with experts", moe.shared_width
    instead = "has no file of it: choose decoder_block, and check norms, rotary positions, router"
    other = shared % moe.expert_hidden > 0
    return gaps_of(
        [
            (True, "a model of this shape by name", instead),
            (mixed, dense, "has dense blocks at the start: set the others by hand"),
            (other, f"shared experts of width {shared}", "has shared experts of an expert's width"),
        ]
    )


def _route_row(cfg: Config) -> Row:
    """The route that tokens take; MaxText's own is one flat exchange."""
    has = has_exchange(cfg) and (cfg.route not in ("split", "duplicate") or cfg.mesh.tensor > 1)
    what = {
        "merge": "a token crosses once to each device that has its experts (merge)",
        "two_level": "exchange in two levels, between nodes first (two_level)",
        "two_level_merge": "exchange in two levels, a token once to each node (two_level_merge)",
    }.get(cfg.route, f"the route {cfg.route}, which says what tensor ranks send")
    return has, what, "has one flat ragged all-to-all, a row for each choice of a token"
