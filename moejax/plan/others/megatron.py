"""A plan in arguments of Megatron-LM's `pretrain_gpt.py`, whose parser megatron-core carries.

Meanings follow megatron-core 0.19.2: megatron/training/arguments.py and the docstrings of
TransformerConfig, from which its parser makes most arguments. Its ranks have the order of the mesh
here: tensor next to each other, then expert, then the rest of data parallelism.
"""

from moejax.config.schema import Config
from moejax.plan.others.gaps import (
    Row,
    across_row,
    chunks_row,
    codec_gaps,
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
from moejax.plan.others.megatron_model import model_gaps, model_options
from moejax.plan.others.translation import (
    Gap,
    Option,
    Sizes,
    Translation,
    Value,
    experts_text,
    has_chunks,
    has_exchange,
    sizes_of,
    stages_text,
    torchrun,
)

PACKAGE = "megatron-core 0.19.2"
YOURS = (
    "data, tokenizer, learning rate, steps, checkpoints, and the losses of the router. Tensor "
    "parallelism without Megatron-FSDP needs CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell"
)
DEEPEP_NODE = 8  # devices of a node up to which DeepEP is taken; HybridEP is for larger ones
NORMS = ("layernorm", "moe_act")
# model.remat -> (granularity, modules that are recomputed, the consequence).
REMATS: dict[str, tuple[str | None, tuple[str, ...], str]] = {
    "none": (None, (), "nothing is recomputed"),
    "dots": ("selective", ("core_attn", *NORMS), "results of matrix products are kept"),
    "experts": ("selective", NORMS, "attention, gate and up are kept"),
    "attention": ("selective", NORMS, "attention is kept, and more than planned"),
    "collectives": ("full", (), "next in memory: inputs of a block alone"),
    "token_collectives": ("full", (), "next in memory: inputs of a block alone"),
    "full": ("full", (), "inputs of a block alone are kept"),
}
# model.remat -> Megatron-LM's way where it keeps other values.
RECOMPUTED = {
    "collectives": "sends tokens and gathers weights again in backward",
    "token_collectives": "sends tokens again in backward (recompute-granularity selective does "
    "not, and needs more memory)",
    "attention": "keeps gate and up, so needs more memory: to compute them again it would send "
    "tokens again (recompute-modules moe)",
}
LEVELS = ("merge", "two_level", "two_level_merge")  # routes that its flex dispatcher resembles


def to_megatron(cfg: Config, node_devices: int) -> Translation:
    """Returns the nearest arguments of Megatron-LM for a resolved config, by devices of a node."""
    sizes = sizes_of(cfg)
    return Translation(
        trainer="Megatron-LM",
        package=PACKAGE,
        style="dashes",
        start=(*torchrun(sizes), "pretrain_gpt.py"),
        options=(
            *model_options(cfg),
            *_mesh(cfg, sizes),
            *_sharding(cfg, sizes),
            *_batch(cfg, sizes),
            *_experts(cfg, node_devices),
            *_remat(cfg),
        ),
        gaps=tuple(_gaps(cfg, sizes)),
        yours=YOURS,
    )


def _mesh(cfg: Config, sizes: Sizes) -> list[Option]:
    ranks = f"replica {sizes.replica} x fsdp {sizes.fsdp} x expert {sizes.expert}"
    stages = f"{stages_text(cfg)}; the rest is data parallel: {ranks}"
    options = [
        Option("tensor-model-parallel-size", sizes.tensor, f"tensor {sizes.tensor}"),
        Option("pipeline-model-parallel-size", sizes.stage, stages),
        Option("context-parallel-size", cfg.mesh.context, sharing_text(cfg)),
    ]
    if sizes.stage > 1 and cfg.model.stage_chunks > 1:
        name = "num-virtual-stages-per-pipeline-rank"
        options.append(Option(name, cfg.model.stage_chunks, stages_text(cfg)))
    if sizes.tensor > 1 and (cfg.mesh.activations == "sequence" or cfg.model.has_experts):
        text = f"activations between blocks: {cfg.mesh.activations}"
        if cfg.mesh.activations != "sequence":
            text += "; but experts with tensor parallelism need it"
        options.append(Option("sequence-parallel", None, text))
    if cfg.model.has_experts:
        kind, text = cfg.mesh.expert_weights, experts_text(cfg)
        expert = sizes.expert * (sizes.tensor if kind == "folded" else 1)
        tensor = sizes.tensor if kind == "hidden" else 1
        options += [
            Option("expert-model-parallel-size", expert, text),
            Option("expert-tensor-parallel-size", tensor, text),
        ]
    return options


def _sharded_once(cfg: Config, sizes: Sizes) -> bool:
    """Returns whether all weights are gathered, and gradients reduced, once a step."""
    if sizes.stage > 1:
        return True
    return sizes.fsdp == 1 and (sizes.expert == 1 or cfg.mesh.gather_dense == "step")


def _sharding(cfg: Config, sizes: Sizes) -> list[Option]:
    """Returns the sharding of weights and optimizer state over data parallel ranks."""
    over = sizes.fsdp * sizes.expert
    text = "gradients are reduced beside the backward pass"
    overlap = [Option("overlap-grad-reduce", None, text)]
    if over == 1:
        return overlap if sizes.data > 1 else []
    text = "weights are gathered ahead of their use"
    overlap.append(Option("overlap-param-gather", None, text))
    text = f"state is sharded over fsdp x expert = {over}"
    options = [Option("use-distributed-optimizer", None, text), *overlap]
    if not _sharded_once(cfg, sizes):
        text = "weights are sharded too, and gathered at each use"
        options += [
            Option("use-megatron-fsdp", None, text),
            Option("data-parallel-sharding-strategy", "optim_grads_params", text),
            Option("ckpt-format", "fsdp_dtensor", "the format that Megatron-FSDP asks for"),
        ]
    if sizes.replica > 1:
        text = f"replica {sizes.replica}: copies of what is sharded"
        options.append(Option("num-distributed-optimizer-instances", sizes.replica, text))
    return options


def _batch(cfg: Config, sizes: Sizes) -> list[Option]:
    text = f"{sizes.batch} sequences / ({sizes.data} ranks x {sizes.micro_batches} micro-batches)"
    options = [
        Option("micro-batch-size", sizes.rows, text),
        Option("global-batch-size", sizes.batch, "train.batch_sequences"),
    ]
    if cfg.model.dtype == "bfloat16":
        options.append(Option("bf16", None, "model.dtype; masters are float32"))
    if cfg.train.gradient_dtype == "bfloat16":
        options.append(Option("grad-reduce-in-bf16", None, "train.gradient_dtype"))
    return options


def _experts(cfg: Config, node_devices: int) -> list[Option]:
    """Returns the dispatcher of tokens, and its overlap with other work."""
    if not cfg.model.has_experts:
        return []
    options = [Option("moe-grouped-gemm", None, "experts of a device are one grouped product")]
    if cfg.moe.capacity_factor is not None:
        factor = cfg.moe.capacity_factor
        options.append(Option("moe-expert-capacity-factor", factor, "moe.capacity_factor"))
    options += _dispatcher(cfg, node_devices)
    if _overlaps(cfg):
        text = "chunks of the exchange overlap; here whole micro-batches do"
        options.append(Option("overlap-moe-expert-parallel-comm", None, text))
    elif cfg.moe.num_shared_experts and has_exchange(cfg):
        text = "shared experts need no exchange, and run beside it"
        options.append(Option("moe-shared-expert-overlap", None, text))
    return options


def _dispatcher(cfg: Config, node_devices: int) -> list[Option]:
    if not has_exchange(cfg) or cfg.route not in LEVELS:
        text = f"route {cfg.route}" if has_exchange(cfg) else "every device has all its experts"
        return [Option("moe-token-dispatcher-type", "alltoall", f"{text}: one flat exchange")]
    backend = "deepep" if node_devices <= DEEPEP_NODE else "hybridep"
    text = f"route {cfg.route}: a token crosses between nodes once, then goes on inside"
    return [
        Option("moe-token-dispatcher-type", "flex", text),
        Option("moe-flex-dispatcher-backend", backend, f"nodes of {node_devices} devices"),
        Option("moe-router-dtype", "fp32", f"{backend} asks for it"),
    ]


def _overlaps(cfg: Config) -> bool:
    """Returns whether exchanges may overlap with other micro-batches: not if all is recomputed."""
    return (
        has_chunks(cfg)
        and cfg.train.micro_batches > 1
        and cfg.mesh.expert > 1
        and cfg.model.dtype == "bfloat16"
        and REMATS[cfg.model.remat][0] != "full"
    )


def _remat(cfg: Config) -> list[Option]:
    granularity, modules, text = REMATS[cfg.model.remat]
    if granularity is None:
        return []
    text = f"remat {cfg.model.remat}: {text}"
    options = [Option("recompute-granularity", granularity, text)]
    if granularity == "selective":
        # It does not know an activation of experts where no layer has them.
        known = tuple(name for name in modules if cfg.model.has_experts or name != "moe_act")
        return [*options, Option("recompute-modules", known, text)]
    values: dict[str, Value] = {"recompute-method": "uniform", "recompute-num-layers": 1}
    return options + [Option(name, value, "block by block") for name, value in values.items()]


def _gaps(cfg: Config, sizes: Sizes) -> list[Gap]:
    mesh, remat = cfg.mesh, cfg.model.remat
    sharded = sizes.fsdp * sizes.expert > 1 and not _sharded_once(cfg, sizes)
    once = "dense weights gathered once a step, experts' at each use"
    whole = sizes.tensor > 1 and mesh.activations != "sequence" and cfg.model.has_experts
    beside = "; it overlaps the exchange of one micro-batch with the products of another"
    combined = mesh.stage > 1 and mesh.schedule == "combined_1f1b"
    turns = "layers forward and backward in turns, for their exchanges"
    plain = "is written as 1F1B; see its --overlap-moe-expert-parallel-comm"
    rows = [
        (sharded and mesh.gather_dense == "step", once, "gathers all of them at each use"),
        whole_row(cfg, "has copies too, but on groups of neighbouring devices"),
        (whole, "whole activations on each tensor rank", "shards them by sequence"),
        chunks_row(cfg, f"exchanges all tokens at once{beside * _overlaps(cfg)}"),
        _route_row(cfg),
        trim_row(cfg),
        across_row(cfg),
        host_row(cfg),
        pieces_row(cfg, "reduces buckets of its own size (ddp-bucket-size: parameters)"),
    ]
    last = [
        ends_row(cfg),
        slices_row(cfg),
        sharing_row(cfg, "cuts each sequence in two parts for each device"),
        (combined, turns, plain),
        (remat in RECOMPUTED, f"the values that remat {remat} keeps", RECOMPUTED.get(remat, "")),
    ]
    return [*model_gaps(cfg), *gaps_of(rows), *codec_gaps(cfg), *gaps_of(last)]


def _route_row(cfg: Config) -> Row:
    what = f"the route {cfg.route}"
    if cfg.route in LEVELS:
        instead = "its kernels choose levels and de-duplicate in their own way"
        return has_exchange(cfg), f"{what} as it was priced", instead
    instead = "sends each tensor rank's own tokens, then gathers inside tensor ranks"
    return has_exchange(cfg) and cfg.route != "split" and cfg.mesh.tensor > 1, what, instead
