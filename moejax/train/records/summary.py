"""The summary of a run before it starts: parameters, mesh, memory, FLOPs, collectives."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from rich.console import Console
from rich.table import Table

from moejax.config.checks.machine import machine_memory
from moejax.config.compression import NO_COMPRESSION, describe_codecs
from moejax.errors import InputError
from moejax.layout.layout import Layout
from moejax.layout.route import explain
from moejax.model.count import Counts, count
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.candidate import sampling_peak, trace_step
from moejax.plan.price.host import copies_bytes, node_bytes
from moejax.plan.trace.schedule import Collective, collectives_of
from moejax.runtime.memory import device_memory
from moejax.runtime.processes import Processes
from moejax.step.train_step import TrainStep

FORCED = "experts do not follow scores. For benchmarks: no model, no load of a real run"


@dataclass(frozen=True)
class Summary:
    """A run in numbers. Bytes are of one device."""

    counts: Counts
    bytes_by_kind: dict[str, int]
    peaks: dict[str, int]  # peak bytes of the step, of evaluation and of sampling
    tokens_per_step: int
    collectives: list[Collective]
    host_bytes: int = 0  # peak in the host's memory


def summarize(train_step: TrainStep) -> Summary:
    """Traces step, evaluation and sampling; allocates nothing and needs no device."""
    traced = trace_step(train_step)
    schedule = traced.schedule()
    peaks = {
        "step": traced.peak(schedule),
        "evaluation": traced.evaluation_peak(),
        "sampling": sampling_peak(train_step),
    }
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
        **(
            {"this site's weights, momentum and errors of the outer loop": more}
            if (more := arguments.get("outer loop"))
            else {}
        ),
        **({"codec state": codec_memory} if (codec_memory := arguments["codec memory"]) else {}),
        "batch": arguments["batch"],
        "logits of one chunk": _logit_bytes(train_step),
    }
    return Summary(
        counts=count(train_step.cfg, train_step.parameter_sizes(), train_step.adapter_sizes()),
        bytes_by_kind=by_kind,
        peaks={name: peak.bytes for name, peak in peaks.items()},
        tokens_per_step=train_step.cfg.train.batch_sequences * train_step.cfg.data.sequence_length,
        collectives=collectives_of(schedule),
        host_bytes=max(peak.host_bytes for peak in peaks.values()),
    )


def _logit_bytes(train_step: TrainStep) -> int:
    """Returns bytes of the logits that exist at the same time."""
    layout, cfg = train_step.layout, train_step.cfg
    parts = layout.size(layout.inside.token_axes) * cfg.train.micro_batches
    own = cfg.train.batch_sequences * cfg.data.sequence_length // parts
    tokens = min(own, train_step.model.chunk_tokens)
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
        if cfg.moe.router.forced != "none":
            table.add_row("FORCED ROUTING", f"{cfg.moe.router.forced}: {FORCED}")
    if train_step.spec.compression != NO_COMPRESSION:
        table.add_row("codecs across nodes", describe_codecs(train_step.spec.codecs))
    if (outer := cfg.outer).every is not None:
        what = f"1 / {outer.every} of the model in each {'round' if outer.hub else 'step'}"
        how = what if outer.order == "layers" else f"all of the model after {outer.every} steps"
        count = f"this is {outer.site} of {outer.sites}" if outer.hub else train_step.num_sites
        sites = f"{count}, which average {how}; codec {outer.codec}"
        table.add_row("sites", sites)
    steps = f"{summary.tokens_per_step:,} tokens a step, {cfg.train.num_steps:,} steps"
    table.add_row("batch", f"{cfg.train.batch_sequences} x {cfg.data.sequence_length}: {steps}")
    for kind, size in summary.bytes_by_kind.items():
        table.add_row(f"{kind}, a device", human_bytes(size))
    peaks = ", ".join(f"{name} {human_bytes(size)}" for name, size in summary.peaks.items())
    table.add_row(
        "peak memory, a device", f"about {human_bytes(max(summary.peaks.values()))}: {peaks}"
    )
    if summary.host_bytes:
        table.add_row("in the host's memory, a device", human_bytes(summary.host_bytes))
    for (kind, axes), (calls, size) in _by_kind(summary.collectives, train_step.layout).items():
        table.add_row(f"{kind} over {axes}", f"{calls:,} a step, {human_bytes(size)} a device")
    console.print(table)


def _by_kind(
    collectives: list[Collective], layout: Layout
) -> dict[tuple[str, str], tuple[int, int]]:
    """Returns calls and bytes by kind and axes. Axes of one device are left out."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for one in collectives:
        key = one.kind, ", ".join(axis for axis in one.axes if layout.size((axis,)) > 1)
        calls, size = totals.get(key, (0, 0))
        totals[key] = calls + one.calls, size + one.calls * one.bytes
    return totals


