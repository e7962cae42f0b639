"""Real runs on one device, in the process of the tests: small, and their steps are traced once."""

import dataclasses
import io

import jax
import pytest
from rich.console import Console

from moejax.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from moejax.config.schema import CheckpointConfig, DataConfig
from moejax.train import loop, planning, replay
from moejax.train.inputs import open_inputs
from tests.cases import CERTAIN, small_config
from tests.train.poisoned import digest, dying, poison

STEPS, EVERY = 12, 4  # of a run, and between its checkpoints
BUILT = {}  # traced steps, and their summaries


class KilledError(Exception):
    """Stands for a kill."""


def kill():
    """Kills the run."""
    raise KilledError


def config(run_dir, *, every=EVERY, **train):
    """The config of a run that saves every so many steps."""
    settings = {
        "num_steps": STEPS,
        "batch_sequences": 4,
        "log_every": 1,
        "eval_every": None,
        "sample_tokens": 0,
        "max_skipped": 2,
    }
    cfg = small_config(
        model={"vocab_size": 264, "width": 8, "num_heads": 2, "num_kv_heads": 2, "mlp_hidden": 384},
        moe={"num_experts": 2, "expert_hidden": 8, **CERTAIN},
        train=settings | train,
    )
    return dataclasses.replace(
        cfg,
        run_dir=str(run_dir),
        data=DataConfig(sequence_length=16),
        checkpoint=CheckpointConfig(save_every=every, keep=3),
        plan=dataclasses.replace(cfg.plan, mode="hand"),
    )


def batch(position):
    """The digest of a batch, by its position in the data."""
    tokens = open_inputs(config("nowhere")).train.rows(position, 0, 4).token_BT
    tokens[:, 0] = 0
    return digest(tokens)


def change_manifest(step, change):
    """Has `change` alter what the manifest of a checkpoint says about the run."""
    facts = read_manifest(step)
    for name in ("format_version", "files", "digest"):  # which are written anew
        del facts[name]
    change(facts)
    (step / MANIFEST).unlink()
    write_manifest(step, facts)


def train(cfg, bad, *, die=None, jump=False):
    """Trains on data some of whose batches are bad.

    Args:
      bad: positions of batches in the data.
      die: when the run is killed, if it goes back (`dying`).

    Returns:
      What was shown, and of each step its number and its batch.
    """
    seen, shown = [], io.StringIO()

    def tell(step, tokens):
        seen.append((step, digest(tokens)))

    with pytest.MonkeyPatch.context() as patch:
        poison(bad, patch.setattr, jump=jump, seen=tell)
        _share_steps(patch.setattr, jump)
        # The last evaluation reads all of a long text, and is not what is looked at here.
        patch.setattr(loop, "finish", lambda run, state: None)
        if die is not None:
            dying(die, patch.setattr, kill)
        try:
            loop.train(cfg, Console(file=shown, width=200))
        except KilledError:
            assert die is not None
    return shown.getvalue(), seen


def run_again(cfg, step, bad):
    """Replays a step. Returns whether it was equal, and what was shown."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        poison(bad, patch.setattr)
        _share_steps(patch.setattr, jump=False)
        equal = replay.replay(cfg, step, Console(file=shown, width=200))
    return equal, shown.getvalue()


def _share_steps(replace, jump):
    """Has runs take the step of an earlier run, where it is the same, with the config of theirs."""
    build, summarize = planning.build_step, planning.summarize

    def kept(cfg, mesh, platform):
        built = BUILT.setdefault((cfg.train.num_steps, jump), {})
        if not built:
            train_step = build(cfg, mesh, platform)
            built |= {"step": train_step.step, "summary": summarize(train_step), "of": train_step}
        model = dataclasses.replace(built["of"].model, cfg=cfg)
        own = dataclasses.replace(built["of"], model=model)
        own.__dict__["step"] = built["step"]  # where a cached property keeps its value
        return own

    def summary(train_step):
        return BUILT[train_step.cfg.train.num_steps, jump]["summary"]

    for module in (planning, replay):
        replace(module, "build_step", kept)
        replace(module, "start", lambda mesh: jax.devices()[:1])
    replace(planning, "summarize", summary)
    replace(loop, "measure_peak", lambda devices, dtype: 1e12)
