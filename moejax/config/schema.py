"""Every setting of a run: frozen dataclasses, and the rules each value must obey on its own.

A config file (`get_config()` in Python, or YAML or JSON) and `--config.a.b=value` overrides are
turned into one frozen `Config` by `config.load`; rules between fields live in `config.checks`.
Defaults describe a small byte-level model that trains on a laptop. Units stand in the names.
"""

from dataclasses import dataclass

from moejax.config.declare import section, setting
from moejax.config.model_schema import FullAttentionConfig as FullAttentionConfig
from moejax.config.model_schema import IndexerConfig as IndexerConfig
from moejax.config.model_schema import LinearConfig as LinearConfig
from moejax.config.model_schema import ModelConfig, MoEConfig
from moejax.config.model_schema import RopeConfig as RopeConfig
from moejax.config.model_schema import RouterConfig as RouterConfig


@dataclass(frozen=True)
class ProfileConfig:
    """Profile of some steps, written to run_dir/profile."""

    start_step: int | None = setting(
        None, "first step of the profile; none: no profile", at_least=1
    )
    num_steps: int = setting(3, "steps of the profile; many make it slow to open", at_least=1)


@dataclass(frozen=True)
class TrackConfig:
    """Trackers to which process 0 sends metrics, beside metrics.jsonl and TensorBoard."""

    wandb: str | None = setting(None, "project of Weights & Biases; none: not used")
    mlflow: str | None = setting(None, "experiment of MLflow; none: not used")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of a run, and copies of them."""

    save_every: int | None = setting(
        100, "steps between checkpoints; none: only at the end", at_least=1
    )
    # No range of its own: configs of older runs may keep one, and are read.
    keep: int = setting(
        3, "newest checkpoints to keep; a run keeps at least 2, one to fall back to"
    )
    copy_to: str | None = setting(
        None, "place to copy finished checkpoints to, such as s3://bucket/run; none: no copies"
    )
    memory_every: int | None = setting(
        None,
        "steps between copies of the state in the hosts' memory; none: no copies",
        at_least=1,
    )
    memory_dir: str = setting("/dev/shm", "folder of these copies, of a file system in memory")
    init_from: str | None = setting(None, "checkpoint directory to take weights from at step 0")
    verify: str = setting(
        "full",
        "check before a restore: digests of files (full), or their sizes",
        choices=("full", "size"),
    )
    allow_changed_data: bool = setting(
        False, "resume although the data differ from the checkpoint's"
    )


@dataclass(frozen=True)
class WatchdogConfig:
    """Seconds after which a stage of a run counts as hung: the process ends with exit code 124."""

    start_s: float | None = setting(
        1800, "devices, plan and restore, until compilation; none: any time", above=0
    )
    compile_s: float | None = setting(3600, "a compilation", above=0)
    step_s: float | None = setting(900, "a step, or waiting for its batch", above=0)
    evaluate_s: float | None = setting(
        3600, "one batch of an evaluation, its compilation included, or the sample", above=0
    )
    save_s: float | None = setting(3600, "waiting for a checkpoint", above=0)
    silent_s: float | None = setting(
        60, "no word from another process; JAX itself waits 100 s, with less to say", above=0
    )


@dataclass(frozen=True)
class MeshConfig:
    """Devices and how the program is spread over them."""

    replica: int | None = setting(
        1, "copies of the whole model; none: as many as the other axes leave", at_least=1
    )
    fsdp: int = setting(1, "weights sharded, gathered on use", at_least=1)
    expert: int = setting(
        1, "experts spread over these devices (tokens and dense weights too)", at_least=1
    )
    tensor: int = setting(1, "heads and hidden width spread over these devices", at_least=1)
    context: int = setting(
        1, "devices, the last of fsdp and expert, that share each sequence", at_least=1
    )
    context_stripe: int = setting(
        512, "positions side by side of a sequence that is shared", at_least=1
    )
    context_exchange: str = setting(
        "gather",
        "keys of shared sequences: gather all, or pass on those of a device along a ring",
        choices=("gather", "ring"),
    )
    stage: int = setting(1, "pipeline stages: layers spread over these devices", at_least=1)
    schedule: str = setting(
        "1f1b",
        "order of micro-batches in stages, which keep 2 x stages of them: 1f1b; combined_1f1b "
        "hides exchanges of one pass behind the other",
        choices=("1f1b", "combined_1f1b"),
    )
    stage_keeps: str = setting(
        "residuals",
        "what each stage stores per micro-batch: residuals, or only its input (recomputed)",
        choices=("residuals", "input"),
    )
    stage_slices: int = setting(
        1,
        "slices of a micro-batch's positions that follow one another through stages; load balance "
        "is counted per slice",
        at_least=1,
    )
    activations: str = setting(
        "sequence",
        "activations between blocks on the tensor axis",
        choices=("sequence", "replicated"),
    )
    expert_weights: str = setting(
        "hidden",
        "hidden: hidden width over tensor; folded: experts over (expert, tensor); whole: a copy on "
        "each tensor rank",
        choices=("hidden", "folded", "whole"),
    )
    gather_dense: str = setting(
        "use",
        "when dense weights are gathered and gradients reduced: at each use, or once a step",
        choices=("use", "step"),
    )
    gather_across: str = setting(
        "flat",
        "gather of weights sharded across nodes; flat: in one; else across nodes first, then "
        "inside: across at each use, once for both passes, or once a step",
        choices=("flat", "use", "passes", "step"),
    )
    nodes: int | None = setting(
        None,
        "number of equal nodes, joined by slow links; none: as many as processes",
        at_least=1,
    )
    platform: str | None = setting(
        None, "none: the first that JAX finds", choices=("cpu", "gpu", "tpu")
    )
    simulated_devices: int | None = setting(
        None, "CPU devices to simulate, over all processes of the program", at_least=1
    )


@dataclass(frozen=True)
class DataConfig:
    """Token files, and the order in which they are read."""

    source: str = setting(
        "stdlib",
        "stdlib: the text of Python's own library; routing: texts with recorded experts, files of "
        "moejax generate --routing; else files of moejax prepare",
        choices=("stdlib", "tokens", "array_record", "routing"),
    )
    train_files: tuple[str, ...] = setting(
        (), "token files, or files of recorded routing, or globs (all sources but stdlib)"
    )
    eval_files: tuple[str, ...] = setting((), "held-out token files or globs; empty: no evaluation")
    sequence_length: int = setting(256, "T: positions of one sequence", at_least=1)
    shuffle: bool = setting(True, "visit sequences in an order drawn from the seed")
    repeat: bool = setting(True, "start again, reshuffled, when all sequences were seen")
    isolate_documents: bool = setting(True, "attention stays inside a document")
    train_weights: tuple[float, ...] = setting(
        (),
        "weight of each entry of train_files in the mix of sequences, whatever its size, such as "
        "3,1; empty: all files are one stream",
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, from optax."""

    name: str = setting(
        "adamw", "muon: matrices by Muon, the rest by AdamW", choices=("adamw", "muon")
    )
    learning_rate: float = setting(3e-3, "peak learning rate", at_least=0)
    schedule: str = setting(
        "cosine", "learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    warmup_steps: float = setting(
        20, "steps of linear warm-up from zero; below 1: share of train.num_steps", at_least=0
    )
    final_fraction: float = setting(
        0.1, "learning rate at the end over its peak", at_least=0, at_most=1
    )
    beta1: float = setting(0.9, "decay of the first moment", at_least=0, at_most=1)
    beta2: float = setting(0.95, "decay of the second moment", at_least=0, at_most=1)
    epsilon: float = setting(1e-8, "AdamW epsilon", above=0)
    weight_decay: float = setting(
        0.1, "decoupled decay of matrices (norms and biases are exempt)", at_least=0
    )
    clip_norm: float | None = setting(
        1.0, "global gradient norm to clip to; none: no clipping", above=0
    )
    muon_learning_rate: float = setting(2e-2, "peak learning rate of Muon's matrices", at_least=0)
    muon_momentum: float = setting(0.95, "momentum of Muon", at_least=0, at_most=1)

    def warmup(self, num_steps: int) -> int:
        """Returns the steps of warm-up in a run of `num_steps`."""
        share = self.warmup_steps < 1
        return round(self.warmup_steps * num_steps) if share else int(self.warmup_steps)