def human_bytes(size: float) -> str:
    """Returns a number of bytes as text, with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# Assumed if no cluster is named: an H100 or H200 in a large product, and its network adapter.
FLOPS_PER_S, BYTES_PER_S = 400e12, 50e9


def gather_note(train_step: TrainStep, summary: Summary, topology: Topology | None) -> str | None:
    """Returns a warning if gathers between nodes take longer than all products; else None.

    Args:
      topology: the cluster of the run; None: not known, and that of an H200 is assumed.
    """
    layout = train_step.layout
    sent, gathers = 0.0, 0.0
    for one in summary.collectives:
        across = layout.size(layout.between_nodes(one.axes))
        if one.traffic != "weights" or one.kind != "all_gather" or across == 1:
            continue
        inside = layout.size(layout.inside_node(one.axes))
        count = inside * across
        size = one.calls * one.bytes * (count - 1) / count / inside  # to another node
        sent += size
        if topology is None:
            gathers += size / BYTES_PER_S
        else:
            group = topology.group(inside, across)
            gathers += one.calls * max(topology.seconds(one.kind, one.bytes, *group))
    devices = layout.size(layout.mesh_axes)
    flops = summary.counts.flops_per_token * summary.tokens_per_step / devices
    rate, where = FLOPS_PER_S, f"{FLOPS_PER_S / 1e12:.0f} TFLOP/s and {BYTES_PER_S / 1e9:.0f} GB/s"
    if topology is not None:
        rate = topology.device.product_rate(train_step.cfg.model.dtype, flops)
        where = topology.name
    products = flops / max(rate, 1.0)
    if gathers <= products:
        return None
    return (
        f"the step is bound by its gathers: {human_bytes(sent)} of weights cross nodes for each "
        f"device, {gathers:,.3g} s, and all products take {products:,.3g} s ({where}). Fewer "
        "micro-batches, shards inside a node or pipeline stages send less; moejax plan chooses "
        "them."
    )


def check_memory(
    train_step: TrainStep, processes: Processes, *, gradients: bool = True, beside: int = 0
) -> int:
    """Checks that state and gradients alone fit the memory of a device.

    Args:
      gradients: whether gradients are computed: an evaluation has none.
      beside: bytes that a device holds beside the weights: keys and values, or copies of weights.
    Returns:
      `memory_limit`.

    Raises:
      InputError: in all processes, if they do not fit.
    """
    limit = memory_limit(processes)
    arguments = train_step.argument_bytes()
    needed = sum(arguments.values()) + beside
    held = "weights and what stands beside them" if beside else "weights"
    if gradients:  # which have the shapes of weights
        needed, held = needed + arguments["weights"], "weights, optimizer state and gradients"
    if needed > limit:
        simulated = train_step.platform == "cpu"
        whose = "its share of this machine" if simulated else "what JAX may take of it"
        raise InputError(
            f"the model does not fit. A device would hold {human_bytes(needed)} of {held}, "
            f"and has {human_bytes(limit)}, {whose}. They must fit. "
            f"Shard more (mesh.fsdp, mesh.expert, mesh.tensor) over more "
            f"{'machines' if simulated else 'devices'}, or make the model smaller."
        )
    return limit


def check_hosts(train_step: TrainStep, summary: Summary, processes: Processes) -> None:
    """Checks that what devices keep in the memory of hosts fits, with copies of the state there.

    Raises:
      InputError: in all processes, if it does not.
    """
    copies = copies_bytes(train_step)
    if not summary.host_bytes and not copies:
        return
    arguments, hosts = train_step.argument_bytes(), processes.hosts()
    node = node_bytes(
        train_step, sum(arguments.values()) + arguments["weights"], summary.host_bytes
    )
    here = hosts.count(hosts[processes.index]) * len(jax.local_devices())
    needed = node * here * (train_step.cfg.mesh.nodes or 1) // train_step.mesh.size
    for host, (taken, room) in zip(
        hosts, processes.gather([needed, machine_memory()]), strict=True
    ):
        if taken > room:
            kept = f", copies of the state {human_bytes(copies)} of that" if copies else ""
            raise InputError(
                f"the memory of hosts is too small. The run takes {human_bytes(taken)} of {host}'s"
                f"{kept}, and it has {human_bytes(room)}. All must fit. Keep less there "
                "(memory.optimizer, memory.experts, memory.residuals, checkpoint.memory_every), or "
                "shard more over more machines."
            )


def host_warnings(train_step: TrainStep, summary: Summary, topology: Topology | None) -> list[str]:
    """Returns a warning if what a run keeps in the memory of a known cluster's hosts does not fit.

    It is the reason for which `check_hosts` would end the run.
    """
    host = None if topology is None else topology.host
    node = _on_node(train_step, summary)
    if host is None or node <= host.memory_bytes:
        return []
    return [
        f"warning: the run takes {human_bytes(node)} of the memory of a node's host, which has "
        f"{human_bytes(host.memory_bytes)}. It would not start."
    ]


def _on_node(train_step: TrainStep, summary: Summary) -> int:
    """Returns the bytes of a node's host that a run surely takes; 0 if it keeps nothing there."""
    if not summary.host_bytes and not copies_bytes(train_step):
        return 0
    arguments = train_step.argument_bytes()
    held = sum(arguments.values()) + arguments["weights"]  # gradients are as large
    return node_bytes(train_step, held, summary.host_bytes)


def memory_limit(processes: Processes) -> int:
    """Returns the bytes that a device may use: the smallest number over all devices."""
    hosts, devices = processes.hosts(), jax.local_devices()
    together = hosts.count(hosts[processes.index])
    memory = min(device_memory(device, together * len(devices)) for device in devices)
    return min(processes.gather(memory))


def memory_warnings(summary: Summary, limit: int) -> list[str]:
    """Returns a warning if the estimated peak may not fit."""
    name, fullest = max(summary.peaks.items(), key=lambda item: item[1])
    if fullest <= limit:
        return []
    return [
        f"warning: peak memory ({name}) is about {human_bytes(fullest)}, and a device "
        f"has {human_bytes(limit)}. If memory runs out, raise train.micro_batches, or choose "
        f"a stronger model.remat."
    ]
