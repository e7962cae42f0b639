"""Compiles the train step for described devices and reads the result."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import Mesh

from moejax.aot.compiled import CompiledCollective, CompiledText, HostCopy, ScheduleText
from moejax.aot.target import NODE, Target, describe_devices
from moejax.aot.work import Work, measure_work
from moejax.config.checks import check, resolve_mesh
from moejax.config.schema import Config
from moejax.layout.layout import Axes, build_layout
from moejax.layout.mesh import build_mesh
from moejax.model.count import count
from moejax.moe.sizes import usual_sizes
from moejax.runtime.compiler import Options
from moejax.runtime.patches import described_gpu
from moejax.step.train_step import TrainStep, build_step

# Controls for the trainer's options: XLA's defaults, and no overlap at all.
CONTROLS: dict[str, dict[str, Options]] = {
    "gpu": {
        "XLA's default": {"xla_gpu_experimental_parallel_collective_overlap_limit": 1},
        "nothing asynchronous": {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"},
    },
    "tpu": {"XLA's default": {"xla_tpu_enable_async_all_to_all": "false"}},
}


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step. Bytes are per device, and in its memory unless they are named host's.

    Attributes:
      work: the device's work in a step.
      model_flops: a device's share of the model's FLOPs in a step, without recomputation.
      other_peaks: peak bytes of evaluation and sampling, if they were compiled too.
    """

    mesh: dict[str, int]
    slow: Axes  # mesh axes that cross nodes
    options: Options
    seconds: float  # of compilation
    argument_bytes: int  # state and batch
    temporary_bytes: int
    peak_bytes: int
    exchanges: list[CompiledCollective]
    schedules: list[ScheduleText]
    work: Work
    model_flops: float
    other_peaks: dict[str, int] = field(default_factory=dict)
    host_argument_bytes: int = 0
    host_temporary_bytes: int = 0
    copies: list[HostCopy] = field(default_factory=list)

    @property
    def max_bytes(self) -> int:
        """The largest peak of all compiled programs."""
        return max(self.peak_bytes, *self.other_peaks.values(), 0)

    def token_exchanges(self, *, backward: bool | None = None) -> list[CompiledCollective]:
        """Returns the all-to-alls of tokens or their gradients; `backward` None: of both passes.

        Skips the all-to-all of router weights, which has one number a row.
        """
        sent = [one for one in self.exchanges if one.kind == "all_to_all" and "float" in one.dtype]
        least = max((one.bytes for one in sent), default=0) / 32
        return [one for one in sent if one.bytes > least and backward in (None, one.backward)]

    def reductions(self) -> list[CompiledCollective]:
        """The reductions of weight gradients: in the backward pass, of more than one number."""
        kinds = ("all_reduce", "reduce_scatter")
        return [
            exchange
            for exchange in self.exchanges
            if exchange.kind in kinds
            and exchange.backward
            and "float" in exchange.dtype
            and exchange.bytes > 1024
            and not all(axis.startswith("tensor") for axis in exchange.axes)  # activations
        ]

    def reductions_beside_exchanges(self) -> list[CompiledCollective]:
        """Reductions in flight together with an all-to-all on the same tier."""
        crosses = {one.launch: bool(set(one.axes) & set(self.slow)) for one in self.exchanges}

        def meets(one: CompiledCollective) -> bool:
            return any(crosses[name] == crosses[one.launch] for name in one.beside)

        return list(filter(meets, self.reductions()))

    def hidden_reductions(self) -> float:
        """Share of the reductions' bytes that overlap a matrix product."""
        return overlapped_share(self.reductions())

    def hidden_copies(self, *, to_device: bool) -> float:
        """Share of the bytes between host and device in a direction that overlap a product."""
        return overlapped_share([one for one in self.copies if one.to_device == to_device])

    def hidden_gathers(self) -> float:
        """Share of the gathered weights' bytes that overlap a matrix product."""
        return overlapped_share([one for one in self.exchanges if one.kind == "all_gather"])

    def executed(self, *, most: bool = False) -> dict[str, float]:
        """Returns the FLOPs executed over the model's, by class, and of "all".

        Args:
          most: count whole buffers of rows, instead of the rows that a balanced router fills.
        """
        flops = self.work.most_flops if most else self.work.flops
        shares = {name: number / self.model_flops for name, number in flops.items()}
        return shares | {"all": sum(shares.values())}

    def wire(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Returns (kind, axes) -> bytes that a device sends in a step, share behind a product."""
        sent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for exchange in self.exchanges:
            row = sent[exchange.kind, ", ".join(exchange.axes)]
            size = exchange.wire_bytes(self.mesh)
            row[0] += size
            row[1] += size * exchange.hides
        return {key: (size, hidden / max(size, 1)) for key, (size, hidden) in sorted(sent.items())}

    def hidden_wire(self) -> float:
        """Share of all bytes on the wire that overlap a matrix product."""
        rows = self.wire().values()
        return sum(size * share for size, share in rows) / max(sum(size for size, _ in rows), 1)

    def hidden_share(self, *, backward: bool | None = None) -> float:
        """Returns the share of the token all-to-alls that overlap a matrix product."""
        sent = self.token_exchanges(backward=backward)
        return overlapped_share([replace(one, bytes=1) for one in sent])


def overlapped_share(exchanges: Sequence[CompiledCollective | HostCopy]) -> float:
    """Returns the share of bytes that overlap a matrix product."""
    hidden = sum(one.calls * one.bytes for one in exchanges if one.hides)
    return hidden / max(sum(one.calls * one.bytes for one in exchanges), 1)


def described_config(cfg: Config, target: Target, nodes: int) -> Config:
    """Returns the config of a run on a described cluster, checked.

    Raises:
      InputError: from `check` and `resolve_mesh`.
    """
    mesh = replace(cfg.mesh, nodes=nodes, platform=target.platform, simulated_devices=None)
    cfg = replace(cfg, mesh=mesh)
    check(cfg)
    return resolve_mesh(cfg, nodes * NODE, target.platform)


def build_described(cfg: Config, target: Target) -> TrainStep:
    """Returns the train step of a config from `described_config`."""
    assert cfg.mesh.nodes is not None
    devices = describe_devices(target, cfg.mesh.nodes)
    return build_step(cfg, build_mesh(build_layout(cfg.mesh), devices), target.platform)


def compile_step(train_step: TrainStep, options: Options | None = None) -> CompiledStep:
    """Compiles the step of `build_described` and reads the compiled program.

    Args:
      options: compiler options besides the trainer's own.
    """
    lowered = lower_step(train_step)
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=options)
    return read_step(train_step, compiled, time.perf_counter() - start, options)


def read_step(
    train_step: TrainStep, compiled: Any, seconds: float, options: Options | None = None
) -> CompiledStep:
    """Reads the compiled program of `build_described`'s step; see `compile_step`."""
    memory = compiled.memory_analysis()
    mesh = dict(train_step.layout.sizes)
    text = CompiledText(compiled.as_text(), mesh)
    return CompiledStep(
        mesh=mesh,
        slow=train_step.layout.between_nodes(train_step.layout.mesh_axes),
        options=train_step.options | (options or {}),
        seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=_peak(memory),
        exchanges=text.exchanges(),
        schedules=text.schedules(),
        work=measure_work(text, filled=filled_share(train_step)),
        model_flops=model_flops(train_step),
        host_argument_bytes=memory.host_argument_size_in_bytes,
        host_temporary_bytes=memory.host_temp_size_in_bytes,
        copies=text.copies(),
    )


def _peak(memory: Any) -> int:
    """Returns the peak bytes of a device. XLA's own figure counts the host's with them."""
    if not memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes:
        return memory.peak_memory_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + results


def model_flops(train_step: TrainStep) -> float:
    """Returns a device's share of the model's FLOPs in a step: see `model.count.Counts`."""
    counts = count(train_step.cfg, train_step.parameter_sizes(), train_step.adapter_sizes())
    layout = train_step.layout
    tokens = math.prod(train_step.batch_shape) / layout.size(layout.mesh_axes)
    return counts.flops_per_token * tokens


def filled_share(train_step: TrainStep) -> float:
    """Returns the share of the rows in the experts' buffers that a balanced router fills."""
    cfg, layout, route = train_step.cfg, train_step.layout, train_step.spec.route
    if not route.exchanges:
        return 1.0
    ranks = layout.size(layout.inside.token_axes) * cfg.train.micro_batches
    ranks *= 1 if route.replicated else layout.size(layout.tensor)
    tokens = math.prod(train_step.batch_shape) // ranks
    rows = usual_sizes(route, layout, cfg.moe, tokens=tokens).expert_rows * route.parts
    gathers = [layout.size(hop.axes) for hop in route.hops if hop.kind == "gather"]
    arriving = tokens * cfg.moe.experts_per_token * math.prod(gathers)
    return min(1.0, arriving / rows)


def lower_step(train_step: TrainStep) -> Any:
    """Traces and lowers the step of `build_described`, ready to be compiled."""
    return _lowered(train_step, train_step.step)


def update_bytes(train_step: TrainStep, step: CompiledStep, options: Options | None = None) -> int:
    """Returns the bytes that the optimizer's update needs besides state and gradients.

    Compares the step with a program of the gradients alone.
    """
    compiled = _lowered(train_step, train_step.gradients).compile(compiler_options=options)
    memory = compiled.memory_analysis()
    return step.temporary_bytes - memory.temp_size_in_bytes - memory.output_size_in_bytes


def other_peaks(train_step: TrainStep, step: CompiledStep) -> dict[str, int]:
    """Returns the peak bytes of evaluation and sampling, with the whole state on the device.

    The compiler drops arguments that these programs do not read; the device holds them all the
    same, so they are added.
    """
    lowered = {
        "evaluation": _lowered(train_step, train_step.evaluate),
        "sampling": _lowered(train_step, train_step.next_logits, train_step.abstract_prompt()),
    }
    peaks = {}
    for name, function in lowered.items():
        memory = function.compile().memory_analysis()
        unread = step.argument_bytes - memory.argument_size_in_bytes
        peaks[name] = _peak(memory) + unread
    return peaks


def _lowered(train_step: TrainStep, function: Any, argument: Any = None) -> Any:
    assert isinstance(train_step.mesh, Mesh)
    with described_gpu(train_step.mesh.devices.flat[0]):
        return function.lower(train_step.abstract, argument or train_step.abstract_batch())


def census(exchanges: Iterable[CompiledCollective]) -> dict[tuple[str, str, str, str], list[int]]:
    """Returns (kind, axes, dtype, how) -> arrays moved in a step, bytes, overlapped arrays."""
    rows: dict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for exchange in exchanges:
        how = "async" if exchange.asynchronous else "sync"
        row = rows[exchange.kind, ", ".join(exchange.axes), exchange.dtype, how]
        row[0] += exchange.calls
        row[1] += exchange.calls * exchange.bytes
        row[2] += exchange.calls * exchange.hides
    return dict(sorted(rows.items()))
