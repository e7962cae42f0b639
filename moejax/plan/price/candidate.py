"""A plan, traced and priced: the program of its step, the seconds and the memory that it takes."""

from dataclasses import dataclass, field
from typing import Any

from moejax.config.schema import Config
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.cost import Costs, SimulatedStep, simulate_step
from moejax.plan.price.routing import ExpertLoad, work_of
from moejax.plan.trace.memory import Peak, peak
from moejax.plan.trace.reader import read as read_jaxpr
from moejax.plan.trace.schedule import Schedule
from moejax.runtime.compiler import described_cudnn
from moejax.step.train_step import TrainStep, build_step


@dataclass(frozen=True)
class TracedStep:
    """A traced step, and its evaluation.

    Their schedules depend on whether buckets overflow, so they are made on demand.
    """

    train_step: TrainStep
    jaxpr: Any
    evaluation: Any  # a jaxpr too

    @property
    def cfg(self) -> Config:
        """Of the step."""
        return self.train_step.cfg

    def schedule(self, rounds: int = 0) -> Schedule:
        """What a device does; see `plan.trace.reader.read`."""
        return read_jaxpr(self.jaxpr, rounds=rounds)

    def peak(self, schedule: Schedule) -> Peak:
        """What a step must hold (`plan.trace.memory`). Gradients are as large as their masters."""
        return peak(schedule, self.train_step.argument_bytes()["weights"])

    def evaluation_peak(self, rounds: int = 0) -> Peak:
        """What evaluation must hold, beside a state of which it reads but a part."""
        return peak(read_jaxpr(self.evaluation, rounds=rounds), replaces=False)


@dataclass(frozen=True)
class PricedPlan:
    """A plan and what it costs. Seconds are of a step, bytes of one device.

    Attributes:
      traced: the traced step and evaluation.
      parts: (share of the expert layers, the step as it would be if all were so).
      steps: the most that a step holds.
      evaluation: the most that evaluation holds. Sampling, of one sequence a device, holds no more.
    """

    traced: TracedStep = field(repr=False)
    parts: tuple[tuple[float, SimulatedStep], ...] = field(repr=False)
    steps: Peak
    evaluation: Peak

    @property
    def peak(self) -> Peak:
        """Of the device's memory."""
        return max(self.steps, self.evaluation, key=lambda one: one.bytes)

    @property
    def cfg(self) -> Config:
        """The config that the plan makes."""
        return self.traced.cfg

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(share * simulated.seconds for share, simulated in self.parts)

    @property
    def main(self) -> SimulatedStep:
        """The step of most layers."""
        return max(self.parts, key=lambda part: part[0])[1]


def trace_config(cfg: Config, platform: str) -> TracedStep:
    """Traces the train step of a resolved config; needs no devices, allocates nothing."""
    mesh = build_abstract_mesh(build_layout(cfg.mesh))
    with described_cudnn():
        return trace_step(build_step(cfg, mesh, platform))


def trace_step(train_step: TrainStep) -> TracedStep:
    """Traces a train step and its evaluation."""
    shapes = train_step.abstract, train_step.abstract_batch()
    step, evaluation = (one.trace(*shapes).jaxpr for one in (train_step.step, train_step.evaluate))
    return TracedStep(train_step, step, evaluation)


def sampling_peak(train_step: TrainStep) -> Peak:
    """What sampling must hold: of one sequence a device, so no more than evaluation."""
    traced = train_step.next_logits.trace(train_step.abstract, train_step.abstract_prompt())
    return peak(read_jaxpr(traced.jaxpr), replaces=False)


def price(traced: TracedStep, topology: Topology, routing: ExpertLoad) -> PricedPlan:
    """Plays a traced step on a cluster, for tokens that fall so."""
    layout, route = traced.train_step.layout, traced.train_step.spec.route
    parts, steps, evaluations = [], [], []
    for share, work in work_of(routing, traced.cfg, layout, route):
        schedule = traced.schedule(work.rounds)
        parts.append((share, simulate_step(schedule, Costs(topology, layout, work))))
        steps.append(traced.peak(schedule))
        evaluations.append(traced.evaluation_peak(work.rounds))
    steps, evaluations = (max(one, key=lambda found: found.bytes) for one in (steps, evaluations))
    return PricedPlan(traced, tuple(parts), steps, evaluations)
