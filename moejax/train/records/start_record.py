"""Facts that a run records: of each start config, devices and traffic; the load of its experts."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.config.load import to_dict
from moejax.layout.layout import Layout
from moejax.plan.trace.schedule import Collective
from moejax.runtime.event_log import EventLog
from moejax.runtime.processes import Processes
from moejax.step.train_step import TrainStep
from moejax.train.records.summary import Summary
from moejax.version import __version__

SNAPSHOTS = 200  # about as many records of the experts' load has a run


def describe_start(train_step: TrainStep, summary: Summary, processes: Processes) -> dict[str, Any]:
    """Returns the fields of a `start` event: config, devices, versions and traffic of a step."""
    devices = jax.devices()
    return {
        "config": to_dict(train_step.cfg),
        "devices": len(devices),
        "device": devices[0].device_kind,
        "processes": processes.count,
        "nodes": train_step.cfg.mesh.nodes,
        "jax": jax.__version__,
        "moejax": __version__,
        "parameters": summary.counts.total,
        "tokens_per_step": summary.tokens_per_step,
        "traffic": traffic_rows(summary.collectives, train_step.layout),
    }


def highest_peak(log: Path, facts: Mapping[str, Any], measured: float) -> float:
    """Returns the largest peak in FLOP/s that a start of the run measured on the same devices.

    A start beside other programs measures a low peak, and its share of it would look too good.

    Args:
      log: `metrics.jsonl`, which need not exist.
      facts: of this start, from `describe_start`.
    """
    peaks = [measured]
    for text in log.read_text(encoding="utf-8").splitlines() if log.is_file() else ():
        if '"event": "start"' in text:
            start = json.loads(text)
            same = all(
                start.get(name) == facts[name] for name in ("device", "devices", "processes")
            )
            if same and start["config"]["model"]["dtype"] == facts["config"]["model"]["dtype"]:
                peaks.append(start.get("peak_flops_per_second") or 0.0)
    return max(peaks)


def traffic_rows(collectives: list[Collective], layout: Layout) -> list[dict[str, Any]]:
    """Returns calls and operand bytes of one device in a step, by class, kind and mesh axes.

    Axes of one device are left out. The largest first.
    """
    totals: dict[tuple[str, str, tuple[str, ...]], list[int]] = defaultdict(lambda: [0, 0])
    for one in collectives:
        axes = tuple(axis for axis in one.axes if layout.size((axis,)) > 1)
        if axes:
            total = totals[one.traffic, one.kind, axes]
            total[0] += one.calls
            total[1] += one.calls * one.bytes
    return [
        {
            "class": name,
            "kind": kind,
            "axes": list(axes),
            "between_nodes": bool(layout.between_nodes(axes)),
            "calls": calls,
            "bytes": size,
        }
        for (name, kind, axes), (calls, size) in sorted(
            totals.items(), key=lambda item: -item[1][1]
        )
    ]


class ExpertLoads(EventLog):
    """Appends the experts' load to `experts.jsonl`, as often as a picture of the run needs."""

    def __init__(self, run_dir: Path, num_steps: int):
        """Opens the file of a run, of whose `num_steps` about `SNAPSHOTS` are recorded."""
        super().__init__(run_dir / "experts.jsonl")
        self._every, self._num_steps = num_steps / SNAPSHOTS, num_steps
        self._last: int | None = None

    def add(self, step: int, load_LE: Any) -> None:
        """Adds the load of a step, unless the last recorded step is too near."""
        last = self._last
        if last is None or not last < step < last + self._every or step == self._num_steps:
            self.write("load", step=step, load=np.asarray(load_LE).tolist())
            self._last = step