@dataclass(frozen=True)
class LoraConfig:
    """Fine-tuning of low-rank adapters; the weights of `checkpoint.init_from` stay as they are."""

    rank: int | None = setting(
        None, "A: rank of the adapters; none: no adapters, all weights are trained", at_least=1
    )
    alpha: float | None = setting(
        None, "an adapter is scaled by alpha / rank; none: twice the rank", above=0
    )
    targets: tuple[str, ...] | None = setting(
        None,
        "parameters with an adapter, * for any text: attention.w_q, moe.w_*; none: all matrices of "
        "attention, experts and MLPs, without routers",
    )
    base_dtype: str = setting(
        "float32",
        "dtype in which frozen matrices are stored; routers, norms and biases stay float32",
        choices=("float32", "bfloat16"),
    )

    @property
    def scale(self) -> float:
        """The factor of an adapter's product: alpha / rank."""
        if self.rank is None or self.alpha is None:
            return 2.0
        return self.alpha / self.rank


@dataclass(frozen=True)
class TrainConfig:
    """The training loop."""

    num_steps: int = setting(200, "optimizer steps of the whole run", at_least=1)
    batch_sequences: int = setting(32, "sequences of one step, over all devices", at_least=1)
    micro_batches: int = setting(
        1,
        "gradient accumulation: number of micro-batches a batch is split into, in evaluation too",
        at_least=1,
    )
    gradient_dtype: str = setting(
        "float32", "dtype of gradients while they are reduced", choices=("float32", "bfloat16")
    )
    reduction_bytes: int | None = setting(
        None, "largest piece in which a gradient is reduced; none: each weight whole", at_least=1
    )
    predict_ahead_loss: float = setting(
        0.3, "coefficient of the loss of model.predict_ahead, nats per target", above=0
    )
    indexer_loss: float = setting(
        0.0,
        "coefficient of the loss that trains the indexers of sparse attention: their divergence "
        "from attention, in nats per position, summed over layers; 0: they stay as they are",
        at_least=0,
    )
    seed: int = setting(0, "decides weights, data order and routing noise", at_least=0)
    log_every: int = setting(10, "steps between logged lines", at_least=1)
    eval_every: int | None = setting(
        100, "steps between evaluations; none: only at the end", at_least=1
    )
    eval_batches: int = setting(
        16, "batches of one evaluation; the last evaluation reads all", at_least=1
    )
    max_skipped: int | None = setting(
        10,
        "number of consecutive non-finite updates after which the run goes back, or ends; none: "
        "never",
        at_least=1,
    )
    rollbacks: int = setting(
        2,
        "times a run goes back to the checkpoint before bad steps and leaves out the batches "
        "since; 0: it ends",
        at_least=0,
    )
    spike_threshold: float | None = setting(
        6.0,
        "a loss that is above the median of the steps before by so many standard deviations, "
        "three steps in a row, is a spike; none: no detection",
        above=0,
    )
    on_spike: str = setting(
        "tell",
        "tell: a warning; roll_back: the run goes back, as from non-finite updates",
        choices=("tell", "roll_back"),
    )
    sample_tokens: int = setting(200, "tokens sampled at the end; 0: none", at_least=0)
    compare_every: int | None = setting(
        None,
        "steps between comparisons of the state's copies on different devices; none: only before "
        "each checkpoint",
        at_least=1,
    )
    sample_prompt: str = setting("def ", "text the sample continues")


