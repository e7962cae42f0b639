"""Checks that restored numbers are those that were saved, by the digests in a manifest.

Files were verified before (`train.saved`). This compares what is on the devices now with what was
there at the save, so it also finds a wrong write, and a wrong restore.
"""

from collections.abc import Mapping
from typing import Any

import jax

from moejax.errors import InputError
from moejax.runtime.processes import Processes
from moejax.step.state import TrainState
from moejax.train.checkpoint import by_key, flat, restore_items
from moejax.train.digests import add_up, from_json, together
from moejax.train.misplaced import differences, summary
from moejax.train.saved import Saved


def wrong_numbers(
    manifest: Mapping[str, Any], arrays: Mapping[str, jax.Array], processes: Processes
) -> str | None:
    """Returns what differs from the saved numbers, in words; None if nothing does.

    All processes call it, and return the same. Formats before 3 have no digests, nor have imports;
    numbers that were cast on the way are not compared.
    """
    known = manifest.get("arrays")
    if not known:
        return None
    saved = {key: from_json(key, facts) for key, facts in known.items()}
    compared = {
        key: x for key, x in arrays.items() if key in saved and saved[key].dtype == x.dtype.name
    }
    found = together(processes.gather(add_up(compared).here()))
    texts = differences(saved, found)
    return summary(texts) if texts else None


def restore_weights(saved: Saved, abstract: TrainState, processes: Processes) -> dict[str, Any]:
    """Reads the item `weights` of a checkpoint, shaped and sharded like that of `abstract`.

    Raises:
      InputError: in all processes, if numbers are not those that were saved.
    """
    weights = restore_items(saved.path, abstract, ("weights",))["weights"]
    wrong = wrong_numbers(saved.manifest, by_key({"weights": flat(weights)}), processes)
    if wrong is not None:
        raise InputError(
            f"checkpoint is damaged. {saved.path}: {wrong}. Restored numbers must be those that "
            f"were saved. Copy it again, or name an older step."
        )
    return weights
