"""A plan, traced and priced: the program of its step, the seconds and the memory that it takes."""

from dataclasses import dataclass, field
from typing import Any

from moejax.config.schema import Config
from moejax.layout.layout import build_layout
from moejax.layout.mesh import build_abstract_mesh
from moejax.plan.cluster.topology import Topology
from moejax.plan.price.cost import Costs, Played, play
from moejax.plan.price.routing import Routing, work_of
from moejax.plan.trace.memory import Peak, peak
from moejax.plan.trace.reader import read as read_jaxpr
from moejax.plan.trace.schedule import Schedule
from moejax.runtime.compiler import described_cudnn
from moejax.step.trainer import Trainer, build_trainer


@dataclass(frozen=True)
class Read:
    """A traced step, and its evaluation.

    Their schedules depend on whether buckets overflow, so they are made on demand.
    """

    trainer: Trainer
    jaxpr: Any
    evaluation: Any  # a jaxpr too

    @property
    def cfg(self) -> Config:
        """Of the step."""
        return self.trainer.cfg

    def schedule(self, rounds: int = 0) -> Schedule:
        """What a device does; see `plan.trace.reader.read`."""
        return read_jaxpr(self.jaxpr, rounds=rounds)

    def peak(self, schedule: Schedule) -> Peak:
        """What a step must hold (`plan.trace.memory`). Gradients are as large as their masters."""
        return peak(schedule, self.trainer.given_bytes()["weights"])

    def evaluation_peak(self, rounds: int = 0) -> Peak:
        """What evaluation must hold, beside a state of which it reads but a part."""
        return peak(read_jaxpr(self.evaluation, rounds=rounds), replaces=False)


@dataclass(frozen=True)
class Priced:
    """A plan and what it costs. Seconds are of a step, bytes of one device.

    Attributes:
      read: the traced step.
      parts: (share of the expert layers, the step as it would be if all were so).
      steps: the most that a step holds.
      evaluation: the most that evaluation holds. Sampling, of one sequence a device, holds no more.
    """

    read: Read = field(repr=False)
    parts: tuple[tuple[float, Played], ...] = field(repr=False)
    steps: Peak
    evaluation: Peak

    @property
    def peak(self) -> Peak:
        """Of the device's memory."""
        return max(self.steps, self.evaluation, key=lambda one: one.bytes)

    @property
    def cfg(self) -> Config:
        """The config that the plan makes."""
        return self.read.cfg

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(share * played.seconds for share, played in self.parts)

    @property
    def main(self) -> Played:
        """The step of most layers."""
        return max(self.parts, key=lambda part: part[0])[1]


def read_step(cfg: Config, platform: str) -> Read:
    """Traces the train step of a resolved config; needs no devices, allocates nothing."""
    mesh = build_abstract_mesh(build_layout(cfg.mesh))
    with described_cudnn():
        return read_trainer(build_trainer(cfg, mesh, platform))


def read_trainer(trainer: Trainer) -> Read:
    """Traces the step of a trainer, and its evaluation."""
    shapes = trainer.abstract, trainer.abstract_batch()
    step, evaluation = (one.trace(*shapes).jaxpr for one in (trainer.step, trainer.evaluate))
    return Read(trainer, step, evaluation)


def sampling_peak(trainer: Trainer) -> Peak:
    """What sampling must hold: of one sequence a device, so no more than evaluation."""
    traced = trainer.next_logits.trace(trainer.abstract, trainer.abstract_prompt())
    return peak(read_jaxpr(traced.jaxpr), replaces=False)


def price(read: Read, topology: Topology, routing: Routing) -> Priced:
    """Plays a traced step on a cluster, for tokens that fall so."""
    layout, route = read.trainer.layout, read.trainer.program.route
    parts, steps, evaluations = [], [], []
    for share, work in work_of(routing, read.cfg, layout, route):
        schedule = read.schedule(work.rounds)
        parts.append((share, play(schedule, Costs(topology, layout, work))))
        steps.append(read.peak(schedule))
        evaluations.append(read.evaluation_peak(work.rounds))
    steps, evaluations = (max(one, key=lambda found: found.bytes) for one in (steps, evaluations))
    return Priced(read, tuple(parts), steps, evaluations)
