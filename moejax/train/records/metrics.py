"""Metrics of training, and their records: JSONL and TensorBoard."""

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import masked_crc32c

from moejax.errors import StorageFullError, writing
from moejax.runtime.event_log import EventLog
from moejax.step.state import Metrics, TrainState
from moejax.train.records.trackers import Trackers

# Values that an evaluation records, and their display.
EVALUATED = {"bits_per_byte": "{:.3f} bits per byte", "nats_per_token": "{:.4f} nats per token"}


@dataclass(frozen=True)
class Report:
    """One logged line."""

    step: int
    loss: float  # nats per target; NaN without targets
    losses: list[float]  # of each step since the last line; this step's is the last
    tokens_per_second: float
    flops_per_second: float  # of the model, without recomputation
    share_of_peak: float  # share of the measured peak of a large matrix product
    balance: float  # load-balance loss: 1 is even
    router_entropy: float  # of a token's scores, over its largest: 1 tells no experts apart
    busiest_expert: float  # largest load of an expert over the mean, worst layer
    # By expert layer: assignments dropped in the step, those that overflowed buckets, and their
    # rounds.
    dropped: list[int]
    overflowed: list[int]
    rounds: list[int]
    rounds_per_step: float  # of all expert layers, mean over the steps since the last line
    gradient_norm: float
    learning_rate: float  # of this step's update
    skipped: int  # updates skipped so far because they were not finite
    seconds_left: float
    # of `model.predict_ahead`, nats per target; None without, NaN without targets
    ahead_loss: float | None = None
    without_targets: bool | None = None  # whether no position of the step had a target; None: some
    forced_routing: str | None = None  # `moe.router.forced`; None where scores choose experts
    # Share of the recorded choices that the router makes too; None without, NaN if a step has none.
    routing_agreement: float | None = None

    def line(self, num_steps: int, width: int | None = None) -> str:
        """Returns the report as one line of text.

        Args:
          width: of the terminal, in characters. A longer line leaves out FLOP/s, then balance.
        """
        minutes, seconds = divmod(int(self.seconds_left), 60)
        gigaflops = self.flops_per_second / 1e9
        parts = {
            "step": f"step {self.step}/{num_steps}",
            "forced": f"FORCED ROUTING {self.forced_routing}" if self.forced_routing else "",
            "loss": "no targets" if self.without_targets else f"loss {self.loss:.4f}",
            "ahead": "" if self.without_targets else self._ahead_text(),
            "rate": f"{self.tokens_per_second:,.0f} tok/s",
            "flops": f"{gigaflops:,.1f} GFLOP/s ({self.share_of_peak:.0%} of peak)",
            "balance": f"balance {self.balance:.3f}",
            "replayed": self._replayed_text(),
            "dropped": f"dropped {sum(self.dropped)}",
            "rounds": f"overflow rounds {sum(self.rounds)}" if any(self.rounds) else "",
            "skipped": f"skipped {self.skipped}" if self.skipped else "",
            "left": f"{minutes}:{seconds:02d} left",
        }
        for left_out in ("flops", "balance"):
            if width is not None and len("  ".join(filter(None, parts.values()))) > width:
                parts[left_out] = ""
        return "  ".join(filter(None, parts.values()))

    def _replayed_text(self) -> str:
        agreed = self.routing_agreement
        if agreed is None or math.isnan(agreed):
            return ""
        return f"as recorded {agreed:.1%}"

    def _ahead_text(self) -> str:
        if self.ahead_loss is None:
            return ""
        known = not math.isnan(self.ahead_loss)
        return f"ahead {self.ahead_loss:.4f}" if known else "no targets ahead"


@dataclass
class Meter:
    """Turns step metrics into reports. The clock starts when the first step is done.

    Attributes:
      peak: FLOP/s of all devices in a large matrix product.
      schedule: learning rate by the number of updates that were applied before.
    """

    tokens_per_step: int
    flops_per_token: int
    peak: float
    num_steps: int
    schedule: Callable[[int], Any]
    forced_routing: str | None = None
    started: tuple[float, int] | None = None
    _paused: float = 0.0
    # On the devices, of the steps since `start`.
    _since: list[Any] = field(default_factory=list)

    def start(self, step: int) -> None:
        """Starts the clock after `step` steps."""
        self.started, self._paused = (time.perf_counter(), step), 0.0
        self._since = []

    def pause(self, seconds: float) -> None:
        """Excludes seconds from the rates, such as those of an evaluation."""
        self._paused += seconds

    def add(self, metrics: Metrics) -> None:
        """Keeps a step's metrics, of experts' loads the newest. Does not wait for the step."""
        if self._since:
            self._since[-1] = self._since[-1]._replace(load_LE=None)
        self._since.append(metrics)

    def report(self, step: int) -> Report:
        """Fetches the metrics since `start`, of which `step` is the last, and computes rates.

        Waits for the step.
        """
        metrics = self._since[-1]
        losses = [losses_of(one) for one in self._since]
        loss, ahead = losses[-1]
        assert self.started is not None, "start comes first"
        begin, first = self.started
        seconds = time.perf_counter() - begin - self._paused
        per_second = (step - first) / seconds
        tokens = per_second * self.tokens_per_step
        load_LE = np.asarray(metrics.load_LE, np.float64)
        skipped = int(metrics.skipped)
        dropped, overflowed, rounds = np.asarray(metrics.uneven_L3).T
        busiest = float((load_LE.max(axis=1) / load_LE.mean(axis=1)).max()) if load_LE.size else 1.0
        return Report(
            step=step,
            loss=loss,
            losses=[one for one, _ in losses],
            tokens_per_second=tokens,
            flops_per_second=tokens * self.flops_per_token,
            share_of_peak=tokens * self.flops_per_token / self.peak,
            balance=float(metrics.balance),
            router_entropy=float(metrics.router_entropy),
            busiest_expert=busiest,
            dropped=dropped.tolist(),
            overflowed=overflowed.tolist(),
            rounds=rounds.tolist(),
            rounds_per_step=float(sum(np.asarray(one.uneven_L3)[:, 2].sum() for one in self._since))
            / (step - first),
            gradient_norm=float(metrics.gradient_norm),
            learning_rate=float(self.schedule(max(step - 1 - skipped, 0))),
            skipped=skipped,
            seconds_left=(self.num_steps - step) / per_second if per_second else 0.0,
            ahead_loss=ahead,
            without_targets=None if has_targets(metrics) else True,
            forced_routing=self.forced_routing,
            routing_agreement=agreement_of(metrics),
        )