@dataclass(frozen=True)
class MemoryConfig:
    """Where a device keeps what it seldom needs: in its own memory, or in its host's."""

    optimizer: str = setting(
        "device",
        "the optimizer's moments of matrices; host: a piece of them at a time is on the device",
        choices=("device", "host"),
    )
    experts: str = setting(
        "device",
        "experts' weights and gradients; host: a layer's come while it attends (no stages)",
        choices=("device", "host"),
    )
    residuals: str = setting(
        "device",
        "what forward keeps for backward: the named values of model.remat, or what stages keep",
        choices=("device", "host"),
    )


@dataclass(frozen=True)
class CompressionConfig:
    """Codecs across nodes: none, bfloat16, int8, e4m3, e5m2, int4, or see config.compression."""

    preset: str = setting(
        "none", "codecs of all classes that are not set", choices=("none", "hybrid", "strong")
    )
    dense_gradient: str = setting("preset", "gradients of weights outside the experts")
    expert_gradient: str = setting("preset", "gradients of the experts' weights")
    dispatch: str = setting("preset", "tokens on their way to the experts")
    combine: str = setting("preset", "the experts' results")
    dispatch_backward: str = setting("preset", "gradients of dispatched tokens")
    combine_backward: str = setting("preset", "gradients of results")
    weights: str = setting("preset", "gathered weights")
    stage: str = setting("preset", "hidden states between pipeline stages")
    stage_gradient: str = setting(
        "preset", "gradients between stages; +feedback makes gradients of weights worse"
    )
    block: int = setting(128, "values that share a scale; a multiple of 4", at_least=4)
    start_layer: int = setting(
        0,
        "number of first blocks, rounded up to a whole pattern, whose gradients are not compressed",
        at_least=0,
    )


