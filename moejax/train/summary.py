"""The summary of a run before it starts: parameters, mesh, memory, FLOPs, collectives."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from moejax.config.compression import NO_COMPRESSION, describe_codecs
from moejax.layout.layout import Layout
from moejax.layout.route import explain
from moejax.model.count import Counts, count
from moejax.plan.price.candidate import sampling_peak, trace_step
from moejax.plan.trace.schedule import Collective, collectives_of
from moejax.step.train_step import TrainStep


@dataclass(frozen=True)
class Summary:
    """A run in numbers. Bytes are of one device."""

    counts: Counts
    bytes_by_kind: dict[str, int]
    peaks: dict[str, int]  # peak bytes of the step, of evaluation and of sampling
    tokens_per_step: int
    collectives: list[Collective]


def summarize(train_step: TrainStep) -> Summary:
    """Traces step, evaluation and sampling; allocates nothing and needs no device."""
    traced = trace_step(train_step)
    schedule = traced.schedule()
    arguments = train_step.argument_bytes()
    lora = train_step.cfg.lora
    trained = "weights" if lora.rank is None else "adapters"
    by_kind = {
        f"{trained} (float32 masters)": arguments["weights"],
        **(
            {f"frozen weights ({lora.base_dtype})": arguments["frozen weights"]}
            if lora.rank is not None
            else {}
        ),
        "gradients": arguments["weights"],
        "optimizer state": arguments["optimizer"],
        **({"codec state": codec_memory} if (codec_memory := arguments["codec memory"]) else {}),
        "batch": arguments["batch"],
        "logits of one chunk": _logit_bytes(train_step),
    }
    return Summary(
        counts=count(train_step.cfg, train_step.parameter_sizes(), train_step.adapter_sizes()),
        bytes_by_kind=by_kind,
        peaks={
            "step": traced.peak(schedule).bytes,
            "evaluation": traced.evaluation_peak().bytes,
            "sampling": sampling_peak(train_step).bytes,
        },
        tokens_per_step=train_step.cfg.train.batch_sequences * train_step.cfg.data.sequence_length,
        collectives=collectives_of(schedule),
    )


def _logit_bytes(train_step: TrainStep) -> int:
    """Bytes of the logits that exist at one time."""
    layout, cfg = train_step.layout, train_step.cfg
    rows = cfg.train.batch_sequences // layout.size(layout.inside.token_axes)
    rows //= cfg.train.micro_batches
    tokens = min(rows * cfg.data.sequence_length, train_step.model.chunk_tokens)
    return tokens * cfg.model.vocab_size // layout.size(layout.tensor) * 4


def print_summary(
    summary: Summary,
    train_step: TrainStep,
    console: Console,
    planned: Sequence[tuple[str, str]] = (),
) -> None:
    """Shows the run as a table, with its plan, and collectives by kind and axes."""
    counts, cfg = summary.counts, train_step.cfg
    table = Table(title="run", show_header=False, title_justify="left")
    table.add_row("parameters", f"{counts.total:,} total, {counts.active:,} active per token")
    if cfg.lora.rank is not None:
        share = f"{counts.trained:,} parameters are trained, of rank {cfg.lora.rank}"
        table.add_row("adapters", f"{share}; {counts.total:,} are frozen")
    table.add_row("FLOPs per token", f"{counts.flops_per_token:,} (forward and backward)")
    mesh = " x ".join(f"{axis}={size}" for axis, size in train_step.layout.sizes)
    table.add_row("mesh", f"{mesh} ({cfg.mesh.activations}, experts {cfg.mesh.expert_weights})")
    for row in planned:
        table.add_row(*row)
    if cfg.model.has_experts:
        table.add_row("route of tokens", explain(train_step.spec.route))
    if train_step.spec.compression != NO_COMPRESSION:
        table.add_row("codecs across nodes", describe_codecs(train_step.spec.codecs))
    steps = f"{summary.tokens_per_step:,} tokens a step, {cfg.train.num_steps:,} steps"
    table.add_row("batch", f"{cfg.train.batch_sequences} x {cfg.data.sequence_length}: {steps}")
    for kind, size in summary.bytes_by_kind.items():
        table.add_row(f"{kind}, a device", human_bytes(size))
    peaks = ", ".join(f"{name} {human_bytes(size)}" for name, size in summary.peaks.items())
    table.add_row(
        "peak memory, a device", f"about {human_bytes(max(summary.peaks.values()))}: {peaks}"
    )
    for (kind, axes), (calls, size) in _by_kind(summary.collectives, train_step.layout).items():
        table.add_row(f"{kind} over {axes}", f"{calls:,} a step, {human_bytes(size)} a device")
    console.print(table)


def _by_kind(
    collectives: list[Collective], layout: Layout
) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes by kind and axes; axes of one device are left out."""
    totals: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for collective in collectives:
        key = (
            collective.kind,
            ", ".join(axis for axis in collective.axes if layout.size((axis,)) > 1),
        )
        calls, size = totals[key]
        totals[key] = (calls + collective.calls, size + collective.calls * collective.bytes)
    return dict(totals)


def human_bytes(size: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
