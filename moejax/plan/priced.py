"""A plan, traced and priced: the program of its step, the seconds and the memory that it takes."""

from dataclasses import dataclass, field
from typing import Any

from moejax.config import Config
from moejax.dims import build_layout
from moejax.plan.build import build_abstract_mesh
from moejax.plan.memory import Peak, peak
from moejax.plan.price import Costs, Played, play
from moejax.plan.routing import Routing, work_of
from moejax.plan.schedule import Schedule
from moejax.plan.target import described_cudnn
from moejax.plan.topology import Topology
from moejax.plan.trace import read as read_jaxpr
from moejax.train.step import Trainer, build_trainer


@dataclass(frozen=True)
class Read:
    """A traced step. Its schedule depends on whether buckets overflow, so it is made on demand."""

    trainer: Trainer
    jaxpr: Any

    @property
    def cfg(self) -> Config:
        """Of the step."""
        return self.trainer.cfg

    def schedule(self, rounds: int = 0) -> Schedule:
        """What a device does; see `plan.trace.read`."""
        return read_jaxpr(self.jaxpr, rounds=rounds)

    def peak(self, schedule: Schedule) -> Peak:
        """What a device must hold; see `plan.memory`. Gradients are as large as their masters."""
        return peak(schedule, self.trainer.given_bytes()["weights"])


@dataclass(frozen=True)
class Priced:
    """A plan and what it costs. Seconds are of a step, bytes of one device.

    Attributes:
      read: the traced step.
      parts: (share of the expert layers, the step as it would be if all were so).
      peak: of the device's memory.
    """

    read: Read = field(repr=False)
    parts: tuple[tuple[float, Played], ...] = field(repr=False)
    peak: Peak

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
    trainer = build_trainer(cfg, build_abstract_mesh(build_layout(cfg.mesh)), platform)
    with described_cudnn():
        traced = trainer.step.trace(trainer.abstract, trainer.abstract_batch())
    return Read(trainer, traced.jaxpr)


def price(read: Read, topology: Topology, routing: Routing) -> Priced:
    """Plays a traced step on a cluster, for tokens that fall so."""
    layout, route = read.trainer.layout, read.trainer.program.route
    parts, most = [], None
    for share, work in work_of(routing, read.cfg, layout, route):
        schedule = read.schedule(work.rounds)
        parts.append((share, play(schedule, Costs(topology, layout, work))))
        needed = read.peak(schedule)
        most = needed if most is None or needed.bytes > most.bytes else most
    assert most is not None
    return Priced(read, tuple(parts), most)
