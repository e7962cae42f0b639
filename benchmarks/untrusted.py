"""What becomes of broken files: each reader of files from elsewhere, on files with changed bytes.

A trial flips, cuts, inserts, repeats or nests bytes of a whole file, or puts another number in the
place of a digit, and reads it. It may be read or refused in one line; anything else is a crash.
Writes untrusted.json and untrusted.md.

    python -m benchmarks.untrusted --out benchmarks/results          # some minutes
    python -m benchmarks.untrusted --out /tmp/untrusted --trials 50
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import stamp
from tests.faults.untrusted import NEEDS, READERS, tally

PAGE = """\
# What becomes of broken files

`{command}` wrote this page. Each trial
changes one to three places of a whole file (a bit flipped, the rest cut off, bytes inserted or
repeated, brackets nested 5,000 deep, another number in the place of a digit) and reads it. The
seeds of the trials are 0 to {last}; `tests/faults/untrusted.py` has the readers. The machine:
{where}, JAX {jax}, Python {python}, {date}.

| reader | what it reads | trials | refused in one line | read | crashed | seconds |
|---|---|---:|---:|---:|---:|---:|
{rows}

*Read*: the change left a file that means something, such as another digit in a text, or a damaged
line of a log, which is left out. *Crashed*: any exception but the one that becomes one line and
exit code 2.
"""
WHAT = {
    "topology": "a measured cluster",
    "plan": "a plan of `moejax plan`",
    "routing": "`routing.json` of a run",
    "config": "a YAML config",
    "config_json": "`config.json` of a run",
    "tokens": "a shard of tokens, and the file beside it",
    "jsonl": "texts, JSON lines",
    "gzipped": "texts, compressed JSON lines",
    "parquet": "texts, Parquet",
    "tokenizer": "`tokenizer.json`",
    "manifest": "a checkpoint's manifest",
    "weights": "a folder of safetensors, its index and config",
    "published": "`config.json` of a published model, for the planner",
    "run": "metrics and events of a run, for `moejax report` and `goodput`",
}


def trials(count: int) -> Iterator[dict[str, Any]]:
    """Makes the trials, reader by reader, and yields what came of each reader."""
    home = Path.cwd()
    for reader in READERS:
        name = reader.__name__
        if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
            sys.exit(f"untrusted: {NEEDS[name]} is not installed: make install")
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            began = time.perf_counter()
            found = tally(reader, Path(folder), range(count))
            seconds = time.perf_counter() - began
            os.chdir(home)
        print(name, found, f"{seconds:.1f} s", flush=True)
        yield {
            "reader": name,
            "trials": count,
            "refused": found.refused,
            "read": found.read,
            "crashed": found.crashed,
            "seconds": round(seconds, 1),
        }


def page(found: list[dict[str, Any]], machine: dict[str, Any], command: str) -> str:
    """Returns the page of results."""
    rows = [
        f"| {one['reader']} | {WHAT[one['reader']]} | {one['trials']:,} | {one['refused']:,} "
        f"| {one['read']:,} | {len(one['crashed'])} | {one['seconds']:.1f} |"
        for one in found
    ]
    return PAGE.format(
        command=command,
        last=found[0]["trials"] - 1,
        where=f"{machine['machine']['cpu']}, {machine['machine']['cpus_used']} cores",
        rows="\n".join(rows),
        **{name: machine[name] for name in ("jax", "python", "date")},
    )


def main() -> int:
    """Makes the trials and writes the page. Returns 1 if a reader crashed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--trials", type=int, default=1000, help="of each reader; 1000 if not given"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine, found = stamp(), list(trials(args.trials))
    command = "python -m benchmarks.untrusted --out benchmarks/results"
    if args.trials != parser.get_default("trials"):
        command += f" --trials {args.trials}"
    facts = {"machine": machine, "command": command, "readers": found}
    (args.out / "untrusted.json").write_text(json.dumps(facts, indent=1) + "\n")
    (args.out / "untrusted.md").write_text(page(found, machine, command))
    return 1 if any(one["crashed"] for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
