"""Runs with one checkpoint, and what they say of held-out text."""

import json

from moejax.checkpoint.compatible import describe_run
from moejax.checkpoint.writer import Checkpoints
from moejax.data.tokens import open_files
from moejax.train.evaluation import evaluate
from tests.train.running import build_run


def save(folder, train_step, state, *base):
    """Writes a checkpoint of step 0; `base` is the source of frozen weights."""
    writer = Checkpoints(folder / "checkpoints", keep=1)
    writer.save(0, state, describe_run(train_step, {"train": [], "held_out": []}, *base))
    writer.close()


def event_of(cfg, state, folder):
    """The event of an evaluation by the run itself."""
    source = open_files(cfg.data.eval_files, "bin", model_vocab=264)
    run, _ = build_run(cfg, folder, held_out=source)
    evaluate(run, state, 0, limit=None)
    run.records.close()
    (event,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return event
