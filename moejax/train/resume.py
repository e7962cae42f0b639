"""Which settings may change when a run goes on from a checkpoint."""

from typing import Any

from moejax.config import Config
from moejax.errors import InputError
from moejax.settings import diff, from_dict

# A change here would make the weights, the optimizer state or the data position mean another thing.
FIXED = (
    "model.",
    "moe.",
    "data.",
    "optimizer.name",
    "train.batch_sequences",
    "train.seed",
)
# Of those, what changes how the step computes and not what it computes.
FREE = ("model.dtype", "model.remat", "model.scan_layers", "moe.implementation")


def check_resumable(saved: dict[str, Any], cfg: Config) -> list[str]:
    """Compares the config of a checkpoint with the run's.

    Returns what changed harmlessly, to be logged.

    Raises:
      InputError: if something changed that the checkpoint depends on; the message lists it.
    """
    changes = diff(from_dict(saved), cfg)
    refused = [c for c in changes if c[0].startswith(FIXED) and c[0] not in FREE]
    if refused:
        listed = ", ".join(f"{name}: {before} -> {after}" for name, before, after in refused)
        raise InputError(
            f"config differs from the checkpoint's. {listed}. These cannot change within a run. "
            f"Change them back, or set another run_dir (with checkpoint.init_from to keep weights)."
        )
    return [f"{name}: {before} -> {after}" for name, before, after in changes]
