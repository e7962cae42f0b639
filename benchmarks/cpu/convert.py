"""How fast are `moejax hf import` and `export` beside reading and writing the files alone?

A random Mixtral of 0.69 billion parameters is written to a scratch directory, and converted both
ways in one process. In turns with each conversion, the same bytes are read and written in plain
calls of the system: the files that the conversion reads, files as large as those that it wrote,
synced to the disk, and the SHA-256 of the checkpoint's files, which every checkpoint has. Starting
Python and JAX is not part of either side. Writes convert.json and convert.md.

    python -m benchmarks.cpu.convert --out benchmarks/results
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu.mixtral import config_of, write_mixtral
from benchmarks.machine import Clock, spread, stamp
from moejax.checkpoint.manifest import sha256
from moejax.convert.exporting import export_run
from moejax.convert.importing import import_folder

CONFIG = config_of(layers=6, width=1024, heads=16, experts=16, hidden=2048, vocabulary=32_000)
BUFFER = 16 << 20  # bytes of a plain read or write
BAR = 0.5  # of the speed of plain reads and writes


@dataclass(frozen=True)
class Conversion:
    """One conversion, and the files on both of its ends."""

    name: str
    run: Callable[[Path], None]  # writes a new folder
    source: Path
    checkpoint_is_source: bool


def files_of(folder: Path) -> list[Path]:
    """Returns a folder's files."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size_of(folder: Path) -> int:
    """Returns the bytes of a folder's files."""
    return sum(path.stat().st_size for path in files_of(folder))


def read_plainly(folder: Path) -> None:
    """Reads all files of a folder into one buffer."""
    buffer = bytearray(BUFFER)
    for path in files_of(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def write_plainly(path: Path, size: int) -> None:
    """Writes a file of so many bytes, and syncs it."""
    data = memoryview(np.random.default_rng(0).bytes(BUFFER))
    with path.open("wb", buffering=0) as file:
        while size > 0:
            size -= file.write(data[: min(size, BUFFER)])
        os.fsync(file.fileno())


def timed(action: Callable[[], Any]) -> float:
    """Returns the seconds of a call, after what was written before has reached the disk."""
    os.sync()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def convert(conversion: Conversion, out: Path) -> dict[str, float]:
    """Returns wall and CPU seconds of one conversion."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    wall = timed(lambda: conversion.run(out))
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "cpu": cpu}


def plain(conversion: Conversion, out: Path, scratch: Path) -> dict[str, float]:
    """Returns seconds of reading, writing and digests of a conversion's bytes."""
    checkpoint = conversion.source if conversion.checkpoint_is_source else out
    seconds = {
        "read": timed(lambda: read_plainly(conversion.source)),
        "write": timed(lambda: write_plainly(scratch, size_of(out))),
        "digests": timed(lambda: [sha256(path) for path in files_of(checkpoint)]),
    }
    scratch.unlink()
    return seconds


def conversions(place: Path) -> list[Conversion]:
    """Returns what is measured; the exports read what is imported here."""
    model = place / "model"
    found = []
    for dtype in ("float32", "bfloat16"):
        imported = place / dtype
        import_folder(model, imported, dtype=dtype)
        found.append(
            Conversion(f"import, stored in {dtype}", importing(model, dtype), model, False)
        )
        found.append(Conversion(f"export from {dtype}", exporting(imported), imported, True))
    return found


def importing(model: Path, dtype: str) -> Callable[[Path], None]:
    """Returns what imports a folder."""
    return lambda out: import_folder(model, out, dtype=dtype)


def exporting(imported: Path) -> Callable[[Path], None]:
    """Returns what exports to bfloat16."""
    return lambda out: export_run(imported, out)


def measure(rounds: int, place: Path) -> dict[str, Any]:
    """Returns seconds of both sides, by conversion and round."""
    write_mixtral(place / "model", CONFIG, "BF16")
    found: dict[str, Any] = {}
    cases = conversions(place)
    clock, before = Clock(sorted(os.sched_getaffinity(0))), time.process_time()
    out = place / "out"
    for turn in range(rounds):
        for case in cases:
            ours = convert(case, out)
            theirs = plain(case, out, place / "plain")
            rows = found.setdefault(case.name, {"read": size_of(case.source), "rounds": []})
            rows["written"] = size_of(out)
            rows["rounds"].append({"ours": ours, "plain": theirs})
            shutil.rmtree(out)
            print(f"round {turn + 1}, {case.name}: {ours['wall']:.2f} s, {theirs}", flush=True)
    others = clock.others_share(time.process_time() - before)
    return {"conversions": found, "others_share": others, **stamp()}


def row(name: str, case: dict[str, Any]) -> tuple[str, float]:
    """Returns a line of the table, and the median share of the plain speed."""
    rounds = case["rounds"]
    shares = [sum(r["plain"].values()) / r["ours"]["wall"] for r in rounds]
    parts = {k: statistics.median(r["plain"][k] for r in rounds) for k in rounds[0]["plain"]}
    wall = statistics.median(r["ours"]["wall"] for r in rounds)
    cpu = statistics.median(r["ours"]["cpu"] for r in rounds)
    both = case["read"] + case["written"]
    share = spread(shares)
    cells = [
        name,
        f"{case['read'] / 1e9:.2f}",
        f"{case['written'] / 1e9:.2f}",
        f"{wall:.2f}",
        f"{cpu:.2f}",
        f"{parts['read']:.2f} + {parts['write']:.2f} + {parts['digests']:.2f}",
        f"{both / wall / 1e6:.0f}",
        f"**{share['median']:.2f}** ({share['minimum']:.2f} to {share['maximum']:.2f})",
    ]
    return "| " + " | ".join(cells) + " |", share["median"]


def page(result: dict[str, Any]) -> str:
    """Returns the page."""
    rows = [row(name, case) for name, case in result["conversions"].items()]
    others = result["others_share"]
    busy = "unknown" if others is None else f"{100 * others:.0f} %"
    met = sum(share >= BAR for _, share in rows)
    count = len(next(iter(result["conversions"].values()))["rounds"])
    return (
        "# Import and export beside plain reads and writes\n\n"
        "`python -m benchmarks.cpu.convert`\n\n"
        f"Share of the plain speed: plain seconds by ours. Wanted is {BAR} or more; {met} of "
        f"{len(rows)} conversions have it. Median and range of {count} rounds, both sides in "
        "turns.\n\n"
        "| conversion | GB read | GB written | s | s of CPU | plain s: read + write + digests "
        "| MB/s | share |\n|---|---:|---:|---:|---:|---:|---:|---:|\n"
        + "\n".join(line for line, _ in rows)
        + "\n\nA Mixtral of 0.69 billion random parameters, one bfloat16 file; exports are in "
        "bfloat16. Plain: one thread reads the conversion's input, writes and syncs as many bytes "
        "as its output, and takes the SHA-256 of the checkpoint's files, which an import writes "
        "and an export compares. All files fit in memory and are in the page cache on both sides; "
        "what was written before is synced before each timing. "
        "Starting Python and JAX is on neither side.\n\n"
        f"Share of the CPUs that went to other processes meanwhile: {busy}. JAX {result['jax']}, "
        f"Python {result['python']}, {result['date']}.\n\n"
        f"Machine: {json.dumps(result['machine'])}\n"
    )


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="directory with 10 GB free (default: /tmp)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as place:
        result = measure(args.rounds, Path(place))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "convert.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "convert.md").write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    main()
