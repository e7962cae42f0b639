"""Traces and prices one plan: its step's program, time and memory."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from moejax.config.schema import Config
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.plan.cluster.topology import Topology
from moejax.plan.price import host
from moejax.plan.price.cost import Costs, SimulatedStep, simulate_step
from moejax.plan.price.routing import ExpertLoad, bucket_fills
from moejax.plan.trace.memory import Peak, peak
from moejax.plan.trace.reader import read as read_jaxpr
from moejax.plan.trace.schedule import Schedule
from moejax.runtime.patches import described_gpu
from moejax.step.model import build_spec
from moejax.step.train_step import TrainStep, build_step


@dataclass(frozen=True)
class TracedStep:
    """A traced step, and its evaluation.

    Schedules depend on whether buckets overflow, so they are made on demand: with rounds only if
    the step was traced with them.
    """

    train_step: TrainStep
    jaxpr: Any
    evaluation: Any  # a jaxpr too

    @property
    def cfg(self) -> Config:
        """The resolved config."""
        return self.train_step.cfg

    def schedule(self, rounds: int = 0, *, burst: bool = False) -> Schedule:
        """Returns the step's schedule; see `plan.trace.reader.read`."""
        return self._read(self.jaxpr, rounds, burst)

    @property
    def bursts(self) -> float:
        """Share of the steps in which sites send all of the model at once, and wait for it."""
        outer = self.cfg.outer
        return 0.0 if outer.every is None or outer.order == "layers" else 1 / outer.every

    def peak(self, schedule: Schedule) -> Peak:
        """Returns the step's peak memory. Gradients are as large as the master weights."""
        return peak(schedule, self.train_step.argument_bytes()["weights"])

    def evaluation_peak(self, rounds: int = 0) -> Peak:
        """Returns the evaluation's peak memory, which includes the whole state."""
        return peak(self._read(self.evaluation, rounds), replaces=False)

    def _read(self, jaxpr: Any, rounds: int, burst: bool = False) -> Schedule:
        if rounds and not self.train_step.spec.rounds:
            raise ValueError("overflow rounds cannot be priced: traced without overflow rounds")
        return read_jaxpr(jaxpr, rounds=rounds, burst=burst)


@dataclass(frozen=True)
class PricedPlan:
    """A plan with its predicted time and memory. Seconds of a step, bytes of one device.

    Attributes:
      parts: (share of the expert layers and of the steps, the step if all were like these).
      steps, evaluation: peak memory of a step, and of evaluation. Sampling needs no more.
    """

    traced: TracedStep = field(repr=False)
    parts: tuple[tuple[float, SimulatedStep], ...] = field(repr=False)
    steps: Peak
    evaluation: Peak

    @property
    def peak(self) -> Peak:
        """The larger peak of step and evaluation."""
        return max(self.steps, self.evaluation, key=lambda memory: memory.bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of one device in its host's memory."""
        return max(self.steps.host_bytes, self.evaluation.host_bytes)

    @property
    def node_bytes(self) -> int:
        """Bytes of a node's host that a run takes, if it keeps anything there; else 0."""
        step = self.traced.train_step
        taken = host.node_bytes(step, self.peak.bytes, self.host_bytes)
        return taken if self.host_bytes or host.copies_bytes(step) else 0

    @property
    def cfg(self) -> Config:
        """The plan's resolved config."""
        return self.traced.cfg

    @property
    def seconds(self) -> float:
        """Predicted time of a step; the mean over a period where some wait for all of the model."""
        return sum(share * simulated.seconds for share, simulated in self.parts)

    @property
    def main(self) -> SimulatedStep:
        """The simulated step of the most common kind of layer."""
        return max(self.parts, key=lambda part: part[0])[1]


NEW_OBJECTS = 100_000  # made before garbage is looked for; Python's own number is 2,000 at most


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Lets the garbage collector scan less during traces: no older objects, and new ones rarely."""
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def trace_config(
    cfg: Config, platform: str, load: ExpertLoad | None = None, *, documents: float = 1.0
) -> TracedStep:
    """Traces the train step of a resolved config; needs no devices, allocates nothing.

    Args:
      load: load to price it for. If this overflows no bucket, overflow rounds, which are a second
        expert layer, are not traced. None: any load.
      documents: as of `StepSpec`.
    """
    mesh = build_abstract_mesh(build_layout(cfg.mesh))
    rounds = load is None or may_overflow(cfg, platform, load)
    with described_gpu():
        return trace_step(build_step(cfg, mesh, platform, rounds=rounds, documents=documents))


def may_overflow(cfg: Config, platform: str, load: ExpertLoad) -> bool:
    """Returns whether buckets overflow under a load, more than rarely."""
    layout = build_layout(cfg.mesh)
    route = build_spec(cfg, build_abstract_mesh(layout), platform, None).route
    return any(fill.rounds for _, fill in bucket_fills(load, cfg, layout, route))


def trace_step(train_step: TrainStep) -> TracedStep:
    """Traces a train step and its evaluation."""
    shapes = train_step.abstract, train_step.abstract_batch()
    step, evaluation = train_step.step.trace(*shapes), train_step.evaluate.trace(*shapes)
    return TracedStep(train_step, step.jaxpr, evaluation.jaxpr)


def sampling_peak(train_step: TrainStep) -> Peak:
    """Returns the peak memory of sampling one sequence a device."""
    traced = train_step.next_logits.trace(train_step.abstract, train_step.abstract_prompt())
    return peak(read_jaxpr(traced.jaxpr), replaces=False)


def price(traced: TracedStep, topology: Topology, load: ExpertLoad) -> PricedPlan:
    """Simulates a traced step on a cluster for a given expert load."""
    layout, route = traced.train_step.layout, traced.train_step.spec.route
    parts, steps, evaluations = [], [], []
    sharing = topology.device.oversubscription
    for share, fill in bucket_fills(load, traced.cfg, layout, route, sharing):
        costs = Costs(topology, layout, fill)
        for burst, steps_share in ((False, 1 - traced.bursts), (True, traced.bursts)):
            if steps_share:
                schedule = traced.schedule(fill.rounds, burst=burst)
                parts.append((share * steps_share, simulate_step(schedule, costs)))
                steps.append(traced.peak(schedule))
        evaluations.append(traced.evaluation_peak(fill.rounds))
    size = attrgetter("bytes")
    return PricedPlan(traced, tuple(parts), max(steps, key=size), max(evaluations, key=size))
