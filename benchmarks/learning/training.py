"""A run of the trainer for its held-out loss."""

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from moejax.config.schema import Config
from moejax.screen import screen
from moejax.train.loop import train


def held_out(cfg: Config, seed: int) -> dict[str, Any]:
    """Trains once; returns held-out bits per byte along the run, and of all held-out text."""
    with tempfile.TemporaryDirectory() as directory:
        settings = dataclasses.replace(cfg.train, seed=seed)
        cfg = dataclasses.replace(cfg, run_dir=directory, train=settings)
        began = time.perf_counter()
        train(cfg, screen(stderr=True))
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    curve = {str(e["step"]): e["bits_per_byte"] for e in events if e["event"] == "eval"}
    final = next(e["bits_per_byte"] for e in events if e["event"] == "final_eval")
    return {"final": final, "curve": curve, "seconds": time.perf_counter() - began}
