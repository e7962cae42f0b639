"""The train command, which records the batches that it trains on.

  python -m tests.faults.recording --to FOLDER -- --config ...

Each process adds a line a step to a file of its own, before the step runs: the step, and a digest
of each row of the global batch that lies on its devices.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np


def row_digests(batch: Any) -> dict[int, str]:
    """Returns the digests of a batch's rows on this process's devices, by row."""
    digests: dict[int, str] = {}
    shards = [array.addressable_shards for array in batch if array is not None]
    for same_rows in zip(*shards, strict=True):
        first = same_rows[0].index[0].start or 0
        rows = zip(*(np.asarray(shard.data) for shard in same_rows), strict=True)
        for row, parts in enumerate(rows, first):
            digest = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
            assert digests.setdefault(row, digest) == digest, f"row {row} differs between devices"
    return digests


def recorded(batches: Iterator[Any], first: int, file: TextIO) -> Iterator[Any]:
    """Yields the batches, each after its line."""
    for step, batch in enumerate(batches, first):
        file.write(json.dumps({"step": step, "rows": row_digests(batch)}) + "\n")
        yield batch


def steps_of(folder: Path) -> list[int]:
    """Returns the steps that process 0 took, in order, from 0 on."""
    return [json.loads(line)["step"] for line in (folder / "0.jsonl").read_text().splitlines()]


def batches_of(folder: Path, rows: int) -> dict[int, str]:
    """Returns the digest of each global batch that was recorded whole, by step.

    Args:
      rows: of a global batch.
    """
    found: dict[int, dict[str, str]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            known = found.setdefault(record["step"], {})
            for row, digest in record["rows"].items():
                assert known.setdefault(row, digest) == digest, f"processes differ in row {row}"
    return {
        step: hashlib.sha256("".join(known[str(row)] for row in range(rows)).encode()).hexdigest()
        for step, known in found.items()
        if len(known) == rows
    }


def main() -> int:
    """Runs the command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()

    from moejax.train.__main__ import main as train
    from moejax.train.inputs import Inputs

    args.to.mkdir(parents=True, exist_ok=True)
    path, whole = args.to / f"{os.environ.get('MOEJAX_PROCESS', '0')}.jsonl", Inputs.batches

    @contextmanager
    def batches(self: Inputs, train_step: Any, first: int, last: int) -> Iterator[Any]:
        with path.open("a", buffering=1) as file, whole(self, train_step, first, last) as found:
            yield recorded(found, first, file)

    Inputs.batches = batches  # type: ignore[method-assign]
    return train(args.command[1:])


if __name__ == "__main__":
    sys.exit(main())