def agreement_of(metrics: Metrics) -> float | None:
    """Returns the share of a step's recorded choices that the router makes too, of all layers."""
    if metrics.replayed_L2 is None:
        return None
    agreed, given = np.asarray(metrics.replayed_L2).sum(axis=0)
    return float(agreed / given) if given else math.nan


def has_targets(metrics: Metrics) -> bool:
    """Whether some position of a step had a target. Without one the step has no loss."""
    return metrics.has_targets is None or bool(metrics.has_targets[0])


def losses_of(metrics: Metrics) -> tuple[float, float | None]:
    """Returns a step's loss, and that of `model.predict_ahead` or None. Without targets: NaN."""
    has = [True, True] if metrics.has_targets is None else [*metrics.has_targets]
    loss = float(metrics.loss) if has[0] else math.nan
    if metrics.ahead is None:
        return loss, None
    return loss, float(metrics.ahead) if has[1] else math.nan


def router_distance(state: TrainState) -> float | None:
    """Returns how far routers of sites are from the outer ones, over the norm of those.

    Of the sites and parts of routers that this process's devices hold: nothing is sent. None
    without an outer loop, and without routers.
    """
    if state.sites is None:
        return None
    apart = norm = 0.0
    trees = state.sites.params, state.params
    own, outer = (dict(jax.tree.leaves_with_path(tree)) for tree in trees)
    for path in (path for path in outer if "router" in jax.tree_util.keystr(path)):
        shared = {part.device: part.data for part in outer[path].addressable_shards}
        for part in own[path].addressable_shards:
            wanted = np.asarray(shared[part.device], np.float64)
            apart += float(((np.asarray(part.data[0], np.float64) - wanted) ** 2).sum())
            norm += float((wanted**2).sum())
    return math.sqrt(apart / norm) if norm else None


def held_out_text(values: Mapping[str, float | None]) -> str:
    """Returns an evaluation's recorded values as text."""
    if values.get("targets") == 0:
        return "no targets"
    # JSON has no NaN: it was recorded as null.
    known = {name: math.nan if value is None else value for name, value in values.items()}
    return ", ".join(
        template.format(known[name]) for name, template in EVALUATED.items() if name in known
    )


class Board:
    """Adds numbers by tag and step to a new file of TensorBoard's events.

    Each is written at once, in the caller's thread. tensorboardX's own writer uses a thread: a full
    disk ends it unnoticed, and the run then waits forever for space in its queue.
    """

    def __init__(self, directory: Path):
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self.path = directory / name
        with writing(self.path):
            directory.mkdir(parents=True, exist_ok=True)
            # Without a buffer, closing has nothing left to write.
            self._file = self.path.open("ab", buffering=0)
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        except StorageFullError:
            self.close()
            raise

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a number for each tag."""
        values_of = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        if values_of:
            self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values_of)))

    def _write(self, event: Event) -> None:
        # A record of a TFRecord file: length, data, and a checksum of each.
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        left = length + sums[0] + data + sums[1]
        with writing(self.path):
            while left:
                left = left[self._file.write(left) :]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Records:
    """Writes reports and events to `metrics.jsonl` and TensorBoard, and passes them to trackers."""

    def __init__(self, run_dir: Path, *, written: bool = True, trackers: Trackers | None = None):
        """Opens the records of a run, which only process 0 writes."""
        self.trackers = trackers or Trackers({})
        self._events = EventLog(run_dir / "metrics.jsonl" if written else Path(os.devnull))
        self._board = Board(run_dir / "tensorboard") if written else None

    def report(self, report: Report) -> None:
        """Records a training report. Values that the run does not have are left out."""
        values = {name: value for name, value in vars(report).items() if value is not None}
        self._events.write("step", **values)
        *between, _ = values.pop("losses")
        for step, loss in enumerate(between, report.step - len(between)):
            self._draw("train", step, {"loss": loss})
        scalars = {n: sum(v) if isinstance(v, list) else v for n, v in values.items()}
        del scalars["step"]
        for name in ("without_targets", "forced_routing"):
            scalars.pop(name, None)
        self._draw("train", report.step, scalars)

    def event(self, event: str, step: int, **values: float | int | str) -> None:
        """Records an event; its numbers go to TensorBoard too."""
        self._events.write(event, step=step, **values)
        self._draw(event, step, {n: v for n, v in values.items() if isinstance(v, int | float)})

    def start(self, step: int, facts: Mapping[str, Any]) -> None:
        """Records the facts of a start or resume (`start_record.describe_start`)."""
        self._events.write("start", step=step, **facts)

    def _draw(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if self._board is not None:
            named = {f"{group}/{name}": float(value) for name, value in values.items()}
            self._board.add(step, named)
            if named:
                self.trackers.log(step, named)

    def close(self) -> list[str]:
        """Closes everything. Returns the problems of trackers, in words."""
        self.trackers.close()
        if self._board is not None:
            self._board.close()
        self._events.close()
        return self.trackers.problems()
