"""Passes metrics on to Weights & Biases and MLflow, if the config asks for it.

A slow or broken tracker never stops or delays a run: each has a thread of its own, fed through a
bounded queue. Metrics that do not fit are left out and counted. The run's own records
(`metrics.jsonl`, TensorBoard) do not depend on trackers.
"""

import importlib.util
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from moejax.config.fields import fields, get_value
from moejax.config.schema import Config
from moejax.errors import InputError, without_secrets, write_whole

WAITING = 10_000  # steps and events that may wait for a slow tracker
PATIENCE_S = 30.0  # seconds that a run's end waits for a tracker to send the rest
NAMES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
PARAMS_A_CALL = 100  # MLflow takes no more
PARAM_LENGTH = 500  # characters of a setting: older servers take no more
_KEEPING = threading.Lock()  # held while `trackers.json` is changed


class _Tracker(Protocol):
    """A service that keeps metrics; any method may raise, or take long."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self) -> None: ...


_Values = tuple[int, dict[str, float]]  # a step, and its values


class Trackers:
    """The trackers of a run, each in a thread."""

    def __init__(self, openers: Mapping[str, Callable[[], _Tracker]]):
        """Takes functions that open trackers, by name; they are called in the threads."""
        self._feeds = [_Feed(name, opener) for name, opener in openers.items()]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Passes values of a step on. Returns at once."""
        for feed in self._feeds:
            feed.put((step, dict(values)))

    def problems(self) -> list[str]:
        """Returns the problems since the last call, in words."""
        return [text for feed in self._feeds for text in feed.problems()]

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Waits until all is sent, at most `patience_s` seconds for all trackers together."""
        until = time.monotonic() + patience_s
        for feed in self._feeds:
            feed.end(until)


class _Feed:
    """A thread that passes values to one tracker."""

    def __init__(self, name: str, opener: Callable[[], _Tracker]):
        self._name, self._opener = name, opener
        self._queue: queue.Queue[_Values | None] = queue.Queue(WAITING)
        self._found: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._left_out, self._failed = 0, threading.Event()
        # A daemon: a tracker that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, values: _Values) -> None:
        if self._failed.is_set():
            return
        try:
            self._queue.put_nowait(values)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                self._found.put(f"{self._name} is slow: reports are left out of it")

    def problems(self) -> list[str]:
        found = []
        while not self._found.empty():
            found.append(self._found.get())
        return found

    def end(self, until: float) -> None:
        with suppress(queue.Full):
            self._queue.put(None, timeout=max(until - time.monotonic(), 0.01))
        self._thread.join(max(until - time.monotonic(), 0.01))
        self._failed.set()  # nothing is sent any more while the process ends
        if self._thread.is_alive():
            self._found.put(f"{self._name} did not finish in time: its last reports may be missing")
        elif self._left_out:
            self._found.put(f"{self._name} lacks {self._left_out} reports, as it was slow")

    def _run(self) -> None:
        try:
            tracker = self._opener()
            while (values := self._queue.get()) is not None and not self._failed.is_set():
                tracker.log(*values)
            tracker.finish()
        except BaseException as error:  # whatever it raises, the run goes on
            self._failed.set()
            # Before it is cut: half a secret would not be recognised.
            text = " ".join(without_secrets(str(error)).split())[:200]
            self._found.put(f"{self._name} is told no more: {type(error).__name__}: {text}")


def check_trackers(cfg: Config) -> None:
    """Raises InputError if a tracker's library is not installed, or MLflow has no address."""
    for name in NAMES:
        if getattr(cfg.track, name) is not None and importlib.util.find_spec(name) is None:
            raise InputError(
                f"`track.{name}` = {getattr(cfg.track, name)!r}, but {name} is not installed. "
                f"Install moejax[{name}], or set track.{name}=none."
            )
    if cfg.track.mlflow is not None and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise InputError(
            f"`track.mlflow` = {cfg.track.mlflow!r}, but MLFLOW_TRACKING_URI is not set. Set it "
            "to the address of a server (http://HOST:5000), or set track.mlflow=none."
        )


def open_trackers(cfg: Config) -> Trackers:
    """Returns the configured trackers. A resumed run goes on in the same run of each."""
    run_dir = Path(cfg.run_dir)
    kinds = {"wandb": _WandB, "mlflow": _MLflow}
    wanted = {name: kind for name, kind in kinds.items() if getattr(cfg.track, name) is not None}
    return Trackers({NAMES[n]: lambda kind=kind: kind(cfg, run_dir) for n, kind in wanted.items()})


class _WandB:
    """A run of Weights & Biases."""

    def __init__(self, cfg: Config, run_dir: Path):
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=cfg.track.wandb,
            id=_ids(run_dir).get("wandb"),  # None in a new run, which it names itself
            name=run_dir.name,
            dir=str(run_dir),
            resume="allow",
            config=_settings(cfg),
            settings=wandb.Settings(console="off", silent=True, init_timeout=PATIENCE_S),
        )
        _save_id(run_dir, "wandb", self._run.id)
        # A resumed run goes on from a checkpoint, which may be before the last step that was sent.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow, at the address in MLFLOW_TRACKING_URI."""

    def __init__(self, cfg: Config, run_dir: Path):
        import mlflow  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._client, self._metric = mlflow.MlflowClient(), Metric
        found = _ids(run_dir).get("mlflow")
        if found is None:
            known = self._client.get_experiment_by_name(cfg.track.mlflow)
            create = self._client.create_experiment
            experiment = create(cfg.track.mlflow) if known is None else known.experiment_id
            found = self._client.create_run(experiment, run_name=run_dir.name).info.run_id
            settings = [Param(n, str(v)[:PARAM_LENGTH]) for n, v in _settings(cfg).items()]
            for first in range(0, len(settings), PARAMS_A_CALL):
                self._client.log_batch(found, params=settings[first : first + PARAMS_A_CALL])
            _save_id(run_dir, "mlflow", found)
        else:
            self._client.update_run(found, status="RUNNING")
        self._id: str = found

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def _settings(cfg: Config) -> dict[str, Any]:
    """Returns every setting by its dotted name."""
    return {name: get_value(cfg, name) for name in fields()}


def _ids(run_dir: Path) -> dict[str, str]:
    """Returns each tracker's own id of this run; empty for a new run."""
    path = run_dir / "trackers.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _save_id(run_dir: Path, name: str, own: str) -> None:
    with _KEEPING:
        write_whole(run_dir / "trackers.json", json.dumps({**_ids(run_dir), name: own}) + "\n")