@dataclass(frozen=True)
class OuterConfig:
    """The outer loop across sites: the copies along `mesh.replica`, or with `hub` other runs."""

    every: int | None = setting(
        None,
        "steps (with outer.hub: rounds) in which all of the model is averaged over the sites; "
        "none: no outer loop, every step sums gradients over copies",
        at_least=1,
    )
    hub: str | None = setting(
        None,
        "HOST:PORT of moejax sites: this run is one of the sites; none: sites are the copies along "
        "mesh.replica",
    )
    site: int = setting(0, "with outer.hub: number of this site, from zero", at_least=0)
    sites: int = setting(
        1, "with outer.hub: number of sites at most; each has its share of the text", at_least=1
    )
    rate: float = setting(0.7, "learning rate of the outer step", above=0)
    momentum: float = setting(0.5, "Nesterov momentum of the outer step", at_least=0)
    codec: str = setting(
        "int4+feedback",
        "codec of differences between sites: none, bfloat16, int8, e4m3, e5m2, int4; +feedback",
    )
    order: str = setting(
        "layers",
        "layers: each step sends one part, beside its computation; all: everything at once after "
        "every outer.every steps, which waits for it",
        choices=("layers", "all"),
    )


@dataclass(frozen=True)
class PlanConfig:
    """The planner, which chooses mesh, route, chunks, pieces and recomputation left at defaults."""

    mode: str = setting(
        "default",
        "auto: the planner chooses; hand: no planner; default: auto if nothing is set by hand; "
        "else the path of a plan file of moejax plan --out",
    )
    topology: str | None = setting(
        None, "a known cluster (h200:8: of 8 nodes) or a topology file; none: measured at the start"
    )
    routing: str = setting(
        "balanced", "how tokens fall on experts: balanced, zipf:POWER, or a recorded routing.json"
    )
    documents: float | None = setting(
        None,
        "share of the pairs of positions that lie inside a document; none: as in the data",
        above=0,
        at_most=1,
    )
    codecs: str = setting(
        "none", "the preset whose codecs may be chosen", choices=("none", "hybrid", "strong")
    )
    traces: int | None = setting(
        None,
        "traces after which the search ends; none: 11 (CPU: 17), or 46 (CPU: 91) for more than 64 "
        "devices",
        at_least=2,
    )
    seconds: float | None = setting(
        None,
        "time cap of the search in seconds, reported if reached; none: 120, or 600 for more "
        "than 64 devices",
        above=0,
    )
    keep: tuple[str, ...] = setting(
        (), "settings or groups that the planner must not change, even defaults: mesh.expert,route"
    )
    sites: bool = setting(
        False,
        "also plan an outer loop, which changes training: nodes of a site, period, codec, order",
    )
    replan: bool = setting(
        False, "plan again at a checkpoint when steps take longer or shorter than predicted"
    )


@dataclass(frozen=True)
class Config:
    """One run."""

    run_dir: str = setting(
        "runs/default", "directory of checkpoints, metrics and the resolved config"
    )
    route: str = setting(
        "split",
        "how tokens travel to their experts; docs/architecture.md draws the routes",
        choices=(
            "duplicate",
            "split",
            "merge",
            "two_level",
            "two_level_merge",
        ),
    )
    route_chunks: int = setting(
        1, "chunks of the exchange, which overlap with the experts", at_least=1
    )
    route_chunks_backward: int | None = setting(
        None, "the same in the backward pass; none: as many as forward", at_least=1
    )
    route_trim: bool = setting(
        False, "send only the rows of a bucket that some device fills (needs one chunk)"
    )
    kernels: str = setting(
        "auto",
        "auto: plain JAX where a kernel declines; required: refuse to run then",
        choices=("auto", "required"),
    )
    model: ModelConfig = section(ModelConfig, "transformer")
    moe: MoEConfig = section(MoEConfig, "expert layers")
    mesh: MeshConfig = section(MeshConfig, "devices")
    data: DataConfig = section(DataConfig, "tokens")
    optimizer: OptimizerConfig = section(OptimizerConfig, "optimizer")
    lora: LoraConfig = section(LoraConfig, "low-rank adapters")
    train: TrainConfig = section(TrainConfig, "the loop")
    memory: MemoryConfig = section(MemoryConfig, "memory of devices and hosts")
    compression: CompressionConfig = section(CompressionConfig, "codecs across nodes")
    outer: OuterConfig = section(OuterConfig, "outer loop across sites")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "checkpoints")
    plan: PlanConfig = section(PlanConfig, "the planner")
    profile: ProfileConfig = section(ProfileConfig, "profile of some steps")
    track: TrackConfig = section(TrackConfig, "trackers of metrics")
    watchdog: WatchdogConfig = section(WatchdogConfig, "time limits of a run's stages")
