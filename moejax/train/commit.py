"""What follows when Orbax has committed a step: digests by all processes, the manifest, pruning.

It runs in a thread beside the steps, in every process. Each takes the digests of its share of the
files, and adds what its devices found of the state's numbers; process 0 writes the manifest.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moejax.errors import InputError, RunError
from moejax.runtime.processes import Processes
from moejax.train.digests import DeviceSums, together
from moejax.train.manifest import (
    find_damage,
    finished_steps,
    hash_files,
    read_manifest,
    write_manifest,
)
from moejax.train.stored import missing_in


def check_written(step: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks, before a manifest calls it whole, that a written step has all of its arrays.

    Args:
      shapes: of the arrays, by ITEM/KEY.
    Raises:
      RunError: if it lacks some.
    """
    if (missing := missing_in(step, shapes)) is not None:
        raise RunError(
            f"a checkpoint was written and cannot be read back. {step}: {missing}. It gets no "
            f"manifest, so nothing takes it for whole; those before it are. Look at the file "
            f"system, and run the same command again."
        )


class OtherProcessError(Exception):
    """Another process could not finish its part of a save. The message has its error."""


def commit(step: Path, facts: Mapping[str, Any], sums: DeviceSums, processes: Processes) -> None:
    """Writes the manifest of a step whose files are all there. All processes call it.

    Args:
      step: its directory.
      facts: entries of the manifest.
      sums: of the numbers of the state that was saved.
    Raises:
      OtherProcessError: in process 0, if another process failed.
    """
    here = {
        "files": hash_files(step, (processes.index, processes.count)),
        "arrays": sums.here(),
    }
    if not processes.first:
        processes.send(_name(step, processes.index), json.dumps(here))
        return
    everywhere = [here]
    for index in range(1, processes.count):
        there = json.loads(processes.receive(_name(step, index)))
        if "error" in there:
            raise OtherProcessError(f"process {index}: {there['error']}")
        everywhere.append(there)
    files = {name: known for part in everywhere for name, known in part["files"].items()}
    arrays = together(part["arrays"] for part in everywhere)
    digests = {"arrays": {key: arrays[key].to_json() for key in sorted(arrays)}}
    write_manifest(step, {**facts, **digests}, files=files)


def tell_first(step: Path, error: Exception, processes: Processes) -> None:
    """Tells process 0 that this process's part of a save failed."""
    if not processes.first:
        processes.send(_name(step, processes.index), json.dumps({"error": str(error)}))


def _name(step: Path, index: int) -> str:
    return f"saved/{step.name}/{index}"


def prune(directory: Path, keep: int) -> None:
    """Removes steps that are older than the newest `keep` whole ones.

    Whole are those whose manifest is as it was written and lists files of the sizes they have. What
    is not whole counts for nothing and stays: a start looks at it again and sets it aside.
    """
    whole = 0
    for step in sorted(finished_steps(directory), reverse=True):
        path = directory / str(step)
        if whole >= keep:
            # Not through Orbax's manager: its delete waits for the other processes on a device,
            # where their steps are under way.
            shutil.rmtree(path)
        elif _is_whole(path):
            whole += 1


def _is_whole(path: Path) -> bool:
    try:
        return find_damage(path, read_manifest(path), "size") is None
    except InputError:
        return False
